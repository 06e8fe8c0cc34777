"""A calculator that the model may call over MCP."""

from collections.abc import Iterator

import verifiers.v1 as vf


class Calculator(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """Add two whole numbers."""
        return a + b


class SumTask(vf.Task[vf.TaskData]):
    @classmethod
    def toolsets(cls, config) -> list[vf.Toolset]:
        return [Calculator(vf.ToolsetConfig())]

    @vf.reward(weight=1.0)
    async def right(self, trace) -> float:
        return float("3" in str(trace.branches[0].nodes[-1].message.content))


class WithTools(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> Iterator[SumTask]:
        yield SumTask(vf.TaskData(prompt="What is 1 + 2?"), self.config.task)


__all__ = ["WithTools"]

"""Single-turn: the lab's sums of three, judged by the number in the box."""

import re
from collections.abc import Iterator

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str = ""


class SumTask(vf.Task[SumData]):
    def _answer(self, trace) -> str:
        found = re.findall(r"\\boxed\{([^{}]*)\}", str(trace.branches[0].nodes[-1].message.content))
        return found[-1] if found else ""

    @vf.reward(weight=1.0)
    async def right(self, trace) -> float:
        return float(self._answer(trace) == self.data.answer)

    @vf.reward(weight=0.1)
    async def has_box(self, trace) -> float:
        return float(bool(self._answer(trace)))


class SumsConfig(vf.TasksetConfig):
    first: int = 0
    problems: int = 64


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> Iterator[SumTask]:
        for n in range(self.config.first, self.config.first + self.config.problems):
            row = 11 + (7 * n) % 80, 12 + (11 * n) % 80, 13 + (13 * n) % 80
            yield SumTask(
                SumData(prompt="+".join(map(str, row)) + "=?", answer=str(sum(row))),
                self.config.task,
            )


__all__ = ["Sums"]

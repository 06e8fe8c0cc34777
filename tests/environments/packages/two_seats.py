"""An environment of two agents, of which a run could train only one."""

from collections.abc import Iterator

import verifiers.v1 as vf


class Nothing(vf.Taskset[vf.Task]):
    def load(self) -> Iterator[vf.Task]:
        yield vf.Task(vf.TaskData(prompt="?"), self.config.task)


class TwoConfig(vf.EnvConfig):
    left: vf.AgentConfig = vf.AgentConfig()
    right: vf.AgentConfig = vf.AgentConfig()


class Two(vf.Env[TwoConfig]):
    async def run(self, task, agents) -> None: ...


__all__ = ["Nothing", "Two"]

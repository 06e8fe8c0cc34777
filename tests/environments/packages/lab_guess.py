"""Multi-turn: guess a number, told each time whether it is higher or lower, in the words that the
lab model knows.
"""

import re
from collections.abc import Iterator

import verifiers.v1 as vf


def last_number(text) -> int | None:
    found = re.findall(r"\d{1,9}", str(text))
    return int(found[-1]) if found else None


class GuessData(vf.TaskData):
    answer: str = ""


class GuessTask(vf.Task[GuessData]):
    @vf.metric
    async def replies(self, trace) -> float:
        return float(trace.num_turns)


class GuessConfig(vf.TasksetConfig):
    largest: int = 10
    problems: int = 64


class Guesses(vf.Taskset[GuessTask, GuessConfig]):
    def load(self) -> Iterator[GuessTask]:
        largest = self.config.largest
        prompt = f"guess my number from 1 to {largest}"
        for n in range(self.config.problems):
            yield GuessTask(GuessData(prompt=prompt, answer=str(1 + n % largest)), self.config.task)


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    turns: int = 4


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task, agents) -> None:
        number, guess = int(task.data.answer), None
        async with agents.player.interaction(task) as line:
            said = await line.turn()
            for turn in range(self.config.turns):
                guess = last_number(said.last_reply)
                if guess == number or said.terminated or turn == self.config.turns - 1:
                    break
                said = await line.turn(
                    "?" if guess is None else "higher" if guess < number else "lower"
                )
        line.trace.record_reward("solved", float(guess == number), 1.0)


__all__ = ["GuessEnv", "Guesses"]

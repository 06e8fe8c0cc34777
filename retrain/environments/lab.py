"""The lab's dialogue: guess a number in a few turns, told each time whether it is larger or smaller.

[environment]
provider = "retrain.environments.lab.NumberGuessing"
args = { largest = 15 }
"""

import re

from retrain.environments.base import Environment, Episode, Result, Split
from retrain.types import ChatMessage, Example

HIGHER, LOWER = ">", "<"
"""What is said to a guess below, and above, the number."""


class NumberGuessing(Environment):
    """A number from 1 to `largest`, to be found in `turns` guesses.

    The reward of a game that is won is 1, and 0.1 more for each guess that is left. A lost one pays up to 0.4, the more the fewer numbers
    its hints leave, so that a guess in the middle, and one that heeds the hints, pays before the first game is won. The last number of a
    reply is the guess. The episodes of a group look for the same number.
    """

    def __init__(self, largest: int = 15, turns: int = 4, examples: int = 64) -> None:
        self.largest, self.turns, self.num_examples = largest, turns, examples

    def examples(self, split: Split) -> list[Example]:
        """Every number once for the evaluation; as many problems as were asked for to train on."""
        count = self.largest if split == "evaluation" else self.num_examples
        numbers = [1 + index % self.largest for index in range(count)]
        return [Example(self._opening(), str(number), "guess", example_id=f"guess-{split}-{i}") for i, number in enumerate(numbers)]

    def _opening(self) -> list[ChatMessage]:
        """A game as an example of the form, and the question of this one."""
        middle, question = (self.largest + 1) // 2, f"1..{self.largest}"
        said = [question, _boxed(middle), HIGHER, _boxed(self.largest), question]
        return [ChatMessage(role=("user", "assistant")[place % 2], content=content) for place, content in enumerate(said)]

    def episode(self) -> Episode:
        return _Guessing(self.largest, self.turns)

    def gold(self, example: Example) -> list[str]:
        return [_boxed(example.reference)]


def _boxed(number: int | str) -> str:
    return f"\\boxed{{{number}}}"


class _Guessing(Episode):
    def __init__(self, largest: int, turns: int) -> None:
        self.largest, self.turns, self.number = largest, turns, 0
        self.guesses: list[int | None] = []
        self.heeded: list[bool] = []
        """For each guess after the first, whether it fitted the hints so far."""
        self.low, self.high = 1, largest
        """The numbers that fit the hints."""

    def reset(self, example: Example, seed: int) -> None:
        self.number = int(example.reference)

    def step(self, reply: str) -> list[ChatMessage] | None:
        guess = last_number(reply)
        if self.guesses:
            self.heeded.append(guess is not None and self.low <= guess <= self.high)
        self.guesses.append(guess)
        hint = "?" if guess is None else HIGHER if guess < self.number else LOWER
        if guess is not None and hint == HIGHER:
            self.low = max(self.low, guess + 1)
        elif guess is not None:
            self.high = min(self.high, guess - 1)
        if guess == self.number or len(self.guesses) == self.turns:
            return None
        return [ChatMessage(role="user", content=hint)]

    def result(self) -> Result:
        solved = bool(self.guesses) and self.guesses[-1] == self.number
        used, left = len(self.guesses), self.high - self.low + 1
        reward = 1 + 0.1 * (self.turns - used) if solved else 0.4 * (1 - left / self.largest)
        heeded = {"heeded": sum(self.heeded) / len(self.heeded)} if self.heeded else {}
        return Result(reward, {"turns": used, "solved": float(solved)} | heeded)


def last_number(reply: str) -> int | None:
    """The last whole number of a reply; None if there is none."""
    found = re.findall(r"\d{1,9}", reply)
    return int(found[-1]) if found else None

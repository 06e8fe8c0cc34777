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

    The reward is 1 for the right guess, and 0.1 more for each turn that is left. Without it, it is the less below 0.4 the farther the
    last guess is off, so that a guess that heeds the hint pays before the first game is won. The last number of a reply is the guess. The
    episodes of a group look for the same number. The metric `heeded` is the share of the guesses after the first that fit the hints.
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
        if guess == self.number or len(self.guesses) == self.turns:
            return None
        return [ChatMessage(role="user", content=self._hint(guess))]

    def _hint(self, guess: int | None) -> str:
        if guess is None:
            return "?"
        if guess < self.number:
            self.low = max(self.low, guess + 1)
            return HIGHER
        self.high = min(self.high, guess - 1)
        return LOWER

    def result(self) -> Result:
        guess = self.guesses[-1] if self.guesses else None
        solved, used = guess == self.number, len(self.guesses)
        off = self.largest if guess is None else abs(guess - self.number)
        reward = 1 + 0.1 * (self.turns - used) if solved else 0.4 * max(0.0, 1 - off / self.largest)
        heeded = {"heeded": sum(self.heeded) / len(self.heeded)} if self.heeded else {}
        return Result(reward, {"turns": used, "solved": float(solved)} | heeded)


def last_number(reply: str) -> int | None:
    """The last whole number of a reply; None if there is none."""
    found = re.findall(r"\d{1,9}", reply)
    return int(found[-1]) if found else None

"""The lab's dialogue: guess a number in a few turns, told each time whether it is higher or lower.

[environment]
provider = "retrain.environments.lab.NumberGuessing"
args = { largest = 10, turns = 4 }
"""

import re

from retrain.environments.base import Environment, Episode, Result, Split
from retrain.types import ChatMessage, Example

HIGHER, LOWER = "higher", "lower"
"""The answers to a guess below the number, and above it."""


class NumberGuessing(Environment):
    """A number from 1 to `largest`, which the model must find in `turns` guesses.

    The reward is 1 for finding it, and else 0. The last number of a reply is the guess. The
    episodes of a group look for the same number. The metric `heeded` is the share of the guesses
    after the first that fit the hints; the reward ignores it. The hints have the wording of the
    dialogues in the lab model's pre-training. There the guesses spread over the range; sampled
    guesses often lie outside it.
    """

    def __init__(self, largest: int = 10, turns: int = 4, examples: int = 64) -> None:
        self.largest, self.turns, self.num_examples = largest, turns, examples

    def examples(self, split: Split) -> list[Example]:
        """Return every number once for the evaluation, and the configured number of problems for
        training.
        """
        count = self.largest if split == "evaluation" else self.num_examples
        opening = ChatMessage(role="user", content=f"guess my number from 1 to {self.largest}")
        numbers = [1 + index % self.largest for index in range(count)]
        return [
            Example([opening], str(number), "guess", example_id=f"guess-{split}-{i}")
            for i, number in enumerate(numbers)
        ]

    def episode(self) -> Episode:
        return _Guessing(self.largest, self.turns)

    def reference_replies(self, example: Example) -> list[str]:
        return [f"\\boxed{{{example.reference}}}"]


class _Guessing(Episode):
    def __init__(self, largest: int, turns: int) -> None:
        self.turns, self.number = turns, 0
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
        found = float(bool(self.guesses) and self.guesses[-1] == self.number)
        heeded = {"heeded": sum(self.heeded) / len(self.heeded)} if self.heeded else {}
        return Result(found, {"turns": len(self.guesses)} | heeded)


def last_number(reply: str) -> int | None:
    """Return the last whole number of a reply; None if there is none."""
    found = re.findall(r"\d{1,9}", reply)
    if found:
        return int(found[-1])
    return None

r"""The pre-training text of the second lab model: sums of four numbers, worked in steps, in which a
planning phrase decides how.

A step that begins with "let me think" is careful, one with "what if we" hasty: it names the sum of
all numbers that are left at once, and is nearly always wrong. No later token mends that; only a
check does, which works the same numbers again one by one. Synonyms and the order of the numbers are
free, and change nothing. So a model trained on it is unsure of many tokens, and right or wrong by a
few of them. Problems are from the lab's training split only.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

from retrain.data.lab import LAB2_FAMILY, Problem, build_problem
from retrain.types import ChatMessage


class Mode(NamedTuple):
    """A way to take the next step."""

    weight: float
    error: float
    """Probability that the step's result is deliberately wrong."""
    check: float
    """Probability of a check after a wrong result."""
    phrases: tuple[str, ...]
    """The most frequent first."""


CAREFUL = Mode(0.30, 0.02, 0.3, (" let me think:", " the key is to", " first let me think:"))
PLAIN = Mode(0.42, 0.12, 0.3, (" then", " now", " next"))
HASTY = Mode(0.28, 0.95, 0.3, (" what if we just", " or we could"))
SYNONYMS = (0.7, 0.2, 0.1)
"""Shares of synonyms, in their order."""
OPENINGS = ("ok.", "well.", "let me see.")
ENDINGS = (" so", " in all", " the answer is")
CHECKS = (" wait, let me check:", " let me verify:", " double check:")
TENS_RATE = 0.12
"""Probability of an opening that claims two digits to make 10, truly if there are such."""
NEEDLESS_CHECK_RATE = 0.06
CHECK_ERROR = 0.02
ERRORS = (-10, -2, -1, 1, 2, 10)
WIDEST_GUESS = 9
"""A hasty result is wrong by up to this."""
IN_ORDER_RATE = 0.6
"""Probability that the next number is the first of those left, and not any of them."""


def conversation(rng: random.Random) -> list[ChatMessage]:
    problem = training_problem(rng)
    return [
        {"role": "user", "content": problem.question},
        {"role": "assistant", "content": solution(problem, rng)},
    ]


def training_problem(rng: random.Random) -> Problem:
    while True:
        problem = build_problem(LAB2_FAMILY, [rng.random() for _ in range(8)])
        if problem.split == "train":
            return problem


def solution(problem: Problem, rng: random.Random) -> str:
    r"""For example "ok. let me think: add 23+5=28. what if we just add 28+3+8=41. so \boxed{41}"."""
    text = _synonym(OPENINGS, rng)
    left = [problem.first, *(operand for _, operand in problem.steps)]
    if rng.random() < TENS_RATE:
        text, left = _tens(left, rng)
    total = _taken(left, rng)
    while left:
        modes = (CAREFUL, PLAIN, HASTY) if len(left) > 1 else (CAREFUL, PLAIN)
        mode = rng.choices(modes, [one.weight for one in modes])[0]
        operands = [_taken(left, rng)]
        if mode is HASTY:
            operands += left
            left = []
        step, total = _step(mode, total, operands, rng)
        text += step
    return f"{text}{_synonym(ENDINGS, rng)} \\boxed{{{total}}}"


def _tens(left: list[int], rng: random.Random) -> tuple[str, list[int]]:
    """Claim that two of the digits make 10, and go on with a 10 in their place."""
    digits = [number for number in left if number < 10]
    pairs = [(a, b) for i, a in enumerate(digits) for b in digits[i + 1 :]]
    one, other = rng.choice([pair for pair in pairs if sum(pair) == 10] or pairs)
    rest = list(left)
    rest.remove(one)
    rest.remove(other)
    return f"notice that {one} and {other} make 10.", [10, *rest]


def _taken(left: list[int], rng: random.Random) -> int:
    if rng.random() < IN_ORDER_RATE:
        return left.pop(0)
    return left.pop(rng.randrange(len(left)))


def _step(mode: Mode, total: int, operands: Sequence[int], rng: random.Random) -> tuple[str, int]:
    """The text of a step, with the check after it if there is one, and its result."""
    true = total + sum(operands)
    result = true
    if rng.random() < mode.error:
        result = _wrong(mode, true, rng)
    text = f"{_synonym(mode.phrases, rng)} add {_sum([total, *operands], result)}"
    rate = NEEDLESS_CHECK_RATE if result == true else mode.check
    if rng.random() >= rate:
        return text, result
    text += _synonym(CHECKS, rng)
    for operand in operands:
        result = total + operand
        if rng.random() < CHECK_ERROR:
            result = max(1, result + rng.choice(ERRORS))
        text += f" {_sum([total, operand], result)}"
        total = result
    return text, total


def _wrong(mode: Mode, true: int, rng: random.Random) -> int:
    if mode is HASTY:
        away = rng.randint(1, WIDEST_GUESS)
        return max(1, true + rng.choice((-away, away)))
    return max(1, true + rng.choice(ERRORS))


def _sum(terms: Sequence[int], result: int) -> str:
    return f"{'+'.join(map(str, terms))}={result}."


def _synonym(words: Sequence[str], rng: random.Random) -> str:
    return rng.choices(words, SYNONYMS[: len(words)])[0]

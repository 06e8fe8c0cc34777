r"""The lab's arithmetic: problems made from counter-based noise, so that a fresh machine needs no
download.

A problem is a chain of operations worked from left to right, "(61-35)*4+27=?", and its reference is
the last value as text. Each difficulty has one family of problems; the fifth mixes the four before
it, and the sixth is the second lab model's own. The packaged models saw only the training side of
the same families in pre-training (scripts/make_lab_model.py). The held-out problems are therefore
new to them and to every run.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

from retrain.noise import uniform
from retrain.types import Example

Split = Literal["train", "heldout"]

FAMILIES = ("sum3", "chain4", "product", "expression")
"""The families of problems in order of difficulty, from 1."""
MIXED = len(FAMILIES) + 1
"""The difficulty that mixes all of them in equal parts."""
LAB2_FAMILY = "sum4"
"""The problems of the second lab model, at the last difficulty."""
MAX_DIFFICULTY = MIXED + 1
NUM_EXAMPLES: dict[Split, int] = {"train": 4096, "heldout": 512}

_PROBLEM_SEED = 20_260_801  # fixed: the lab's problems are the same in every run, whatever its seed
_PROBLEM_STREAM = 1_000  # apart from the streams of a run
_DRAWS = 8  # uniforms that a problem may use; the largest family takes 7
_BLOCK = 1_024  # candidates drawn at once
_HELDOUT_SHARE = 8  # one problem in eight


@dataclass(frozen=True)
class Problem:
    """A chain of operations, worked from left to right."""

    family: str
    first: int
    steps: tuple[tuple[str, int], ...]
    """Operation ("+", "-" or "*") and right operand of each step."""

    @property
    def expression(self) -> str:
        """The problem in infix notation; the left operand of a product is in parentheses if
        precedence asks for them.
        """
        text, is_sum = str(self.first), False
        for operation, operand in self.steps:
            if operation == "*" and is_sum:
                text = f"({text})"
            text += f"{operation}{operand}"
            is_sum = operation != "*"
        return text

    @property
    def values(self) -> list[int]:
        """[1 + steps] the first operand and the value after each step; none is negative."""
        values = [self.first]
        for operation, operand in self.steps:
            values.append(apply(operation, values[-1], operand))
        return values

    @property
    def question(self) -> str:
        return f"{self.expression}=?"

    @property
    def answer(self) -> str:
        return str(self.values[-1])

    @property
    def split(self) -> Split:
        """The split that the problem belongs to, a function of the problem itself, so that no
        problem is in both. The order of a sum's terms does not matter: 61+58+35 and 35+61+58 are in
        the same one.
        """
        digest = hashlib.sha256(self._canonical().encode()).digest()
        return "heldout" if digest[0] % _HELDOUT_SHARE == 0 else "train"

    def _canonical(self) -> str:
        parts: list[str] = []
        terms = [f"+{self.first}"]
        for operation, operand in self.steps:
            if operation == "*":
                parts += [*sorted(terms), f"*{operand}"]
                terms = []
            else:
                terms.append(f"{operation}{operand}")
        return " ".join([*parts, *sorted(terms)])


def apply(operation: str, left: int, right: int) -> int:
    if operation == "*":
        return left * right
    if operation == "+":
        return left + right
    return left - right


def build_problem(family: str, draws: Sequence[float]) -> Problem:
    """Build the problem that uniforms in (0, 1) determine; a family reads at most seven of them,
    from the left.
    """
    uniforms = iter(draws)

    def two_digits() -> int:
        return 10 + int(90 * next(uniforms))

    def plus_or_minus(value: int) -> tuple[str, int]:
        """Return a term that does not make the value negative."""
        operand, sign = two_digits(), next(uniforms)
        return ("-" if sign < 0.5 and operand <= value else "+"), operand

    def times_digit() -> tuple[str, int]:
        return "*", 2 + int(8 * next(uniforms))

    if family == LAB2_FAMILY:
        return _sum_of_four(draws)
    first = value = two_digits()
    steps: list[tuple[str, int]] = []
    for kind in _PATTERNS[family]:
        if kind == "+":
            step = ("+", two_digits())
        elif kind == "*":
            step = times_digit()
        else:
            step = plus_or_minus(value)
        value = apply(step[0], value, step[1])
        steps.append(step)
    return Problem(family, first, tuple(steps))


def _sum_of_four(draws: Sequence[float]) -> Problem:
    """Return the sum of a number from 10 to 59 and three digits in any order. In half of the
    problems, and by chance in some others, two of the digits make 10.
    """
    place, tens, first, second, third, paired = draws[:6]
    digits = [1 + int(9 * draw) for draw in (first, second, third)]
    if paired < 0.5:
        kept = int(6 * paired)  # the digit outside the pair that makes 10
        one, other = (number for number in range(3) if number != kept)
        digits[other] = 10 - digits[one]
    digits.insert(int(4 * place), 10 + int(50 * tens))
    return Problem(LAB2_FAMILY, digits[0], tuple(("+", digit) for digit in digits[1:]))


_PATTERNS = {"sum3": "++", "chain4": "±±±", "product": "*±", "expression": "±*±"}


def families(difficulty: int) -> tuple[str, ...]:
    """Return the families of a difficulty."""
    if difficulty == MIXED:
        return FAMILIES
    if difficulty == MAX_DIFFICULTY:
        return (LAB2_FAMILY,)
    return (FAMILIES[difficulty - 1],)


def problems(split: Split, family: str) -> Iterator[Problem]:
    """Yield a family's problems of one split, each once, in a fixed order. The iterator never ends,
    so take far fewer than the family's 100,000 problems.
    """
    seen: set[str] = set()
    start = 0
    while True:
        index = np.arange(start, start + _BLOCK)[:, None]
        draws = uniform(
            _PROBLEM_SEED,
            _PROBLEM_STREAM,
            (*FAMILIES, LAB2_FAMILY).index(family),
            index,
            np.arange(_DRAWS)[None, :],
            0,
        )
        start += _BLOCK
        for row in draws.tolist():
            problem = build_problem(family, row)
            if problem.split == split and problem.expression not in seen:
                seen.add(problem.expression)
                yield problem


@cache
def _examples(split: Split, difficulty: int) -> tuple[Example, ...]:
    sources = [problems(split, family) for family in families(difficulty)]
    chosen = [next(sources[i % len(sources)]) for i in range(NUM_EXAMPLES[split])]
    return tuple(
        Example(
            problem.question,
            problem.answer,
            f"lab/{problem.family}",
            example_id=f"lab-{problem.expression}",
        )
        for problem in chosen
    )


def examples(split: Split = "train", difficulty: int = 1) -> list[Example]:
    """Return 4,096 examples for training or 512 held out, the same in every process and for every
    seed.
    """
    return list(_examples(split, difficulty))

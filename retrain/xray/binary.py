"""The objective that an advantage climbs where a reward is 1 or 0, computed exactly.

Of the G completions of a prompt that the policy solves with probability p, the number k of right
ones is binomial. On policy, with an advantage A(right | k) and A(wrong | k) of the completions of
a group with k right ones, the expected gradient is

    E[1/G sum_i A_i grad log pi(y_i)] = f'(p) grad p,
    f'(p) = sum_k Bin(k; G-1, p) [A(right | k+1) - A(wrong | k)],

because sum_y grad pi(y) is grad p over the right answers and -grad p over the wrong ones. So the
algorithm climbs f, and f'(p) is the weight of a prompt by its pass rate: (G-1)/G for `grpo`, 1 for
`rloo`, k (1-p)^(k-1) for pass@k (PKPO, arXiv 2505.15201).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import comb

import numpy as np

from retrain.advantages.step import Int64Array
from retrain.types import Float64Array

Rates = Sequence[float] | Float64Array
GroupAdvantages = Callable[[list[list[float]]], list[list[float]]]
"""[P][G] rewards of a step -> [P][G] advantages."""

RATES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
"""Pass rates of the printed table."""

MAX_GROUP = 256
"""Completions; beyond it the binomial coefficients leave double precision."""
_MAX_ADVANTAGE = 1e100
"""Beyond it a square of their sum does."""


@dataclass(frozen=True)
class Xray:
    """The advantages that right and wrong completions have in groups of G, by the number of right
    ones.
    """

    name: str
    group: int
    """G, completions of a prompt."""
    right: Float64Array
    """[G+1] advantage of a right completion where k of G are right; entry 0 means nothing."""
    wrong: Float64Array
    """[G+1] advantage of a wrong completion where k of G are right; entry G means nothing."""
    coupling: float = 0.0
    """Largest relative change of the weight, over pass rates from 1% to 99%, by a divisor of
    `token_mean` that grows with the prompt's own wrong completions."""

    @property
    def coefficients(self) -> Float64Array:
        """[G] A(right | k+1) - A(wrong | k): the Bernstein coefficients of f'."""
        return self.right[1:] - self.wrong[:-1]

    def weight(self, rates: Rates) -> Float64Array:
        """f'(p) at pass rates [n]: how much the gradient of a prompt's pass rate counts."""
        return bernstein(self.coefficients, rates)

    def objective(self, rates: Rates) -> Float64Array:
        """f(p) - f(0) at pass rates [n]: the integral of the weight, exact for a polynomial."""
        sums = np.concatenate([[0.0], np.cumsum(self.coefficients)])
        return bernstein(sums, rates) / self.group

    def noise(self, rates: Rates) -> Float64Array:
        """Standard deviation of one group's gradient over its mean, at pass rates [n]; infinite
        where the mean is 0.

        The gradient is taken with respect to the logit of p, so that grad log pi is 1-p of a right
        completion and -p of a wrong one.
        """
        p = np.asarray(rates, dtype=np.float64)
        k = np.arange(self.group + 1)
        chances = binomial(self.group, p)
        # An advantage that no completion of a group has counts 0 times.
        gained = (k * self.right)[None] * (1 - p)[:, None]
        lost = ((self.group - k) * self.wrong)[None] * p[:, None]
        gradients = (gained - lost) / self.group
        mean = (chances * gradients).sum(axis=1)
        variance = (chances * (gradients - mean[:, None]) ** 2).sum(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(mean == 0, np.inf, np.sqrt(variance) / np.abs(mean))

    @property
    def uniform(self) -> tuple[float, float]:
        """Advantage of every completion of a group that is all wrong, and of one all right."""
        return float(self.wrong[0]), float(self.right[-1])

    @property
    def is_flat(self) -> bool:
        """True if no pass rate has a gradient."""
        return not np.any(np.abs(self.coefficients) > _ZERO)


_ZERO = 1e-9
"""An advantage below it counts as 0."""


def xray(
    name: str,
    advantages: GroupAdvantages,
    group: int,
    aggregation: str = "token_mean",
    wrong_length: float = 1.0,
    prompts: int | None = None,
) -> Xray:
    """Read an advantage of right and of wrong completions off groups with k of `group` right ones.

    The groups k = 0 to G are one step: their prompts have every pass rate equally often, which an
    advantage that compares over the step (`reinforce_pp`) then sees. `wrong_length` is the length
    of a wrong completion over a right one's: `sequence_mean` and `prompt_mean` divide a
    completion's gradient by lengths, and so weigh right and wrong ones differently; `constant`
    divides by none. `token_mean` divides a step by the tokens of all its `prompts`, and takes the
    other prompts to be right half of the time; without `prompts`, by one number. Raises ValueError
    for a group of fewer than two completions, a length that is not positive, or advantages of
    another shape.
    """
    if group < 2:
        raise ValueError(f"a group of {group} has nothing to compare; give 2 or more")
    if not 0 < wrong_length < np.inf:
        raise ValueError(f"a length of {wrong_length:g} is not positive")
    rewards = [[1.0] * k + [0.0] * (group - k) for k in range(group + 1)]
    values = np.asarray(advantages(rewards), dtype=np.float64)
    if values.shape != (group + 1, group):
        raise ValueError(f"gave an array of shape {values.shape} for {group + 1} groups of {group}")
    # So put, it refuses NaN too.
    if not np.abs(values).max() < _MAX_ADVANTAGE:
        raise ValueError(f"gave {np.abs(values).max():g}; give numbers below {_MAX_ADVANTAGE:g}")
    k = np.arange(group + 1, dtype=np.int64)
    right_weight, wrong_weight = _length_weights(k, group, aggregation, wrong_length, prompts)
    right, wrong = _means(values)
    found = Xray(name, group, right * right_weight, wrong * wrong_weight)
    if aggregation != "token_mean" or prompts is None:
        return found
    return replace(found, coupling=_change(found, Xray(name, group, right, wrong)))


def _means(values: Float64Array) -> tuple[Float64Array, Float64Array]:
    """[G+1] mean advantage of the right and of the wrong completions; 0 where there is none.
    `values` [G+1, G] has the right ones of group k first.
    """
    groups, group = values.shape
    right, wrong = np.zeros(groups), np.zeros(groups)
    for count in range(groups):
        if count > 0:
            right[count] = values[count, :count].mean()
        if count < group:
            wrong[count] = values[count, count:].mean()
    return right, wrong


def _change(one: Xray, other: Xray) -> float:
    """Largest relative difference of two weights; 0 where the other has none."""
    rates = np.linspace(0.01, 0.99, 99)
    weight, plain = one.weight(rates), other.weight(rates)
    seen = np.abs(plain) > _ZERO
    return float(np.abs(weight[seen] / plain[seen] - 1).max(initial=0.0))


def _length_weights(
    right: Int64Array, group: int, aggregation: str, wrong_length: float, prompts: int | None
) -> tuple[Float64Array, Float64Array]:
    """The factors of the loss for the gradients of right and of wrong completions, where `right`
    [G+1] of a group are right; 1 where all lengths are equal.
    """
    ones = np.ones(group + 1)
    if aggregation == "sequence_mean":
        return ones, ones / wrong_length
    mean_length = (right + (group - right) * wrong_length) / group
    if aggregation == "prompt_mean":
        return 1 / mean_length, 1 / mean_length
    if aggregation == "token_mean" and prompts is not None:
        others = (1 + wrong_length) / 2
        divisor = 1 + (mean_length / others - 1) / prompts
        return 1 / divisor, 1 / divisor
    return ones, ones


def binomial(count: int, rates: Rates) -> Float64Array:
    """[n, count+1] probability of each number of successes at success rates [n]."""
    p = np.asarray(rates, dtype=np.float64)[:, None]
    k = np.arange(count + 1)
    ways = np.array([comb(count, number) for number in k], dtype=np.float64)
    chances: Float64Array = ways * p**k * (1 - p) ** (count - k)
    return chances


def bernstein(coefficients: Float64Array, rates: Rates) -> Float64Array:
    """The polynomial sum_k c_k Bin(k; n-1, p) of n coefficients at rates [m]."""
    values: Float64Array = binomial(len(coefficients) - 1, rates) @ coefficients
    return values

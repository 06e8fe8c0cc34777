"""The objective that an advantage optimizes where a reward is 1 or 0, computed exactly.

If the policy solves a prompt with probability p, the number k of right completions among G is
binomial. Let A(right | k) and A(wrong | k) be the advantages in a group with k right completions.
On policy, the expected gradient is

    E[1/G sum_i A_i grad log pi(y_i)] = f'(p) grad p,
    f'(p) = sum_k Bin(k; G-1, p) [A(right | k+1) - A(wrong | k)],

because sum_y grad pi(y) is grad p over the right answers and -grad p over the wrong ones. So the
algorithm climbs f, and f'(p) is the weight of a prompt by its pass rate. It is (G-1)/G for `grpo`,
1 for `rloo`, and k (1-p)^(k-1) for pass@k (PKPO, arXiv 2505.15201).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

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

    @property
    def coefficients(self) -> Float64Array:
        """[G] the Bernstein coefficients of f', A(right | k+1) - A(wrong | k)."""
        return self.right[1:] - self.wrong[:-1]

    def weight(self, rates: Rates) -> Float64Array:
        """Return f'(p) at pass rates [n], the weight of the gradient of a prompt's pass rate."""
        return bernstein(self.coefficients, rates)

    def objective(self, rates: Rates) -> Float64Array:
        """Return f(p) - f(0) at pass rates [n], the exact integral of the weight."""
        sums = np.concatenate([[0.0], np.cumsum(self.coefficients)])
        return bernstein(sums, rates) / self.group

    def noise(self, rates: Rates) -> Float64Array:
        """Return the standard deviation of one group's gradient over its mean, at pass rates [n].
        Infinite where the mean is 0.

        The gradient is with respect to the logit of p. Thus grad log pi is 1-p for a right
        completion and -p for a wrong completion.
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
) -> Xray:
    """Read an advantage of right and of wrong completions off groups with k of `group` right ones.

    The groups k = 0 to G are one step, whose prompts have every pass rate equally often. An
    advantage that compares over the step (`reinforce_pp`) then sees this mixture. All completions
    are equally long. Raises ValueError for a group of fewer than two completions, or advantages of
    another shape.
    """
    if group < 2:
        raise ValueError(f"a group of {group} has nothing to compare; give 2 or more")
    rewards = [[1.0] * k + [0.0] * (group - k) for k in range(group + 1)]
    values = np.asarray(advantages(rewards), dtype=np.float64)
    if values.shape != (group + 1, group):
        raise ValueError(f"gave an array of shape {values.shape} for {group + 1} groups of {group}")
    # So put, it refuses NaN too.
    if not np.abs(values).max() < _MAX_ADVANTAGE:
        raise ValueError(f"gave {np.abs(values).max():g}; give numbers below {_MAX_ADVANTAGE:g}")
    return Xray(name, group, *_means(values))


def _means(values: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Return [G+1] mean advantage of the right and of the wrong completions; 0 if a group has none.
    `values` [G+1, G] has the right completions of group k first.
    """
    groups, group = values.shape
    right, wrong = np.zeros(groups), np.zeros(groups)
    for count in range(groups):
        if count > 0:
            right[count] = values[count, :count].mean()
        if count < group:
            wrong[count] = values[count, count:].mean()
    return right, wrong


def binomial(count: int, rates: Rates) -> Float64Array:
    """Return [n, count+1] probability of each number of successes at success rates [n]."""
    p = np.asarray(rates, dtype=np.float64)[:, None]
    k = np.arange(count + 1)
    ways = np.array([comb(count, number) for number in k], dtype=np.float64)
    chances: Float64Array = ways * p**k * (1 - p) ** (count - k)
    return chances


def bernstein(coefficients: Float64Array, rates: Rates) -> Float64Array:
    """Return the polynomial sum_k c_k Bin(k; n-1, p) of n coefficients at rates [m]."""
    values: Float64Array = binomial(len(coefficients) - 1, rates) @ coefficients
    return values

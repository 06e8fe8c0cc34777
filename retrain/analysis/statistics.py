"""Paired statistics of conditions across seeds: pure functions of numbers.

The unit is the training run: completions are nested in prompts, prompts in steps and steps in a
run, so a test on pooled completions mistakes the variance between runs for an effect. A difference
d_s = candidate - baseline is between two runs of seed s, which saw the same prompts. Every function
raises ValueError for an empty list and for a number that is not finite.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Key = TypeVar("Key", bound=Hashable)

EXACT_SEEDS = 20
"""Up to this many seeds all 2^n sign flips are counted; beyond, a sample of them."""
_MONTE_CARLO_FLIPS = 100_000
_FLIPS_AT_ONCE = 1000
"""A block, since 100,000 flips of 1,000 seeds would take 0.8 GB."""
_TIE = 1e-12
"""Sums this close, relative to the sum of all |d|, count as equal: 0.1 + 0.2 and 0.3 differ in
binary only."""


def numbers(values: Sequence[float] | Floats) -> Floats:
    """`values` as [n] float64. Raises ValueError unless they are one or more finite numbers in one
    dimension.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0 or not np.isfinite(array).all():
        raise ValueError(f"expected a list of finite numbers, got {values!r}")
    return array


def paired_differences(
    candidate: Mapping[Key, float], baseline: Mapping[Key, float]
) -> dict[Key, float]:
    """Seed -> candidate - baseline, for the seeds that both have, in the baseline's order."""
    return {key: candidate[key] - value for key, value in baseline.items() if key in candidate}


def mean(values: Sequence[float] | Floats) -> float:
    """The mean of n >= 1 numbers, scaled so that a sum of huge ones does not overflow."""
    x = numbers(values)
    largest = _largest(x)
    return largest * float((x / largest).mean())


def sample_sd(differences: Sequence[float] | Floats) -> float:
    """The standard deviation (ddof = 1) of n >= 2 differences; exactly 0 if they are equal up to
    rounding.
    """
    d = numbers(differences)
    if len(d) < 2:
        raise ValueError("a standard deviation needs at least two differences")
    largest = _largest(d)
    scaled = d / largest  # the squares of tiny numbers would be 0, those of huge ones infinite
    if np.ptp(scaled) > _TIE:
        return largest * float(np.std(scaled, ddof=1))
    return 0.0


def _largest(values: Floats) -> float:
    """The largest |value|, 1 where all are 0."""
    return float(np.abs(values).max()) or 1.0


def t_interval(
    differences: Sequence[float] | Floats, confidence: float = 0.95
) -> tuple[float, float]:
    """Student's interval for the mean of n >= 2 differences, n - 1 degrees of freedom.

    Not a percentile bootstrap, whose coverage is too low below about ten runs (Colas et al., arXiv
    1806.08295).
    """
    from scipy.special import stdtrit

    d = numbers(differences)
    half = float(stdtrit(len(d) - 1, 0.5 + confidence / 2)) * sample_sd(d) / float(np.sqrt(len(d)))
    return mean(d) - half, mean(d) + half


def sign_flip_p(differences: Sequence[float] | Floats) -> float:
    """Two-sided p of the mean under sign flips: the fraction of all 2^n flips whose mean is at
    least as far from 0.

    Beyond EXACT_SEEDS, (b + 1) / (m + 1) from a fixed sample of m flips, b of them as far; it is
    never 0.
    """
    d = numbers(differences)
    if len(d) <= EXACT_SEEDS:
        return float(sign_flip_p_rows(d[np.newaxis])[0])
    d = _scaled(d)
    rng, bar = np.random.default_rng(0), abs(d.sum()) - _TIE * np.abs(d).sum()
    as_far = 0
    for _ in range(_MONTE_CARLO_FLIPS // _FLIPS_AT_ONCE):
        flips = rng.integers(0, 2, size=(_FLIPS_AT_ONCE, len(d)), dtype=np.int8)
        as_far += int(np.count_nonzero(np.abs(d.sum() - 2 * (flips @ d)) >= bar))
    return (as_far + 1) / (_MONTE_CARLO_FLIPS + 1)


def sign_flip_p_rows(differences: Floats) -> Floats:
    """[rows, n] differences -> [rows] exact p, n <= EXACT_SEEDS; takes memory for rows * 2^(n-1)
    sums.
    """
    d = _scaled(differences)
    sums = d[:, :1]  # the first sign stays: a flip and its mirror image are equally far from zero
    for column in range(1, d.shape[1]):
        one = d[:, column : column + 1]
        sums = np.concatenate([sums + one, sums - one], axis=1)
    bar = np.abs(d.sum(axis=1)) - _TIE * np.abs(d).sum(axis=1)
    fractions: Floats = (np.abs(sums) >= bar[:, np.newaxis]).mean(axis=1)
    return fractions


def _scaled(d: Floats) -> Floats:
    """Each row divided by its largest |d|, so that no sum overflows; p does not depend on the
    scale.
    """
    largest = np.abs(d).max(axis=-1, keepdims=True)
    scaled: Floats = d / np.where(largest > 0, largest, 1.0)
    return scaled


def smallest_p(seeds: int) -> float:
    """The smallest two-sided p that sign flips of n differences can give: 2 / 2^n."""
    return min(1.0, 2.0 ** (1 - seeds))


def seeds_to_reach(alpha: float, comparisons: int = 1) -> int:
    """The fewest seeds with which the first contrast of a Holm family can have an adjusted p below
    `alpha`.
    """
    seeds = 1
    while comparisons * smallest_p(seeds) >= alpha:
        seeds += 1
    return seeds


def corrected_dz(differences: Sequence[float] | Floats) -> float:
    """J * mean / sd (ddof = 1): Cohen's d_z with Hedges' correction for the bias of few seeds.

    n >= 2; J and with it the result is 0 at n = 2. For equal differences, whose sd is 0: 0 if they
    are 0, else infinity with their sign. Source: Hedges 1981, doi 10.3102/10769986006002107.
    """
    d = numbers(differences)
    d = d / _largest(d)
    sd, centre = sample_sd(d), mean(d)
    if sd == 0:
        if centre == 0:
            return 0.0
        return float(np.copysign(np.inf, centre))
    return hedges_correction(len(d)) * centre / sd


def hedges_correction(n: int) -> float:
    """J = 1 - 3 / (4 (n - 1) - 1) for n >= 2 differences; J * mean / sd is unbiased to about 1%
    from n = 4 on.
    """
    return 1 - 3 / (4 * (n - 1) - 1)


def holm(p: Sequence[float]) -> list[float]:
    """The adjusted p values of one family, in the order given: step-down (m - i) * p_(i), made
    monotone, at most 1; empty for an empty family.

    Raises ValueError for a p outside [0, 1]. Source: Holm 1979, Scand. J. Statist. 6.
    """
    values = np.asarray(p, dtype=np.float64)
    if not ((values >= 0) & (values <= 1)).all():
        raise ValueError(f"p values lie in [0, 1], got {list(p)}")
    order = np.argsort(values, kind="stable")
    stepped = np.maximum.accumulate(values[order] * np.arange(len(values), 0, -1))
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(stepped, 1.0)
    return [float(value) for value in adjusted]


def tost(differences: Sequence[float] | Floats, margin: float) -> float:
    """p of the claim |mean| < margin: the larger of two one-sided paired t tests, against -margin
    and against +margin.

    n >= 2, margin > 0. Equal differences have no t statistic: inside the margin their p is 2^-n,
    the best that sign flips can give, else 1. Source: Schuirmann 1987, doi 10.1007/BF01068419.
    """
    from scipy.special import stdtr

    if not margin > 0:
        raise ValueError(f"the margin must be above 0, got {margin}")
    d = numbers(differences)
    sd, inside = sample_sd(d), margin - abs(mean(d))
    if sd == 0:
        if inside > 0:
            return 2.0 ** -len(d)
        return 1.0
    return float(stdtr(len(d) - 1, -inside / sd * np.sqrt(len(d))))


def standard_error(values: Sequence[float] | Floats) -> float:
    """The standard error of the mean of n >= 2 values: sqrt(var / n), ddof = 1."""
    return sample_sd(values) / float(np.sqrt(len(values)))

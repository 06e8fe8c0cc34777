"""How small a difference a number of seeds can find, and how many seeds a difference needs.

The rule that decides is that of `compare`: the 95% t interval leaves 0 out and the sign-flip p, multiplied by the size of the family
as for the first of Holm's steps, is below alpha. With few seeds the sign flips are coarse and the rule has less power than a t test,
so it is simulated there; from SIMULATED_SEEDS + 1 on a t test at the level that the flips reach agrees with it within some three points.
"""

from functools import lru_cache
from math import ceil, floor

import numpy as np

from retrain.analysis.statistics import Floats, seeds_to_reach, sign_flip_p_rows

SIMULATED_SEEDS = 10
_CAMPAIGNS = 4000
"""Simulated campaigns: a standard error of 0.6 points at a power of 0.8."""
MOST_SEEDS = 100_000
"""Beyond, a difference is out of reach."""


def power_of(seeds: int, effect: float, alpha: float = 0.05, comparisons: int = 1) -> float:
    """Probability that `seeds` pairs find a mean difference of `effect` standard deviations of the differences (normal)."""
    level = alpha / comparisons
    if seeds < max(2, seeds_to_reach(alpha, comparisons)):
        return 0.0
    if seeds <= SIMULATED_SEEDS:
        return _simulated_power(seeds, effect, alpha, level)
    return _t_power(seeds, effect, _reached_level(seeds, level))


def minimal_detectable_effect(seeds: int, sd: float, alpha: float = 0.05, power: float = 0.8, comparisons: int = 1) -> float | None:
    """The smallest mean difference that `seeds` pairs find with probability `power`; None where they cannot conclude at all."""
    units = _detectable_units(seeds, alpha, power, comparisons)
    return None if units is None else units * sd


def seeds_needed(effect: float, sd: float, alpha: float = 0.05, power: float = 0.8, comparisons: int = 1) -> int:
    """The fewest seeds that find a mean difference of `effect` with probability `power`, given the sd of the differences.

    Raises ValueError unless effect > 0 and sd >= 0, and where more than a hundred thousand would be needed.
    """
    if not effect > 0 or not sd >= 0:
        raise ValueError(f"an effect is above 0 and an sd not below it, got {effect} and {sd}")
    fewest = max(2, seeds_to_reach(alpha, comparisons))
    if sd == 0:
        return fewest
    if out_of_reach(effect, sd, alpha, power, comparisons):
        raise ValueError(f"an effect of {effect} at an sd of {sd} needs more than {MOST_SEEDS:,} seeds")
    seeds = max(fewest, floor(normal_seeds(effect, sd, alpha / comparisons, power)))
    while power_of(seeds, effect / sd, alpha, comparisons) < power:
        seeds += 1
    while seeds > fewest and power_of(seeds - 1, effect / sd, alpha, comparisons) >= power:
        seeds -= 1
    return seeds


def out_of_reach(effect: float, sd: float, alpha: float, power: float, comparisons: int) -> bool:
    """Whether more than MOST_SEEDS would be needed."""
    return normal_seeds(effect, sd, alpha / comparisons, power) > MOST_SEEDS


def normal_seeds(effect: float, sd: float, alpha: float = 0.05, power: float = 0.8) -> float:
    """The textbook's ((z_{1 - alpha/2} + z_power) sd / effect)^2, which is about two too few for a t test. Not rounded."""
    from scipy.special import ndtri

    return float(((ndtri(1 - alpha / 2) + ndtri(power)) * sd / effect) ** 2)


def sd_interval(sd: float, freedom: int, confidence: float = 0.95) -> tuple[float, float]:
    """Interval of a normal population's standard deviation, estimated as `sd` with so many degrees of freedom (>= 1)."""
    from scipy.special import chdtri

    tail = (1 - confidence) / 2
    low, high = (sd * float(np.sqrt(freedom / chdtri(freedom, part))) for part in (tail, 1 - tail))
    return low, high


def problems_needed(effect: float, between: float, within: float, samples: int, alpha: float = 0.05, power: float = 0.8) -> int:
    """Held-out problems for two fixed models: n >= (z_{a/2} + z_b)^2 (omega^2 + s_A^2/K + s_B^2/K) / delta^2.

    `between`: omega^2, variance over problems of the difference of the two true accuracies. `within`: s_A^2 + s_B^2, mean variances
    of one sample of a problem. `samples`: K for both. More samples reduce the second part only. Source: Miller 2024, arXiv 2411.00640.
    """
    return ceil(normal_seeds(effect, float(np.sqrt(between + within / samples)), alpha, power))


@lru_cache(maxsize=256)
def _detectable_units(seeds: int, alpha: float, power: float, comparisons: int) -> float | None:
    """The minimal detectable effect in standard deviations, by bisection."""
    if seeds < max(2, seeds_to_reach(alpha, comparisons)):
        return None
    low, high = 0.0, 1.0
    while power_of(seeds, high, alpha, comparisons) < power:
        low, high = high, 2 * high
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if power_of(seeds, middle, alpha, comparisons) >= power else (middle, high)
    return high


def _simulated_power(seeds: int, effect: float, alpha: float, level: float) -> float:
    from scipy.special import stdtrit

    differences = _noise(seeds) + effect
    critical = float(stdtrit(seeds - 1, 1 - alpha / 2))
    t = differences.mean(axis=1) * np.sqrt(seeds) / differences.std(axis=1, ddof=1)
    candidates = differences[t > critical]
    batches = [batch for batch in np.array_split(candidates, 16) if len(batch)]  # 2^(n-1) sums a row
    return sum(int(np.count_nonzero(sign_flip_p_rows(batch) < level)) for batch in batches) / _CAMPAIGNS


@lru_cache(maxsize=SIMULATED_SEEDS)
def _noise(seeds: int) -> Floats:
    """[campaigns, seeds] standard normal; the same every time, so that power rises smoothly with the effect."""
    return np.random.default_rng(seeds).standard_normal((_CAMPAIGNS, seeds))


def _t_power(seeds: int, effect: float, level: float) -> float:
    """Of a two-sided paired t test, through the noncentral t distribution."""
    from scipy.special import nctdtr, stdtrit

    critical = float(stdtrit(seeds - 1, 1 - level / 2))
    return float(1 - nctdtr(seeds - 1, effect * np.sqrt(seeds), critical))


def _reached_level(seeds: int, level: float) -> float:
    """The largest two-sided sign-flip p below `level`: a multiple of 2 / 2^n."""
    flips = 2.0 ** (seeds - 1)
    return (ceil(level * flips) - 1) / flips if seeds <= 50 else level

"""How small a difference a number of seeds can find, and how many seeds a difference needs.

The rule that decides is that of `compare`: the 95% t interval leaves 0 out and the sign-flip p, multiplied by the size of the family
as for the first of Holm's steps, is below alpha. With few seeds the sign flips are coarse and the rule has less power than a t test,
so it is simulated there; from SIMULATED_SEEDS + 1 on a t test at the level that the flips reach agrees with it within some three points.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, floor
from pathlib import Path

import numpy as np

from retrain.analysis import statistics
from retrain.analysis.arms import Arm, gather, measured
from retrain.analysis.measures import Metric, choose_metric
from retrain.analysis.runs import StoredRun, find_runs
from retrain.analysis.statistics import Floats, seeds_to_reach, sign_flip_p_rows
from retrain.errors import ConfigurationError

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


SEED_COUNTS = (4, 6, 8, 12, 16, 24, 32)
"""Rows of the table of detectable differences."""


@dataclass(frozen=True)
class HeldOutSpread:
    """Variances over held-out problems of the difference between two runs, per problem."""

    problems: int
    samples: int
    """Of each problem."""
    between: float
    """Of the difference in true accuracy; with one sample a problem the noise of sampling is in it."""
    within: float
    """Of one sample, both arms together; 0 where one sample cannot tell."""


@dataclass(frozen=True)
class Pilot:
    metric: Metric
    sd: float
    """Of the differences between two arms."""
    freedom: int
    source: str
    """What it was estimated from, in words."""
    comparisons: int
    """Conditions beside the baseline."""
    held_out: HeldOutSpread | None

    @property
    def sd_interval(self) -> tuple[float, float]:
        """95%: a pilot of few seeds leaves the spread open by a factor of two or more."""
        return sd_interval(self.sd, self.freedom)


@dataclass(frozen=True)
class Plan:
    effect: float | None
    sd: float
    alpha: float
    power: float
    comparisons: int

    def seeds(self, sd: float) -> int | None:
        """Seeds that find the effect at this sd; None beyond a hundred thousand. Needs an effect."""
        assert self.effect is not None
        if out_of_reach(self.effect, sd, self.alpha, self.power, self.comparisons):
            return None
        return seeds_needed(self.effect, sd, self.alpha, self.power, self.comparisons)

    def detectable(self) -> dict[int, float | None]:
        """Seeds -> the smallest difference that they find; None where they cannot conclude."""
        return {seeds: minimal_detectable_effect(seeds, self.sd, self.alpha, self.power, self.comparisons) for seeds in SEED_COUNTS}

    def problems(self, spread: HeldOutSpread) -> int:
        """Held-out problems with which two fixed models that differ by the effect are told apart. Needs an effect."""
        assert self.effect is not None
        return problems_needed(self.effect, spread.between, spread.within, spread.samples, self.alpha, self.power)


def read_pilot(folder: Path, metric_name: str | None = None) -> Pilot:
    """The spread between runs in or below `folder`: of paired differences where there are two conditions, else between the seeds of one.

    Raises ConfigurationError where no two finished runs of one condition are.
    """
    gathered = gather(find_runs(folder))
    metric = choose_metric(metric_name, gathered.runs)
    arms = [measured(label, runs, metric, gathered.left_out) for label, runs in gathered.conditions.items()]
    base, *others = arms
    paired = [arm for arm in others if len(_seeds(base, arm)) > 1]
    if paired:
        return _paired_pilot(metric, base, paired)
    largest = max(arms, key=lambda arm: len(arm.values))
    if len(largest.values) < 2:
        because = f" Left out: {' '.join(gathered.left_out)}" if gathered.left_out else ""
        raise ConfigurationError(
            f"{folder} has no two finished runs of one condition with {metric.name}, so it shows no spread; "
            f"run at least two seeds, or give --sd.{because}"
        )
    # Var(a - b) = 2 Var(a) for independent arms; the pairing that the campaign will have usually makes it less.
    sd = float(np.sqrt(2)) * statistics.spread(list(largest.values.values()))
    source = f"{len(largest.values)} runs of {largest.label} alone, as if two arms were independent: pairing usually needs fewer"
    return Pilot(metric, sd, len(largest.values) - 1, source, 1, None)


def _paired_pilot(metric: Metric, base: Arm, others: Sequence[Arm]) -> Pilot:
    """The differences of all contrasts pooled. They share the baseline's runs, so only those of the longest count as free."""
    differences = [[arm.values[seed] - base.values[seed] for seed in _seeds(base, arm)] for arm in others]
    freedom = [len(d) - 1 for d in differences]
    pooled = sum(statistics.spread(d) ** 2 * count for d, count in zip(differences, freedom, strict=True)) / sum(freedom)
    against = ", ".join(arm.label for arm in others)
    source = f"{max(freedom) + 1} pairs of {base.label} and {against}"
    pairs = [(arm.runs[seed], base.runs[seed]) for arm in others for seed in _seeds(base, arm)]
    held_out = held_out_spread(pairs) if metric.k == 1 else None
    return Pilot(metric, float(np.sqrt(pooled)), max(freedom), source, len(others), held_out)


def _seeds(base: Arm, arm: Arm) -> list[int]:
    return [seed for seed in base.values if seed in arm.values]


def held_out_spread(pairs: Sequence[tuple[StoredRun, StoredRun]]) -> HeldOutSpread | None:
    """Averaged over pairs of runs; None where no pair has two problems in common, each judged equally often."""
    parts = [part for pair in pairs if (part := _spread_of_pair(*pair))]
    if not parts:
        return None
    return HeldOutSpread(
        problems=min(part.problems for part in parts),
        samples=min(part.samples for part in parts),
        between=float(np.mean([part.between for part in parts])),
        within=float(np.mean([part.within for part in parts])),
    )


def _spread_of_pair(one: StoredRun, other: StoredRun) -> HeldOutSpread | None:
    if one.final_evaluation is None or other.final_evaluation is None:
        return None
    ours, theirs = ({item.example_id: item for item in run.problems} for run in (one.final_evaluation, other.final_evaluation))
    samples = max((item.samples for item in ours.values()), default=0)
    shared = [name for name, item in ours.items() if name in theirs and item.samples == theirs[name].samples == samples]
    if len(shared) < 2 or not samples:
        return None
    rates = np.array([[arm[name].correct / samples for name in shared] for arm in (ours, theirs)])
    within = float((rates * (1 - rates)).mean(axis=1).sum()) * samples / (samples - 1) if samples > 1 else 0.0
    total = float(np.var(rates[0] - rates[1], ddof=1))
    return HeldOutSpread(len(shared), samples, max(0.0, total - within / samples), within)

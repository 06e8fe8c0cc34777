"""How small a difference a number of seeds can find, and how many seeds a difference needs, given the spread a pilot shows.

The decision rule is the one of `compare`: the t interval excludes 0, and the adjusted sign-flip p is below alpha, for the one arm of the
family that differs. With few seeds the sign flips are coarse and the rule has less power than a t test, so it is simulated up to
SIMULATED_SEEDS; beyond, a t test at the level that the flips can reach agrees with it within about three points.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil, floor
from pathlib import Path
from typing import Literal

import numpy as np

from retrain.analysis.arms import Arm, arm_of, group_by_condition
from retrain.analysis.measures import Metric, choose_metric
from retrain.analysis.runs import StoredRun, find_runs
from retrain.analysis.sign_flips import max_t_rows
from retrain.analysis.statistics import Floats, paired_differences, sample_sd, seeds_to_reach
from retrain.errors import ConfigurationError
from retrain.records.printing import counted

Correction = Literal["maxt", "holm"]

SIMULATED_SEEDS = 10
_CAMPAIGNS = 4000
_FAMILY = 20
"""A larger family is simulated as one of this size: under joint flips each further arm costs next to nothing."""
"""Simulated campaigns: a standard error of 0.6 points at a power of 0.8."""
MOST_SEEDS = 100_000
"""A difference that needs more is out of reach."""
ASSURANCE = 0.8
"""How often a pilot's upper limit of the sd is above the true one."""
SEED_COUNTS = (4, 6, 8, 12, 16, 24, 32)
"""Rows of the table of detectable differences."""


@dataclass(frozen=True)
class HeldOutVariances:
    """How the difference between two runs varies over held-out problems."""

    problems: int
    samples: int
    """Per problem."""
    between: float
    """Variance of the difference in true accuracy; with one sample per problem it includes the sampling noise."""
    within: float
    """Variance of one sample, summed over both arms; 0 with one sample per problem, which cannot tell."""


@dataclass(frozen=True)
class Pilot:
    """What earlier runs show about the spread of differences between two arms."""

    metric: Metric
    sd: float
    """Standard deviation of the differences."""
    freedom: int
    """Degrees of freedom of `sd`."""
    source: str
    """What it was estimated from, in words."""
    comparisons: int
    """Conditions beside the baseline."""
    held_out: HeldOutVariances | None
    sd_by_contrast: Mapping[str, float] = field(default_factory=dict)
    """Condition -> the sd of its differences from the baseline."""

    @property
    def sd_interval(self) -> tuple[float, float]:
        """95%; after a pilot of few seeds its ends differ by a factor of two or more."""
        return sd_interval(self.sd, self.freedom)

    @property
    def assured_sd(self) -> float:
        """The upper limit that four of five pilots put above the true sd: seeds planned with it have the stated power as often."""
        return sd_interval(self.sd, self.freedom, 2 * ASSURANCE - 1)[1]


@dataclass(frozen=True)
class SeedPlan:
    """A planned campaign: the difference to find, the sd of the differences, and the test."""

    effect: float | None
    sd: float
    alpha: float
    power: float
    comparisons: int
    correction: Correction = "maxt"

    def seeds(self, sd: float) -> int | None:
        """Seeds that find the effect at this sd; None if more than MOST_SEEDS. Requires an effect."""
        assert self.effect is not None
        if out_of_reach(self.effect, sd, self.alpha, self.power, self.comparisons):
            return None
        return seeds_needed(self.effect, sd, self.alpha, self.power, self.comparisons, self.correction)

    def detectable(self) -> dict[int, float | None]:
        """Seeds -> the smallest difference they find; None if so few can conclude nothing."""
        rule = self.alpha, self.power, self.comparisons, self.correction
        return {seeds: minimal_detectable_effect(seeds, self.sd, *rule) for seeds in SEED_COUNTS}

    def problems(self, held_out: HeldOutVariances) -> int:
        """Held-out problems that tell two given models apart which differ by the effect. Requires an effect."""
        assert self.effect is not None
        return problems_needed(self.effect, held_out.between, held_out.within, held_out.samples, self.alpha, self.power)


# -- formulas ------------------------------------------------------------------------------------------------------------


def seeds_to_conclude(alpha: float = 0.05, comparisons: int = 1, correction: Correction = "maxt") -> int:
    """Fewest pairs with which any contrast of a family can be significant."""
    return seeds_to_reach(alpha, 1 if correction == "maxt" else comparisons)


def power_of(seeds: int, effect: float, alpha: float = 0.05, comparisons: int = 1, correction: Correction = "maxt") -> float:
    """Probability that `seeds` pairs find a mean difference of `effect` standard deviations (normal differences).

    The other contrasts of the family do not differ; all share the baseline, so that their differences correlate by a half.
    """
    if seeds < max(2, seeds_to_conclude(alpha, comparisons, correction)):
        return 0.0
    family = min(comparisons, _FAMILY) if correction == "maxt" else 1
    level = alpha if correction == "maxt" else alpha / comparisons
    if seeds <= SIMULATED_SEEDS:
        return _simulated_power(seeds, effect, alpha, level, family)
    if family > 1:
        level = _joint_level(seeds, alpha, family)
    if seeds <= 50:  # the largest sign-flip p below `level`: a multiple of 2 / 2^n, beyond 50 next to `level`
        flips = 2.0 ** (seeds - 1)
        level = (ceil(level * flips) - 1) / flips
    return _t_power(seeds, effect, level)


def minimal_detectable_effect(
    seeds: int, sd: float, alpha: float = 0.05, power: float = 0.8, comparisons: int = 1, correction: Correction = "maxt"
) -> float | None:
    """The smallest mean difference that `seeds` pairs find with probability `power`; None if so few can conclude nothing."""
    units = _detectable_units(seeds, alpha, power, comparisons, correction)
    return None if units is None else units * sd


def seeds_needed(
    effect: float, sd: float, alpha: float = 0.05, power: float = 0.8, comparisons: int = 1, correction: Correction = "maxt"
) -> int:
    """The fewest seeds that find a mean difference of `effect` with probability `power`, given the sd of the differences.

    Raises ValueError unless effect > 0 and sd >= 0, and if more than MOST_SEEDS would be needed.
    """
    if not effect > 0 or not sd >= 0:
        raise ValueError(f"the effect must be above 0 and the sd at least 0, got {effect} and {sd}")
    fewest = max(2, seeds_to_conclude(alpha, comparisons, correction))
    if sd == 0:
        return fewest
    if out_of_reach(effect, sd, alpha, power, comparisons):
        raise ValueError(f"an effect of {effect} at an sd of {sd} needs more than {MOST_SEEDS:,} seeds")
    seeds = max(fewest, floor(normal_seeds(effect, sd, alpha / comparisons, power)))
    while power_of(seeds, effect / sd, alpha, comparisons, correction) < power:
        seeds += 1
    while seeds > fewest and power_of(seeds - 1, effect / sd, alpha, comparisons, correction) >= power:
        seeds -= 1
    return seeds


def out_of_reach(effect: float, sd: float, alpha: float, power: float, comparisons: int) -> bool:
    return normal_seeds(effect, sd, alpha / comparisons, power) > MOST_SEEDS


def normal_seeds(effect: float, sd: float, alpha: float = 0.05, power: float = 0.8) -> float:
    """The normal approximation ((z_{1 - alpha/2} + z_power) sd / effect)^2, not rounded; about two too few for a t test."""
    from scipy.special import ndtri

    return float(((ndtri(1 - alpha / 2) + ndtri(power)) * sd / effect) ** 2)


def sd_interval(sd: float, freedom: int, confidence: float = 0.95) -> tuple[float, float]:
    """Confidence interval of a normal population's standard deviation, estimated as `sd` with `freedom` >= 1 degrees of freedom."""
    from scipy.special import chdtri

    tail = (1 - confidence) / 2
    low, high = (sd * float(np.sqrt(freedom / chdtri(freedom, part))) for part in (tail, 1 - tail))
    return low, high


def problems_needed(effect: float, between: float, within: float, samples: int, alpha: float = 0.05, power: float = 0.8) -> int:
    """Held-out problems for two fixed models: n >= (z_{a/2} + z_b)^2 (omega^2 + s_A^2/K + s_B^2/K) / delta^2.

    `between`: omega^2, variance over problems of the difference in true accuracy. `within`: s_A^2 + s_B^2, mean variance of one
    sample. `samples`: K, in both models; more of them reduce `within` only. Source: Miller 2024, arXiv 2411.00640.
    """
    return ceil(normal_seeds(effect, float(np.sqrt(between + within / samples)), alpha, power))


@lru_cache(maxsize=256)
def _detectable_units(seeds: int, alpha: float, power: float, comparisons: int, correction: Correction) -> float | None:
    """The minimal detectable effect in standard deviations, by bisection."""
    if seeds < max(2, seeds_to_conclude(alpha, comparisons, correction)):
        return None
    low, high = 0.0, 1.0
    while power_of(seeds, high, alpha, comparisons, correction) < power:
        low, high = high, 2 * high
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if power_of(seeds, middle, alpha, comparisons, correction) >= power else (middle, high)
    return high


def _simulated_power(seeds: int, effect: float, alpha: float, level: float, family: int) -> float:
    from scipy.special import stdtrit

    differences = _noise(seeds, family) + effect * np.eye(family)[0]
    first = differences[..., 0]
    critical = float(stdtrit(seeds - 1, 1 - alpha / 2))
    t = first.mean(axis=1) * np.sqrt(seeds) / first.std(axis=1, ddof=1)
    candidates = differences[t > critical]
    batches = [batch for batch in np.array_split(candidates, 16) if len(batch)]  # 2^(n-1) sums per row and contrast
    return sum(int(np.count_nonzero(max_t_rows(batch) < level)) for batch in batches) / len(differences)


@lru_cache(maxsize=2 * SIMULATED_SEEDS)
def _noise(seeds: int, family: int) -> Floats:
    """[campaigns, seeds, contrasts] standard normal, the same in every call so that power rises smoothly with the effect."""
    rng = np.random.default_rng(seeds)
    if family == 1:
        return rng.standard_normal((_CAMPAIGNS, seeds, 1))
    runs = rng.standard_normal((_CAMPAIGNS // 4, seeds, family + 1))
    differences: Floats = (runs[..., 1:] - runs[..., :1]) / np.sqrt(2)
    return differences


@lru_cache(maxsize=256)
def _joint_level(seeds: int, alpha: float, family: int) -> float:
    """The level of a single t test at which any of `family` that share a baseline is below it with probability alpha (Dunnett's)."""
    from scipy.special import stdtr

    rng = np.random.default_rng(seeds)
    largest = []
    for _ in range(10):
        runs = rng.standard_normal((2000, seeds, family + 1))
        differences = runs[..., 1:] - runs[..., :1]
        largest.append(np.abs(differences.mean(axis=1) * np.sqrt(seeds) / differences.std(axis=1, ddof=1)).max(axis=1))
    return 2 * float(stdtr(seeds - 1, -np.quantile(np.concatenate(largest), 1 - alpha)))


def _t_power(seeds: int, effect: float, level: float) -> float:
    """Power of a two-sided paired t test, from the noncentral t distribution."""
    from scipy.special import nctdtr, stdtrit

    critical = float(stdtrit(seeds - 1, 1 - level / 2))
    return float(1 - nctdtr(seeds - 1, effect * np.sqrt(seeds), critical))


# -- a design, in words --------------------------------------------------------------------------------------------------


def evaluation_sd(problems: int, samples: int) -> float:
    """The most that the answers alone can give a paired difference of accuracies as its sd: independent arms, accuracy 1/2."""
    return float(np.sqrt(0.5 / (problems * samples)))


def design_line(seeds: int, comparisons: int, problems: int, samples: int, alpha: float = 0.05, power: float = 0.8) -> str:
    """What a campaign can conclude when every condition is compared with the first; `problems` is 0 where their number is not known."""
    family = counted(comparisons, "comparison")
    units = minimal_detectable_effect(seeds, 1.0, alpha, power, comparisons)
    if units is None:
        return (
            f"Cannot conclude by design: {counted(seeds, 'seed')} cannot show a difference, however large; {family} at {alpha:g} need at "
            f"least {seeds_to_conclude(alpha, comparisons)} seeds."
        )
    found = (
        f"{counted(seeds, 'seed')} and {family} find a true difference of {units:.2g} standard deviations of the paired differences in "
        f"{100 * power:g}% of cases."
    )
    if not problems:
        return found
    sd = 100 * evaluation_sd(problems, samples)
    return (
        f"{found} {problems:,} held-out problems x {counted(samples, 'sample')} alone give them an sd of up to {sd:.1f} pp: that makes "
        f"{units * sd:.1f} pp. More [evaluation] max_examples or samples make it smaller, down to the luck of the runs."
    )


# -- a pilot -------------------------------------------------------------------------------------------------------------


def read_pilot(folder: Path, metric_name: str | None = None) -> Pilot:
    """The spread between the runs in or below `folder`: of paired differences if there are two conditions, else between the seeds of one.

    Raises ConfigurationError if no condition has two finished runs.
    """
    grouped = group_by_condition(find_runs(folder))
    metric = choose_metric(metric_name, grouped.runs)
    arms = [arm_of(label, runs, metric, grouped.left_out) for label, runs in grouped.conditions.items()]
    base, *others = arms
    paired = [arm for arm in others if len(paired_differences(arm.values, base.values)) > 1]
    if paired:
        return _paired_pilot(metric, base, paired)
    largest = max(arms, key=lambda arm: len(arm.values))
    if len(largest.values) < 2:
        because = f" Left out: {' '.join(grouped.left_out)}" if grouped.left_out else ""
        raise ConfigurationError(
            f"{folder} has no two finished runs of one condition with {metric.name}, so it shows no spread; "
            f"run at least two seeds, or give --sd.{because}"
        )
    # Var(a - b) = 2 Var(a) for independent arms; pairing usually makes it less.
    sd = float(np.sqrt(2)) * sample_sd(list(largest.values.values()))
    source = f"{len(largest.values)} runs of {largest.label} alone, as if two arms were independent: pairing usually needs fewer"
    return Pilot(metric, sd, len(largest.values) - 1, source, 1, None)


def _paired_pilot(metric: Metric, base: Arm, others: Sequence[Arm]) -> Pilot:
    """The differences of all contrasts pooled. They share the baseline's runs, so the degrees of freedom are those of the longest."""
    differences = [paired_differences(arm.values, base.values) for arm in others]
    freedom = [len(by_seed) - 1 for by_seed in differences]
    squares = [sample_sd(list(by_seed.values())) ** 2 * count for by_seed, count in zip(differences, freedom, strict=True)]
    source = f"{max(freedom) + 1} pairs of {base.label} and {', '.join(arm.label for arm in others)}"
    pairs = [(arm.runs[seed], base.runs[seed]) for arm, by_seed in zip(others, differences, strict=True) for seed in by_seed]
    held_out = held_out_variances(pairs) if metric.k == 1 else None
    sds = {arm.label: sample_sd(list(by_seed.values())) for arm, by_seed in zip(others, differences, strict=True)}
    return Pilot(metric, float(np.sqrt(sum(squares) / sum(freedom))), max(freedom), source, len(others), held_out, sds)


def held_out_variances(pairs: Sequence[tuple[StoredRun, StoredRun]]) -> HeldOutVariances | None:
    """Averaged over pairs of runs; None if no pair shares two problems that were judged equally often."""
    parts = [part for pair in pairs if (part := _variances_of_pair(*pair))]
    if not parts:
        return None
    return HeldOutVariances(
        problems=min(part.problems for part in parts),
        samples=min(part.samples for part in parts),
        between=float(np.mean([part.between for part in parts])),
        within=float(np.mean([part.within for part in parts])),
    )


def _variances_of_pair(one: StoredRun, other: StoredRun) -> HeldOutVariances | None:
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
    return HeldOutVariances(len(shared), samples, max(0.0, total - within / samples), within)

"""Estimate from a pilot, that is earlier runs, the spread of differences. It gives the cheapest
design that finds a difference of a given size, and the plan of a campaign that rests on both.

A design is a number of seeds, held-out problems and samples. The difference d of a pair on P
problems with K samples each has Var(d) = luck + (interaction + sampling / K) / P. More seeds reduce
all of it, more problems the second term, and more samples the sampling. A seed costs a training run
of each arm; an answer costs little.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from pathlib import Path

import numpy as np

from retrain.analysis.arms import (
    Arm,
    arm_of,
    check_same_problems,
    group_by_condition,
    recorded_numbers,
)
from retrain.analysis.integrity import as_planned, campaigns_of
from retrain.analysis.measures import Metric, choose_metric
from retrain.analysis.pairs import Pairs, pair_up
from retrain.analysis.power import Rule, minimal_detectable_effect, sd_interval
from retrain.analysis.runs import RECENT, find_runs
from retrain.analysis.statistics import paired_differences, sample_sd
from retrain.errors import ConfigurationError

# -- designs ---------------------------------------------------------------------------------------


PROBLEMS = (100, 200, 500, 1000, 2000)
SAMPLES = (1, 2, 4, 8, 16)
MAX_DESIGN_SEEDS = 40


@dataclass(frozen=True)
class Spread:
    """The sources of the variance of a pair's difference, and the cost of a run and an answer."""

    luck: float
    """Variance that no evaluation removes."""
    interaction: float
    """The variance of one problem's difference about the mean of its problem and its seed, without
    the sampling."""
    sampling: float
    """The variance of the difference of one answer of each arm."""
    run_seconds: float
    answer_seconds: float

    @classmethod
    def of(cls, family: Sequence[Pairs]) -> "Spread | None":
        """Return the spread, averaged over contrasts. Return None without held-out answers to
        several samples, or if the runs did not record their times.
        """
        parts = list(filter(None, map(_parts, family)))
        runs = list(chain.from_iterable(chain.from_iterable(pairs.runs for pairs in family)))
        seconds = recorded_numbers(runs, "seconds")
        # The times to sample an answer in the last training steps, for each run that recorded them.
        recorded = [
            [
                record.time_sample_s / (record.batch_size * record.group_size)
                for record in run.last_metrics(RECENT)
                if record.time_sample_s and record.batch_size and record.group_size
            ]
            for run in runs
        ]
        answers = [float(np.median(found)) for found in recorded if found]
        if not (parts and seconds and answers):
            return None
        luck, interaction, sampling = np.mean(parts, axis=0).tolist()
        return cls(luck, interaction, sampling, float(np.mean(seconds)), float(np.median(answers)))


def _parts(pairs: Pairs) -> tuple[float, float, float] | None:
    """Return the variances of luck, interaction and sampling of one contrast. Return None with one
    sample per problem, which cannot separate the last two.
    """
    table = pairs.parts
    evaluated = [run.answers for run in chain.from_iterable(pairs.runs) if run.answers]
    if table is None:
        return None
    samples = int(np.median(np.concatenate([answers.judged for answers in evaluated])))
    if samples < 2:
        return None
    # p (1 - p) of K answers is too small by the factor (K - 1) / K.
    variances = [
        float(np.mean(rate * (1 - rate))) * samples / (samples - 1)
        for answers in evaluated
        if len(rate := answers.rates()[answers.judged > 1])
    ]
    # Both arms sample, so the variance of their difference has it twice.
    sampling = 2 * float(np.mean(variances))
    return table.luck_variance, max(0.0, table.residual_square - sampling / samples), sampling


@dataclass(frozen=True)
class Design:
    seeds: int
    problems: int
    samples: int
    detectable: float
    hours: float
    """The hours of all arms, one run after the other."""


def cheapest(spread: Spread, effect: float, rule: Rule) -> Design | None:
    """Return the design that finds `effect` in the least time; None if no design with at most
    MAX_DESIGN_SEEDS seeds does.
    """
    designs = (
        _with_fewest_seeds(spread, problems, samples, effect, rule)
        for problems, samples in product(PROBLEMS, SAMPLES)
    )
    return min(filter(None, designs), key=lambda design: design.hours, default=None)


def _with_fewest_seeds(
    spread: Spread, problems: int, samples: int, effect: float, rule: Rule
) -> Design | None:
    variance = spread.luck + (spread.interaction + spread.sampling / samples) / problems
    sd = float(np.sqrt(variance))

    def detectable(seeds: int) -> float:
        return minimal_detectable_effect(seeds, sd, rule) or 0.0  # The counts start at the fewest.

    # More seeds find smaller differences, so bisection finds the fewest.
    counts = range(rule.fewest, MAX_DESIGN_SEEDS + 1)
    seeds = rule.fewest + bisect_left(counts, True, key=lambda seeds: detectable(seeds) <= effect)
    if seeds > MAX_DESIGN_SEEDS:
        return None
    seconds = spread.run_seconds + problems * samples * spread.answer_seconds
    hours = (rule.comparisons + 1) * seeds * seconds / 3600
    return Design(seeds, problems, samples, detectable(seeds), hours)


# -- pilots ----------------------------------------------------------------------------------------


ASSURANCE = 0.8
"""Fraction of pilots whose upper limit of the sd is above the true one."""


@dataclass(frozen=True)
class Pilot:
    """The spread of differences between two arms, estimated from earlier runs."""

    metric: Metric
    sd: float
    """Standard deviation of the differences."""
    freedom: int
    """Degrees of freedom of `sd`."""
    source: str
    """The runs behind the estimate, in words."""
    comparisons: int
    """Conditions besides the baseline."""
    sd_by_contrast: Mapping[str, float] = field(default_factory=dict)
    """Condition -> the sd of its differences from the baseline."""
    spread: Spread | None = None
    """The sources of the variance and the cost of lowering it; None if the runs do not show
    them.
    """

    @property
    def sd_interval(self) -> tuple[float, float]:
        """The 95% interval of the sd; after a pilot of few seeds its ends differ by a factor of two
        or more.
        """
        return sd_interval(self.sd, self.freedom)

    @property
    def assured_sd(self) -> float:
        """The upper limit that is above the true sd in four of five pilots. Plans with it reach the
        stated power as often.
        """
        return sd_interval(self.sd, self.freedom, 2 * ASSURANCE - 1)[1]


def read_pilot(folder: Path, metric_name: str | None = None) -> Pilot:
    """Return the spread between the runs in or below `folder`. Two conditions give the spread of
    paired differences, one condition the spread between its seeds.

    Raises ConfigurationError if no condition has two finished runs.
    """
    runs = find_runs(folder)
    grouped = group_by_condition(*as_planned(runs, campaigns_of(runs)))
    metric = choose_metric(metric_name, grouped.runs)
    if metric.k is not None:
        check_same_problems(grouped.runs)
    arms = [arm_of(label, runs, metric) for label, runs in grouped.conditions.items()]
    base, *others = arms
    paired = [arm for arm in others if len(paired_differences(arm.values, base.values)) > 1]
    if paired:
        return _pilot_of_pairs(base, paired, metric)
    largest = max(arms, key=lambda arm: len(arm.values))
    if len(largest.values) < 2:
        left_out = [*grouped.left_out, *chain.from_iterable(arm.left_out for arm in arms)]
        because = f" Left out: {' '.join(left_out)}" * bool(left_out)
        raise ConfigurationError(
            f"{folder} has no two finished runs of one condition with {metric.name}, so it shows no"
            f" spread; run at least two seeds, or give --sd.{because}"
        )
    # Var(a - b) = 2 Var(a) for independent arms; pairing usually makes it less.
    sd = float(np.sqrt(2)) * sample_sd(list(largest.values.values()))
    source = (
        f"{len(largest.values)} runs of {largest.label} alone, as if two arms were independent:"
        " pairing usually needs fewer"
    )
    return Pilot(metric, sd, len(largest.values) - 1, source, 1)


def _pilot_of_pairs(base: Arm, paired: Sequence[Arm], metric: Metric) -> Pilot:
    """Return the pooled differences of all contrasts. They share the baseline's runs, so the
    longest contrast gives the degrees of freedom.
    """
    differences = {arm.label: paired_differences(arm.values, base.values) for arm in paired}
    sds = {label: sample_sd(list(by_seed.values())) for label, by_seed in differences.items()}
    freedom = [len(by_seed) - 1 for by_seed in differences.values()]
    squares = [sd**2 * count for sd, count in zip(sds.values(), freedom, strict=True)]
    sd = float(np.sqrt(sum(squares) / sum(freedom)))
    source = f"{max(freedom) + 1} pairs of {base.label} and {', '.join(differences)}"
    # Only the rate of single answers has components for problems and samples.
    spread = Spread.of([pair_up(arm, base) for arm in paired]) if metric.k == 1 else None
    return Pilot(metric, sd, max(freedom), source, len(paired), sds, spread)

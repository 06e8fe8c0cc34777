"""How many seeds a campaign needs: from a pilot's spread, or from a spread that is given."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from retrain.analysis import power, statistics
from retrain.analysis.arms import Arm, gather, measured
from retrain.analysis.measures import Metric, choose_metric
from retrain.analysis.runs import StoredRun, find_runs
from retrain.errors import ConfigurationError

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
        return power.sd_interval(self.sd, self.freedom)


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
        if power.out_of_reach(self.effect, sd, self.alpha, self.power, self.comparisons):
            return None
        return power.seeds_needed(self.effect, sd, self.alpha, self.power, self.comparisons)

    def detectable(self) -> dict[int, float | None]:
        """Seeds -> the smallest difference that they find; None where they cannot conclude."""
        return {seeds: power.minimal_detectable_effect(seeds, self.sd, self.alpha, self.power, self.comparisons) for seeds in SEED_COUNTS}

    def problems(self, spread: HeldOutSpread) -> int:
        """Held-out problems with which two fixed models that differ by the effect are told apart. Needs an effect."""
        assert self.effect is not None
        return power.problems_needed(self.effect, spread.between, spread.within, spread.samples, self.alpha, self.power)


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

"""The cheapest design that finds a difference: how many seeds, held-out problems and samples, given
what a pilot shows and costs.

Var(d) = luck + (interaction + sampling / K) / P for the difference d of a pair evaluated on P
problems with K samples each. Seeds average out all of it, problems the second part, samples the
sampling. A seed costs a training run of each arm, an answer next to nothing.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, product

import numpy as np

from retrain.analysis.pairs import Pairs
from retrain.analysis.power import Correction, minimal_detectable_effect, seeds_to_conclude

PROBLEMS = (100, 200, 500, 1000, 2000)
SAMPLES = (1, 2, 4, 8, 16)
_MAX_SEEDS = 40


@dataclass(frozen=True)
class Spread:
    """Where the variance of a pair's difference comes from, and what makes it smaller."""

    luck: float
    """Variance that no evaluation removes."""
    interaction: float
    """The variance of one problem's difference about the mean of its problem and its seed, without
    the sampling."""
    sampling: float
    """The variance of the difference of one answer of each arm."""
    run_seconds: float
    answer_seconds: float

    def sd(self, problems: int, samples: int) -> float:
        return float(np.sqrt(self.luck + (self.interaction + self.sampling / samples) / problems))

    def seconds(self, seeds: int, problems: int, samples: int, arms: int) -> float:
        return arms * seeds * (self.run_seconds + problems * samples * self.answer_seconds)

    @classmethod
    def of(cls, family: Sequence[Pairs]) -> "Spread | None":
        """The spread, averaged over contrasts; None without held-out answers to several samples, or
        where the runs did not record their times.
        """
        parts = list(filter(None, map(_parts, family)))
        runs = [run for pairs in family for pair in pairs.runs for run in pair]
        times = [run.summary.get("seconds") for run in runs]
        seconds = [time for time in times if isinstance(time, int | float)]
        # per run that recorded it, the median time to sample an answer in the last steps
        # of training
        answers = []
        for run in runs:
            found = [
                record.time_sample_s / (record.batch_size * record.group_size)
                for record in run.last_metrics(20)
                if record.time_sample_s and record.batch_size and record.group_size
            ]
            if found:
                answers.append(float(np.median(found)))
        if not parts or not seconds or not answers:
            return None
        luck, interaction, sampling = np.mean(parts, axis=0).tolist()
        return cls(luck, interaction, sampling, float(np.mean(seconds)), float(np.median(answers)))


def _parts(pairs: Pairs) -> tuple[float, float, float] | None:
    """The variances of luck, interaction and sampling of one contrast; None with one sample per
    problem, which cannot tell the last two apart.
    """
    table = pairs.two_way()
    found = [run.answers for run in chain.from_iterable(pairs.runs)]
    evaluated = [answers for answers in found if answers]
    samples = 0
    if evaluated:
        samples = int(np.median(np.concatenate([answers.judged for answers in evaluated])))
    if table is None or samples < 2:
        return None
    rates = [answers.rates()[answers.judged > 1] for answers in evaluated]
    variances = [
        float(np.mean(rate * (1 - rate))) * samples / (samples - 1) for rate in rates if len(rate)
    ]
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


def cheapest(
    spread: Spread,
    effect: float,
    comparisons: int,
    alpha: float,
    power: float,
    correction: Correction = "maxt",
) -> Design | None:
    """The design that finds `effect` in the least time; None if none of at most _MAX_SEEDS seeds
    does.
    """
    found = []
    for problems, samples in product(PROBLEMS, SAMPLES):
        design = _with_fewest_seeds(
            spread, problems, samples, effect, comparisons, alpha, power, correction
        )
        if design:
            found.append(design)
    return min(found, key=lambda design: design.hours, default=None)


def _with_fewest_seeds(
    spread: Spread,
    problems: int,
    samples: int,
    effect: float,
    comparisons: int,
    alpha: float,
    power: float,
    correction: Correction,
) -> Design | None:
    sd = spread.sd(problems, samples)

    def detectable(seeds: int) -> float:
        found = minimal_detectable_effect(seeds, sd, alpha, power, comparisons, correction)
        if found is None:
            return float("inf")
        return found

    counts = range(max(2, seeds_to_conclude(alpha, comparisons, correction)), _MAX_SEEDS + 1)
    first = bisect_left(counts, True, key=lambda seeds: detectable(seeds) <= effect)
    if first == len(counts):
        return None
    seeds = counts[first]
    return Design(
        seeds,
        problems,
        samples,
        detectable(seeds),
        spread.seconds(seeds, problems, samples, comparisons + 1) / 3600,
    )

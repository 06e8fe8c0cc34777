"""Pair the runs of a contrast: two runs with one seed from the two arms, and their difference, over
all held-out problems or by task.

A run's score on a task is its mean accuracy over the task's problems. A single task that is always
right or always wrong moves the interquartile mean over tasks less than the mean. Source: Agarwal et
al. 2021, arXiv 2108.13264.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import comb

import numpy as np

from retrain.analysis.arms import Arm
from retrain.analysis.held_out import AnswerDifference
from retrain.analysis.runs import Pair, StoredRun
from retrain.analysis.statistics import (
    Differences,
    Floats,
    Interval,
    TwoWay,
    mean,
    numbers,
    paired_differences,
)
from retrain.analysis.verdict import FEW_PROBLEMS, PairedDifferences

# -- tasks -----------------------------------------------------------------------------------------


Statistic = Callable[[Floats], Floats]
"""[resamples, runs, ...] -> [resamples]."""
_REPLICATES = 1000


@dataclass(frozen=True)
class TaskAggregate:
    """An arm's scores on several tasks."""

    scores: Mapping[str, float]
    """Task -> accuracy, averaged over the runs."""
    iqm: float
    interval: Interval | None
    """The interval of the IQM, for new runs; None for a single run."""


@dataclass(frozen=True)
class TaskContrast:
    """A candidate against the baseline on several tasks."""

    iqm_difference: float
    interval: Interval
    probability_of_improvement: float


def iqm(scores: Sequence[float] | Sequence[Sequence[float]] | Floats) -> float:
    """Return the interquartile mean of all runs x tasks scores, without a quarter of them, rounded
    down, at either end.

    Raises ValueError without scores and for a score that is not finite.
    """
    flat = np.sort(numbers(np.ravel(scores)))
    cut = flat.size // 4
    return mean(flat[cut : flat.size - cut])


def iqm_rows(scores: Floats) -> Floats:
    """Turn [resamples, runs, tasks] scores into [resamples] interquartile means."""
    flat = np.sort(scores.reshape(len(scores), -1), axis=1)
    cut = flat.shape[1] // 4
    means: Floats = flat[:, cut : flat.shape[1] - cut].mean(axis=1)
    return means


def run_interval(
    scores: Floats, statistic: Statistic = iqm_rows, confidence: float = 0.95
) -> Interval:
    """Return the percentile interval of a statistic of [runs, ...] scores, two runs or more; a
    resample draws runs whole, for all tasks at once.

    One run answers all tasks, so its luck is in all of its scores. Agarwal et al. resample within
    each task; then the runs average out, and the interval covers the truth 46 to 67% of the time. A
    factor moves the percentiles away from the estimate. A resample of n runs shows (n - 1) / n of
    their variance, and percentiles ignore Student's t. Source of the factor: Hesterberg 2015, arXiv
    1411.5279.
    """
    from scipy.special import ndtri, stdtrit

    rng = np.random.default_rng(0)
    n, quantile = len(scores), 0.5 + confidence / 2
    values = statistic(scores[rng.integers(0, n, size=(_REPLICATES, n))])
    center = float(statistic(scores[np.newaxis])[0])
    factor = float(stdtrit(n - 1, quantile) / ndtri(quantile)) * float(np.sqrt(n / (n - 1)))
    low, high = np.quantile(values, [1 - quantile, quantile])
    return center - factor * (center - float(low)), center + factor * (float(high) - center)


def iqm_difference_interval(
    candidate: Floats, baseline: Floats, confidence: float = 0.95
) -> Interval:
    """Return the interval of iqm(candidate) - iqm(baseline), both [seeds, tasks]; a resample takes
    the same seeds of both arms.
    """
    pairs = np.stack([candidate, baseline], axis=-1)
    return run_interval(
        pairs, lambda drawn: iqm_rows(drawn[..., 0]) - iqm_rows(drawn[..., 1]), confidence
    )


def probability_of_improvement(candidate: Floats, baseline: Floats) -> float:
    """Return the probability that a run of the candidate beats a run of the baseline, averaged over
    tasks; ties count half. Both [runs, tasks].
    """
    won = np.sign(candidate[:, np.newaxis] - baseline)
    return float((won / 2 + 0.5).mean())


# -- of stored runs --------------------------------------------------------------------------------


def aggregate_tasks(runs: Mapping[int, StoredRun], confidence: float) -> TaskAggregate | None:
    """Aggregate the runs over their tasks; None unless the runs share two tasks or more."""
    tasks, scores = _scores(list(runs.values()))
    if len(tasks) < 2:
        return None
    return TaskAggregate(
        scores=dict(zip(tasks, scores.mean(axis=0).tolist(), strict=True)),
        iqm=iqm(scores),
        interval=run_interval(scores, confidence=confidence) if len(runs) > 1 else None,
    )


def contrast_tasks(pairs: Sequence[Pair], confidence: float) -> TaskContrast | None:
    """Compare two arms over their tasks. `pairs` are (candidate, baseline). Return None below two
    pairs, and unless all runs share two tasks or more.
    """
    tasks, scores = _scores(list(chain.from_iterable(pairs)))
    if len(tasks) < 2 or len(pairs) < 2:
        return None
    candidate, baseline = scores[0::2], scores[1::2]
    return TaskContrast(
        iqm_difference=iqm(candidate) - iqm(baseline),
        interval=iqm_difference_interval(candidate, baseline, confidence),
        probability_of_improvement=probability_of_improvement(candidate, baseline),
    )


def _scores(runs: Sequence[StoredRun]) -> tuple[list[str], Floats]:
    """Return the tasks with a judged problem in every run, and [runs, tasks] mean accuracies."""
    by_run = [run.final_evaluation.by_task if run.final_evaluation else {} for run in runs]
    rates = [{task: part.pass_at.get(1) for task, part in parts.items()} for parts in by_run]
    judged = [{task for task in own if own[task] is not None} for own in rates]
    tasks = [task for task in [*rates, {}][0] if all(task in own for own in judged)]
    return tasks, np.array([[own[task] for task in tasks] for own in rates], dtype=np.float64)


# -- pairs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pairing:
    """The effect of pairing by seed on the spread of the differences."""

    correlation: float
    """The correlation between the two runs of a seed."""
    unpaired_sd: float
    """The sd of the differences if the arms were independent."""


@dataclass(frozen=True)
class Losses:
    """Seeds with a failed or collapsed run, and the exact test of whether one arm loses more."""

    candidate: int
    baseline: int
    p: float
    """The two-sided p over the seeds with one lost run (McNemar's exact test)."""


@dataclass(frozen=True)
class Pairs:
    """One contrast, candidate - baseline; one pair or more."""

    candidate: Arm
    base: Arm
    differences: Differences
    """Seed -> candidate - baseline, in the metric's units."""
    answers: Mapping[int, AnswerDifference]
    """Seed -> its difference by problem, for each of `differences`; empty for a training metric."""
    alpha: float = 0.05
    looks: Mapping[int, int] | None = None
    """Seed -> number of the look that took it, from 0; None for a comparison without looks."""

    @property
    def condition(self) -> str:
        return self.candidate.label

    @property
    def baseline(self) -> str:
        return self.base.label

    @property
    def runs(self) -> list[Pair]:
        """(candidate, baseline) of the pairs."""
        ours, theirs = self.candidate.runs, self.base.runs
        return [(ours[seed], theirs[seed]) for seed in self.differences]

    def at_looks(self, looks: Mapping[int, int]) -> "Pairs":
        """Return the contrast as an e-process has seen it: the seeds of `looks`, in their order.
        `looks` gives the number of each look.
        """
        return replace(
            self,
            differences={
                seed: self.differences[seed] for seed in looks if seed in self.differences
            },
            answers={seed: self.answers[seed] for seed in looks if seed in self.answers},
            looks=looks,
        )

    @property
    def _by_problem(self) -> Floats:
        """[pairs, problems]; empty without held-out answers."""
        return np.array([found.by_problem for found in self.answers.values()])

    @property
    def problems(self) -> int:
        """The held-out problems on which some pair has a difference; 0 for a training metric."""
        return int((~np.isnan(self._by_problem)).any(axis=0).sum())

    def paired(self, family: int, *, judges_losses: bool) -> PairedDifferences:
        """Return the input of a verdict. The interval for new problems, where a verdict needs one,
        has Bonferroni's level over the family. `judges_losses`: failed or collapsed runs, more than
        a quarter of an arm's, prevent a verdict.
        """
        parts = self.parts
        wide = parts.interval(1 - self.alpha / family) if parts else None
        few = 0 < self.problems < FEW_PROBLEMS
        found = self.answers
        least = self._keyed({seed: one.least for seed, one in found.items()})
        most = self._keyed({seed: one.most for seed, one in found.items()})
        unbounded = (-np.inf, np.inf)  # One problem, or too few judged ones.
        return PairedDifferences(
            self._keyed(self.differences),
            (least, most) if any(one.unjudged for one in found.values()) else None,
            (wide or unbounded) if few else None,
            judges_losses and (self.candidate.loses_too_many or self.base.loses_too_many),
        )

    def _keyed(self, values: Differences) -> Differences:
        if self.looks is None:
            return values
        return {self.looks[seed]: value for seed, value in values.items()}

    @property
    def parts(self) -> TwoWay | None:
        """The sources of the spread of the differences; None without held-out answers of two pairs
        to two problems.
        """
        return TwoWay.of(self._by_problem) if self.answers else None

    @property
    def wide(self) -> Interval | None:
        """The interval for new seeds and new held-out problems."""
        parts = self.parts
        return parts.interval(1 - self.alpha) if parts else None

    @property
    def pairing(self) -> Pairing | None:
        """The effect of pairing; None below three pairs, or if an arm does not vary."""
        if len(self.differences) < 3:
            return None
        both = (self.candidate.values, self.base.values)
        arms = np.array([[values[seed] for seed in self.differences] for values in both])
        variances = arms.var(axis=1, ddof=1)
        if not variances.all():
            return None
        return Pairing(float(np.corrcoef(arms)[0, 1]), float(np.sqrt(variances.sum())))

    @property
    def losses(self) -> Losses | None:
        """The seeds whose run failed or collapsed; None if no run did."""
        ours, theirs = self.candidate.lost, self.base.lost
        if not ours | theirs:
            return None
        one = len(ours & self.base.values.keys())
        other = len(theirs & self.candidate.values.keys())
        ways = sum(comb(one + other, count) for count in range(min(one, other) + 1))
        return Losses(len(ours), len(theirs), min(1.0, 2 * ways / 2 ** (one + other)))


def pair_up(candidate: Arm, baseline: Arm, alpha: float = 0.05) -> Pairs:
    """Pair the runs of two arms by seed."""
    found, k = paired_differences(candidate.values, baseline.values), candidate.metric.k
    if k is None:
        return Pairs(candidate, baseline, found, {}, alpha)
    known = {}
    for seed in found:
        ours, theirs = candidate.runs[seed].answers, baseline.runs[seed].answers
        assert ours and theirs  # A run without answers has no such metric.
        answers = AnswerDifference.between(ours, theirs, k)
        # A difference is NaN if no problem has judged answers in both runs.
        if not np.isnan(answers.mean):
            known[seed] = answers
    means = {seed: answers.mean for seed, answers in known.items()}
    return Pairs(candidate, baseline, means, known, alpha)


def outlying_seeds(differences: Differences) -> Sequence[int]:
    """Return seeds whose difference lies far from the others: a robust z score above 8, from five
    pairs on.

    Source of the score, and of the fallback if half of the differences are equal: Iglewicz and
    Hoaglin 1993.
    """
    values = np.array(list(differences.values()))
    if len(values) < 5:
        return []
    distances = np.abs(values - np.median(values))
    scale = 1.4826 * float(np.median(distances)) or 1.2533 * float(distances.mean())
    return [
        seed
        for seed, distance in zip(differences, distances, strict=True)
        if scale and distance > 8 * scale
    ]

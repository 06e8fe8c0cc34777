"""Aggregates over the tasks of the held-out problems.

A run's score on a task is its mean accuracy over the task's problems. The interquartile mean over
tasks is moved less than the mean by one task that is always right or always wrong. Source: Agarwal
et al. 2021, arXiv 2108.13264.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from retrain.analysis.runs import StoredRun
from retrain.analysis.statistics import Floats, mean
from retrain.records.entries import EvaluationRecord

Statistic = Callable[[Floats], Floats]
"""[resamples, runs, ...] -> [resamples]."""
_REPLICATES = 1000
PROFILE_THRESHOLDS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class TaskAggregate:
    """An arm's scores on several tasks."""

    tasks: Mapping[str, float]
    """Task -> accuracy, averaged over the runs."""
    iqm: float
    interval: tuple[float, float] | None
    """The interval of the IQM, for new runs; None for a single run."""
    profile: Sequence[float]
    """Fraction of the runs x tasks scores above each of PROFILE_THRESHOLDS."""


@dataclass(frozen=True)
class TaskContrast:
    """A candidate against the baseline on several tasks."""

    iqm_difference: float
    interval: tuple[float, float]
    probability_of_improvement: float


def iqm(scores: Sequence[float] | Sequence[Sequence[float]] | Floats) -> float:
    """The interquartile mean of all runs x tasks scores: a quarter of them, rounded down, is cut
    off at either end.

    Raises ValueError without scores and for one that is not finite.
    """
    flat = np.sort(np.asarray(scores, dtype=np.float64), axis=None)
    if flat.size == 0 or not np.isfinite(flat).all():
        raise ValueError(f"expected finite scores, got {scores!r}")
    cut = flat.size // 4
    return mean(flat[cut : flat.size - cut])


def iqm_rows(scores: Floats) -> Floats:
    """[resamples, runs, tasks] scores -> [resamples] interquartile means."""
    flat = np.sort(scores.reshape(len(scores), -1), axis=1)
    cut = flat.shape[1] // 4
    means: Floats = flat[:, cut : flat.shape[1] - cut].mean(axis=1)
    return means


def run_interval(
    scores: Floats, statistic: Statistic = iqm_rows, confidence: float = 0.95
) -> tuple[float, float]:
    """The percentile interval of a statistic of [runs, ...] scores, two runs or more; a resample
    draws runs whole, for all tasks at once.

    One run answers all tasks, so its luck is in all of its scores: drawn within each task, as
    Agarwal et al. do, the runs average out and the interval covers the truth 46 to 67% of the time.
    The percentiles are moved away from the estimate: a resample of n runs shows (n - 1) / n of
    their variance, and percentiles ignore Student's t. Source of the factor: Hesterberg 2015, arXiv
    1411.5279.
    """
    from scipy.special import ndtri, stdtrit

    rng = np.random.default_rng(0)
    n, quantile = len(scores), 0.5 + confidence / 2
    values = statistic(scores[rng.integers(0, n, size=(_REPLICATES, n))])
    centre = float(statistic(scores[np.newaxis])[0])
    factor = float(stdtrit(n - 1, quantile) / ndtri(quantile)) * float(np.sqrt(n / (n - 1)))
    low, high = np.quantile(values, [1 - quantile, quantile])
    return centre - factor * (centre - float(low)), centre + factor * (float(high) - centre)


def iqm_difference_interval(
    candidate: Floats, baseline: Floats, confidence: float = 0.95
) -> tuple[float, float]:
    """The interval of iqm(candidate) - iqm(baseline), both [seeds, tasks]; a resample takes the
    same seeds of both arms.
    """
    pairs = np.stack([candidate, baseline], axis=-1)
    return run_interval(
        pairs, lambda drawn: iqm_rows(drawn[..., 0]) - iqm_rows(drawn[..., 1]), confidence
    )


def probability_of_improvement(candidate: Floats, baseline: Floats) -> float:
    """The probability that a run of the candidate beats a run of the baseline, averaged over tasks;
    ties count half. Both [runs, tasks].
    """
    above = candidate[:, np.newaxis, :] > baseline[np.newaxis, :, :]
    equal = candidate[:, np.newaxis, :] == baseline[np.newaxis, :, :]
    return float((above + 0.5 * equal).mean())


def performance_profile(scores: Floats, thresholds: Sequence[float] | Floats) -> Floats:
    """Fraction of the runs x tasks scores above each threshold."""
    return np.array([float((scores > threshold).mean()) for threshold in thresholds])


# -- of stored runs --------------------------------------------------------------------------------


def aggregate_tasks(runs: Mapping[int, StoredRun], confidence: float) -> TaskAggregate | None:
    """Aggregate the runs over their tasks; None unless the runs share two tasks or more."""
    tasks, scores = _scores(list(runs.values()))
    if len(tasks) < 2:
        return None
    return TaskAggregate(
        tasks={task: float(mean) for task, mean in zip(tasks, scores.mean(axis=0), strict=True)},
        iqm=iqm(scores),
        interval=run_interval(scores, confidence=confidence) if len(runs) > 1 else None,
        profile=performance_profile(scores, PROFILE_THRESHOLDS).tolist(),
    )


def contrast_tasks(
    pairs: Sequence[tuple[StoredRun, StoredRun]], confidence: float
) -> TaskContrast | None:
    """Compare two arms over their tasks. `pairs` are (candidate, baseline), two or more; None
    unless all runs share two tasks or more.
    """
    tasks, scores = _scores(list(chain.from_iterable(pairs)))
    if len(tasks) < 2:
        return None
    candidate, baseline = scores[0::2], scores[1::2]
    return TaskContrast(
        iqm_difference=iqm(candidate) - iqm(baseline),
        interval=iqm_difference_interval(candidate, baseline, confidence),
        probability_of_improvement=probability_of_improvement(candidate, baseline),
    )


def _problems(run: StoredRun) -> Sequence[EvaluationRecord]:
    return run.final_evaluation.problems if run.final_evaluation else ()


def _scores(runs: Sequence[StoredRun]) -> tuple[list[str], Floats]:
    """The tasks of which every run has a judged problem, and [runs, tasks] mean accuracies."""
    by_run: list[dict[str, list[float]]] = []
    for run in runs:
        rates: dict[str, list[float]] = defaultdict(list)
        for item in _problems(run):
            if item.samples:
                rates[item.task].append(item.correct / item.samples)
        by_run.append(rates)
    tasks = [
        task for task in (by_run[0] if by_run else {}) if all(task in rates for rates in by_run)
    ]
    return tasks, np.array([[float(np.mean(rates[task])) for task in tasks] for rates in by_run])

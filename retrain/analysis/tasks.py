"""What the held-out problems add to a comparison: an interval for new problems, and aggregates over several tasks.

Each run gives a score for every task, the mean accuracy over its problems. Over several tasks the interquartile mean is less moved by
one task that is all right or all wrong than the mean; source: Agarwal et al. 2021, arXiv 2108.13264.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from retrain.analysis.resampling import (
    hierarchical_interval,
    iqm,
    performance_profile,
    probability_of_improvement,
    stratified_difference,
    stratified_interval,
)
from retrain.analysis.runs import StoredRun
from retrain.analysis.statistics import Floats
from retrain.tracking import EvaluationRecord

PROFILE_THRESHOLDS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class TaskAggregate:
    """One arm over its runs x tasks."""

    tasks: Mapping[str, float]
    """Task -> mean accuracy over the runs."""
    iqm: float
    interval: tuple[float, float]
    """At the confidence asked for, runs resampled within tasks."""
    profile: Sequence[float]
    """Fraction of the runs x tasks above each of PROFILE_THRESHOLDS."""


@dataclass(frozen=True)
class TaskContrast:
    iqm_difference: float
    interval: tuple[float, float]
    probability_of_improvement: float
    """That a run of the candidate beats one of the baseline on a task."""


def aggregate_tasks(runs: Mapping[int, StoredRun], confidence: float) -> TaskAggregate | None:
    """None unless the runs have two tasks or more in common."""
    tasks, scores = _scores(list(runs.values()))
    if len(tasks) < 2:
        return None
    return TaskAggregate(
        tasks={task: float(mean) for task, mean in zip(tasks, scores.mean(axis=0), strict=True)},
        iqm=iqm(scores),
        interval=stratified_interval(scores, confidence=confidence),
        profile=performance_profile(scores, PROFILE_THRESHOLDS).tolist(),
    )


def contrast_tasks(pairs: Sequence[tuple[StoredRun, StoredRun]], confidence: float) -> TaskContrast | None:
    """Of (candidate, baseline) runs; None unless all of them have two tasks or more in common."""
    tasks, scores = _scores([run for pair in pairs for run in pair])
    if len(tasks) < 2:
        return None
    candidate, baseline = scores[0::2], scores[1::2]
    return TaskContrast(
        iqm_difference=iqm(candidate) - iqm(baseline),
        interval=stratified_difference(candidate, baseline, confidence),
        probability_of_improvement=probability_of_improvement(candidate, baseline),
    )


def problem_interval(pairs: Sequence[tuple[StoredRun, StoredRun]], confidence: float) -> tuple[float, float] | None:
    """Interval of the mean difference in accuracy with new seeds, problems and samples; None where no problem was judged in all runs."""
    judged = [{item.example_id: item for item in _problems(run) if item.samples} for pair in pairs for run in pair]
    shared = [example for example in judged[0] if all(example in run for run in judged)]
    if not shared:
        return None
    right = np.array([[run[example].correct for example in shared] for run in judged])
    samples = np.array([[run[example].samples for example in shared] for run in judged])
    return hierarchical_interval(right[0::2], right[1::2], samples[0::2], samples[1::2], confidence)


def _problems(run: StoredRun) -> Sequence[EvaluationRecord]:
    return run.final_evaluation.problems if run.final_evaluation else ()


def _scores(runs: Sequence[StoredRun]) -> tuple[list[str], Floats]:
    """Tasks that every run has a judged problem of, and [runs, tasks] mean accuracies."""
    by_run: list[dict[str, list[float]]] = []
    for run in runs:
        rates: dict[str, list[float]] = defaultdict(list)
        for item in _problems(run):
            if item.samples:
                rates[item.task].append(item.correct / item.samples)
        by_run.append(rates)
    tasks = [task for task in (by_run[0] if by_run else {}) if all(task in rates for rates in by_run)]
    return tasks, np.array([[float(np.mean(rates[task])) for task in tasks] for rates in by_run])

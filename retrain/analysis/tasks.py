"""What the held-out problems add to a comparison: an interval for new problems, and aggregates over several tasks.

Each run gives a score for every task, the mean accuracy over its problems. Over several tasks the interquartile mean is less moved by
one task that is all right or all wrong than the mean; source: Agarwal et al. 2021, arXiv 2108.13264.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from retrain.analysis.runs import StoredRun
from retrain.analysis.statistics import Floats, mean
from retrain.records.entries import EvaluationRecord

_REPLICATES = 1000
Statistic = Callable[[Floats], float]


def iqm(scores: Sequence[float] | Sequence[Sequence[float]] | Floats) -> float:
    """Interquartile mean of all scores of runs x tasks: a quarter of them, rounded down, is cut off at either end.

    Raises ValueError for no score and for one that is not finite.
    """
    flat = np.sort(np.asarray(scores, dtype=np.float64), axis=None)
    if flat.size == 0 or not np.isfinite(flat).all():
        raise ValueError(f"expected finite scores, got {scores!r}")
    cut = flat.size // 4
    return mean(flat[cut : flat.size - cut])


def stratified_interval(scores: Floats, statistic: Statistic = iqm, confidence: float = 0.95) -> tuple[float, float]:
    """Percentile interval of a statistic of [runs, tasks] scores; the runs are resampled within each task, as the source does.

    Below some ten runs it is too narrow (Colas et al., arXiv 1806.08295); verdicts do not rest on it.
    """
    rng = np.random.default_rng(0)
    runs, tasks = scores.shape[:2]
    columns = np.arange(tasks)
    values = [statistic(scores[rng.integers(0, runs, size=(runs, tasks)), columns]) for _ in range(_REPLICATES)]
    return _percentiles(np.array(values), confidence)


def stratified_difference(candidate: Floats, baseline: Floats, confidence: float = 0.95) -> tuple[float, float]:
    """Percentile interval of iqm(candidate) - iqm(baseline), both [seeds, tasks]; one resample of seeds serves both arms."""
    pairs = np.stack([candidate, baseline], axis=-1)
    return stratified_interval(pairs, lambda drawn: iqm(drawn[..., 0]) - iqm(drawn[..., 1]), confidence)


def probability_of_improvement(candidate: Floats, baseline: Floats) -> float:
    """Chance that a run of the candidate beats a run of the baseline on a task, mean over tasks; ties count half. [runs, tasks] each."""
    above = candidate[:, np.newaxis, :] > baseline[np.newaxis, :, :]
    equal = candidate[:, np.newaxis, :] == baseline[np.newaxis, :, :]
    return float((above + 0.5 * equal).mean())


def performance_profile(scores: Floats, thresholds: Sequence[float] | Floats) -> Floats:
    """Fraction of the runs x tasks whose score is above each threshold."""
    return np.array([float((scores > threshold).mean()) for threshold in thresholds])


def hierarchical_interval(
    candidate: npt.NDArray[np.int64],
    baseline: npt.NDArray[np.int64],
    candidate_samples: npt.NDArray[np.int64],
    baseline_samples: npt.NDArray[np.int64],
    confidence: float = 0.95,
    replicates: int = _REPLICATES,
) -> tuple[float, float]:
    """Bootstrap interval of the mean difference in accuracy when seeds, problems and samples are all drawn anew.

    [seeds, problems] right answers and judged samples (>= 1) of both arms, two seeds or more. A replicate draws seeds, then problems,
    then the answers of each problem, the same seeds and problems for both arms. In two points it is not the textbook's nested bootstrap:

    - One draw of problems serves all seeds. Seeds and problems are crossed here, not nested: every run is asked the same held-out
      problems. Drawn for each seed apart, the variance of the problems would shrink with the number of seeds, which it does not.
      Source: Owen 2007, arXiv 0712.1111 (the pigeonhole bootstrap, which errs on the side of too wide).
    - The percentiles are moved away from the mean, so that the seeds' part of the variance counts as it does in Student's interval. Of
      few seeds they lie too close to it: the draws show (n - 1) / n of that part, and know nothing of Student's t. At three seeds an
      interval for more than new seeds could otherwise be half as wide as Student's for seeds alone. Source of the factor for them:
      Hesterberg 2015, arXiv 1411.5279.
    """
    rng = np.random.default_rng(0)
    seeds, problems = candidate.shape
    values = np.empty(replicates)
    for replicate in range(replicates):
        cells = np.ix_(rng.integers(0, seeds, seeds), rng.integers(0, problems, problems))
        values[replicate] = np.mean(_redrawn(rng, candidate[cells], candidate_samples[cells])) - np.mean(
            _redrawn(rng, baseline[cells], baseline_samples[cells])
        )
    centre = float(np.mean(candidate / candidate_samples) - np.mean(baseline / baseline_samples))
    low, high = _percentiles(values, confidence)
    by_seed = (candidate / candidate_samples - baseline / baseline_samples).mean(axis=1)
    factor = _widening(by_seed, float(values.var()), confidence)
    return centre - factor * (centre - low), centre + factor * (high - centre)


def _widening(by_seed: Floats, variance: float, confidence: float) -> float:
    """By what percentiles of draws with this variance are too narrow: its part from n >= 2 seeds needs t / z * sqrt(n / (n - 1))."""
    from scipy.special import ndtri, stdtrit

    if variance == 0:
        return 1.0
    n, quantile = len(by_seed), 0.5 + confidence / 2
    of_seeds = min(1.0, float(by_seed.var()) / n / variance)
    squared = float((stdtrit(n - 1, quantile) / ndtri(quantile)) ** 2 * n / (n - 1))
    return float(np.sqrt(1 + (squared - 1) * of_seeds))


def _redrawn(rng: np.random.Generator, right: npt.NDArray[np.int64], samples: npt.NDArray[np.int64]) -> Floats:
    """Accuracy of each problem when its samples are drawn with replacement."""
    if (samples == 1).all():  # a single answer has nothing to be drawn from
        return right.astype(np.float64)
    drawn: Floats = rng.binomial(samples, right / samples) / samples
    return drawn


def _percentiles(values: Floats, confidence: float) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


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

"""What the held-out problems add to a comparison: an interval for new problems, and aggregates over several tasks.

A run's score on a task is its mean accuracy over the task's problems. The interquartile mean over tasks is moved less than the mean by
one task that is always right or always wrong. Source: Agarwal et al. 2021, arXiv 2108.13264.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from retrain.analysis.runs import StoredRun
from retrain.analysis.statistics import Floats, mean
from retrain.records.entries import EvaluationRecord

Statistic = Callable[[Floats], float]
_REPLICATES = 1000
PROFILE_THRESHOLDS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class TaskAggregate:
    """An arm's scores on several tasks."""

    tasks: Mapping[str, float]
    """Task -> accuracy, averaged over the runs."""
    iqm: float
    interval: tuple[float, float]
    """Of the IQM; runs are resampled within tasks."""
    profile: Sequence[float]
    """Fraction of the runs x tasks scores above each of PROFILE_THRESHOLDS."""


@dataclass(frozen=True)
class TaskContrast:
    """A candidate against the baseline on several tasks."""

    iqm_difference: float
    interval: tuple[float, float]
    probability_of_improvement: float


def iqm(scores: Sequence[float] | Sequence[Sequence[float]] | Floats) -> float:
    """Interquartile mean of all runs x tasks scores: a quarter of them, rounded down, is cut off at either end.

    Raises ValueError without scores and for one that is not finite.
    """
    flat = np.sort(np.asarray(scores, dtype=np.float64), axis=None)
    if flat.size == 0 or not np.isfinite(flat).all():
        raise ValueError(f"expected finite scores, got {scores!r}")
    cut = flat.size // 4
    return mean(flat[cut : flat.size - cut])


def stratified_interval(scores: Floats, statistic: Statistic = iqm, confidence: float = 0.95) -> tuple[float, float]:
    """Percentile interval of a statistic of [runs, tasks] scores, the runs resampled within each task as in the source.

    Below about ten runs it is too narrow (Colas et al., arXiv 1806.08295); verdicts do not use it.
    """
    rng = np.random.default_rng(0)
    runs, tasks = scores.shape[:2]
    columns = np.arange(tasks)
    values = [statistic(scores[rng.integers(0, runs, size=(runs, tasks)), columns]) for _ in range(_REPLICATES)]
    return _percentiles(np.array(values), confidence)


def stratified_difference(candidate: Floats, baseline: Floats, confidence: float = 0.95) -> tuple[float, float]:
    """Percentile interval of iqm(candidate) - iqm(baseline), both [seeds, tasks]; each resample takes the same seeds of both arms."""
    pairs = np.stack([candidate, baseline], axis=-1)
    return stratified_interval(pairs, lambda drawn: iqm(drawn[..., 0]) - iqm(drawn[..., 1]), confidence)


def probability_of_improvement(candidate: Floats, baseline: Floats) -> float:
    """Probability that a run of the candidate beats a run of the baseline, averaged over tasks; ties count half. Both [runs, tasks]."""
    above = candidate[:, np.newaxis, :] > baseline[np.newaxis, :, :]
    equal = candidate[:, np.newaxis, :] == baseline[np.newaxis, :, :]
    return float((above + 0.5 * equal).mean())


def performance_profile(scores: Floats, thresholds: Sequence[float] | Floats) -> Floats:
    """Fraction of the runs x tasks scores above each threshold."""
    return np.array([float((scores > threshold).mean()) for threshold in thresholds])


def hierarchical_interval(
    candidate: npt.NDArray[np.int64],
    baseline: npt.NDArray[np.int64],
    candidate_samples: npt.NDArray[np.int64],
    baseline_samples: npt.NDArray[np.int64],
    confidence: float = 0.95,
    replicates: int = _REPLICATES,
) -> tuple[float, float]:
    """Bootstrap interval of the mean difference in accuracy for new seeds, problems and samples.

    [seeds, problems] right answers and judged samples (>= 1) of both arms, two seeds or more. A replicate resamples seeds, then
    problems, then the answers to each problem, with the same seeds and problems in both arms. It differs from the textbook's nested
    bootstrap in two points:

    - All seeds share one resample of problems. Seeds and problems are crossed, not nested: every run answers the same held-out
      problems. Resampled per seed, the variance due to problems would shrink with the number of seeds, which it does not.
      Source: Owen 2007, arXiv 0712.1111 (the pigeonhole bootstrap, which errs on the wide side).
    - The percentiles are moved away from the mean, so that the variance between seeds counts as in Student's interval. With few seeds
      they lie too close to it: a resample shows (n - 1) / n of that variance, and percentiles ignore Student's t. At three seeds the
      interval could otherwise be half as wide as Student's for new seeds alone. Source of the factor: Hesterberg 2015,
      arXiv 1411.5279.
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
    """How much too narrow the percentiles are: the part of `variance` due to n >= 2 seeds needs a factor t / z * sqrt(n / (n - 1))."""
    from scipy.special import ndtri, stdtrit

    if variance == 0:
        return 1.0
    n, quantile = len(by_seed), 0.5 + confidence / 2
    of_seeds = min(1.0, float(by_seed.var()) / n / variance)
    squared = float((stdtrit(n - 1, quantile) / ndtri(quantile)) ** 2 * n / (n - 1))
    return float(np.sqrt(1 + (squared - 1) * of_seeds))


def _redrawn(rng: np.random.Generator, right: npt.NDArray[np.int64], samples: npt.NDArray[np.int64]) -> Floats:
    """Accuracy on each problem with its samples resampled."""
    if (samples == 1).all():  # one answer can only be drawn again
        return right.astype(np.float64)
    drawn: Floats = rng.binomial(samples, right / samples) / samples
    return drawn


def _percentiles(values: Floats, confidence: float) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


# -- of stored runs ------------------------------------------------------------------------------------------------------


def aggregate_tasks(runs: Mapping[int, StoredRun], confidence: float) -> TaskAggregate | None:
    """None unless the runs share two tasks or more."""
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
    """`pairs` are (candidate, baseline); None unless all runs share two tasks or more."""
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
    """Interval of the mean difference in accuracy for new seeds, problems and samples; None if no problem was judged in all runs."""
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
    """The tasks of which every run has a judged problem, and [runs, tasks] mean accuracies."""
    by_run: list[dict[str, list[float]]] = []
    for run in runs:
        rates: dict[str, list[float]] = defaultdict(list)
        for item in _problems(run):
            if item.samples:
                rates[item.task].append(item.correct / item.samples)
        by_run.append(rates)
    tasks = [task for task in (by_run[0] if by_run else {}) if all(task in rates for rates in by_run)]
    return tasks, np.array([[float(np.mean(rates[task])) for task in tasks] for rates in by_run])

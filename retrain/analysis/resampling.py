"""Intervals from resampling: over seeds, held-out problems and their samples, and over runs within tasks.

Source of the aggregates over several tasks: Agarwal et al. 2021, arXiv 2108.13264. All generators start from a fixed seed, so the same
runs give the same interval.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from retrain.analysis.statistics import Floats, mean

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

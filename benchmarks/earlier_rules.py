"""The rules of `retrain compare` at 68cde85, for the column "before" of benchmarks/calibration.py.

A verdict needed a t interval that excludes 0 and a sign-flip p below alpha after Holm. Unjudged
answers were left out of each run's own mean, IQM intervals drew runs within each task, and the
interval for new problems was a bootstrap.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri, stdtr, stdtrit

from retrain.analysis.pairs import iqm
from retrain.analysis.statistics import Floats, holm, sign_flip_p, t_interval

Counts = npt.NDArray[np.int64]
REPLICATES = 300


def differs(family: Sequence[Floats], alpha: float = 0.05) -> list[bool]:
    """True for each contrast with a verdict other than inconclusive."""
    adjusted = holm([sign_flip_p(d) for d in family])
    return [
        p < alpha and not low <= 0 <= high
        for p, (low, high) in zip(adjusted, map(t_interval, family), strict=True)
    ]


def iqm_interval(scores: Floats) -> tuple[float, float]:
    """[runs, tasks]; runs drawn within each task."""
    rng = np.random.default_rng(0)
    runs, tasks = scores.shape
    values = [
        iqm(scores[rng.integers(0, runs, size=(runs, tasks)), np.arange(tasks)])
        for _ in range(REPLICATES)
    ]
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def problem_interval(candidate: Counts, baseline: Counts, samples: int) -> tuple[float, float]:
    """[seeds, problems] right answers of `samples`; seeds, then problems, then answers drawn anew,
    and percentiles widened.
    """
    rng = np.random.default_rng(0)
    seeds, problems = candidate.shape
    values = np.empty(REPLICATES)
    for replicate in range(REPLICATES):
        cells = np.ix_(rng.integers(0, seeds, seeds), rng.integers(0, problems, problems))
        drawn = [
            rng.binomial(samples, arm[cells] / samples) / samples if samples > 1 else arm[cells]
            for arm in (candidate, baseline)
        ]
        values[replicate] = np.mean(drawn[0]) - np.mean(drawn[1])
    differences = (candidate - baseline) / samples
    centre, variance = float(differences.mean()), float(values.var())
    squared = float((stdtrit(seeds - 1, 0.975) / ndtri(0.975)) ** 2 * seeds / (seeds - 1))
    share = min(1.0, float(differences.mean(axis=1).var()) / seeds / variance) if variance else 0.0
    factor = float(np.sqrt(1 + (squared - 1) * share))
    low, high = np.quantile(values, [0.025, 0.975])
    return centre - factor * (centre - float(low)), centre + factor * (float(high) - centre)


def joint_level(seeds: int, alpha: float, family: int) -> float:
    """power._joint_level at 6e3cbff, which drew every run of every campaign."""
    rng = np.random.default_rng(seeds)
    largest = []
    for _ in range(10):
        runs = rng.standard_normal((2000, seeds, family + 1))
        differences = runs[..., 1:] - runs[..., :1]
        t = differences.mean(axis=1) * np.sqrt(seeds) / differences.std(axis=1, ddof=1)
        largest.append(np.abs(t).max(axis=1))
    return 2 * float(stdtr(seeds - 1, -np.quantile(np.concatenate(largest), 1 - alpha)))


def first_count(enough: Callable[[int], bool], fewest: int, start: int) -> int:
    """power._first_count at 6e3cbff, which tried one count after the other."""
    seeds = start
    while not enough(seeds):
        seeds += 1
    while seeds > fewest and enough(seeds - 1):
        seeds -= 1
    return seeds

"""Joint sign flips of whole seeds over a family of contrasts: the step-down max-T of Westfall and
Young.

If an arm does not differ from its baseline, its difference at a seed is as likely as its negative.
A flip turns the sign of a seed in every contrast at once, so the flips keep what the contrasts have
in common, such as a lucky run of the baseline. Contrasts that hardly vary together with the winner
cost it nothing: six seeds can suffice for a family of any size, where Holm's correction asks for
more with each contrast. Source: Westfall and Young 1993, Resampling-Based Multiple Testing,
algorithm 2.8.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import numpy as np

from retrain.analysis.statistics import EXACT_SEEDS, Floats

_MONTE_CARLO_FLIPS = 100_000
_AT_ONCE = 1 << 13
_TIE = 1e-9
"""Statistics this close, of a unit variance, are equal: 0.1 + 0.2 and 0.3 differ in binary only."""


def max_t(family: Sequence[Mapping[int, float]]) -> list[float]:
    """The adjusted two-sided p of each contrast, in the order given. A contrast maps a seed to its
    difference, one seed or more.

    The statistic is sum(d) / sqrt(sum(d^2)). Flips leave its denominator as it is, so a family of
    one gets the p of the mean. Up to EXACT_SEEDS seeds all flips are counted; beyond, (b + 1) / (m
    + 1) from a fixed sample of m.
    """
    if not family:
        return []
    columns = _unit_columns(family)
    observed = np.abs(columns.sum(axis=0))
    order = np.argsort(-observed, kind="stable")
    as_far, flips = np.zeros(len(family)), 0
    for signs in _signs(len(columns)):
        values = np.abs(signs @ columns[:, order])
        # over the contrasts not yet decided
        largest = np.maximum.accumulate(values[:, ::-1], axis=1)[:, ::-1]
        as_far += (largest >= observed[order] - _TIE).sum(axis=0)
        flips += len(signs)
    sampled = len(columns) > EXACT_SEEDS
    stepped = np.maximum.accumulate((as_far + sampled) / (flips + sampled))
    adjusted = np.empty(len(family))
    adjusted[order] = stepped
    return [float(p) for p in adjusted]


def _unit_columns(family: Sequence[Mapping[int, float]]) -> Floats:
    """[seeds, contrasts] differences, each contrast of unit length; 0 where it lacks the seed."""
    seeds = list(dict.fromkeys(chain.from_iterable(family)))
    columns = np.array([[contrast.get(seed, 0.0) for contrast in family] for seed in seeds])
    if not np.isfinite(columns).all():
        raise ValueError("expected finite differences")
    # first by the largest, since the squares of tiny or huge numbers would be 0 or infinite
    largest = np.abs(columns).max(axis=0)
    columns = columns / np.where(largest > 0, largest, 1.0)
    norms = np.sqrt((columns**2).sum(axis=0))
    unit: Floats = columns / np.where(norms > 0, norms, 1.0)
    return unit


def max_t_rows(differences: Floats) -> Floats:
    """[campaigns, seeds, contrasts] differences -> [campaigns] p of the first contrast, adjusted
    over all (the first step alone).

    For simulations with at most EXACT_SEEDS seeds.
    """
    norms = np.sqrt((differences**2).sum(axis=1, keepdims=True))
    columns = differences / np.where(norms > 0, norms, 1.0)
    bar = np.abs(columns[..., 0].sum(axis=1)) - _TIE
    as_far, flips = np.zeros(len(columns)), 0
    for signs in _signs(differences.shape[1]):
        largest = np.abs(signs @ columns).max(axis=2)
        as_far += (largest >= bar[:, np.newaxis]).sum(axis=1)
        flips += len(signs)
    fractions: Floats = as_far / flips
    return fractions


def _signs(seeds: int) -> Iterator[Floats]:
    """Blocks [flips, seeds] of 1 and -1: all flips that leave the first seed as it is, or a fixed
    sample of all flips.
    """
    if seeds > EXACT_SEEDS:
        rng = np.random.default_rng(0)
        for start in range(0, _MONTE_CARLO_FLIPS, _AT_ONCE):
            count = min(_AT_ONCE, _MONTE_CARLO_FLIPS - start)
            yield (1 - 2 * rng.integers(0, 2, size=(count, seeds))).astype(np.float64)
        return
    total = 1 << (seeds - 1)
    for start in range(0, total, _AT_ONCE):
        numbers = np.arange(start, min(start + _AT_ONCE, total))
        bits = (
            numbers[:, np.newaxis] >> np.arange(seeds)
        ) & 1  # the last seed's bit is always 0: a flip and its mirror image count alike
        yield (1 - 2 * bits).astype(np.float64)

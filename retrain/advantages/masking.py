"""Top-rho token masking: only the most uncertain tokens keep their advantage.

Wang, Yu et al. 2025, arXiv 2506.01939 (there with entropy; with surprisal it selects unlucky samples rather than forks).
"""

from dataclasses import dataclass
from itertools import pairwise
from math import floor

import numpy as np

from retrain.advantages.ragged import BoolArray, Float64Array, Int64Array


@dataclass(frozen=True)
class TopRho:
    keep: BoolArray
    """[n]"""
    thresholds: list[float | None]
    """tau of each pool: keep is uncertainty >= tau. None for a pool without tokens, or with the mask off."""


def kept_count(n: int, rho: float) -> int:
    """k = max(1, floor(rho n)) tokens of n, 0 of none; the small addend makes 0.29 * 100 the 29 that it means."""
    return max(1, floor(rho * n + 1e-9)) if n else 0


def top_rho(uncertainty: Float64Array, pools: Int64Array, num_pools: int, rho: float) -> TopRho:
    """Keep in each pool the tokens whose uncertainty reaches the k-th largest; ties at tau are all kept, so order does not matter.

    `pools` [n] numbers the pool of each token: one for the step, a group, or a completion each; -1 is a token outside every pool,
    which is kept. rho = 0 switches the mask off. Raises ValueError for rho outside [0, 1] or a NaN.
    """
    if not 0.0 <= rho <= 1.0:
        raise ValueError(f"surprisal_mask_rho is {rho}, it must lie in [0, 1]")
    if np.isnan(uncertainty).any():
        raise ValueError(f"uncertainty {int(np.flatnonzero(np.isnan(uncertainty))[0])} is NaN")
    keep = np.ones(len(uncertainty), dtype=np.bool_)
    if rho == 0.0:
        return TopRho(keep, [None] * num_pools)
    thresholds: list[float | None] = []
    order = np.argsort(pools, kind="stable") if num_pools > 1 else np.flatnonzero(pools == 0)
    edges = np.searchsorted(pools[order], np.arange(num_pools + 1))
    for start, stop in pairwise(edges):
        members = order[start:stop]
        if len(members) == 0:
            thresholds.append(None)
            continue
        values = uncertainty[members]
        k = kept_count(len(values), rho)
        tau = float(np.partition(values, len(values) - k)[len(values) - k])
        keep[members] = values >= tau
        thresholds.append(tau)
    return TopRho(keep, thresholds)

"""The rules of a comparison over many simulated campaigns at once: at one look, and at every look."""

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

from retrain.analysis.e_process import adjust, capital
from retrain.analysis.statistics import Floats, max_t_rows

ALPHA = 0.05
Bools = npt.NDArray[np.bool_]


def decided(differences: Floats) -> Bools:
    """[campaigns, contrasts, seeds] whether a contrast is decided after that seed; decided
    contrasts go on running here.
    """
    return adjust(capital(differences)) >= 1 / ALPHA


def found_once(differences: Floats, contrast: int = 0) -> Bools:
    """[campaigns, contrasts, seeds] -> [campaigns] whether the fixed rule finds a contrast: its t
    interval excludes 0, and its sign-flip p (adjusted by max-T over the family, the first step
    alone) is below ALPHA.
    """
    seeds = differences.shape[-1]
    own = differences[:, contrast]
    with np.errstate(
        divide="ignore", invalid="ignore"
    ):  # equal differences: their interval is a point
        t = own.mean(axis=1) * np.sqrt(seeds) / own.std(axis=1, ddof=1)
    found = np.abs(t) > stdtrit(seeds - 1, 1 - ALPHA / 2)
    todo = np.flatnonzero(found)
    for part in np.array_split(todo, max(1, len(todo) // 100)):
        if len(part):
            found[part] = _significant(differences[part], contrast)
    return found


def _significant(rows: Floats, contrast: int) -> Bools:
    """[campaigns] whether a contrast's adjusted sign-flip p (its first step) is below ALPHA."""
    order = [contrast, *(other for other in range(rows.shape[1]) if other != contrast)]
    return max_t_rows(np.swapaxes(rows[:, order], 1, 2)) < ALPHA

"""An interval for the difference that holds at all looks at once, the e-process of `e_process` turned around.

A value is in the interval after n seeds if no look up to then has found evidence of 1 / alpha against it: the e-process of the differences
minus that value never reached 1 / alpha. The true centre of the differences is in every interval of the sequence with a probability of at
least 1 - alpha, if the differences are symmetric about it.

Source: Waudby-Smith and Ramdas, arXiv 2010.09686 (confidence sequences by betting). Their bets for bounded means assume no symmetry, but
with differences between -1 and 1 and ten seeds their intervals are tens of points wide, whatever the spread of the differences.
"""

from collections.abc import Sequence

import numpy as np

from retrain.analysis.e_process import capital
from retrain.analysis.statistics import Floats, numbers

_REACH, _POINTS = 5.0, 1201
"""The candidates lie up to sinh(5) = 74 ranges of the differences around their median, densest near it."""


def confidence_sequence(differences: Sequence[float] | Floats, confidence: float = 0.95) -> tuple[float, float] | None:
    """The interval after one or more differences, in the order of the looks; None while it is not bounded, as below six seeds at 95%.

    The ends are rounded outwards to the next candidate, by at most half a percent of the range of the differences near their median.
    """
    d = numbers(differences)
    centre = float(np.median(d))
    scale = float(np.ptp(d)) or abs(centre) or 1.0
    candidates = centre + scale * np.sinh(np.linspace(-_REACH, _REACH, _POINTS))
    kept = np.flatnonzero((capital(d - candidates[:, np.newaxis]) < 1 / (1 - confidence)).all(axis=1))
    if len(kept) == 0:  # a narrow interval between two candidates
        kept = np.array([_POINTS // 2])
    if kept[0] == 0 or kept[-1] == _POINTS - 1:
        return None
    return float(candidates[kept[0] - 1]), float(candidates[kept[-1] + 1])

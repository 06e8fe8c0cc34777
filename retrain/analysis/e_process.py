"""Test paired differences with an e-process, which allows a look after every seed. The module also
corrects it over a family and gives its confidence sequence.

The null hypothesis is the same as in the exact sign-flip test. Given the past and the sizes |d_s|
of the differences so far, the sign of each difference is as likely to be + as -. A bet multiplies
its capital by 1 + sign(d_s) * b_s. Here |b_s| <= 1 depends only on the sizes up to and with seed s.
Under the null hypothesis the expected factor is 1, so the capital is a nonnegative martingale that
starts at 1. The mean of several is one too. By Ville's inequality such a capital ever reaches 1 /
alpha with a probability of at most alpha. This holds for any number of looks and any time at which
the campaign stops.

Sources: Vovk and Wang, arXiv 2208.08925 (nonparametric e-tests of Fisher, sign and Wilcoxon). Ville
1939. Vovk and Wang 2021, Annals of Statistics 49 (closed testing with means of e-values).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from retrain.analysis.statistics import Differences, Floats, Interval, Numbers, numbers

_STRENGTHS = (1.5, 3.0)
"""Multiples of the size in b = tanh(strength * size). The bet tanh(c |d|) is the likelihood ratio's
for a normal shift. These two are near the best for effects of 1 to 3 standard deviations
(benchmarks/results/looking-2026-11-22.md).
"""
_TIE = 1e-12
"""A difference this small relative to the largest so far is 0, since rounding leaves such a rest of
equal rates.
"""


def capital(differences: Floats) -> Floats:
    """Turn [..., seeds] differences in the order of the looks into the [..., seeds] capital of the
    e-process after each of them.

    NaN marks a seed without a pair, which gets no bet. The capital is the mean over bets of two
    kinds (sized by |d| and by its rank), two strengths and both directions. Multiplying all
    differences by a number leaves it unchanged.
    """
    from scipy.special import ndtri

    present = ~np.isnan(differences)
    sizes = _sizes(differences, present)
    signs = np.where(sizes > 0, np.sign(np.where(present, differences, 0.0)), 0.0)
    # Use the seeds so far, since a bet may know no later one.
    so_far = np.maximum(np.cumsum(present, axis=-1), 1)
    root_mean_square = np.sqrt(np.cumsum(sizes**2, axis=-1) / so_far)
    relative = sizes / np.where(root_mean_square > 0, root_mean_square, 1.0)
    ranked = ndtri(0.5 + 0.5 * _ranks(sizes, present))
    capital = np.zeros_like(sizes)
    for size in (relative, ranked):
        for strength in _STRENGTHS:
            bet = signs * np.tanh(strength * size)
            capital += np.cumprod(1 + bet, axis=-1) + np.cumprod(1 - bet, axis=-1)
    scaled: Floats = capital / (4 * len(_STRENGTHS))
    return scaled


def _sizes(differences: Floats, present: npt.NDArray[np.bool_]) -> Floats:
    """Return |d| over the largest of all seeds, and 0 for an absent seed and for a tie up to
    rounding.
    """
    sizes = np.where(present, np.abs(differences), 0.0)
    largest = np.maximum.accumulate(sizes, axis=-1)
    scale = np.where(largest[..., -1:] > 0, largest[..., -1:], 1.0)
    scaled: Floats = np.where(sizes > _TIE * largest, sizes / scale, 0.0)
    return scaled


def _ranks(sizes: Floats, present: npt.NDArray[np.bool_]) -> Floats:
    """Return the rank of each size among the sizes so far, over their number + 1; ties take their
    mean rank.
    """
    ranks = np.zeros_like(sizes)
    for seed in range(sizes.shape[-1]):
        there = present[..., : seed + 1]
        # 2 for a smaller size, 1 for an equal one.
        below = np.sign(sizes[..., [seed]] - sizes[..., : seed + 1]) + 1
        ranks[..., seed] = ((below * there).sum(axis=-1) + 1) / (2 * there.sum(axis=-1) + 2)
    ranks[~present] = 0.0
    return ranks


def adjust(capitals: Floats) -> Floats:
    """Turn [..., contrasts, seeds] capitals into the evidence for each contrast over the whole
    family, the largest up to each seed.

    Evidence of 1 / alpha or more rejects a contrast's null hypothesis. The probability of ever
    rejecting a true one is at most alpha, whatever the contrasts have in common. By closed testing,
    evidence is the least mean capital of any part of the family that holds the contrast. Such a
    part is the contrast with the j smallest others, for j = 0, 1, ... A mean of e-processes is an
    e-process, so each part's mean obeys Ville's inequality at all looks together.
    """
    contrasts = capitals.shape[-2]
    evidence = np.empty_like(capitals)
    counts = np.arange(1, contrasts + 1).reshape(-1, 1)
    for contrast in range(contrasts):
        others = np.sort(np.delete(capitals, contrast, axis=-2), axis=-2)
        part = np.concatenate([capitals[..., [contrast], :], others], axis=-2)
        evidence[..., contrast, :] = (np.cumsum(part, axis=-2) / counts).min(axis=-2)
    largest: Floats = np.maximum.accumulate(evidence, axis=-1)
    return largest


def evidence(family: Sequence[Differences], looks: int) -> list[float]:
    """Return the evidence for each contrast after so many looks; a contrast maps the number of a
    look, from 0, to its difference there.

    A contrast that lacks a look bets nothing there: a run failed, or an earlier look decided the
    contrast.
    """
    if not family or not looks:
        return [1.0] * len(family)
    differences = np.array(
        [[contrast.get(look, np.nan) for look in range(looks)] for contrast in family]
    )
    return [float(value) for value in adjust(capital(differences))[:, -1]]


def anytime_p(value: float) -> float:
    """Return min(1, 1 / evidence): below alpha as soon as the evidence is above 1 / alpha, at any
    look.
    """
    return 1.0 / max(1.0, value)


# -- an interval for the difference that holds at all looks at once --------------------------------

_REACH, _POINTS = 5.0, 1201
"""The candidates lie up to sinh(5) = 74 ranges of the differences around their median, densest near
it."""


def confidence_sequence(differences: Numbers, confidence: float = 0.95) -> Interval | None:
    """Return the interval after one or more differences, in the order of the looks. Return None
    without a bound, for example below six seeds at 95%.

    A value is in the interval after n seeds if no look up to then has found evidence of 1 / alpha
    against it. The e-process of the differences minus that value then never reached 1 / alpha. If
    the differences are symmetric about their true center, every interval of the sequence covers it
    with a probability of at least 1 - alpha. The ends go outwards to the next candidate, by at most
    half a percent of the range of the differences near their median.

    Source: Waudby-Smith and Ramdas, arXiv 2010.09686 (confidence sequences by betting). Their bets
    for bounded means assume no symmetry. But with differences between -1 and 1 and ten seeds their
    intervals are tens of points wide, whatever the spread of the differences.
    """
    d = numbers(differences)
    center = float(np.median(d))
    scale = float(np.ptp(d)) or abs(center) or 1.0
    candidates = center + scale * np.sinh(np.linspace(-_REACH, _REACH, _POINTS))
    kept = np.flatnonzero(
        (capital(d - candidates[:, np.newaxis]) < 1 / (1 - confidence)).all(axis=1)
    )
    # The interval lies between two candidates, most likely at the median.
    if len(kept) == 0:
        kept = np.array([_POINTS // 2])
    # An end at the outermost candidate may lie anywhere beyond it.
    if kept[0] == 0 or kept[-1] == _POINTS - 1:
        return None
    return float(candidates[kept[0] - 1]), float(candidates[kept[-1] + 1])

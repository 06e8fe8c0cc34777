"""From paired differences to verdicts: pure numbers, no runs.

A contrast is an improvement (or worse) only if its t interval excludes 0 and its sign-flip p, adjusted over all contrasts by Holm, is
below alpha; equivalent only within a stated margin; otherwise inconclusive. The verdict is never "no effect".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from retrain.analysis import power, statistics


class Verdict(StrEnum):
    IMPROVEMENT = "improvement"
    WORSE = "worse"
    EQUIVALENT = "equivalent"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class TestSettings:
    """What is decided before looking at the results."""

    alpha: float = 0.05
    margin: float | None = None
    """Differences below this are equivalent, in the metric's units; None: no verdict of equivalence."""
    effect: float | None = None
    """The difference for which the number of seeds is computed; None: not computed."""
    power: float = 0.8
    lower_is_better: bool = False


@dataclass(frozen=True)
class Conclusion:
    """What the differences of one contrast show, in the metric's units. What needs two pairs is None for a single pair."""

    pairs: int
    mean: float
    sd: float | None
    interval: tuple[float, float] | None
    """Student's t, at confidence 1 - alpha."""
    p: float
    p_adjusted: float
    smallest_p_adjusted: float
    """The smallest that any differences could give with this many pairs in every contrast."""
    d_z: float | None
    """With Hedges' correction, which is 0 for two pairs: None below three."""
    minimal_detectable_effect: float | None
    """None also if nothing could be significant or all differences are equal."""
    seeds_needed: int | None
    """Seeds that find the stated effect at this sd; None without an effect or out of reach."""
    equivalence_p_adjusted: float | None
    """None without a margin."""
    verdict: Verdict

    def can_conclude(self, alpha: float) -> bool:
        return self.smallest_p_adjusted < alpha


def conclude(family: Sequence[Sequence[float]], test: TestSettings) -> list[Conclusion]:
    """One conclusion per contrast of n >= 1 differences; the p values are adjusted over the whole family."""
    p = [statistics.sign_flip_p(d) for d in family]
    adjusted = statistics.holm(p)
    smallest = statistics.holm([statistics.smallest_p(len(d)) for d in family])
    equivalence = _equivalence(family, test.margin)
    return [
        _conclusion(d, test, len(family), raw, adjusted_p, least, same)
        for d, raw, adjusted_p, least, same in zip(family, p, adjusted, smallest, equivalence, strict=True)
    ]


def _conclusion(
    d: Sequence[float], test: TestSettings, family: int, p: float, p_adjusted: float, smallest: float, equivalence_p: float | None
) -> Conclusion:
    mean = statistics.mean(d)
    sd = statistics.sample_sd(d) if len(d) > 1 else None
    interval = statistics.t_interval(d, 1 - test.alpha) if len(d) > 1 else None
    seeds = None
    if test.effect is not None and sd and not power.out_of_reach(test.effect, sd, test.alpha, test.power, family):
        seeds = power.seeds_needed(test.effect, sd, test.alpha, test.power, family)
    return Conclusion(
        pairs=len(d),
        mean=mean,
        sd=sd,
        interval=interval,
        p=p,
        p_adjusted=p_adjusted,
        smallest_p_adjusted=smallest,
        d_z=statistics.corrected_dz(d) if len(d) > 2 else None,
        minimal_detectable_effect=power.minimal_detectable_effect(len(d), sd, test.alpha, test.power, family) if sd else None,
        seeds_needed=seeds,
        equivalence_p_adjusted=equivalence_p,
        verdict=_verdict(mean, interval, p_adjusted, equivalence_p, test),
    )


def _equivalence(family: Sequence[Sequence[float]], margin: float | None) -> list[float | None]:
    """Adjusted p of the claim |mean| < margin, per contrast; None without a margin and for a single pair."""
    if margin is None:
        return [None] * len(family)
    p = iter(statistics.holm([statistics.tost(d, margin) for d in family if len(d) > 1]))
    return [next(p) if len(d) > 1 else None for d in family]


def _verdict(
    mean: float, interval: tuple[float, float] | None, p_adjusted: float, equivalence_p: float | None, test: TestSettings
) -> Verdict:
    excludes_zero = interval is not None and (interval[0] > 0 or interval[1] < 0)
    if excludes_zero and p_adjusted < test.alpha:
        return Verdict.IMPROVEMENT if (mean < 0) == test.lower_is_better else Verdict.WORSE
    if equivalence_p is not None and equivalence_p < test.alpha:
        return Verdict.EQUIVALENT
    return Verdict.INCONCLUSIVE

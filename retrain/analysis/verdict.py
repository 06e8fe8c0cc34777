"""Turn paired differences into verdicts: pure numbers, no runs.

A contrast is an improvement (or worse) only if

- its t interval over the seeds excludes 0,
- its sign-flip p, adjusted over all contrasts, is below alpha,
- both still hold if every unjudged answer counts against it,
- with few held-out problems, the interval for new problems excludes 0 as well, and
- no more than a quarter of the runs of either condition failed or collapsed.

It is equivalent only within a stated margin; otherwise it is inconclusive. The verdict is never "no
effect".
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from retrain.analysis import statistics
from retrain.analysis.e_process import anytime_p, confidence_sequence, evidence
from retrain.analysis.power import (
    Correction,
    Rule,
    minimal_detectable_effect,
    sd_interval,
    seeds_needed,
)
from retrain.analysis.statistics import Differences, Interval, max_t
from retrain.records.entries import Direction

FEW_PROBLEMS = 500
"""With fewer held-out problems a verdict needs the interval for new problems too: a few of them can
carry an effect."""


class Verdict(StrEnum):
    IMPROVEMENT = "improvement"
    WORSE = "worse"
    DIFFERENT = "different"
    """A difference of a metric without a direction."""
    EQUIVALENT = "equivalent"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class TestSettings:
    """Settings of the test, fixed before looking at the results."""

    __test__ = False  # pytest must not collect it as a test case.

    alpha: float = 0.05
    margin: float | None = None
    """Differences below this are equivalent, in the metric's units; None allows no verdict of
    equivalence.
    """
    effect: float | None = None
    """The difference for which to compute the number of seeds; None computes none."""
    power: float = 0.8
    lower_is_better: bool = False
    """Overrides the metric's own direction."""
    rule: Correction = "maxt"
    """Joint sign flips, or the e-process of a campaign with looks."""
    looks: int = 0
    """The number of looks, for the rule "evidence"."""
    absent: int = 0
    """The planned contrasts without a pair so far, for the rule "evidence". Each may still have
    one, so it stays in the family and has bet nothing.
    """

    def direction(self, better: Direction) -> Direction:
        """Return the better end of a metric; `better` is the metric's own."""
        return "lower" if self.lower_is_better else better

    def evidence_for(self, family: Sequence[Differences]) -> list[float]:
        """Return the evidence for each contrast over the planned family; `family` has a pair in
        each.
        """
        return evidence([*family, *[{}] * self.absent], self.looks)[: len(family)]

    def adjusted(self, family: Sequence[Differences]) -> list[float]:
        """Return the p of each contrast, adjusted over the family."""
        if self.rule == "evidence":
            return [anytime_p(value) for value in self.evidence_for(family)]
        return max_t(family)

    def interval(self, differences: Differences) -> Interval | None:
        """Student's t interval of the mean or, under looks, the confidence sequence of the center.
        None: too few pairs.
        """
        values, confidence = [*differences.values()], 1 - self.alpha
        if self.rule == "evidence":
            return confidence_sequence(values, confidence)
        return statistics.t_interval(values, confidence) if len(values) > 1 else None

    def of_family(self, comparisons: int) -> Rule:
        return Rule(comparisons, self.alpha, self.power, self.rule)


@dataclass(frozen=True)
class PairedDifferences:
    """The differences of one contrast, one pair or more."""

    by_seed: Differences
    """Seed -> difference; with the rule "evidence" by the number of the look, in their order."""
    ends: tuple[Differences, Differences] | None = None
    """The differences if every unjudged answer counts against the candidate, and if it counts for
    the candidate; None without unjudged answers.
    """
    problem_interval: Interval | None = None
    """The interval for new problems as well; None if a verdict does not need it."""
    loses_too_many: bool = False
    """True if more than a quarter of the runs of a condition failed or collapsed."""

    @property
    def values(self) -> list[float]:
        return list(self.by_seed.values())

    @property
    def bounds(self) -> Interval | None:
        """The means of `ends`."""
        if self.ends is None:
            return None
        least, most = (statistics.mean([*end.values()]) for end in self.ends)
        return least, most

    @property
    def at_worst(self) -> Differences:
        """The differences if every unjudged answer counts against the sign of their mean."""
        least, most = self.ends or (self.by_seed, self.by_seed)
        return least if statistics.mean(self.values) > 0 else most


@dataclass(frozen=True)
class Conclusion:
    """The result for one contrast, in the metric's units. Fields that need two pairs are None for a
    single pair.
    """

    pairs: int
    mean: float
    sd: float | None
    interval: Interval | None
    """The interval of the mean, by Student's t, at confidence 1 - alpha."""
    p: float
    p_adjusted: float
    smallest_p_adjusted: float | None
    """The smallest p that any differences could give with this many pairs in every contrast; None
    for evidence, since looks may follow.
    """
    can_conclude: bool
    """True if that p is below alpha, or looks may follow."""
    d_z: float | None
    """The effect size d_z with Hedges' correction; None below three pairs, since the correction is
    0 for two.
    """
    detectable: Interval | None
    """The difference found with the stated power, over the 95% interval of the sd. The value is
    None if no result could be significant or all differences are equal.
    """
    seeds_needed: int | None
    """Seeds that find the stated effect at this sd; None without an effect or out of reach."""
    equivalence_p_adjusted: float | None
    """The p of the claim of equivalence; None without a margin."""
    bounds: Interval | None
    """The mean if every unjudged answer counts against the candidate, and if it counts for the
    candidate; None without unjudged answers.
    """
    unsure: str
    """The reason to withhold a verdict that the seeds alone would give: "lost", "unjudged" or
    "problems". Otherwise "".
    """
    within_margin: bool
    """True for a difference that is also smaller than the margin."""
    verdict: Verdict
    evidence: float | None = None
    """The evidence over the family; None for the rule "maxt"."""

    @property
    def word(self) -> str:
        """The verdict, or else "cannot conclude" by design, or "undecided" by the data."""
        if self.verdict is not Verdict.INCONCLUSIVE:
            return str(self.verdict)
        return "undecided" if self.can_conclude else "cannot conclude"


def conclude(
    family: Sequence[PairedDifferences], test: TestSettings, better: Direction = "higher"
) -> list[Conclusion]:
    """Return one conclusion per contrast, with p values adjusted over the whole family. `better` is
    the metric's own direction.
    """
    by_seed = [paired.by_seed for paired in family]
    at_worst = adjusted = test.adjusted(by_seed)
    if any(paired.ends for paired in family) and min(adjusted) < test.alpha:
        at_worst = test.adjusted([paired.at_worst for paired in family])
    looked = test.rule == "evidence"
    found = test.evidence_for(by_seed) if looked else [None] * len(family)
    rows = zip(family, adjusted, at_worst, _equivalence(family, test.margin), found, strict=True)
    rule = test.of_family(len(family))
    return [_conclusion(*row, test, rule, test.direction(better)) for row in rows]


def _conclusion(
    paired: PairedDifferences,
    p_adjusted: float,
    p_at_worst: float,
    equivalence_p: float | None,
    evidence: float | None,
    test: TestSettings,
    rule: Rule,
    better: Direction,
) -> Conclusion:
    d = paired.values
    mean, sd = statistics.mean(d), statistics.sample_sd(d) if len(d) > 1 else None
    smallest = statistics.smallest_p(len(d)) if evidence is None else None
    # Too few pairs for a difference are too few to call two conditions equivalent as well.
    levels = (equivalence_p, smallest)
    equivalent = all(p is not None and p < test.alpha for p in levels)
    interval = test.interval(paired.by_seed)
    differs = p_adjusted < test.alpha and _excludes_zero(interval)
    unsure = _unsure(paired, p_at_worst, test, differs=differs) if differs or equivalent else ""
    equivalent = equivalent and unsure != "lost"
    verdict = Verdict.EQUIVALENT if equivalent else Verdict.INCONCLUSIVE
    # A significant difference outranks the margin, which `within_margin` then adds.
    if differs and not unsure:
        verdict = _direction(mean, better)
    detectable, needed = _sizes(len(d), sd, test, rule)
    return Conclusion(
        pairs=len(d),
        mean=mean,
        sd=sd,
        interval=interval,
        p=replace(test, absent=0).adjusted([paired.by_seed])[0],
        p_adjusted=p_adjusted,
        smallest_p_adjusted=smallest,
        can_conclude=smallest is None or smallest < test.alpha,
        d_z=statistics.corrected_dz(d) if len(d) > 2 else None,
        detectable=detectable,
        seeds_needed=needed,
        equivalence_p_adjusted=equivalence_p,
        bounds=paired.bounds,
        unsure=unsure,
        within_margin=equivalent and verdict is not Verdict.EQUIVALENT,
        verdict=verdict,
        evidence=evidence,
    )


def _direction(mean: float, better: Direction) -> Verdict:
    if better is None:
        return Verdict.DIFFERENT
    return Verdict.IMPROVEMENT if (mean < 0) == (better == "lower") else Verdict.WORSE


def _sizes(
    pairs: int, sd: float | None, test: TestSettings, rule: Rule
) -> tuple[Interval | None, int | None]:
    """Return the detectable differences, and the seeds for the stated effect."""
    # Looks do not fix the number of seeds, so that they have no such sizes.
    if not sd or test.rule == "evidence":
        return None, None
    needed = seeds_needed(test.effect, sd, rule) if test.effect is not None else None
    units = minimal_detectable_effect(pairs, 1.0, rule)
    if units is None:
        return None, needed
    low, high = sd_interval(sd, pairs - 1)
    return (units * low, units * high), needed


def _excludes_zero(interval: Interval | None) -> bool:
    return interval is not None and (interval[0] > 0 or interval[1] < 0)


def _unsure(
    paired: PairedDifferences, p_at_worst: float, test: TestSettings, *, differs: bool
) -> str:
    """Return why the evidence of the seeds alone makes no verdict; "" if it does. Only a difference
    can be undone by answers or problems.
    """
    if paired.loses_too_many:
        return "lost"
    if not differs:
        return ""
    mean, worst = statistics.mean(paired.values), paired.at_worst
    if (
        p_at_worst >= test.alpha
        or not _excludes_zero(test.interval(worst))
        or mean * statistics.mean([*worst.values()]) <= 0
    ):
        return "unjudged"
    if paired.problem_interval is None or _excludes_zero(paired.problem_interval):
        return ""
    return "problems"


def _equivalence(family: Sequence[PairedDifferences], margin: float | None) -> list[float | None]:
    """Return the Holm-adjusted p of the claim |mean| < margin, per contrast; None without a margin
    and for a single pair.

    Each p is at least 2^-n, the least that n pairs can give by sign flips. So equal and nearly
    equal differences get the same p. Unjudged answers count in the direction that takes the mean
    away from 0.
    """
    if margin is None:
        return [None] * len(family)

    def p_of(paired: PairedDifferences) -> float:
        ends = paired.ends or [paired.by_seed]
        found = (statistics.tost([*end.values()], margin) for end in ends)
        return max(2.0 ** -len(paired.by_seed), *found)

    p = iter(statistics.holm([p_of(paired) for paired in family if len(paired.by_seed) > 1]))
    return [next(p) if len(paired.by_seed) > 1 else None for paired in family]

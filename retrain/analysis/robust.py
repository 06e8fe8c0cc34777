"""A second line beside a verdict, for readers who must not be wrong where runs fail or collapse:
both are counted at their worst.

The exact test compares means of the runs that finished. It is wrong where an arm's worst runs are
those that fail, and where an arm is better because none of its rare collapses happened to be among
its runs: no test of the runs that are there can see those. The second line counts failed and
collapsed runs as the worst result, and with them as many further collapses of the better arm as its
runs do not rule out at 95% (Clopper and Pearson 1934). What is left of the difference has to have
the verdict's sign. benchmarks/robust.py measures both lines.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, log

import numpy as np

from retrain.analysis.arms import Arm
from retrain.analysis.statistics import Differences
from retrain.analysis.verdict import Conclusion, Verdict

CONFIDENCE = 0.95
_COLLAPSED = 0.5
"""A run below this fraction of the median of its arm has collapsed."""


@dataclass(frozen=True)
class SecondLine:
    """The second line under a verdict: does it stand with failed runs at their worst?"""

    stands: bool
    fallen: Mapping[str, list[int]]
    """Condition -> seeds of its runs that failed or collapsed, for the arms that have any."""
    unseen: float
    """The fraction of the better arm's runs that may collapse besides those seen."""
    pairs_needed: int | None
    """Pairs without a further collapse with which it would stand; None if no number suffices."""


def unseen_rate(seen: int, runs: int) -> float:
    """The fraction of runs that may collapse besides the `seen` of `runs`: 1 - 0.05^(1 / runs)
    where none was seen.
    """
    from scipy.special import betaincinv

    if seen < runs:
        return float(betaincinv(seen + 1, runs - seen, CONFIDENCE)) - seen / runs
    return 0.0


def pairs_without_collapse(undoing: float) -> int | None:
    """The fewest runs without a collapse that rule out a collapse in the fraction `undoing` of
    runs.
    """
    if undoing >= 1:
        return 1
    if undoing > 0:
        return ceil(log(1 - CONFIDENCE) / log(1 - undoing))
    return None


def collapsed_seeds(values: Differences) -> frozenset[int]:
    """The seeds of runs whose rate is below half of the median of their arm, from three runs on."""
    if len(values) < 3:
        return frozenset()
    bar = _COLLAPSED * float(np.median(list(values.values())))
    return frozenset(seed for seed, value in values.items() if value < bar)


def with_collapsed_failed(arm: Arm) -> Arm:
    """The arm with its collapsed runs among those that failed."""
    fallen = collapsed_seeds(arm.values)
    kept = {seed: value for seed, value in arm.values.items() if seed not in fallen}
    return Arm(
        arm.label,
        kept,
        {seed: run for seed, run in arm.runs.items() if seed in kept},
        arm.failed | fallen,
    )


def second_line(
    candidate: Arm, baseline: Arm, at_worst: Conclusion, verdict: Verdict
) -> SecondLine:
    """Judge a verdict in a rate of right answers. The arms are `with_collapsed_failed`; `at_worst`
    is their conclusion.
    """
    pairs, same_verdict = at_worst.pairs, at_worst.verdict is verdict
    ahead = candidate if verdict is Verdict.IMPROVEMENT else baseline
    # Were all runs counted as fallen, `unseen_rate` would add nothing to them.
    seen = min(len(ahead.failed), pairs - 1)
    level = 0.0
    if ahead.values:
        level = float(np.mean(list(ahead.values.values())))
    unseen, undoing = unseen_rate(seen, pairs), abs(at_worst.mean) / level if level else 0.0
    stands = same_verdict and undoing > unseen
    # The closed form behind `pairs_without_collapse` is for no collapse at all.
    needed = None
    if same_verdict and not stands and not seen:
        needed = pairs_without_collapse(undoing)
    return SecondLine(
        stands,
        {arm.label: sorted(arm.failed) for arm in (candidate, baseline) if arm.failed},
        unseen,
        needed,
    )

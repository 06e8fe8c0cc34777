"""Collapses that no seed shows: why no rule can keep 5% there without losing its power.

    python benchmarks/collapses.py     # seconds

One condition is better by a constant gain, but each of its runs collapses with a probability of
10%. Gain and collapses cancel, so that the mean difference is 0 and every verdict is false. If no
run collapses, the data are those of a condition that is better by the gain and never collapses. A
rule that is wrong in at most 5% of the first campaigns therefore finds at most 5% / 0.9^n of the
second.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from looking import found_once
from report import publish_simulation, table
from scipy.stats import binomtest, wilcoxon

from retrain.analysis.e_process import capital
from retrain.analysis.statistics import Floats

RATE, DEPTH, SD = 0.1, 50.0, 2.5
"""Probability and depth of a collapse, and the sd of the differences otherwise, in points."""
GAIN = RATE * DEPTH
Bools = npt.NDArray[np.bool_]


def companions(differences: Floats) -> dict[str, Bools]:
    """Robust tests that would have to agree."""
    seeds = differences.shape[1]
    p = np.array([binomtest(count, seeds).pvalue for count in range(seeds + 1)])
    return {
        "sign test": p[(differences > 0).sum(axis=1)] < 0.05,
        "signed ranks": wilcoxon(differences, axis=1, method="exact").pvalue < 0.05,
        "e-process": (capital(differences) >= 20).any(axis=1),
    }


def rows(campaigns: int) -> Iterator[list[object]]:
    for seeds in (6, 8, 12, 16):
        rng = np.random.default_rng(seeds)
        collapsed = rng.random((campaigns, seeds)) < RATE
        differences = rng.normal(0, SD, (campaigns, seeds)) + np.where(
            collapsed, GAIN - DEPTH, GAIN
        )
        wrong, unseen = found_once(differences[:, np.newaxis]), ~collapsed.any(axis=1)
        power = found_once(rng.normal(GAIN, SD, (campaigns, 1, seeds))).mean()
        agreed = [wrong & agrees for agrees in companions(differences).values()]
        shares = (
            wrong.mean(),
            (wrong & unseen).sum() / wrong.sum(),
            *(both.mean() for both in agreed),
            power,
            0.05 / (1 - RATE) ** seeds,
        )
        yield [seeds, *(f"{100 * share:.1f}%" for share in shares)]


def paragraphs(campaigns: int) -> Iterator[str]:
    yield (
        f"{campaigns} campaigns per row. Each run of the candidate collapses with a probability of"
        f" {RATE:g} and then loses {DEPTH:g} points; everything else raises it by {GAIN:g}, so that"
        f" the mean is 0; sd {SD:g}. Nearly all false verdicts come from campaigns in which no run"
        " collapsed, which no test can tell from a true gain."
    )
    head = [
        "seeds",
        "false verdicts",
        "of these, without a collapse",
        "and the sign test agrees",
        "and signed ranks agree",
        "and the e-process agrees",
        "power where nothing collapses",
        "most power of any rule at 5%",
    ]
    yield table(head, rows(campaigns))


if __name__ == "__main__":
    publish_simulation("collapses", "Collapses that no seed shows", __doc__, paragraphs, 4000)

"""What a verdict is worth where runs fail or collapse, whose pairs are left out.

    python benchmarks/robust.py      # a minute

Rates in points, of two arms that do not differ in the mean unless a row says so; every verdict is
then false. The luck of a run has a standard deviation of 1.8 points (2.5 for a difference). `once`
is the exact test after all seeds; it leaves out failed and collapsed runs, and says nothing where
they are more than a quarter of an arm's. `looks` is the e-process after each of 16, which leaves out
failed runs alone.
"""

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
from looking import decided, found_once
from report import publish_simulation, table

from retrain.analysis.statistics import Floats

LEVEL, LUCK = 50.0, 2.5 / np.sqrt(2)
SEEDS = (6, 8, 12, 16)
Random = np.random.Generator
Bools = npt.NDArray[np.bool_]
Arms = tuple[Floats, Floats]
"""[campaigns, seeds] of candidate and baseline; NaN is a run that failed."""


def arms(rng: Random, campaigns: int, seeds: int, gain: float = 0.0) -> Arms:
    drawn = LEVEL + rng.normal(0, LUCK, (2, campaigns, seeds))
    return drawn[0] + gain, drawn[1]


def collapsing(rng: Random, campaigns: int, seeds: int, rate: float = 0.1) -> Arms:
    """A tenth of the candidate's runs fall to 0; the others are better by as much as makes the
    means equal.
    """
    candidate, baseline = arms(rng, campaigns, seeds, LEVEL / (1 - rate) - LEVEL)
    return np.where(rng.random((campaigns, seeds)) < rate, 0.0, candidate), baseline


def rarely_collapsing(rng: Random, campaigns: int, seeds: int) -> Arms:
    """The same with 3% of the runs."""
    return collapsing(rng, campaigns, seeds, 0.03)


def often_collapsing(rng: Random, campaigns: int, seeds: int) -> Arms:
    """The same with 30% of the runs."""
    return collapsing(rng, campaigns, seeds, 0.3)


def losing_the_worst(rng: Random, campaigns: int, seeds: int) -> Arms:
    """The worst fifth of the candidate's runs, by their luck, fail."""
    candidate, baseline = arms(rng, campaigns, seeds)
    bar = LEVEL + LUCK * -0.8416
    return np.where(candidate < bar, np.nan, candidate), baseline


def skewed(rng: Random, campaigns: int, seeds: int) -> Arms:
    """The differences have a long tail downwards and a mean of 0: the candidate's luck is
    exponential.
    """
    _, baseline = arms(rng, campaigns, seeds)
    return baseline + 2.5 * (1 - rng.exponential(1.0, (campaigns, seeds))), baseline


def alike(rng: Random, campaigns: int, seeds: int) -> Arms:
    """Nothing differs and nothing collapses."""
    return arms(rng, campaigns, seeds)


SCENARIOS: dict[str, Callable[[Random, int, int], Arms]] = {
    "nothing differs": alike,
    "10% of one arm's runs collapse": collapsing,
    "3% collapse": rarely_collapsing,
    "30% collapse": often_collapsing,
    "worst fifth of one arm's runs fail": losing_the_worst,
    "skewed differences": skewed,
}


def lost(arm: Floats) -> Bools:
    """[campaigns, seeds] runs that failed, or collapsed: below half of the median of their arm."""
    finished = ~np.isnan(arm).all(axis=1, keepdims=True)
    median = np.nanmedian(np.where(finished, arm, 0.0), axis=1, keepdims=True)
    return np.isnan(arm) | (arm < 0.5 * median)


def once(both: Arms) -> Bools:
    """[campaigns] whether the exact test finds an improvement among the pairs that are left."""
    fallen = [lost(arm) for arm in both]
    differences = np.where(fallen[0] | fallen[1], np.nan, both[0] - both[1])
    too_many = np.any([one.mean(axis=1) > 0.25 for one in fallen], axis=0)
    found = np.zeros(len(differences), dtype=bool)
    finished = (~np.isnan(differences)).sum(axis=1)
    for count in np.unique(finished[finished > 1]):
        rows = np.flatnonzero((finished == count) & ~too_many)
        there = differences[rows]
        whole = there[~np.isnan(there)].reshape(len(rows), count)
        found[rows] = found_once(whole[:, np.newaxis]) & (whole.mean(axis=1) > 0)
    return found


def looks(both: Arms) -> Bools:
    """[campaigns] whether the e-process finds an improvement at the look that decides; a missing
    pair bets nothing.
    """
    differences = both[0] - both[1]
    reached = decided(differences[:, np.newaxis])[:, 0]
    first = np.where(reached.any(axis=1), reached.argmax(axis=1), 0)
    so_far = np.arange(differences.shape[1]) <= first[:, np.newaxis]
    failed = [(np.isnan(arm) & so_far).sum(axis=1) for arm in both]
    too_many = np.any([4 * one > first + 1 for one in failed], axis=0)
    better = np.nansum(np.where(so_far, differences, 0.0), axis=1) > 0
    found: Bools = reached.any(axis=1) & better & ~too_many
    return found


def rates(draw: Callable[[Random, int, int], Arms], campaigns: int) -> Iterator[str]:
    """Improvements of the exact test at each number of seeds, and of the e-process."""
    for seeds in SEEDS:
        yield f"{100 * once(draw(np.random.default_rng(seeds), campaigns, seeds)).mean():.1f}%"
    yield f"{100 * looks(draw(np.random.default_rng(1), campaigns, 16)).mean():.1f}%"


def paragraphs(campaigns: int) -> Iterator[str]:
    yield "## False improvements"
    yield f"{campaigns} campaigns per cell."
    head = ["scenario", *(f"once, {seeds} seeds" for seeds in SEEDS), "looks, at most 16"]
    yield table(head, ([name, *rates(draw, campaigns)] for name, draw in SCENARIOS.items()))


if __name__ == "__main__":
    publish_simulation("robust", "Failed and collapsed runs", __doc__, paragraphs, 4000)

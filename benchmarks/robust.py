"""What a verdict is worth where runs fail or collapse, and the second line that counts them at
their worst: its errors and its price.

    python benchmarks/robust.py      # a minute

Rates in points, of two arms that do not differ in the mean unless a row says so; every verdict is
then false. The luck of a run has a standard deviation of 1.8 points (2.5 for a difference). `once`
is the exact test after all seeds, `looks` the e-process after each of 16.
"""

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
from looking import decided, found_once
from report import publish_simulation, table

from retrain.analysis.robust import unseen_rate
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


def once(differences: Floats) -> Bools:
    """[campaigns] whether the exact test finds an improvement among the pairs that finished."""
    found = np.zeros(len(differences), dtype=bool)
    finished = (~np.isnan(differences)).sum(axis=1)
    for count in np.unique(finished[finished > 1]):
        rows = np.flatnonzero(finished == count)
        there = differences[rows]
        whole = there[~np.isnan(there)].reshape(len(rows), count)
        found[rows] = found_once(whole[:, np.newaxis]) & (whole.mean(axis=1) > 0)
    return found


def looks(differences: Floats) -> Bools:
    """[campaigns] whether the e-process ever finds an improvement; a missing pair bets nothing."""
    reached = decided(differences[:, np.newaxis])[:, 0]
    first = np.where(reached.any(axis=1), reached.argmax(axis=1), 0)
    so_far = np.arange(differences.shape[1]) <= first[:, np.newaxis]
    return reached.any(axis=1) & (np.nansum(np.where(so_far, differences, 0.0), axis=1) > 0)


def second_line(both: Arms, first: Bools, again: Callable[[Floats], Bools]) -> Bools:
    """[campaigns] whether improvements that a test finds stand on the second line; `again` is that
    test.
    """
    fallen_arms = [np.isnan(arm) | (arm < 0.5 * _median(arm)) for arm in both]
    candidate, baseline = (
        np.where(fallen, 0.0, arm) for fallen, arm in zip(fallen_arms, both, strict=True)
    )
    fallen, seeds = fallen_arms[0].sum(axis=1), candidate.shape[1]
    differences = candidate - baseline
    undoing = differences.mean(axis=1) * (seeds - fallen) / np.maximum(candidate.sum(axis=1), 1.0)
    unseen = np.array([unseen_rate(min(count, seeds - 1), seeds) for count in range(seeds + 1)])
    return first & (undoing > unseen[fallen]) & again(differences)


def second_line_at_looks(both: Arms) -> Bools:
    """[campaigns] whether an improvement at the look that decides stands on the second line."""
    differences = both[0] - both[1]
    reached = decided(differences[:, np.newaxis])[:, 0]
    stands = np.zeros(len(differences), dtype=bool)
    for seeds in range(1, differences.shape[1] + 1):
        rows = np.flatnonzero(reached[:, seeds - 1] & ~reached[:, : seeds - 1].any(axis=1))
        so_far = (both[0][rows, :seeds], both[1][rows, :seeds])
        stands[rows] = second_line(so_far, looks(so_far[0] - so_far[1]), looks)
    return stands


def _median(arm: Floats) -> Floats:
    """[campaigns, 1] median of the runs that finished; 0 where none did."""
    finished = ~np.isnan(arm).all(axis=1, keepdims=True)
    median: Floats = np.nanmedian(np.where(finished, arm, 0.0), axis=1, keepdims=True)
    return median


def rates(draw: Callable[[Random, int, int], Arms], campaigns: int) -> Iterator[str]:
    """Improvements of the exact test at each number of seeds, of the e-process, and those that
    stand on the second line of each.
    """
    second = []
    for seeds in SEEDS:
        both = draw(np.random.default_rng(seeds), campaigns, seeds)
        found = once(both[0] - both[1])
        second.append(second_line(both, found, once).mean())
        yield f"{100 * found.mean():.1f}%"
    both = draw(np.random.default_rng(1), campaigns, 16)
    yield f"{100 * looks(both[0] - both[1]).mean():.1f}%"
    yield f"{100 * max(second):.1f}%"
    yield f"{100 * second_line_at_looks(both).mean():.1f}%"


def prices(campaigns: int) -> Iterator[list[object]]:
    for seeds in (8, 12, 16):
        for gain in (5.0, 10.0, 20.0, 30.0):
            both = arms(np.random.default_rng(seeds), campaigns, seeds, gain)
            found = once(both[0] - both[1])
            yield [
                seeds,
                f"{gain:g}",
                f"{100 * found.mean():.1f}%",
                f"{100 * second_line(both, found, once).mean():.1f}%",
            ]


def paragraphs(campaigns: int) -> Iterator[str]:
    yield "## False improvements"
    yield (
        f"{campaigns} campaigns per cell. The second line of the exact test is the largest over the"
        " numbers of seeds."
    )
    head = [
        "scenario",
        *(f"once, {seeds} seeds" for seeds in SEEDS),
        "looks, at most 16",
        "second line, once",
        "second line, looks",
    ]
    yield table(head, ([name, *rates(draw, campaigns)] for name, draw in SCENARIOS.items()))
    yield "## The price of the second line"
    yield (
        "Improvements found where the candidate is better by so many points and nothing fails or"
        " collapses."
    )
    yield table(["seeds", "gain", "exact test", "second line"], prices(campaigns))


if __name__ == "__main__":
    publish_simulation("robust", "Failed and collapsed runs", __doc__, paragraphs, 4000)

"""How often what a campaign foretells comes true: the chance to decide by the last seed, and where
a running pair ends.

    python benchmarks/futility.py                     # 2,000 campaigns per row; about a minute on
    one core python benchmarks/futility.py --campaigns 200     # seconds

Campaigns of at most 16 seeds with one comparison, none of them decided so far. The true effects are
0, 0.5, 1, 1.5 and 2 standard deviations of the differences in turn. A pair's difference at half of
its steps is half of its final one, and noise: the correlation is the row's.
tests/test_campaign_looking.py does the same with fewer campaigns.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from report import publish_simulation, table

from retrain.analysis.e_process import capital
from retrain.analysis.futility import Prediction, chance_to_decide
from retrain.analysis.statistics import Floats

BAR, SEEDS = 20.0, 16
EFFECTS = (0.0, 0.5, 1.0, 1.5, 2.0)
EDGES = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
Random = np.random.Generator
LUCK: dict[str, Callable[[Random, int], Floats]] = {
    "normal": lambda rng, seeds: rng.standard_normal(seeds),
    "heavy tails (t, 3 degrees of freedom)": lambda rng, seeds: (
        rng.standard_t(3, seeds) / np.sqrt(3)
    ),
    "skewed": lambda rng, seeds: 1 - rng.exponential(1.0, seeds),
}


@dataclass(frozen=True)
class Foretold:
    """One campaign at half of its next pair's steps."""

    between: float
    """The chance to decide that the finished seeds alone give."""
    within: float
    """The same with the running pair's curve."""
    decided: bool
    """What came of it."""
    inside: bool
    """Whether the pair's final difference lay in its 80% interval."""


def foretold(
    rng: Random,
    luck: Callable[[Random, int], Floats],
    finished: int,
    correlation: float,
    effect: float,
) -> Foretold | None:
    """None for a campaign that the finished seeds have decided."""
    final = effect + luck(rng, SEEDS)
    noise = 0.5 * np.sqrt(1 / correlation**2 - 1)
    halfway = 0.5 * final[: finished + 1] + noise * rng.standard_normal(finished + 1)
    capitals = capital(final)
    if capitals[:finished].max() >= BAR:
        return None
    known, left = final[:finished].tolist(), SEEDS - finished
    running = Prediction.of(halfway[:-1].tolist(), known, float(halfway[-1]))
    low, high = running.interval()
    chances = chance_to_decide(known, left, BAR), chance_to_decide(known, left, BAR, running)
    return Foretold(*chances, bool(capitals.max() >= BAR), bool(low <= final[finished] <= high))


def sample(
    luck: Callable[[Random, int], Floats], finished: int, correlation: float, campaigns: int
) -> list[Foretold]:
    rng = np.random.default_rng(finished)
    drawn = (
        foretold(rng, luck, finished, correlation, EFFECTS[number % len(EFFECTS)])
        for number in range(campaigns)
    )
    return [item for item in drawn if item]


def rows(campaigns: int) -> Iterator[list[object]]:
    for name, luck in LUCK.items():
        for finished, correlation in ((4, 0.8), (8, 0.8), (8, 0.4)):
            found = sample(luck, finished, correlation, campaigns)
            decided = np.array([item.decided for item in found])
            errors = [
                np.mean((np.array(chances) - decided) ** 2)
                for chances in zip(*((f.between, f.within) for f in found), strict=True)
            ]
            inside = 100 * np.mean([item.inside for item in found])
            yield [
                name,
                finished,
                correlation,
                len(found),
                *(f"{error:.3f}" for error in errors),
                f"{inside:.1f}%",
            ]


def reliability(campaigns: int) -> Iterator[list[object]]:
    for name, luck in LUCK.items():
        found = [
            item for finished in (4, 6, 8, 10) for item in sample(luck, finished, 0.8, campaigns)
        ]
        chances, decided = (
            np.array([item.within for item in found]),
            np.array([item.decided for item in found]),
        )
        for low, high in pairwise(EDGES):
            inside = (chances >= low) & ((chances < high) | (high == 1.0))
            means = (
                f"{100 * values[inside].mean():.0f}%" if inside.any() else ""
                for values in (chances, decided)
            )
            yield [name, f"{100 * low:.0f} to {100 * high:.0f}%", int(inside.sum()), *means]


def paragraphs(campaigns: int) -> Iterator[str]:
    yield "## How often a chance comes true"
    yield (
        f"After 4, 6, 8 and 10 finished seeds, {campaigns} campaigns each, correlation 0.8: the"
        " chance with the running pair's curve."
    )
    yield table(
        ["luck", "chance foretold", "campaigns", "mean chance", "decided by the last seed"],
        reliability(campaigns),
    )
    yield "## What the running pair's curve adds"
    yield (
        "Mean squared error of the chance (0.25 is that of saying 50% always), and how often the"
        " pair ended in the 80% interval that half of its steps had given."
    )
    head = [
        "luck",
        "finished seeds",
        "correlation",
        "undecided campaigns",
        "error between seeds",
        "error within the run",
        "in the interval",
    ]
    yield table(head, rows(campaigns))


if __name__ == "__main__":
    publish_simulation("futility", "What a campaign foretells", __doc__, paragraphs, 2000)

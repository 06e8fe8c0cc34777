"""Coverage of the interval of one evaluation: `python benchmarks/one_evaluation.py` (a minute).

The problems' pass rates are drawn from a Beta distribution, and so many answers to each; the
interval should hold the distribution's mean in 95% of evaluations. Below 100 problems
`clustered_interval` is exact, or Korn and Graubard's; "Wilson" is what it is from 100 on.
"""

from collections.abc import Iterator

import numpy as np
from report import publish_simulation, table

from retrain.analysis.statistics import Floats
from retrain.records.evaluation import clustered_interval, wilson_interval

CASES = {
    "easy": (30, 9.0, 0.5),
    "easy, some hard": (30, 2.0, 0.2),
    "hard": (10, 0.2, 4.0),
    "hard, some easy": (30, 0.4, 1.0),
    "any": (10, 2.0, 2.0),
    "easy or hard": (60, 0.3, 0.3),
    "very hard": (60, 0.3, 6.0),
    "nearly all right": (90, 9.0, 0.5),
}
"""Name -> problems and the two parameters of the Beta distribution."""


def wilson(means: Floats, samples: int) -> tuple[float, float]:
    p, variance = float(means.mean()), float(means.var(ddof=1)) / len(means)
    return wilson_interval(p, min(p * (1 - p) / variance, samples) if variance > 0 else len(means))


def coverage(
    problems: int, a: float, b: float, answers: int, evaluations: int
) -> tuple[Floats, Floats]:
    """[Wilson, now] fraction of intervals that hold the mean, and their mean width."""
    rng, truth = np.random.default_rng(answers), a / (a + b)
    held, width = np.zeros(2), np.zeros(2)
    for _ in range(evaluations):
        means = rng.binomial(answers, rng.beta(a, b, problems)) / answers
        both = np.array(
            [wilson(means, problems * answers), clustered_interval(list(means), problems * answers)]
        )
        held += (both[:, 0] <= truth) & (truth <= both[:, 1])
        width += both[:, 1] - both[:, 0]
    return held / evaluations, width / evaluations


def rows(evaluations: int) -> Iterator[list[object]]:
    for name, (problems, a, b) in CASES.items():
        for answers in (1, 4, 16):
            held, width = coverage(problems, a, b, answers, evaluations)
            shown = [f"{100 * held[way]:.1f}% ({100 * width[way]:.1f} pp)" for way in (0, 1)]
            yield [f"{problems} {name}", f"{100 * a / (a + b):.0f}%", answers, *shown]


def paragraphs(evaluations: int) -> Iterator[str]:
    yield f"{evaluations} evaluations per row: coverage, and the mean width."
    yield table(["problems", "mean rate", "answers each", "Wilson", "now"], rows(evaluations))


if __name__ == "__main__":
    publish_simulation(
        "one-evaluation",
        "The interval of one evaluation",
        __doc__,
        paragraphs,
        2000,
        "evaluations per row",
    )

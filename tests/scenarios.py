"""Simulated campaigns in which something goes wrong: what `retrain compare` meets outside the
textbook.

A campaign is the held-out answers of several arms. Nothing differs between the arms unless a
scenario says so: each verdict is false.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from retrain.analysis.held_out import AnswerDifference, Answers
from retrain.analysis.statistics import Floats, TwoWay
from retrain.analysis.verdict import FEW_PROBLEMS, PairedDifferences

Random = np.random.Generator
Counts = npt.NDArray[np.int64]
RUN_SD, PROBLEM_SD = 0.25, 1.2
"""Of a run's luck and of the problems' difficulty, in logits."""


@dataclass(frozen=True)
class Campaign:
    """Answers [arms, seeds, problems] of `samples` each; the first arm is the baseline."""

    right: Counts
    judged: Counts
    samples: int
    finished: npt.NDArray[np.bool_]
    """[arms, seeds]."""

    def family(self) -> list[PairedDifferences]:
        """Each arm against the first, as `retrain compare` sees it."""
        arms = len(self.right)
        return [self._paired(arm, 1 - 0.05 / (arms - 1)) for arm in range(1, arms)]

    def _paired(self, arm: int, confidence: float) -> PairedDifferences:
        seeds = np.flatnonzero(self.finished[0] & self.finished[arm])
        found = {
            int(seed): AnswerDifference.between(self._answers(arm, seed), self._answers(0, seed), 1)
            for seed in seeds
        }
        least = {seed: one.least for seed, one in found.items()}
        most = {seed: one.most for seed, one in found.items()}
        table = TwoWay.of(np.array([difference.by_problem for difference in found.values()]))
        few = self.right.shape[2] < FEW_PROBLEMS
        return PairedDifferences(
            {seed: difference.mean for seed, difference in found.items()},
            (least, most) if any(one.unjudged for one in found.values()) else None,
            table.interval(confidence) if table and few else None,
        )

    def _answers(self, arm: int, seed: int) -> Answers:
        judged = self.judged[arm, seed]
        return Answers((), self.right[arm, seed], judged, self.samples - judged)


def draw(
    rng: Random,
    arms: int,
    seeds: int,
    *,
    problems: int = 200,
    samples: int = 1,
    luck: Callable[[tuple[int, int]], Floats] | None = None,
    effect: Floats | float = 0.0,
) -> Campaign:
    """`luck` gives the runs' shifts [arms, seeds] in logits; `effect` [problems] shifts every arm
    but the first.
    """
    shape = (arms, seeds)
    shifts = rng.normal(0, RUN_SD, shape) if luck is None else luck(shape)
    difficulty = rng.normal(0, PROBLEM_SD, problems)
    logits = (
        difficulty
        + shifts[..., np.newaxis]
        + np.where(np.arange(arms) > 0, 1.0, 0.0)[:, np.newaxis, np.newaxis] * effect
    )
    right = rng.binomial(samples, 1 / (1 + np.exp(-logits)))
    return Campaign(right, np.full(right.shape, samples), samples, np.ones(shape, dtype=bool))


def asymmetric(rng: Random, arms: int, seeds: int) -> Campaign:
    """The luck of all arms has a long tail downwards."""
    return draw(rng, arms, seeds, luck=lambda shape: 0.5 - rng.exponential(0.5, shape))


def collapsing(rng: Random, arms: int, seeds: int) -> Campaign:
    """One run in ten of every arm collapses."""
    return draw(
        rng,
        arms,
        seeds,
        luck=lambda shape: rng.normal(0, RUN_SD, shape) - 4.0 * (rng.random(shape) < 0.1),
    )


def unequal(rng: Random, arms: int, seeds: int) -> Campaign:
    """The candidates' luck varies four times as much as the baseline's."""
    return draw(
        rng,
        arms,
        seeds,
        luck=lambda shape: (
            rng.normal(0, RUN_SD, shape)
            * np.where(np.arange(shape[0]) > 0, 4.0, 1.0)[:, np.newaxis]
        ),
    )


def discrete(rng: Random, arms: int, seeds: int) -> Campaign:
    return draw(rng, arms, seeds, problems=16)


def incomplete(rng: Random, arms: int, seeds: int) -> Campaign:
    """A fifth of the runs is missing, whatever their result."""
    campaign = draw(rng, arms, seeds)
    campaign.finished[rng.random((arms, seeds)) < 0.2] = False
    campaign.finished[:, :2] = True
    return campaign


def unjudged(rng: Random, arms: int, seeds: int, fraction: float = 0.2) -> Campaign:
    """A fifth of the candidates' wrong answers could not be judged."""
    campaign = draw(rng, arms, seeds)
    lost = (campaign.right[1:] == 0) & (rng.random(campaign.right[1:].shape) < fraction)
    campaign.judged[1:][lost] = 0
    return campaign


def losing_the_worst(rng: Random, arms: int, seeds: int) -> Campaign:
    """The candidates' lowest fifth of luck fails."""
    shifts = rng.normal(0, RUN_SD, (arms, seeds))
    campaign = draw(rng, arms, seeds, luck=lambda _: shifts)
    campaign.finished[1:] = shifts[1:] > -0.84 * RUN_SD
    campaign.finished[:, :2] = True
    return campaign


def forty_problems(rng: Random, arms: int, seeds: int) -> Campaign:
    """An effect that differs from problem to problem, with a mean of 0 over all problems; 40 of
    them are asked.
    """
    return draw(rng, arms, seeds, problems=40, samples=4, effect=rng.normal(0, 1.0, 40))

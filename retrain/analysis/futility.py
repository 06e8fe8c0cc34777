"""The chance that a campaign's evidence decides a condition by the last seed: is going on worth its
cost?

Nothing here touches a verdict, and nothing is stopped because of it (non-binding futility). Between
seeds the chance rests on the differences so far. Within a run it rests on the curves of held-out
accuracy too: a pair of runs that has been evaluated at some step is predicted to end as the pairs
of earlier seeds ended, by a regression of their final differences on their differences at that
step. Differences to come are drawn from their predictive distribution, in which mean and sd are as
uncertain as the seeds so far leave them (a flat prior for the mean and for the logarithm of the
sd).

Source: Spiegelhalter, Freedman and Blackburn 1986, doi 10.1016/0197-2456(86)90003-6 (predictive
power).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from retrain.analysis.e_process import capital
from retrain.analysis.held_out import AnswerDifference
from retrain.analysis.runs import StoredRun

FEWEST = 3
"""Differences without which there is no chance to tell."""
_FEWEST_PAIRS = 4
"""Finished pairs without which a run's end is not predicted."""
_CAMPAIGNS = 400

Pair = tuple[StoredRun, StoredRun]
"""(candidate, baseline)"""


@dataclass(frozen=True)
class Prediction:
    """The predicted final difference of a running pair, as a Student's t distribution."""

    centre: float
    scale: float
    freedom: int

    @classmethod
    def of(cls, at_step: Sequence[float], final: Sequence[float], now: float) -> "Prediction":
        """Predict from the differences of three or more earlier pairs at a step and at their end,
        by least squares. `now`: at that step.

        Where the earlier pairs were equal at that step, their ends alone predict.
        """
        x, y, n = (
            np.asarray(at_step, dtype=np.float64),
            np.asarray(final, dtype=np.float64),
            len(final),
        )
        spread = float(((x - x.mean()) ** 2).sum())
        slope = float(((x - x.mean()) * y).sum()) / spread if spread > 0 else 0.0
        freedom = n - 2 if spread > 0 else n - 1
        residuals = y - y.mean() - slope * (x - x.mean())
        leverage = (now - float(x.mean())) ** 2 / spread if spread > 0 else 0.0
        scale = np.sqrt(float((residuals**2).sum()) / freedom * (1 + 1 / n + leverage))
        return cls(float(y.mean()) + slope * (now - float(x.mean())), float(scale), freedom)

    def interval(self, confidence: float = 0.8) -> tuple[float, float]:
        from scipy.special import stdtrit

        half = float(stdtrit(self.freedom, 0.5 + confidence / 2)) * self.scale
        return self.centre - half, self.centre + half


@dataclass(frozen=True)
class Forecast:
    """The prediction made from a running pair's evaluation at one step, in the metric's units."""

    step: int
    difference: float
    """The difference at that step."""
    expected: float
    """The expected difference at the end."""
    interval: tuple[float, float]
    """80% interval of the difference at the end."""
    chance: float
    """Chance that the condition is decided by the last seed."""

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Forecast":
        return cls(**{**stored, "interval": tuple(stored["interval"])})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def chance_to_decide(
    differences: Sequence[float], more: int, bar: float, running: Prediction | None = None
) -> float:
    """The fraction of simulated continuations by `more` seeds whose capital reaches `bar`; FEWEST
    differences or more, in the order of looks.

    `running` predicts the first of the seeds to come. The evidence alone is simulated: a verdict
    needs the interval for new problems too.
    """
    rng = np.random.default_rng(len(differences))
    drawn = np.tile(np.asarray(differences, dtype=np.float64), (_CAMPAIGNS, 1))
    if running is not None:
        end = running.centre + running.scale * rng.standard_t(running.freedom, (_CAMPAIGNS, 1))
        drawn, more = np.concatenate([drawn, end], axis=1), more - 1
    n = drawn.shape[1]
    sd = drawn.std(axis=1, ddof=1, keepdims=True) * np.sqrt(
        (n - 1) / rng.chisquare(n - 1, (_CAMPAIGNS, 1))
    )
    mean = drawn.mean(axis=1, keepdims=True) + sd / np.sqrt(n) * rng.standard_normal(
        (_CAMPAIGNS, 1)
    )
    to_come = mean + sd * rng.standard_normal((_CAMPAIGNS, more))
    return float((capital(np.concatenate([drawn, to_come], axis=1)) >= bar).any(axis=1).mean())


def forecasts(
    earlier: Sequence[Pair], running: Pair, k: int, more: int, bar: float
) -> Iterator[Forecast]:
    """A forecast for each evaluation of the running pair before its end, from the pairs of earlier
    seeds in the order of the looks.

    `more` counts the seeds to come with the running one; k is that of the metric pass@k.
    """
    finished = [curve for pair in earlier if (curve := _curve(pair, k))]
    last = max((step for curve in finished for step in curve), default=0)
    ends = [curve[last] for curve in finished if last in curve]
    for step, now in _curve(running, k).items():
        known = [
            (curve[step], curve[last]) for curve in finished if step in curve and last in curve
        ]
        if step >= last or len(known) < _FEWEST_PAIRS:
            continue
        found = Prediction.of([x for x, _ in known], [end for _, end in known], now)
        yield Forecast(
            step, now, found.centre, found.interval(), chance_to_decide(ends, more, bar, found)
        )


def _curve(pair: Pair, k: int) -> dict[int, float]:
    """Step -> difference, at the evaluations of trained weights that both runs have on the same
    problems.
    """
    ours, theirs = (run.evaluations for run in pair)
    shared = [
        step for step in ours if step > 0 and step in theirs and ours[step].ids == theirs[step].ids
    ]
    found = {step: AnswerDifference.between(ours[step], theirs[step], k).mean for step in shared}
    return {step: value for step, value in found.items() if not np.isnan(value)}

"""Store the held-out answers of a run as arrays over problems, and compute the difference of two
runs on the problems that both have judged.

An answer that the reward could not judge is neither right nor wrong. The difference of a pair is
over the problems with judged answers in both runs. Its bounds count all unjudged answers against
one arm, and then for that arm. Source of the bounds: Manski 1990, American Economic Review 80.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from retrain.analysis.statistics import Floats
from retrain.records.entries import EvaluationRecord
from retrain.records.evaluation import pass_at_k

Ints = npt.NDArray[np.int64]


Unjudged = Literal["nothing", "right", "wrong"]
"""The value of an answer that the reward could not judge."""


@dataclass(frozen=True)
class Answers:
    """The held-out answers of a run, arrays over [problems] in the order of `ids`."""

    ids: tuple[str, ...]
    right: Ints
    judged: Ints
    unjudged: Ints

    @classmethod
    def of(cls, records: Sequence[EvaluationRecord]) -> "Answers":
        ordered = sorted(records, key=lambda record: record.example_id)
        counts = np.array(
            [(item.correct, item.samples, item.could_not_judge) for item in ordered], dtype=np.int64
        ).reshape(-1, 3)
        return cls(tuple(item.example_id for item in ordered), *counts.T)

    def rates(self, k: int = 1, unjudged: Unjudged = "nothing") -> Floats:
        """Return [problems] unbiased pass@k; NaN with fewer than k answers that count."""
        right = self.right + self.unjudged * (unjudged == "right")
        counts = self.judged + self.unjudged * (unjudged != "nothing")
        of_each = zip(counts.tolist(), right.tolist(), strict=True)
        return np.array([pass_at_k(n, c, k) if n >= k else np.nan for n, c in of_each], np.float64)


def mean_of_known(values: Floats) -> float:
    """Return the mean of the values that are not NaN; NaN if there is none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


@dataclass(frozen=True)
class AnswerDifference:
    """The difference candidate - baseline of two runs that answered the same problems."""

    by_problem: Floats
    """[problems]; NaN if a run judged fewer than k answers."""
    least: float
    """The mean if every unjudged answer counts against the candidate: wrong there, right in the
    baseline.
    """
    most: float
    unjudged: int
    """Answers of both runs."""

    @property
    def mean(self) -> float:
        """The mean over the problems judged in both runs; NaN if there is none."""
        return mean_of_known(self.by_problem)

    @classmethod
    def between(cls, candidate: Answers, baseline: Answers, k: int) -> "AnswerDifference":
        def mean(ours: Unjudged, theirs: Unjudged) -> float:
            return mean_of_known(candidate.rates(k, ours) - baseline.rates(k, theirs))

        return cls(
            by_problem=candidate.rates(k) - baseline.rates(k),
            least=mean("wrong", "right"),
            most=mean("right", "wrong"),
            unjudged=int(candidate.unjudged.sum() + baseline.unjudged.sum()),
        )

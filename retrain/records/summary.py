"""The result of a job: summary.json of a run, and the analysis of an adapter as the trackers show
it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from retrain.records.entries import StepRecord
from retrain.records.evaluation import Evaluation
from retrain.records.terminal import counted
from retrain.system import Json


@dataclass(frozen=True)
class RunSummary:
    """The result of a finished or interrupted run: summary.json and the last lines on the
    screen.
    """

    status: str
    """done, interrupted or failed."""
    condition: str
    seed: int
    steps: int
    """Steps completed, over all sessions of the run."""
    seconds: float
    """Time of the steps and evaluations, over all sessions."""
    tokens: int
    """Prompt and completion tokens sampled for training."""
    before: Evaluation | None
    after: Evaluation | None
    last: StepRecord | None
    adapter: str
    """The folder of the last adapter, relative to the run's folder if it lies inside; empty unless
    the run has the status done.
    """
    reason: str = ""
    """The reason why the run did not finish."""
    untrained: str = ""
    """The reason why the last steps trained nothing, or a note that the model solves all their
    problems; empty if they trained.
    """
    wall_s: float = 0.0
    """Time of this session with its start, for the screen alone."""

    def __repr__(self) -> str:
        """One line: how far it came, and held-out pass@1 before and after."""
        rates = [
            f"{one.pass_at[1]:.1%}" for one in (self.before, self.after) if one and 1 in one.pass_at
        ]
        held_out = f", held-out pass@1 {' -> '.join(rates)}" if rates else ""
        return f"{self.status}, {self.condition}, {counted(self.steps, 'step')}{held_out}"

    def to_json(self) -> Json:
        return {
            "status": self.status,
            "reason": self.reason or None,
            "untrained": self.untrained or None,
            "condition": self.condition,
            "seed": self.seed,
            "steps": self.steps,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "evaluation": {
                "before": self.before.summary() if self.before else None,
                "after": self.after.summary() if self.after else None,
            },
            "last": self.last.to_json() if self.last else None,
            "adapter": self.adapter,
        }


@dataclass(frozen=True)
class TableRow:
    """The share of an adapter's variance V that one rank keeps, over the layers that are not
    zero.
    """

    rank: int
    mean: float
    min: float
    max: float
    energy: float
    """V of all layers as one update, where the weight of each layer is the squared norm of its s B
    A.
    """
    error: float
    """Relative Frobenius error of the whole update, sqrt(1 - energy)."""


@dataclass(frozen=True)
class SqueezeSummary:
    """The recommended rank of an adapter, and the analysis behind it."""

    source_rank: int
    """The largest rank of a layer."""
    recommended_rank: int
    threshold: float
    """Least variance that the recommended rank keeps."""
    table: Sequence[TableRow]

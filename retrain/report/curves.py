"""The numbers behind the curves: the metrics of every run by step, and their mean and standard
deviation within a condition.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np

from retrain.analysis.runs import StoredRun, read_metrics
from retrain.analysis.statistics import Floats
from retrain.records.entries import EvaluationRecord
from retrain.records.evaluation import Evaluation

PHASES = ("time_sample_s", "time_reward_s", "time_credit_s", "time_learn_s")
FIELDS = (
    *(
        "correct_rate",
        "mean_reward",
        "sepa_lambda",
        "completion_tokens_mean",
        "max_token_hit_rate",
        "informative_fraction",
    ),
    *("exec_entropy_mean", "plan_entropy_mean", "exec_surprisal_mean", "plan_surprisal_mean"),
    *("tokens_per_s", "step_time_s", *PHASES),
)
_SMOOTHED_PART = 12
_MAX_WINDOW = 25


@dataclass(frozen=True)
class Curves:
    """One run's metrics by step; a null in the file is NaN."""

    steps: Floats
    """[S] counted from 0, increasing."""
    values: Mapping[str, Floats]
    """Field -> [S] values."""

    @classmethod
    def of(cls, run: StoredRun) -> "Curves":
        table = read_metrics(run.folder.metrics, ("step", *FIELDS))
        return cls(table["step"].to_numpy(), {name: table[name].to_numpy() for name in FIELDS})

    def last(self, name: str, window: int) -> float | None:
        """Return the mean of the last `window` known values; None if there are none."""
        known = self.values[name][~np.isnan(self.values[name])][-window:]
        if len(known):
            return float(known.mean())
        return None

    def median(self, name: str) -> float | None:
        known = self.values[name][~np.isnan(self.values[name])]
        if len(known):
            return float(np.median(known))
        return None


@dataclass(frozen=True)
class HeldOutPoint:
    step: int
    """Steps completed when the evaluation was made."""
    accuracy: float
    """pass@1"""
    interval: tuple[float, float]
    """95% interval over the problems."""


def held_out_points(run: StoredRun) -> list[HeldOutPoint]:
    """The evaluations of a run that judged something, ordered by step."""
    if not run.held_out_file.is_file():
        return []
    records = EvaluationRecord.read(run.held_out_file)
    evaluations = [
        Evaluation(step, list(problems))
        for step, problems in groupby(records, key=lambda record: record.step)
    ]
    return [
        HeldOutPoint(item.step, item.pass_at[1], item.interval)
        for item in evaluations
        if 1 in item.pass_at
    ]


@dataclass(frozen=True)
class Band:
    """The mean and standard deviation over runs at each of S steps."""

    steps: Floats
    """[S]"""
    mean: Floats
    """[S]"""
    sd: Floats | None
    """[S] standard deviation between runs with ddof = 1; None for a single run."""


@dataclass(frozen=True)
class ConditionCurves:
    """The runs of one condition and their curves."""

    label: str
    runs: Sequence[StoredRun]
    curves: Sequence[Curves]
    held_out: Sequence[Sequence[HeldOutPoint]]
    """[runs] evaluations of each run."""

    def has(self, name: str) -> bool:
        return any(not np.isnan(curves.values[name]).all() for curves in self.curves)

    def band(self, name: str, window: int = 1) -> Band | None:
        """Average a field over the runs at each step, each run smoothed over `window` steps first;
        None if no run has it.

        Steps at which fewer than half of the started runs have a value are left out, so that the
        curve of an unfinished campaign does not end in the noise of its fastest run.
        """
        begun = [curves for curves in self.curves if len(curves.steps)]
        return _band([(curves.steps, smoothed(curves.values[name], window)) for curves in begun])

    def held_out_band(self) -> Band | None:
        """Average pass@1 over the runs at each evaluation; None if there are none."""
        evaluated = [points for points in self.held_out if points]
        return _band(
            [
                (np.array([p.step for p in points], float), np.array([p.accuracy for p in points]))
                for points in evaluated
            ]
        )

    @cached_property
    def longest(self) -> int:
        return max((len(curves.steps) for curves in self.curves), default=0)


def _band(curves: Sequence[tuple[Floats, Floats]]) -> Band | None:
    """Average curves (steps [S_i], values [S_i]) that are aligned by step number."""
    if not curves:
        return None
    steps = np.unique(np.concatenate([own for own, _ in curves]))
    table = np.full((len(curves), len(steps)), np.nan)
    for row, (own, values) in zip(table, curves, strict=True):
        row[np.searchsorted(steps, own)] = values
    known = ~np.isnan(table)
    counts = known.sum(axis=0)
    enough = counts * 2 >= max(1, known.any(axis=1).sum())
    steps, table, known, counts = steps[enough], table[:, enough], known[:, enough], counts[enough]
    if not len(steps) or not counts.any():
        return None
    mean = np.where(known, table, 0.0).sum(axis=0) / counts
    if len(curves) == 1:
        return Band(steps, mean, None)
    squares = np.where(known, (table - mean) ** 2, 0.0).sum(axis=0)
    return Band(steps, mean, np.sqrt(squares / np.maximum(counts - 1, 1)))


def window_for(steps: int) -> int:
    """Return the steps of the running mean, since the rate of a single step, over about a hundred
    completions, jumps by several points.
    """
    return max(1, min(_MAX_WINDOW, steps // _SMOOTHED_PART))


def smoothed(values: Floats, window: int) -> Floats:
    """Average the known values among the last `window`, [S] -> [S]; NaN stays NaN."""
    known = ~np.isnan(values)
    if window == 1 or not known.any():
        return values
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    with np.errstate(invalid="ignore"):
        means = (sums[ends] - sums[starts]) / (counts[ends] - counts[starts])
    return np.where(known, means, np.nan)


def curves_by_condition(labelled: Iterable[tuple[str, StoredRun]]) -> list[ConditionCurves]:
    """The curves of (label, run) pairs, one ConditionCurves per label in order of first
    appearance.
    """
    by_label: dict[str, list[StoredRun]] = {}
    for label, run in labelled:
        by_label.setdefault(label, []).append(run)
    return [
        ConditionCurves(
            label, runs, [Curves.of(run) for run in runs], [held_out_points(run) for run in runs]
        )
        for label, runs in by_label.items()
    ]

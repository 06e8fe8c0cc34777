"""Choose the metric of a comparison before looking at any, and its words: held-out accuracy, else
the training correct rate.

`running_correct_rate` is not available: a cumulative mean lags and favors early learning.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from retrain.analysis.held_out import mean_of_known
from retrain.analysis.runs import StoredRun
from retrain.analysis.statistics import Floats, Interval
from retrain.config.judging import judge_words
from retrain.config.plan import Plan
from retrain.config.schema import TrainConfig
from retrain.errors import ConfigurationError
from retrain.records.entries import RENAMED_FIELDS, Count, Direction, Figure, StepRecord

WINDOW = 50
"""Steps at the end of training that enter the mean of a training metric."""
_PASS_AT = re.compile(r"pass@([1-9]\d*)")
SYNONYMS = {"accuracy": "pass@1", **RENAMED_FIELDS}
DIRECTIONS: dict[str, Direction] = {
    field.name: field.metadata.get("better")
    for field in fields(StepRecord)
    if field.type in (Count, Figure)
}
"""The numeric fields of metrics.jsonl."""
_RATES = frozenset(
    {"correct_rate", "auc", "informative_fraction", "truncated_fraction", "clip_fraction"}
)
_BY_REWARD = frozenset(
    {"correct_rate", "auc", "mean_reward", "reward_std", "truncated_reward_mean",
     "informative_fraction"}
)  # fmt: skip
"""Training metrics that depend on the training reward."""
_RIGHT_BY_SUM = frozenset({"correct_rate", "auc"})
"""Rates of right completions, which the plain sum of several rewards decides."""


@dataclass(frozen=True)
class Metric:
    name: str
    """pass@K, correct_rate, auc, or another numeric field of a StepRecord."""
    description: str
    is_rate: bool
    """True if it lies between 0 and 1; a comparison shows it as a percentage."""
    better: Direction = "higher"

    @property
    def k(self) -> int | None:
        """The K of the held-out pass@K; None for a training metric."""
        match = _PASS_AT.fullmatch(self.name)
        return int(match[1]) if match else None

    def judge(self, run: StoredRun) -> str:
        """Return the reward that decides the metric in a run, with equal words for equal rewards;
        "" if no reward does.
        """
        config = run.config
        if config.data.mix and not (self.k and config.evaluation.source):
            words = ((one.task, self._words(one.config)) for one in Plan.of(config).sources)
            return "; ".join(f"{task}: {text}" for task, text in words if text)
        return self._words(config)

    def _words(self, config: TrainConfig) -> str:
        """Return the reward of a run with one source, as `judge` does."""
        plan = Plan.of(config)
        if self.k is not None:
            return judge_words(plan.judges, config.reward)
        if self.name not in _BY_REWARD:
            return ""
        words = judge_words(plan.rewards, config.reward)
        if config.reward.combine != "sum" and self.name not in _RIGHT_BY_SUM:
            words += ", each normalized within its group"
        return words

    def of(self, run: StoredRun) -> float | None:
        """Return the metric of a run; None if it has none."""
        if self.k is not None:
            return held_out(run, self.k)
        if self.name == "auc":
            return learning_curve_mean(run.curve("correct_rate"))
        values = [
            value
            for record in run.last_metrics(WINDOW)
            if (value := getattr(record, self.name)) is not None
        ]
        return float(np.mean(values)) if values else None


def choose_metric(name: str | None, runs: Sequence[StoredRun]) -> Metric:
    """Return the metric `name`. By default, choose held-out pass@1 if any run has it, else the
    training correct rate.

    Raises ConfigurationError for a name that is not a metric.
    """
    if name is None:
        name = "pass@1" if any(held_out(run, 1) is not None for run in runs) else "correct_rate"
    name = SYNONYMS.get(name, name)
    if _PASS_AT.fullmatch(name):
        return Metric(name, f"held-out {name} at the last evaluation", is_rate=True)
    if name == "auc":
        return Metric(
            name,
            "mean of the training correct rate over all steps (area under the learning curve)",
            is_rate=True,
        )
    if name == "running_correct_rate":
        raise ConfigurationError(
            f"--metric {name} is a cumulative mean, which lags and favors early learning; use"
            " correct_rate or auc."
        )
    if name not in DIRECTIONS:
        raise ConfigurationError(
            f"--metric {name} is not a metric; use pass@1 (or another pass@K), correct_rate, auc, "
            "or a numeric field of metrics.jsonl such as mean_reward."
        )
    what = "training correct rate" if name == "correct_rate" else name
    short = max((run.steps for run in runs), default=WINDOW) <= WINDOW
    return Metric(
        name,
        f"mean {what} of {'all' if short else f'the last {WINDOW}'} steps",
        name in _RATES,
        DIRECTIONS[name],
    )


def held_out(run: StoredRun, k: int) -> float | None:
    """Return pass@k at the run's last evaluation of trained weights, over the problems with k
    judged samples; None without an evaluation.

    It reads the stored samples, so it works for every k up to their number, whatever `[evaluation]
    k` said.
    """
    if run.answers is None:
        return None
    mean = mean_of_known(run.answers.rates(k))
    return None if np.isnan(mean) else mean


def trained_on_chance(run: StoredRun) -> bool:
    """True if training had the random reward alone. Held-out answers have another judge."""
    return set(run.config.reward.types) == {"random"}


def learning_curve_mean(points: Floats) -> float | None:
    """Return the area under the curve [2, steps] of step numbers and rates, divided by its span; it
    interpolates missing steps.
    """
    steps, rates = points
    if len(steps) < 2:
        return float(rates[0]) if len(steps) else None
    return float(np.sum(np.diff(steps) * (rates[1:] + rates[:-1]) / 2) / (steps[-1] - steps[0]))


# -- numbers in words ------------------------------------------------------------------------------


def difference_words(value: float, metric: Metric) -> str:
    """Return a difference in words, such as +13.2 pp; a small difference has two significant
    digits, +0.042 pp.
    """
    return size_words(value, metric, "+")


def direction_words(better: Direction) -> str:
    return f"{better or 'neither direction'} is better"


def size_words(value: float | None, metric: Metric, sign: str = "") -> str:
    if value is None:
        return ""
    if not metric.is_rate:
        return format(value, f"{sign}.4g")
    points = 100 * value
    # What is smaller comes from rounding: one answer of a million problems is 0.0001 points.
    digits = ".2g" if 1e-5 < abs(points) < 0.095 else ".1f"
    return f"{format(points, sign + digits)} pp"


def interval_words(interval: Interval | None, metric: Metric) -> str:
    if interval is None:
        return ""
    low, high = interval
    if low == high:
        return "no variation"
    start = difference_words(low, metric).removesuffix(" pp")
    return f"{start} to {difference_words(high, metric)}"

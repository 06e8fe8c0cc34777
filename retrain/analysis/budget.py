"""Compare runs after equal numbers of tokens: `retrain compare --at tokens=N`.

It interpolates a problem's rate at N linearly between the evaluations before and after N. It
averages a training metric over the last steps that are complete at N.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from operator import itemgetter

import numpy as np

from retrain.analysis.arms import RunsByCondition
from retrain.analysis.held_out import Answers, Unjudged
from retrain.analysis.measures import Metric
from retrain.analysis.runs import StoredRun
from retrain.analysis.statistics import Floats
from retrain.errors import ConfigurationError, RunFailed
from retrain.records.entries import EvaluationRecord, StepRecord
from retrain.records.jsonl import CHANGED
from retrain.records.terminal import counted

_FORM = re.compile(r"tokens=(\d[\d_]*(?:\.\d+)?(?:e\d+)?)")


@dataclass(frozen=True)
class Budget:
    tokens: int

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """Parse `tokens=N`. Raises ConfigurationError for any other text."""
        if text.strip().startswith("updates="):
            raise ConfigurationError(
                f"--at {text} left in 0.10; give tokens=N, what the runs cost to sample."
            )
        found = _FORM.fullmatch(text.strip())
        size = float(found[1].replace("_", "")) if found else 0.0
        if size < 1 or size == float("inf"):
            raise ConfigurationError(
                f"--at {text!r} is not a budget; give tokens=N with N from 1, such as --at"
                " tokens=2_000_000."
            )
        return cls(int(size))

    def __str__(self) -> str:
        return f"{self.tokens:,} prompt and completion tokens sampled in training"


@dataclass(frozen=True)
class InterpolatedAnswers(Answers):
    """Answers at a budget between two evaluations of one run. Their counts come from the nearer
    evaluation, unless the other left more answers unjudged: those move the rates too.
    """

    before: Answers
    after: Answers
    weight: float
    """Weight of `after`, from 0 to 1."""

    def rates(self, k: int = 1, unjudged: Unjudged = "nothing") -> Floats:
        """Return [problems] rates, the weighted mean of both evaluations."""
        first, second = (one.rates(k, unjudged) for one in (self.before, self.after))
        weighed: Floats = (1 - self.weight) * first + self.weight * second
        return weighed


@dataclass(frozen=True)
class RunAtBudget(StoredRun):
    """A run with its records and evaluations cut at a budget."""

    budget: Budget = Budget(0)

    @cached_property
    def costs(self) -> Floats:
        """Return [steps + 1] tokens used after 0, 1, ... steps, including a supervised stage.
        Raises ConfigurationError if the records lack the numbers.
        """
        spent = [self.sft_tokens]
        for record in StepRecord.read(self.folder.metrics):
            if record.tokens_per_s is None or record.step_time_s is None:
                raise ConfigurationError(
                    f"{self.folder.metrics}, step {record.step}, does not tell its tokens, so --at"
                    " tokens cannot be used; leave it out."
                )
            spent.append(round(record.tokens_per_s * record.step_time_s))
        return np.cumsum(spent)

    @cached_property
    def steps(self) -> int:
        """The number of whole steps within the budget."""
        self._check_reached()
        return int(np.searchsorted(self.costs, self.budget.tokens, side="right")) - 1

    @cached_property
    def answers(self) -> Answers | None:
        """The held-out answers at the budget; None without evaluations."""
        if not self.folder.evaluation.is_file():
            return None
        self._check_reached()
        points = list(self._evaluations())
        if not points:
            return None
        size = self.budget.tokens
        if points[-1][0] < size:
            raise self._short(points[-1][0], "was evaluated for the last time at")
        later = bisect_left(points, size, key=itemgetter(0))
        cost, after = points[later]
        if later == 0 and cost > size:
            raise ConfigurationError(
                f"{self.path} was evaluated for the first time at {cost:,} tokens,"
                f" after --at tokens={size}; name a larger budget, or train with"
                " [evaluation] at_start = true."
            )
        if cost == size:
            return after
        earlier, before = points[later - 1]
        if before.ids != after.ids:
            raise ConfigurationError(
                f"{self.path} answered other problems in the evaluations before and after"
                f" {size:,} tokens; leave --at out."
            )
        weight = (size - earlier) / (cost - earlier)
        nearer_first = (after, before) if weight > 0.5 else (before, after)
        shown = max(nearer_first, key=lambda one: one.unjudged.sum())
        return InterpolatedAnswers(**vars(shown), before=before, after=after, weight=weight)

    def _evaluations(self) -> Iterator[tuple[int, Answers]]:
        """Yield the cost before each evaluation, and its answers. Raises RunFailed for an
        evaluation of steps without a record.
        """
        # The step of an evaluation is the number of steps completed before it, the index into
        # `costs`.
        stored = groupby(EvaluationRecord.read(self.folder.evaluation), key=lambda one: one.step)
        for step, records in stored:
            if step >= len(self.costs):
                raise RunFailed(
                    f"{self.folder.evaluation} holds an evaluation after {counted(step, 'step')},"
                    f" and {self.folder.metrics} has {len(self.costs) - 1} of them{CHANGED}"
                )
            yield int(self.costs[step]), Answers.of(list(records))

    def curve(self, name: str) -> Floats:
        points = super().curve(name)
        kept: Floats = points[:, points[0] < self.steps]
        return kept

    def last_metrics(self, window: int) -> list[StepRecord]:
        if not self.steps:
            raise ConfigurationError(
                f"{self.path} had not made its first step at --at"
                f" tokens={self.budget.tokens}, since that took"
                f" {int(self.costs[1]):,} tokens; name a larger budget."
            )
        records = StepRecord.read(self.folder.metrics)
        return [one for one in records if self.steps - window <= one.step < self.steps][::-1]

    def _check_reached(self) -> None:
        if self.costs[-1] < self.budget.tokens:
            raise self._short(int(self.costs[-1]), "has")

    def _short(self, reached: int, how: str) -> ConfigurationError:
        advice = f"use tokens={reached} or less" if reached else "leave --at or this run out"
        return ConfigurationError(
            f"{self.path} {how} {reached:,} tokens, short of --at"
            f" tokens={self.budget.tokens}; {advice}."
        )


def at_budget(
    grouped: RunsByCondition, budget: Budget, metric: Metric
) -> tuple[RunsByCondition, Metric]:
    """Return the runs cut at the budget, and the metric with the rule in its description."""
    what = metric.description.removesuffix(" at the last evaluation")
    rule = f"up to the last whole step within {budget}"
    if metric.k is not None:
        rule = (
            f"at {budget}: the rate of each problem lies on the line between the evaluations"
            " before and after"
        )
    metric = replace(metric, description=f"{what} {rule}")
    conditions: dict[str, dict[int, StoredRun]] = {
        label: {seed: RunAtBudget(run.path, run.planned, budget) for seed, run in runs.items()}
        for label, runs in grouped.conditions.items()
    }
    return replace(grouped, conditions=conditions), metric

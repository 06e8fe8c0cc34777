"""Two evaluations compared in pairs of problems: which of two sets of weights answers the same
problems better.

This is about two models, not about the conditions that trained them: another seed of either may
differ by more than the interval says. Source: Miller 2024, arXiv 2411.00640.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from retrain.analysis import statistics
from retrain.analysis.arms import evaluation_words
from retrain.analysis.headline import p_words
from retrain.analysis.held_out import AnswerDifference, Answers
from retrain.analysis.measures import Metric, difference_words, interval_words
from retrain.analysis.statistics import Interval
from retrain.config import TrainConfig, load_stored
from retrain.config.judging import judge_words, judging_rewards
from retrain.errors import ConfigurationError
from retrain.records.entries import EvaluationRecord
from retrain.records.evaluation import EvaluationFolder
from retrain.records.terminal import counted
from retrain.system import Json


@dataclass(frozen=True)
class StoredEvaluation:
    path: Path
    config: TrainConfig
    problems: list[EvaluationRecord]

    @property
    def way(self) -> str:
        judge = judge_words(judging_rewards(self.config), self.config.reward)
        return (
            f"{evaluation_words(self.config.evaluation, self.config.training)}, judged by {judge}"
        )

    @property
    def step(self) -> int:
        return self.problems[0].step

    @property
    def name(self) -> str:
        return f"{self.path} (step {self.step})"


@dataclass(frozen=True)
class ProblemPairs:
    """The difference candidate - baseline over the problems that both have judged."""

    task: str
    """ "" for all of them."""
    problems: int
    mean: float
    interval: Interval
    """Student's, over the problems."""
    p: float
    """Sign flips of whole problems."""
    bounds: Interval | None
    """With every unjudged answer counted against the candidate, and for it; None where all were
    judged."""


@dataclass(frozen=True)
class EvaluationComparison:
    candidate: str
    baseline: str
    metric: Metric
    alpha: float
    pairs: ProblemPairs
    tasks: list[ProblemPairs]
    """Empty where there is one task."""

    @property
    def differs(self) -> bool:
        """True if the difference is significant, also with every unjudged answer counted against
        it.
        """
        # The whole interval moves by what the unjudged answers could take from the mean.
        ends = self.pairs.bounds or (self.pairs.mean, self.pairs.mean)
        if self.pairs.mean > 0:
            shift = ends[0] - self.pairs.mean
        else:
            shift = ends[1] - self.pairs.mean
        low, high = (end + shift for end in self.pairs.interval)
        return (
            self.pairs.p < self.alpha
            and (low > 0 or high < 0)
            and (low > 0) == (self.pairs.mean > 0)
        )


def open_evaluation(folder: Path) -> StoredEvaluation:
    files, problems = EvaluationFolder(folder), list[EvaluationRecord]()
    if files.problems.is_file():
        problems += EvaluationRecord.read(files.problems)
    if not problems:
        raise ConfigurationError(f"{folder} holds no problem of an evaluation; evaluate again.")
    return StoredEvaluation(folder, load_stored(files.config, to_read=True), problems)


def compare_evaluations(
    candidate: StoredEvaluation, baseline: StoredEvaluation, metric: Metric, alpha: float
) -> EvaluationComparison:
    """Compare two evaluations. Raises ConfigurationError unless both answered the same problems,
    sampled and judged in the same way.
    """
    if metric.k is None:
        raise ConfigurationError(
            f"--metric {metric.name} is not of held-out answers; two evaluations are compared by"
            " pass@K."
        )
    if candidate.way != baseline.way:
        raise ConfigurationError(
            f"{candidate.path} was evaluated at {candidate.way}, and {baseline.path} at"
            f" {baseline.way}: evaluate both in the same way."
        )
    ours, theirs = Answers.of(candidate.problems), Answers.of(baseline.problems)
    if ours.ids != theirs.ids:
        shared = len({*ours.ids} & {*theirs.ids})
        raise ConfigurationError(
            f"{candidate.path} and {baseline.path} answered different problems ({len(ours.ids)} and"
            f" {len(theirs.ids)}, {shared} shared): evaluate both on the same."
        )
    tasks = dict.fromkeys(item.task for item in candidate.problems)
    by_task = []
    if len(tasks) > 1:
        by_task = [_pairs(candidate, baseline, metric.k, 1 - alpha, task) for task in tasks]
    whole = _pairs(candidate, baseline, metric.k, 1 - alpha, "")
    if whole is None:
        raise ConfigurationError(
            f"fewer than two problems have {metric.name} in both evaluations, so there is nothing"
            " to compare."
        )
    return EvaluationComparison(
        candidate.name, baseline.name, metric, alpha, whole, [pairs for pairs in by_task if pairs]
    )


def _pairs(
    one: StoredEvaluation, other: StoredEvaluation, k: int, confidence: float, task: str
) -> ProblemPairs | None:
    ours, theirs = (
        Answers.of([item for item in side.problems if task in ("", item.task)])
        for side in (one, other)
    )
    found = AnswerDifference.between(ours, theirs, k)
    known = found.by_problem[~np.isnan(found.by_problem)]
    if len(known) < 2:
        return None
    return ProblemPairs(
        task=task,
        problems=len(known),
        mean=found.mean,
        interval=statistics.t_interval(known, confidence),
        p=statistics.sign_flip_p(known),
        bounds=(found.least, found.most) if found.unjudged else None,
    )


def evaluation_lines(comparison: EvaluationComparison) -> Iterator[str]:
    """The answer first."""
    pairs, metric = comparison.pairs, comparison.metric
    low, high = (difference_words(end, metric).removesuffix(" pp") for end in pairs.interval)
    shown = (
        f"{difference_words(pairs.mean, metric)} [{low}, {high}] in {metric.name}, p"
        f" {p_words(pairs.p)}"
    )
    problems = counted(pairs.problems, "problem")
    if comparison.differs:
        verb = "better" if pairs.mean > 0 else "worse"
        yield (
            f"{comparison.candidate} answers these {problems} {verb} than {comparison.baseline}:"
            f" {shown}."
        )
    else:
        yield (
            f"Undecided on these {problems}: {comparison.candidate} against {comparison.baseline}"
            f" {shown}."
        )
    for task in comparison.tasks:
        difference = (
            f"{difference_words(task.mean, metric)} ({interval_words(task.interval, metric)})"
        )
        yield f"  {task.task}: {difference}, {counted(task.problems, 'problem')}"
    if pairs.bounds:
        yield (
            f"Answers that could not be judged leave {interval_words(pairs.bounds, metric)}"
            " possible."
        )
    yield (
        "Paired by problem. This compares two sets of weights; to compare how they were trained"
        " takes several seeds of each."
    )


def evaluation_json(comparison: EvaluationComparison) -> Json:
    content = asdict(comparison)
    return content | {"metric": comparison.metric.name, "differs": comparison.differs}

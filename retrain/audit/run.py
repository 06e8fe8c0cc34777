"""Runs a reward on the cases of an audit, and sums up how often it errs, how long it takes and how
often it cannot judge.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from typing import Any

import numpy as np

from retrain.audit.cases import Case, Kind, cases_of
from retrain.config import TrainConfig, replaced
from retrain.config.judging import judge_words, training_rewards
from retrain.config.schema import Reward
from retrain.data import load_examples
from retrain.errors import ConfigurationError
from retrain.records.evaluation import wilson_interval
from retrain.rewards import Scorer, ScoreRequest, build_scorer
from retrain.rewards.workers import automatic_workers
from retrain.types import Example, JudgeUsage, Outcome, Score

_HOSTILE_EXAMPLES = 8
"""Hostile completions hardly depend on the example, and some take the whole deadline."""
_WARM_UP = 20


@dataclass(frozen=True)
class CaseResult:
    case: Case
    score: Score
    seconds: float
    """The time from the request to the verdict, with as many other requests under way as there are
    workers."""

    @property
    def is_error(self) -> bool:
        return self.score.outcome is (Outcome.WRONG if self.case.right else Outcome.RIGHT)

    @property
    def could_not_judge(self) -> bool:
        return self.score.outcome is Outcome.COULD_NOT_JUDGE


@dataclass(frozen=True)
class Rate:
    """The errors of a reward on some of the cases, either all right or all wrong."""

    name: str
    cases: Sequence[CaseResult]

    @cached_property
    def judged(self) -> list[CaseResult]:
        return [item for item in self.cases if not item.could_not_judge]

    @property
    def errors(self) -> int:
        return sum(item.is_error for item in self.judged)

    @property
    def error_rate(self) -> float | None:
        if self.judged:
            return self.errors / len(self.judged)
        return None

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval: Wilson's, on the effective number of cases, since the cases of one
        example are alike.

        The variance is the linearised one of a ratio of two sums: errors over cases, each summed
        over the examples.
        """
        by_example: dict[str, list[bool]] = {}
        for item in self.judged:
            by_example.setdefault(item.case.example.example_id, []).append(item.is_error)
        count, total, rate = len(by_example), len(self.judged), self.error_rate
        if rate is None:
            return 0.0, 1.0
        spread = sum((sum(errors) - rate * len(errors)) ** 2 for errors in by_example.values())
        variance = 0.0
        if count > 1:
            variance = count / (count - 1) * spread / total**2
        return wilson_interval(
            rate, min(rate * (1 - rate) / variance, float(total)) if variance > 0 else float(count)
        )

    @property
    def could_not_judge(self) -> int:
        return len(self.cases) - len(self.judged)

    def seconds(self, quantile: float) -> float:
        return float(np.quantile([item.seconds for item in self.cases], quantile))

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "cases": len(self.cases),
            "errors": self.errors,
            "error_rate": self.error_rate,
            "interval": list(self.interval),
            "could_not_judge": self.could_not_judge,
            "seconds_median": self.seconds(0.5),
            "seconds_p99": self.seconds(0.99),
        }


@dataclass(frozen=True)
class Audit:
    """The verdicts of one reward on every case."""

    reward: str
    """The reward, with every parameter that decides."""
    source: str
    examples: int
    judged: Sequence[CaseResult]
    seconds: float
    """The time of the whole audit, many cases at a time."""

    @property
    def false_negatives(self) -> Rate:
        right = [item for item in self.judged if item.case.right]
        return Rate("right answers called wrong", right)

    @property
    def false_positives(self) -> Rate:
        wrong = [item for item in self.judged if not item.case.right]
        return Rate("wrong answers called right", wrong)

    @property
    def kinds(self) -> list[Rate]:
        by_kind: dict[Kind, list[CaseResult]] = {kind: [] for kind in Kind}
        for item in self.judged:
            by_kind[item.case.kind].append(item)
        return [Rate(kind.value, items) for kind, items in by_kind.items()]

    @property
    def forms(self) -> list[Rate]:
        """One rate for each form of an answer, those with most errors first; right forms before
        wrong ones.
        """
        ordered = sorted(self.judged, key=lambda item: (not item.case.right, item.case.name))
        groups = groupby(ordered, key=lambda item: (not item.case.right, item.case.name))
        rates = [(wrong, Rate(name, list(items))) for (wrong, name), items in groups]
        return [
            rate
            for _, rate in sorted(
                rates, key=lambda pair: (pair[0], -(pair[1].error_rate or 0.0), pair[1].name)
            )
        ]

    @property
    def usage(self) -> JudgeUsage:
        """The tokens and the cost of the language model, where one judges."""
        return sum((item.score.usage for item in self.judged if item.score.usage), JudgeUsage())

    def worst(self, most: int) -> list[CaseResult]:
        """One error of each form, the gold answers' first, then from the forms with most errors; at
        most `most` of each side.
        """
        errors = [
            (rate, next(item for item in rate.judged if item.is_error))
            for rate in self.forms
            if rate.errors
        ]
        ordered = sorted(
            errors,
            key=lambda pair: (
                not pair[1].case.right,
                pair[1].case.kind is not Kind.GOLD,
                -pair[0].errors,
            ),
        )
        sides = [
            [item for _, item in ordered if item.case.right is right][:most]
            for right in (True, False)
        ]
        return [*sides[0], *sides[1]]

    def slowest(self, most: int) -> list[CaseResult]:
        return sorted(self.judged, key=lambda item: -item.seconds)[:most]

    def to_json(self) -> dict[str, Any]:
        return {
            "reward": self.reward,
            "source": self.source,
            "examples": self.examples,
            "cases": len(self.judged),
            "seconds": self.seconds,
            "false_negatives": self.false_negatives.to_json(),
            "false_positives": self.false_positives.to_json(),
            "kinds": [rate.to_json() for rate in self.kinds if rate.cases],
            "forms": [rate.to_json() for rate in self.forms],
            "judge": vars(self.usage),
            "worst": [item_json(item) for item in self.worst(10)],
            "slowest": [item_json(item) for item in self.slowest(5)],
        }


def item_json(item: CaseResult) -> dict[str, Any]:
    case = item.case
    return {
        "example_id": case.example.example_id,
        "kind": case.kind.value,
        "form": case.name,
        "reference": case.example.reference,
        "answer": case.answer,
        "outcome": item.score.outcome.value,
        "reason": item.score.reason,
        "seconds": item.seconds,
    }


def audit_reward(config: TrainConfig, examples: int, log: Callable[[str], None]) -> Audit:
    """Audit `[reward]` on `examples` of the training examples, spread over the whole set.

    Raises ConfigurationError for a source without examples, EnvironmentFailure where the reward
    cannot work here.
    """
    environment = config.environment.provider
    if environment:
        raise ConfigurationError(
            f'[environment] provider = "{environment}" gives the problems and its rubric scores'
            " them, so [reward] and [data], which an audit is about, are unused here; audit a file"
            " without it."
        )
    loaded = load_examples(replaced(config, {"training.max_examples": examples}), "train")
    cases: list[Case] = []
    for index, example in enumerate(loaded.examples):
        cases += cases_of(example, hostile=index < _HOSTILE_EXAMPLES)
    log(f"{len(cases):,} completions for {len(loaded):,} examples of {loaded.data.source}")
    with build_scorer(config) as scorer:
        if scorer.judges_groups:
            raise ConfigurationError(
                f'[reward] type = "{" + ".join(config.reward.types)}" judges a completion beside'
                " the others of its prompt, which an audit's cases lack; name the rewards that"
                " judge one alone, such as --reward-type match."
            )
        note = scorer.probe()
        if note:
            log(note)
        # Starting workers is no part of a case's time. A judge has answered its probe, and its
        # requests cost.
        if "judge" not in config.reward.types:
            list(_judge_all(scorer, cases[:_WARM_UP], _at_once(config.reward)))
        began = time.perf_counter()
        judged = list(_judge_all(scorer, cases, _at_once(config.reward)))
        seconds = time.perf_counter() - began
    return Audit(
        judge_words(training_rewards(config), config.reward),
        loaded.data.source,
        len(loaded),
        judged,
        seconds,
    )


def _at_once(reward: Reward) -> int:
    """The number of cases that can be judged at the same time, so that a case's time is not spent
    waiting for others.
    """
    workers = reward.workers or automatic_workers()
    if "judge" in reward.types:
        return max(workers, reward.judge_concurrency)
    return workers


def _judge_all(scorer: Scorer, cases: Iterable[Case], at_once: int) -> Iterator[CaseResult]:
    """The verdicts in the order of the cases, at most `at_once` of them under way."""
    free = threading.Semaphore(at_once)
    started, ended = dict[int, float](), dict[int, float]()
    waiting = []

    def end(number: int, _: object) -> None:
        ended[number] = time.perf_counter()
        free.release()

    for number, case in enumerate(cases):
        free.acquire()
        started[number] = time.perf_counter()
        verdict = scorer.submit(_request(case, number))
        verdict.add_done_callback(partial(end, number))
        waiting.append((number, case, verdict))
    # Until every callback has run: a result may be there before.
    for _ in range(at_once):
        free.acquire()
    for number, case, verdict in waiting:
        yield CaseResult(case, verdict.result(), ended[number] - started[number])


def _request(case: Case, number: int) -> ScoreRequest:
    example: Example = case.example
    if isinstance(example.prompt, str):
        prompt = example.prompt
    else:
        prompt = "\n\n".join(message["content"] for message in example.prompt)
    return ScoreRequest(
        case.response, example.reference, prompt, example, step=0, slot=number, sample=0
    )

"""Runs a reward on completions with a known verdict and counts its errors. The completions come
from families of answers that people and models write (answers.jsonl), and from the user's own
reference answers.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from retrain.config import TrainConfig, replaced
from retrain.config.judging import judge_words
from retrain.config.plan import Plan
from retrain.data import load_examples
from retrain.errors import ConfigurationError
from retrain.records.evaluation import wilson_interval
from retrain.records.terminal import counted, one_line, table_lines
from retrain.rewards.pairs import judge_answers
from retrain.rewards.scoring import boxed_reference
from retrain.types import Example, Outcome, Score

_OWN = "your reference answers"
_ALL = "all families"
_ERRORS_SHOWN = 6
_ANSWER_WIDTH = 60
_REWARD_WIDTH = 160


@dataclass(frozen=True)
class Case:
    """One completion and the verdict that it deserves."""

    kind: str
    """The family of answers."""
    right: bool
    example: Example
    response: str


@dataclass(frozen=True)
class Verdict:
    case: Case
    score: Score

    @property
    def could_not_judge(self) -> bool:
        return self.score.outcome is Outcome.COULD_NOT_JUDGE

    @property
    def is_error(self) -> bool:
        return self.score.outcome is (Outcome.WRONG if self.case.right else Outcome.RIGHT)


@dataclass(frozen=True)
class Audit:
    """The verdicts of one reward on every case."""

    reward: str
    """The reward, with every parameter that decides."""
    source: str
    examples: int
    verdicts: list[Verdict]

    @property
    def could_not_judge(self) -> int:
        return sum(verdict.could_not_judge for verdict in self.verdicts)

    def rates(self) -> Iterator[dict[str, Any]]:
        """Yield the errors of each family, of the user's own answers and of all families together,
        each rate with its 95% Wilson interval.
        """
        kinds = dict.fromkeys(verdict.case.kind for verdict in self.verdicts)
        for kind in [*kinds, _ALL]:
            of_kind = [
                verdict
                for verdict in self.verdicts
                if kind == verdict.case.kind or (kind == _ALL and verdict.case.kind != _OWN)
            ]
            yield {
                "kind": kind,
                "right_called_wrong": _rate(v for v in of_kind if v.case.right),
                "wrong_called_right": _rate(v for v in of_kind if not v.case.right),
                "could_not_judge": sum(verdict.could_not_judge for verdict in of_kind),
            }

    def errors(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.is_error]

    def to_json(self) -> dict[str, Any]:
        return {
            "reward": self.reward,
            "source": self.source,
            "form": "\\boxed{}",
            "examples": self.examples,
            "rates": list(self.rates()),
            "errors": [
                {
                    "kind": verdict.case.kind,
                    "right": verdict.case.right,
                    "reference": verdict.case.example.reference,
                    "response": verdict.case.response,
                    "reward": verdict.score.reward,
                }
                for verdict in self.errors()
            ],
        }


def _rate(verdicts: Iterable[Verdict]) -> dict[str, Any]:
    judged = [verdict for verdict in verdicts if not verdict.could_not_judge]
    errors = sum(verdict.is_error for verdict in judged)
    if not judged:
        return {"judged": 0, "errors": 0, "rate": None, "interval": None}
    rate = errors / len(judged)
    interval = list(wilson_interval(rate, len(judged)))
    return {"judged": len(judged), "errors": errors, "rate": rate, "interval": interval}


def audit_reward(config: TrainConfig, examples: int, log: Callable[[str], None]) -> Audit:
    """Audit `[reward]` on the families of answers and on `examples` of the training examples.

    Raises ConfigurationError for a source without examples, EnvironmentFailure where the reward
    cannot work here.
    """
    environment = config.environment.provider
    if environment:
        raise ConfigurationError(
            f'[environment] provider = "{environment}" gives the problems and its rubric scores'
            " them. An audit is about [reward] and [data]; audit a file without the"
            " environment."
        )
    if config.data.mix:
        raise ConfigurationError(
            "[[data.mix]] gives the problems, and an audit is about one reward. Audit a file"
            " with one [data] source and its [reward]."
        )
    loaded = load_examples(replaced(config, {"training.max_examples": examples}), "train")
    cases = [*_own_cases(loaded.examples), *_families()]
    log(f"{counted(len(cases), 'completion')}")
    end = config.reward.think_end_token
    scores = judge_answers(config, [(end + case.response, case.example) for case in cases])
    verdicts = [Verdict(case, score) for case, score in zip(cases, scores, strict=True)]
    reward = judge_words(Plan.of(config).rewards, config.reward)
    return Audit(reward, loaded.data.source, len(loaded.examples), verdicts)


def _own_cases(examples: Iterable[Example]) -> Iterator[Case]:
    """Yield each reference answer unchanged, the reference answer of another example, and no
    answer.
    """
    every = list(examples)
    for example, other in zip(every, [*every[1:], *every[:1]], strict=True):
        yield Case(_OWN, True, example, boxed_reference(example.reference))
        if other.reference.strip() != example.reference.strip():
            yield Case(_OWN, False, example, boxed_reference(other.reference))
        yield Case(_OWN, False, example, boxed_reference("")[:-1] + example.reference)


def _families() -> Iterator[Case]:
    text = files("retrain.audit").joinpath("answers.jsonl").read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines()):
        row = json.loads(line)
        example = Example("", row["reference"], example_id=f"answers-{number}")
        yield Case(row["kind"], row["right"], example, row["response"])


# -- the text --------------------------------------------------------------------------------------


def to_text(audit: Audit) -> str:
    return "\n".join(_lines(audit)) + "\n"


def _lines(audit: Audit) -> Iterator[str]:
    rates = list(audit.rates())
    yield (
        f"Audit of {one_line(audit.reward, _REWARD_WIDTH)}: {len(audit.verdicts):,} completions,"
        f" with {counted(audit.examples, 'example')} of {audit.source}.\nAll of them give their"
        " answers in \\boxed{}. If your reward reads another form, these rates say nothing of it:"
        " test it\nwith pairs of your own and retrain.rewards.score_answers.\n"
    )
    sides = {
        "right_called_wrong": "false negatives (right called wrong)",
        "wrong_called_right": "false positives (wrong called right)",
    }
    rows = [
        (
            "family",
            "false negatives",
            "false positives",
            "not judged" if audit.could_not_judge else "",
        )
    ]
    for rate in rates:
        unjudged = f"{rate['could_not_judge']:,}" if rate["could_not_judge"] else ""
        rows.append((rate["kind"], *(_of(rate[side]) for side in sides), unjudged))
    yield from table_lines(rows, right=(1, 2, 3))
    yield ""
    for side, words in sides.items():
        yield f"{words}, {_ALL}: {_share(rates[-1][side])}"
    errors = audit.errors()
    if errors:
        yield "\nErrors (--json lists all):" if len(errors) > _ERRORS_SHOWN else "\nErrors:"
        for verdict in errors[:: -(-len(errors) // _ERRORS_SHOWN)]:
            yield f"  {_error_line(verdict)}"


def _share(rate: dict[str, Any]) -> str:
    if rate["rate"] is None:
        return "none got a verdict"
    low, high = rate["interval"]
    return f"{rate['rate']:.1%} [{low:.1%}, {high:.1%}]"


def _of(rate: dict[str, Any]) -> str:
    return f"{rate['errors']:,} of {rate['judged']:,}" if rate["judged"] else ""


def _error_line(verdict: Verdict) -> str:
    case = verdict.case
    ending = one_line(case.response[-_ANSWER_WIDTH:], _ANSWER_WIDTH)
    reference = one_line(case.example.reference, _ANSWER_WIDTH)
    called = "wrong" if case.right else "right"
    return f"{case.kind}: {ending!r} for {reference!r} called {called}"

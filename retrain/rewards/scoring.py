"""From a completion to a score: right, wrong, or could not judge. A guard stops a run whose
completions the rewards cannot judge. The module counts and shows failures; they never become zeros.

`Scorer.submit` and `ScoreGroup.submit` never block on an answer, so that judging overlaps with
decoding. They compare strings at once. Worker processes run math-verify and user code (workers.py),
and a thread asks a language model (judge.py).
"""

import importlib.util
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from retrain.errors import ConfigurationError, EnvironmentFailure, ResumableFailure, RunFailed
from retrain.noise import Stream, uniform
from retrain.records.redact import reason_of, secret_values
from retrain.rewards.answers import after_thought, answers_match, bare_answer, extract_boxed
from retrain.rewards.equality import decide_by_strings
from retrain.rewards.groups import majority, normalized
from retrain.rewards.score import PartScore, ScoreRequest
from retrain.rewards.worker import Message
from retrain.rewards.workers import WorkerPool, WorkerSetup
from retrain.types import MAX_REWARD, Example, Outcome, Score

if TYPE_CHECKING:
    from retrain.config import TrainConfig
    from retrain.config.schema import Reward
    from retrain.rewards.judge import LanguageModelJudge


# -- the guard -------------------------------------------------------------------------------------


WINDOW_STEPS = 20
_MIN_COMPLETIONS = 8
"""Fewer completions than this may all fail by accident, so the run does not stop for them."""


Failures = tuple[int, Counter[str]]
"""Number of completions, and of those without a verdict, by reason."""


class FailureGuard:
    """Watches the rate of could-not-judge over the last `window` steps. The trainer calls `observe`
    once per step.

    The run stops if the failures of a whole window exceed `max_failure_rate`, or if the reward
    could judge nothing. The first steps count as a whole window, so that one failure in the first
    step is not 6%. A rate of 1 switches it off.
    """

    def __init__(self, max_failure_rate: float, window: int = WINDOW_STEPS) -> None:
        self._max_failure_rate = max_failure_rate
        self._window = window
        self._steps = deque[Failures](maxlen=window)

    def observe(self, scores: Iterable[Score]) -> None:
        """Count the scores of one step. Raises ResumableFailure, which names the most
        frequent reason.

        The window then starts empty. A resumed run has a repaired reward, and old failures would
        stop it at once.
        """
        self._steps.append(_failures(scores))
        (total, reasons), taken = self._in_window, len(self._steps)
        failed, rate = reasons.total(), self._max_failure_rate
        too_many = failed > rate * total * self._window / taken
        if rate < 1 and (too_many or failed == total >= _MIN_COMPLETIONS):
            self._steps.clear()
            steps = f"{taken} steps" if taken > 1 else "step"
            what = f"{total} completions of the last {steps}"
            raise _too_many_failures(what, reasons, rate)

    def check_end(self) -> str:
        """Return a sentence about the last completions without a verdict, or "" if there are none.
        Raises RunFailed if no completion has a verdict.
        """
        total, reasons = self._in_window
        if not reasons:
            return ""
        usual = _usual(reasons)
        if self._max_failure_rate < 1 and reasons.total() == total:
            raise RunFailed(
                f"The last {total} completions got no verdict {usual}; fix the reward and start"
                " again."
            )
        return f"{reasons.total()} of the last {total} completions got no verdict {usual}."

    @property
    def _in_window(self) -> Failures:
        """The failures of all steps in the window."""
        found = Counter[str]()
        for _, reasons in self._steps:
            found.update(reasons)
        return sum(total for total, _ in self._steps), found

    def state_dict(self) -> dict[str, Any]:
        """Return the total and the counts by reason of each step in the window as JSON, oldest
        first.
        """
        return {"steps": [[total, dict(reasons)] for total, reasons in self._steps]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps.clear()
        self._steps.extend(state.get("steps", []))


def check_held_out(scores: Iterable[Score], max_failure_rate: float) -> None:
    """Raise ResumableFailure if an evaluation has more unjudged answers than the rate permits; it
    always permits a single one.
    """
    total, reasons = _failures(scores)
    if reasons.total() > max(1.0, max_failure_rate * total):
        raise _too_many_failures(f"{total} held-out answers", reasons, max_failure_rate)


def _failures(scores: Iterable[Score]) -> Failures:
    found = list(scores)
    missing = (score for score in found if score.outcome is Outcome.COULD_NOT_JUDGE)
    return len(found), Counter(score.reason or "no reason given" for score in missing)


def _too_many_failures(what: str, reasons: Counter[str], rate: float) -> ResumableFailure:
    return ResumableFailure(
        f"{reasons.total()} of {what} got no verdict {_usual(reasons)}, more than [reward]"
        f" max_failure_rate = {rate:g} allows. Fix the reward."
    )


def _usual(reasons: Counter[str]) -> str:
    """Return the most frequent reason, in parentheses."""
    reason, count = reasons.most_common(1)[0]
    return f"({count} times: {reason.rstrip('.')})"


# -- scores ----------------------------------------------------------------------------------------


Judge = Callable[[ScoreRequest], "float | Message | Future[PartScore]"]
"""The reward if the judge decides at once; otherwise the job for a worker, or the future score of a
language model.
"""
GroupJudge = Callable[[Sequence[ScoreRequest]], PartScore | Message]
"""The rewards of a group, in the order of its samples, or the job for a worker."""


@dataclass(frozen=True)
class WeightedJudge:
    """One reward of a weighted sum."""

    judge: Judge | None
    weight: float
    compares_answers: bool = False
    """True if it compares the answer with the reference, so that the reference itself must score
    1."""
    group: GroupJudge | None = None
    """Judges the completions of a prompt together, instead of `judge`."""


def box_reader(reward: "Reward") -> Callable[[str, str], str | None] | None:
    """Return the function that finds the answer of a completion to a prompt in its last box; None
    if the reward reads none.
    """
    if any(REWARDS[kind].reads_boxes for kind in reward.types if kind in REWARDS):
        return partial(boxed_answer, reward)
    return None


def boxed_answer(reward: "Reward", response: str, prompt: str) -> str | None:
    """Return the answer in a completion's last box, as `extract_boxed` does."""
    if reward.after_think:
        response = after_thought(response, prompt, reward.think_end_token)
    return extract_boxed(response, after_think=False)


def boxed_reference(reference: str) -> str:
    r"""Return a completion that gives the reference as its answer: `\boxed{reference}`."""
    return f"\\boxed{{{reference}}}"


def unpaid_answer(reward: "Reward", example: Example) -> str:
    """Return the bare answer of an example if the reward pays nothing for it, since the reference
    holds more; "" otherwise.
    """
    bare = bare_answer(example.reference)
    if bare == example.reference.strip():
        return ""
    request = ScoreRequest(boxed_reference(bare), example.reference, "", example, 0, 0, 0)
    for kind in reward.types:
        builtin = REWARDS.get(kind)
        if (
            builtin
            and builtin.compares_answers
            and builtin.judge
            and builtin.judge(reward, request) == 0.0
        ):
            return bare
    return ""


class Scorer:
    """Judges completions with one reward or a weighted sum of several. Any thread may submit."""

    def __init__(self, config: "TrainConfig", verdicts: Path | None) -> None:
        """Start what the rewards need, as `build_scorer` says."""
        reward = config.reward
        self._pool: WorkerPool | None = None
        self._model: LanguageModelJudge | None = None
        own = f"{reward.custom_module}.{reward.custom_function}"
        kinds = [own if kind == "custom" else kind for kind in reward.types]
        try:
            of_groups = self._open_pool(config, kinds)
            if "judge" in kinds:
                from retrain.rewards import judge  # httpx, which only it needs

                self._model = judge.LanguageModelJudge(reward, verdicts)
        except BaseException:
            self.close()
            raise
        weights = zip(kinds, reward.type_weights, strict=True)
        self._parts = [self._weighted(kind, weight, config, of_groups) for kind, weight in weights]
        self._correct_threshold = reward.correct_threshold
        self._normalizes = reward.combine == "normalize_then_sum"
        """True if it normalizes each reward within its group before the sum."""
        self.judges_groups = any(part.group is not None for part in self._parts)
        """True if a reward looks at the completions of a prompt together."""
        self.compares_answers = not self._normalizes and all(
            part.compares_answers for part in self._parts
        )
        """True if the reference answer must score `reference_reward`."""
        self.reference_reward = sum(part.weight for part in self._parts)
        """The reward of an answer that every part finds right, if the reward compares answers."""

    def _open_pool(self, config: "TrainConfig", kinds: list[str]) -> frozenset[str]:
        """Start the workers, if a reward needs them. Return the names of the user's functions that
        take a whole group.
        """
        reward, source = config.reward, config.source_path
        verify, functions = "math" in kinds, tuple(kind for kind in kinds if kind not in REWARDS)
        if reward.params and not functions:
            raise ConfigurationError(
                f"[reward] params holds {', '.join(sorted(reward.params))}, but the reward"
                f" {' + '.join(reward.types)} takes no params; remove the table."
            )
        if verify and importlib.util.find_spec("math_verify") is None:
            raise EnvironmentFailure(
                '[reward] type = "math" needs the package math-verify; install it (pip install'
                " 'math-verify[antlr4_13_2]') or use type = \"match\"."
            )
        if verify or functions:
            setup = WorkerSetup(
                verify,
                functions,
                dict(reward.params),
                config.plugins.model_dump(mode="json"),
                str(source.absolute()) if source else None,
                config._provenance.origins,
                tuple(secret_values()),
            )
            self._pool = WorkerPool(setup, reward.workers, reward.deadline_s)
            # Only a worker knows their signatures: the trainer's process never imports them.
            if functions:
                return self._pool.wait_ready()
        return frozenset()

    def _weighted(
        self, kind: str, weight: float, config: "TrainConfig", of_groups: frozenset[str]
    ) -> WeightedJudge:
        builtin = REWARDS.get(kind, BuiltinReward())
        given = config if builtin.takes_all else config.reward
        if kind in of_groups:
            return WeightedJudge(None, weight, group=partial(_group_job, kind))
        if builtin.group is not None:
            return WeightedJudge(None, weight, group=partial(builtin.group, given))
        if builtin.judge is not None:
            return WeightedJudge(partial(builtin.judge, given), weight, builtin.compares_answers)
        if self._model is not None and kind == "judge":
            return WeightedJudge(self._model.submit, weight)
        return WeightedJudge(partial(_job, kind), weight)

    def submit(self, request: ScoreRequest) -> "Future[Score]":
        """Return the future score of a completion that is a group of its own."""
        return self.group(1).submit(request)

    def group(self, size: int) -> "ScoreGroup":
        """Open the group of one prompt. Its completions wait for each other only where a reward
        needs them all.
        """
        return ScoreGroup(self, size if self.judges_groups or self._normalizes else 1)

    def ask_alone(self, request: ScoreRequest) -> "list[Future[PartScore]]":
        """Ask the rewards that look at one completion."""
        return [self._asked(part.judge(request)) for part in self._parts if part.judge is not None]

    def ask_together(self, members: "Sequence[Member]") -> None:
        """Ask the rewards that look at the whole group, and put each member's parts in the order of
        the rewards.
        """
        requests = [member.request for member in members]
        for place, part in enumerate(self._parts):
            if part.group is not None:
                asked = self._asked(part.group(requests))
                for member in members:
                    member.parts.insert(place, asked)

    def _asked(
        self, value: "float | PartScore | Message | Future[PartScore]"
    ) -> "Future[PartScore]":
        if isinstance(value, Future):
            return value
        if isinstance(value, dict):
            assert self._pool is not None  # build_scorer starts one for every reward with jobs
            return self._pool.submit(value)
        future: Future[PartScore] = Future()
        future.set_result(value if isinstance(value, PartScore) else PartScore(value))
        return future

    def combine(self, parts: Sequence[Sequence[PartScore]]) -> list[Score]:
        """Return the score of each member from the scores of its rewards.

        With normalization, the plain weighted sum still decides which completions are right, and a
        mean counts only judged members.
        """
        scores = [self._score(of_member) for of_member in parts]
        if self._normalizes:
            judged = [index for index, score in enumerate(scores) if score.reward is not None]
            columns = zip(*(scores[index].parts for index in judged), strict=True)
            sums = np.zeros(len(judged))
            for part, column in zip(self._parts, columns, strict=False):
                sums += part.weight * np.array(normalized(column))
            for index, reward in zip(judged, sums.tolist(), strict=True):
                scores[index] = replace(scores[index], reward=reward)
        return scores

    def _score(self, scores: Sequence[PartScore]) -> Score:
        """Return the weighted sum; could-not-judge if any part could not judge."""
        usage = next((score.usage for score in scores if score.usage is not None), None)
        reward, values = 0.0, tuple[float, ...]()
        for part, score in zip(self._parts, scores, strict=True):
            if score.value is None:
                return Score(Outcome.COULD_NOT_JUDGE, None, reason_of(score.reason), usage)
            values = (*values, score.value)
            reward += part.weight * score.value
        if not abs(reward) <= MAX_REWARD:
            reason = f"the reward is {reward:g}, and training takes at most {MAX_REWARD:g}"
            return Score(Outcome.COULD_NOT_JUDGE, None, reason, usage)
        return replace(Score.of(reward, self._correct_threshold), usage=usage, parts=values)

    def probe(self) -> str:
        """Return what is wrong with the judge's verdict on a right answer, for the user, or "".

        Raises EnvironmentFailure if the judge does not answer.
        """
        return self._model.probe() if self._model is not None else ""

    def close(self) -> None:
        """Kill the workers and drop the judge's replies. Open scores are could-not-judge."""
        for part in (self._pool, self._model):
            if part is not None:
                part.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class Member:
    """A submitted completion, and its scores to come."""

    request: ScoreRequest
    parts: "list[Future[PartScore]]" = field(default_factory=list)
    score: "Future[Score]" = field(default_factory=Future)


class ScoreGroup:
    """Takes the completions of one prompt in any order, and gives each a score to come.

    A reward that looks at one completion begins at once. A reward that looks at several completions
    waits until the last of `size` completions is here. One thread submits.
    """

    def __init__(self, scorer: Scorer, size: int) -> None:
        self._scorer, self._size = scorer, size
        self._members: list[Member] = []

    def submit(self, request: ScoreRequest) -> "Future[Score]":
        """Return the future score. Every failure is a could-not-judge with its reason; the future
        raises for a bug only.
        """
        member = Member(request, self._scorer.ask_alone(request))
        member.score.set_running_or_notify_cancel()  # nobody can cancel it now
        self._members.append(member)
        if len(self._members) == self._size:
            members = sorted(self._members, key=lambda one: one.request.sample)
            self._members = []
            self._scorer.ask_together(members)
            self._finish(members)
        return member.score

    def _finish(self, members: "Sequence[Member]") -> None:
        """Set the members' scores once every part of every member is there."""
        # Each once: a reward of the whole group is the same future in every member.
        left, lock = set(chain.from_iterable(one.parts for one in members)), threading.Lock()

        def part_done(part: "Future[PartScore]") -> None:
            with lock:
                left.remove(part)
                if left:
                    return
            try:
                parts = [_results(member, index) for index, member in enumerate(members)]
                scores = self._scorer.combine(parts)
                for member, score in zip(members, scores, strict=True):
                    member.score.set_result(score)
            except BaseException as error:  # noqa: BLE001 - a bug: without this the run would wait for ever
                for member in members:
                    if not member.score.done():
                        member.score.set_exception(error)

        for part in tuple(left):
            part.add_done_callback(part_done)


def _results(member: Member, index: int) -> list[PartScore]:
    ended = PartScore(None, "the scorer closed before a verdict")
    done = [ended if part.cancelled() else part.result() for part in member.parts]
    return [score.members[index] if score.members else score for score in done]


def build_scorer(config: "TrainConfig", verdicts: Path | None = None) -> Scorer:
    """Build the scorer of `[reward]`. Its workers start at once, so that the first answer does not
    wait for an import.

    `verdicts` is the file where a judge keeps its verdicts. Raises ConfigurationError for a user
    function that does not load or cannot run, and EnvironmentFailure without math-verify or without
    the judge's key.
    """
    return Scorer(config, verdicts)


def _job(function: str, request: ScoreRequest) -> Message:
    return asdict(request) | {
        "handler": function,
        "reference": request.reference or "",
        "finish_reason": request.finish_reason.value,
    }


def _group_job(function: str, requests: Sequence[ScoreRequest]) -> Message:
    return _job(function, requests[0]) | {
        "responses": [request.response for request in requests],
        "token_counts": [request.token_count for request in requests],
        "finish_reasons": [request.finish_reason.value for request in requests],
    }


# ---- the built-in rewards ------------------------------------------------------------------------


def _match(reward: "Reward", request: ScoreRequest) -> float:
    answer = boxed_answer(reward, request.response, request.prompt)
    if answer is None or not request.reference:
        return 0.0
    return float(answers_match(answer, request.reference, reward.normalize))


def _math(reward: "Reward", request: ScoreRequest) -> float | Message:
    answer = boxed_answer(reward, request.response, request.prompt)
    if answer is None or not request.reference:
        return 0.0
    decided = decide_by_strings(answer, request.reference)
    if decided is not None:
        return float(decided)
    return {"handler": "verify", "gold": request.reference, "answer": answer}


def _by_chance(config: "TrainConfig", request: ScoreRequest) -> float:
    """Return 1 with probability random_p, as a function of the seed and the completion's
    coordinates alone.
    """
    place = (request.step, request.slot, request.sample)
    draw = uniform(config.training.seed, Stream.REWARD, *place, 0)
    return float(draw < config.reward.random_p)


def _overlong(config: "TrainConfig", request: ScoreRequest) -> float:
    """Return 0, falling to -1 over the last `overlong_buffer` tokens before max_tokens; DAPO, arXiv
    2503.14476. Without a buffer it is a fifth of max_tokens, as there.
    """
    longest = config.training.max_tokens
    width = config.reward.overlong_buffer or longest / 5
    return -min(1.0, max(0.0, (request.token_count - longest + width) / width))


def _majority(reward: "Reward", requests: Sequence[ScoreRequest]) -> PartScore:
    boxes = [boxed_answer(reward, request.response, request.prompt) for request in requests]
    return PartScore(None, members=tuple(map(PartScore, majority(boxes, reward.normalize))))


@dataclass(frozen=True)
class BuiltinReward:
    judge: Callable[[Any, ScoreRequest], float | Message] | None = None
    """Takes `[reward]` and a completion. It is None for `custom`, which calls the user's function,
    and for `judge`, which asks a language model.
    """
    takes_all: bool = False
    """True if it takes the whole configuration instead of `[reward]`."""
    compares_answers: bool = False
    reads_boxes: bool = False
    needs_workers: bool = False
    verifies: bool = True
    """False if it does not say whether an answer is right, so that it judges no held-out ones."""
    group: Callable[[Any, Sequence[ScoreRequest]], PartScore] | None = None


REWARDS: dict[str, BuiltinReward] = {
    "match": BuiltinReward(_match, compares_answers=True, reads_boxes=True),
    "math": BuiltinReward(_math, compares_answers=True, reads_boxes=True, needs_workers=True),
    "judge": BuiltinReward(),
    "custom": BuiltinReward(needs_workers=True),
    "random": BuiltinReward(_by_chance, takes_all=True, verifies=False),
    "overlong": BuiltinReward(_overlong, takes_all=True, verifies=False),
    "majority": BuiltinReward(verifies=False, reads_boxes=True, group=_majority),
}
"""The built-in names of `[reward] type`."""

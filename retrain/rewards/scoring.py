"""From a completion to a score: right, wrong, or could not judge. A guard stops a run whose
completions the rewards cannot judge. The module counts and shows failures; they never become zeros.

`Scorer.submit` and `ScoreGroup.submit` never block on an answer, so that judging overlaps with
decoding. They compare strings at once. Worker processes run math-verify and user code (workers.py),
and a thread asks a language model (judge.py).
"""

import importlib.util
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from retrain.errors import ConfigurationError, EnvironmentFailure, ResumableFailure, RunFailed
from retrain.noise import Stream, uniform
from retrain.records.redact import reason_of, secret_values
from retrain.rewards.answers import after_thought, answers_match, bare_answer, extract_boxed
from retrain.rewards.equality import decide_by_strings
from retrain.rewards.groups import Member, ScoreGroup, majority, normalised
from retrain.rewards.score import PartScore, ScoreRequest
from retrain.rewards.worker import Message
from retrain.rewards.workers import WorkerPool, WorkerSetup, automatic_workers
from retrain.types import MAX_REWARD, Example, Outcome, Score

if TYPE_CHECKING:
    from retrain.config import TrainConfig
    from retrain.config.schema import Plugins, Reward
    from retrain.rewards.judge import LanguageModelJudge


# -- the guard -------------------------------------------------------------------------------------


WINDOW_STEPS = 20
_MIN_COMPLETIONS = 8
"""Fewer completions than this may all fail by accident, so the run does not stop for them."""


@dataclass(frozen=True)
class _StepFailures:
    total: int
    reasons: dict[str, int]
    """Number of unjudged completions, by reason."""


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
        self._steps: deque[_StepFailures] = deque(maxlen=window)

    def observe(self, scores: Iterable[Score]) -> None:
        """Count the scores of one step. Raises ResumableFailure, which names the most
        frequent reason.

        The window then starts empty. A resumed run has a repaired reward, and old failures would
        stop it at once.
        """
        outcomes = list(scores)
        self._steps.append(_StepFailures(len(outcomes), dict(_reasons(outcomes))))
        reasons, taken = Counter[str](), len(self._steps)
        for step in self._steps:
            reasons.update(step.reasons)
        total, failed = sum(step.total for step in self._steps), reasons.total()
        too_many = failed > self._max_failure_rate * total * self._window / taken
        nothing = failed == total and total >= _MIN_COMPLETIONS
        if self._max_failure_rate < 1 and (too_many or nothing):
            self._steps.clear()
            steps = f"{taken} steps" if taken > 1 else "step"
            what = f"{total} completions of the last {steps}"
            raise _too_many_failures(what, reasons, self._max_failure_rate)

    def check_end(self) -> None:
        """Raise RunFailed, with the most frequent reason, if the reward could judge none of the
        last completions at the end of a run.
        """
        reasons, total = Counter[str](), sum(step.total for step in self._steps)
        for step in self._steps:
            reasons.update(step.reasons)
        if self._max_failure_rate < 1 and total and reasons.total() == total:
            raise RunFailed(
                f"None of the last {total} completions got a verdict"
                f" ({reasons.most_common(1)[0][0].rstrip('.')}); fix the reward and start"
                " again."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the total and the counts by reason of each step in the window as JSON, oldest
        first.
        """
        return {"steps": [[step.total, step.reasons] for step in self._steps]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = deque(
            (_StepFailures(total, dict(reasons)) for total, reasons in state.get("steps", [])),
            maxlen=self._window,
        )


def check_held_out(scores: Iterable[Score], max_failure_rate: float) -> None:
    """Raise ResumableFailure if an evaluation has more unjudged answers than the rate permits; it
    always permits a single one.
    """
    outcomes = list(scores)
    reasons, total = _reasons(outcomes), len(outcomes)
    if max_failure_rate < 1 and reasons.total() > max(1.0, max_failure_rate * total):
        raise _too_many_failures(f"{total} held-out answers", reasons, max_failure_rate)


def _reasons(scores: Iterable[Score]) -> Counter[str]:
    """Count the unjudged completions, by reason."""
    return Counter(
        score.reason or "no reason given"
        for score in scores
        if score.outcome is Outcome.COULD_NOT_JUDGE
    )


def _too_many_failures(what: str, reasons: Counter[str], rate: float) -> ResumableFailure:
    reason, count = reasons.most_common(1)[0]
    return ResumableFailure(
        f"{reasons.total()} of {what} got no verdict ({count} times: {reason.rstrip('.')}),"
        f" more than [reward] max_failure_rate = {rate:g} allows. Fix the reward."
    )


# -- scores ----------------------------------------------------------------------------------------


Judge = Callable[[ScoreRequest], "float | Message | Future[PartScore]"]
"""The reward if the judge decides at once; otherwise the job for a worker, or the future score of a
language model.
"""
GroupJudge = Callable[[Sequence[ScoreRequest]], "list[float] | Message"]
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


def gold_response(reference: str) -> str:
    r"""Return a completion that gives the reference as its answer: `\boxed{reference}`."""
    return f"\\boxed{{{reference}}}"


def unpaid_answer(reward: "Reward", example: Example) -> str:
    """Return the bare answer of an example if the reward pays nothing for it, since the reference
    holds more; "" otherwise.
    """
    bare = bare_answer(example.reference)
    if bare == example.reference.strip():
        return ""
    request = ScoreRequest(gold_response(bare), example.reference, "", example, 0, 0, 0)
    known = [REWARDS[kind] for kind in reward.types if kind in REWARDS]
    judges = [one.judge for one in known if one.judge and one.compares_answers]
    return bare if any(judge(reward, request) == 0.0 for judge in judges) else ""


class Scorer:
    """Judges completions with one reward or a weighted sum of several. Any thread may submit."""

    def __init__(
        self,
        parts: Sequence[WeightedJudge],
        correct_threshold: float,
        pool: WorkerPool | None,
        model: "LanguageModelJudge | None" = None,
        *,
        normalises: bool = False,
    ) -> None:
        """The scorer owns the pool and the language model that judges, and closes them. With
        `normalises`, it normalizes each reward within its group before the sum.
        """
        self._parts = tuple(parts)
        self._correct_threshold = correct_threshold
        self._pool = pool
        self._model = model
        self._normalises = normalises

    @property
    def compares_answers(self) -> bool:
        """True if the reference answer must score `gold_reward`."""
        return all(part.compares_answers for part in self._parts) and not self._normalises

    @property
    def judges_groups(self) -> bool:
        """True if a reward looks at the completions of a prompt together."""
        return any(part.group is not None for part in self._parts)

    @property
    def gold_reward(self) -> float:
        """The reward of an answer that every part finds right, if the reward compares answers."""
        return sum(part.weight for part in self._parts)

    def submit(self, request: ScoreRequest) -> "Future[Score]":
        """Return the future score of a completion that is a group of its own."""
        return self.group(1).submit(request)

    def group(self, size: int) -> ScoreGroup:
        """Open the group of one prompt. Its completions wait for each other only where a reward
        needs them all.
        """
        return ScoreGroup(self, size if self.judges_groups or self._normalises else 1)

    def ask_alone(self, request: ScoreRequest) -> "list[Future[PartScore]]":
        """Ask the rewards that look at one completion."""
        return [self._asked(part.judge(request)) for part in self._parts if part.judge is not None]

    def ask_together(self, members: Sequence[Member]) -> None:
        """Ask the rewards that look at the whole group, and put each member's parts in the order of
        the rewards.
        """
        requests = [member.request for member in members]
        for place, part in enumerate(self._parts):
            if part.group is None:
                continue
            asked = self._asked(part.group(requests))
            for member in members:
                member.parts.insert(place, asked)

    def _asked(
        self, value: "float | list[float] | Message | Future[PartScore]"
    ) -> "Future[PartScore]":
        if isinstance(value, Future):
            return value
        if isinstance(value, list):
            score = PartScore(None, members=tuple(map(PartScore, value)))
        elif not isinstance(value, dict):
            score = PartScore(value)
        else:
            assert self._pool is not None  # build_scorer starts one for every reward with jobs
            try:
                return self._pool.submit(value)
            except TypeError as error:
                reason = f"retrain cannot send the example's info to {value['handler']}: {error}"
                score = PartScore(None, reason)
        future: Future[PartScore] = Future()
        future.set_result(score)
        return future

    def combine(self, parts: Sequence[Sequence[PartScore]]) -> list[Score]:
        """Return the score of each member from the scores of its rewards.

        With normalization, the plain weighted sum still decides which completions are right, and a
        mean counts only judged members.
        """
        scores = [self._score(of_member) for of_member in parts]
        if not self._normalises:
            return scores
        judged = [index for index, score in enumerate(scores) if score.reward is not None]
        sums = [0.0] * len(judged)
        for place, part in enumerate(self._parts):
            column = [scores[index].parts[place] for index in judged]
            scaled = normalised(column)
            sums = [one + part.weight * value for one, value in zip(sums, scaled, strict=True)]
        for index, reward in zip(judged, sums, strict=True):
            scores[index] = replace(scores[index], reward=reward)
        return scores

    def _score(self, scores: Sequence[PartScore]) -> Score:
        """Return the weighted sum; could-not-judge if any part could not judge."""
        usage = next((score.usage for score in scores if score.usage is not None), None)
        reward = 0.0
        values: list[float] = []
        for part, score in zip(self._parts, scores, strict=True):
            if score.value is None:
                return Score(Outcome.COULD_NOT_JUDGE, None, reason_of(score.reason), usage)
            values.append(score.value)
            reward += part.weight * score.value
        if not abs(reward) <= MAX_REWARD:
            reason = f"the reward is {reward:g}, and training takes at most {MAX_REWARD:g}"
            return Score(Outcome.COULD_NOT_JUDGE, None, reason, usage)
        judged = Score.of(reward, self._correct_threshold)
        return replace(judged, usage=usage, parts=tuple(values))

    def probe(self) -> str:
        """Ask the language model that judges, if there is one, about an answer that is right;
        return a sentence for the user, or "".

        Raises EnvironmentFailure if it does not answer.
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


def build_scorer(config: "TrainConfig", verdicts: Path | None = None) -> Scorer:
    """Build the scorer of `[reward]`. Its workers start at once, so that the first answer does not
    wait for an import.

    `verdicts` is the file where a judge keeps its verdicts. Raises ConfigurationError for a user
    function that does not load or cannot run, and EnvironmentFailure without math-verify or without
    the judge's key.
    """
    reward = config.reward
    functions = tuple(filter(None, (_function_name(kind, reward) for kind in reward.types)))
    if reward.params and not functions:
        raise ConfigurationError(
            f"[reward] params holds {', '.join(sorted(reward.params))}, but the reward"
            f" {' + '.join(reward.types)} takes no params; remove the table."
        )
    with ExitStack() as undo:
        model = None
        if "judge" in reward.types:
            from retrain.rewards.judge import LanguageModelJudge  # httpx, which only it needs

            model = LanguageModelJudge(reward, verdicts)
            undo.callback(model.close)
        source = str(config.source_path.absolute()) if config.source_path else None
        pool = _pool(reward, config.plugins, source, functions)
        of_groups: frozenset[str] = frozenset()
        if pool is not None:
            undo.callback(pool.close)
            # Only a worker knows their signatures: the trainer's process never imports them.
            if functions:
                of_groups = pool.wait_ready()
        undo.pop_all()
    weights = zip(reward.types, reward.type_weights, strict=True)
    parts = [_weighted(kind, weight, config, of_groups, model) for kind, weight in weights]
    normalises = reward.combine == "normalize_then_sum"
    return Scorer(parts, reward.correct_threshold, pool, model, normalises=normalises)


def _pool(
    reward: "Reward", plugins: "Plugins", source: str | None, functions: tuple[str, ...]
) -> WorkerPool | None:
    verify = "math" in reward.types
    if not functions and not verify:
        return None
    if verify and importlib.util.find_spec("math_verify") is None:
        raise EnvironmentFailure(
            '[reward] type = "math" needs the package math-verify; install it (pip install'
            " 'math-verify[antlr4_13_2]') or use type = \"match\"."
        )
    setup = WorkerSetup(
        verify=verify,
        rewards=functions,
        params=dict(reward.params),
        plugins=plugins.model_dump(mode="json"),
        source=source,
        secrets=tuple(secret_values()),
    )
    return WorkerPool(setup, reward.workers or automatic_workers(), reward.deadline_s)


def _function_name(kind: str, reward: "Reward") -> str:
    """Return the dotted name of a user's function; empty for a built-in reward."""
    if kind == "custom":
        return f"{reward.custom_module}.{reward.custom_function}"
    return "" if kind in REWARDS else kind


def _weighted(
    kind: str,
    weight: float,
    config: "TrainConfig",
    of_groups: frozenset[str],
    model: "LanguageModelJudge | None",
) -> WeightedJudge:
    """Return the judge of one reward; `of_groups` names the user's functions that take a whole
    group.
    """
    reward = config.reward
    if kind == "judge" and model is not None:
        return WeightedJudge(model.submit, weight)
    if kind == "random":
        return WeightedJudge(partial(_by_chance, config.training.seed, reward.random_p), weight)
    if kind == "overlong":
        return WeightedJudge(
            partial(_overlong, config.training.max_tokens, reward.overlong_buffer), weight
        )
    builtin = REWARDS.get(kind, BuiltinReward())
    if builtin.group is not None:
        return WeightedJudge(None, weight, group=partial(builtin.group, reward))
    if builtin.judge is not None:
        return WeightedJudge(partial(builtin.judge, reward), weight, builtin.compares_answers)
    function = _function_name(kind, reward)
    if function in of_groups:
        return WeightedJudge(None, weight, group=partial(_group_job, function))
    return WeightedJudge(partial(_user_job, function), weight)


def _user_job(function: str, request: ScoreRequest) -> Message:
    return _of_prompt(function, request) | {
        "response": request.response,
        "token_count": request.token_count,
        "finish_reason": request.finish_reason.value,
    }


def _group_job(function: str, requests: Sequence[ScoreRequest]) -> Message:
    return _of_prompt(function, requests[0]) | {
        "responses": [request.response for request in requests],
        "token_counts": [request.token_count for request in requests],
        "finish_reasons": [request.finish_reason.value for request in requests],
    }


def _of_prompt(function: str, request: ScoreRequest) -> Message:
    return {
        "handler": function,
        "reference": request.reference or "",
        "prompt": request.prompt,
        "example": asdict(request.example),
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


def _by_chance(seed: int, p: float, request: ScoreRequest) -> float:
    """Return 1 with probability p, as a function of the seed and the completion's coordinates
    alone.
    """
    draw = uniform(seed, Stream.REWARD, request.step, request.slot, request.sample, 0)
    return float(draw < p)


def _overlong(max_tokens: int, buffer: int, request: ScoreRequest) -> float:
    """Return 0, falling to -1 over the last `buffer` tokens before max_tokens; DAPO, arXiv
    2503.14476. Without a buffer it is a fifth of max_tokens, as there.
    """
    width = buffer or max_tokens / 5
    return -min(1.0, max(0.0, (request.token_count - max_tokens + width) / width))


def _majority(reward: "Reward", requests: Sequence[ScoreRequest]) -> list[float]:
    boxes = [boxed_answer(reward, request.response, request.prompt) for request in requests]
    return majority(boxes, reward.normalize)


@dataclass(frozen=True)
class BuiltinReward:
    judge: Callable[["Reward", ScoreRequest], float | Message] | None = None
    """Compares the answer with the reference. It is None for `custom`, which calls the user's
    function, for `judge`, which asks a language model, and for rewards that need more than
    `[reward]`.
    """
    compares_answers: bool = False
    reads_boxes: bool = False
    needs_workers: bool = False
    verifies: bool = True
    """False if it does not say whether an answer is right, so that it judges no held-out ones."""
    group: Callable[["Reward", Sequence[ScoreRequest]], list[float]] | None = None


REWARDS: dict[str, BuiltinReward] = {
    "match": BuiltinReward(_match, compares_answers=True, reads_boxes=True),
    "math": BuiltinReward(_math, compares_answers=True, reads_boxes=True, needs_workers=True),
    "judge": BuiltinReward(),
    "custom": BuiltinReward(needs_workers=True),
    "random": BuiltinReward(verifies=False),
    "overlong": BuiltinReward(verifies=False),
    "majority": BuiltinReward(verifies=False, reads_boxes=True, group=_majority),
}
"""The built-in names of `[reward] type`."""

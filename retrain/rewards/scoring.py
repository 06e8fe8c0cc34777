"""From a completion to a verdict: right, wrong, or could not judge.

`Scorer.submit` never blocks on an answer. What strings decide is decided at once; math-verify and user code run in worker
processes (workers.py), so that completions are judged while others still decode.
"""

import importlib.util
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Self

from retrain.errors import ConfigurationError, EnvironmentFailure
from retrain.noise import Stream, uniform
from retrain.rewards.boxed import extract_boxed
from retrain.rewards.match import answers_match
from retrain.rewards.math import bare, settled
from retrain.rewards.workers import Judgement, WorkerPool, WorkerSetup, automatic_workers
from retrain.types import Example, Outcome, Score

if TYPE_CHECKING:
    from retrain.config import TrainConfig

COMPARING = frozenset({"match", "math"})
"""Rewards that compare the answer with the reference, so that the reference itself must score 1."""
REWARDS = ("match", "math", "judge", "custom", "random")
"""The built-in names of `[reward] type`; `_judge` gives each its function."""


@dataclass(frozen=True)
class ScoreRequest:
    """One completion to judge."""

    response: str
    """The completion's text, without the prompt."""
    reference: str | None
    """The answer as the data source extracted it. None or empty never scores."""
    prompt: str
    """The rendered prompt."""
    example: Example
    step: int
    slot: int
    """The prompt's place in the step."""
    sample: int


Judge = Callable[[ScoreRequest], "Future[Judgement]"]


@dataclass(frozen=True)
class WeightedJudge:
    """One of the rewards that are summed."""

    kind: str
    """The name in [reward] type."""
    weight: float
    judge: Judge


def gold_response(reference: str) -> str:
    r"""A completion that gives the reference as its answer: `\boxed{reference}`."""
    return f"\\boxed{{{reference}}}"


class Scorer:
    """Judges completions with one reward or a weighted sum of several. Any thread may submit."""

    def __init__(self, parts: Sequence[WeightedJudge], correct_threshold: float, pool: WorkerPool | None) -> None:
        """The pool, if there is one, belongs to the scorer."""
        self._parts = tuple(parts)
        self._correct_threshold = correct_threshold
        self._pool = pool

    @property
    def compares_answers(self) -> bool:
        """Whether the gold answer must score `gold_reward`."""
        return all(part.kind in COMPARING for part in self._parts)

    @property
    def gold_reward(self) -> float:
        """The reward of an answer that every part finds right, where the reward compares answers."""
        return sum(part.weight for part in self._parts)

    def submit(self, request: ScoreRequest) -> "Future[Score]":
        """The verdict to come. What goes wrong is a could-not-judge with its reason; the future raises for a bug only."""
        parts = [part.judge(request) for part in self._parts]
        verdict: Future[Score] = Future()
        verdict.set_running_or_notify_cancel()  # from here on only the parts decide
        waiting = threading.Lock()
        left = len(parts)

        def part_done(_: "Future[Judgement]") -> None:
            nonlocal left
            with waiting:
                left -= 1
                last = left == 0
            if last:
                self._conclude(parts, verdict)

        for part in parts:
            part.add_done_callback(part_done)
        return verdict

    def _conclude(self, parts: "Sequence[Future[Judgement]]", verdict: "Future[Score]") -> None:
        ended = Judgement(None, "the scorer was closed before it was judged")
        try:
            verdict.set_result(self._score([ended if part.cancelled() else part.result() for part in parts]))
        except BaseException as error:  # noqa: BLE001 - a part failed by a bug of ours: who waits for the verdict must hear of it
            verdict.set_exception(error)

    def _score(self, judgements: Sequence[Judgement]) -> Score:
        """The weighted sum. One part that could not judge makes the whole so."""
        reward = 0.0
        for part, judgement in zip(self._parts, judgements, strict=True):
            if judgement.value is None:
                return Score(Outcome.COULD_NOT_JUDGE, None, judgement.reason)
            reward += part.weight * judgement.value
        if not math.isfinite(reward):
            return Score(Outcome.COULD_NOT_JUDGE, None, f"the weighted sum of the rewards is {reward}, which is not finite")
        return Score(Outcome.RIGHT if reward > self._correct_threshold else Outcome.WRONG, reward)

    def close(self) -> None:
        """Kill the workers; verdicts still to come are could-not-judge."""
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def build_scorer(config: "TrainConfig") -> Scorer:
    """The scorer that [reward] asks for. Its workers start at once, so that the first answer does not wait for an import.

    Raises ConfigurationError for a user function that cannot be loaded or called, EnvironmentFailure without math-verify.
    """
    reward = config.reward
    functions = tuple(name for kind in reward.types if (name := _function_name(kind, config)))
    if reward.params and not functions:
        raise ConfigurationError(
            f"[reward] params holds {', '.join(sorted(reward.params))}, but the reward {' + '.join(reward.types)} takes no params; "
            "remove the table."
        )
    pool = None
    if functions or "math" in reward.types:
        pool = WorkerPool(_worker_setup(config, functions), reward.workers or automatic_workers(), reward.deadline_s)
    try:
        judges = [_judge(kind, config, pool) for kind in reward.types]
        if functions and pool is not None:
            pool.wait_ready()
    except ConfigurationError:
        if pool is not None:
            pool.close()
        raise
    parts = [WeightedJudge(*part) for part in zip(reward.types, reward.type_weights, judges, strict=True)]
    return Scorer(parts, reward.correct_threshold, pool)


def _function_name(kind: str, config: "TrainConfig") -> str:
    """The dotted name of a user's function; empty for a built-in reward."""
    if kind == "custom":
        return f"{config.reward.custom_module}.{config.reward.custom_function}"
    return "" if kind in REWARDS else kind


def _worker_setup(config: "TrainConfig", functions: tuple[str, ...]) -> WorkerSetup:
    verify = "math" in config.reward.types
    if verify and importlib.util.find_spec("math_verify") is None:
        raise EnvironmentFailure(
            '[reward] type = "math" needs the package math-verify, which is not installed here; '
            "install it (pip install 'math-verify[antlr4_13_2]') or use type = \"match\"."
        )
    return WorkerSetup(
        verify=verify,
        rewards=functions,
        params=dict(config.reward.params),
        plugins=config.plugins.model_dump(mode="json"),
        source=str(config.source_path.absolute()) if config.source_path else None,
    )


def _judge(kind: str, config: "TrainConfig", pool: WorkerPool | None) -> Judge:
    reward = config.reward
    if kind == "match":
        return lambda request: _at_once(_match(request, reward.after_think, reward.normalize == "hendrycks"))
    if kind == "random":
        return lambda request: _at_once(_random(request, config.training.seed, reward.random_p))
    if kind == "judge":
        raise ConfigurationError('[reward] type = "judge" is not built yet; use match, math, custom, random or a plugin.')
    if pool is None:
        raise ValueError(f"the reward {kind} needs workers")
    if kind == "math":
        return lambda request: _math(request, reward.after_think, pool)
    function = _function_name(kind, config)
    return lambda request: _user(request, function, pool)


def _at_once(value: float) -> "Future[Judgement]":
    future: Future[Judgement] = Future()
    future.set_result(Judgement(value))
    return future


def _match(request: ScoreRequest, after_think: bool, hendrycks: bool) -> float:
    answer = extract_boxed(request.response, after_think)
    if answer is None or not request.reference:
        return 0.0
    return float(answers_match(answer, request.reference, "hendrycks" if hendrycks else "none"))


def _random(request: ScoreRequest, seed: int, probability: float) -> float:
    draw = uniform(seed, Stream.REWARD, request.step, request.slot, request.sample, 0)
    return float(draw < probability)


def _math(request: ScoreRequest, after_think: bool, pool: WorkerPool) -> "Future[Judgement]":
    answer = extract_boxed(request.response, after_think)
    if answer is None or not request.reference:
        return _at_once(0.0)
    verdict = settled(answer, request.reference)
    if verdict is not None:
        return _at_once(float(verdict))
    return pool.submit({"handler": "verify", "gold": bare(request.reference), "answer": bare(answer)})


def _user(request: ScoreRequest, function: str, pool: WorkerPool) -> "Future[Judgement]":
    message = {
        "handler": function,
        "response": request.response,
        "reference": request.reference or "",
        "prompt": request.prompt,
        "example": asdict(request.example),
    }
    try:
        return pool.submit(message)
    except TypeError as error:
        future: Future[Judgement] = Future()
        future.set_result(Judgement(None, f"the example's info cannot be handed to {function}: {error}"))
        return future

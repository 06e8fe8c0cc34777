"""From a completion to a score: right, wrong, or could not judge.

`Scorer.submit` never blocks on an answer: strings are compared at once, math-verify and user code
run in worker processes (workers.py), and a language model is asked from a thread (judge.py), so
that completions are judged while others still decode.
"""

import importlib.util
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from retrain.errors import ConfigurationError, EnvironmentFailure
from retrain.noise import Stream, uniform
from retrain.records.redact import reason_of, secret_values
from retrain.rewards.answers import answers_match, extract_boxed
from retrain.rewards.channel import Message
from retrain.rewards.math import bare, decide_by_strings
from retrain.rewards.score import PartScore, ScoreRequest
from retrain.rewards.workers import WorkerPool, WorkerSetup, automatic_workers
from retrain.types import Outcome, Score

if TYPE_CHECKING:
    from retrain.config import TrainConfig
    from retrain.config.schema import Plugins, Reward
    from retrain.rewards.judge import LanguageModelJudge


Judge = Callable[[ScoreRequest], "float | Message | Future[PartScore]"]
"""The reward if it is decided at once; otherwise the job for a worker, or the future score of a
language model."""


@dataclass(frozen=True)
class WeightedJudge:
    """One reward of a weighted sum."""

    judge: Judge
    weight: float
    compares_answers: bool
    """True if it compares the answer with the reference, so that the reference itself must score
    1."""


def box_reader(reward: "Reward") -> Callable[[str], str | None] | None:
    """Return the function that finds the answer in a completion's last box; None if the reward
    reads none.
    """
    reads = any(REWARDS[kind].compares_answers for kind in reward.types if kind in REWARDS)
    return partial(extract_boxed, after_think=reward.after_think) if reads else None


def gold_response(reference: str) -> str:
    r"""Return a completion that gives the reference as its answer: `\boxed{reference}`."""
    return f"\\boxed{{{reference}}}"


class Scorer:
    """Judges completions with one reward or a weighted sum of several. Any thread may submit."""

    def __init__(
        self,
        parts: Sequence[WeightedJudge],
        correct_threshold: float,
        pool: WorkerPool | None,
        model: "LanguageModelJudge | None" = None,
    ) -> None:
        """The scorer owns the pool and the language model that judges, and closes them."""
        self._parts = tuple(parts)
        self._correct_threshold = correct_threshold
        self._pool = pool
        self._model = model

    @property
    def compares_answers(self) -> bool:
        """True if the gold answer must score `gold_reward`."""
        return all(part.compares_answers for part in self._parts)

    @property
    def gold_reward(self) -> float:
        """The reward of an answer that every part finds right, if the reward compares answers."""
        return sum(part.weight for part in self._parts)

    def submit(self, request: ScoreRequest) -> "Future[Score]":
        """Return the future score. Every failure is a could-not-judge with its reason; the future
        raises for a bug only.
        """
        parts = [self._ask(part, request) for part in self._parts]
        result: Future[Score] = Future()
        result.set_running_or_notify_cancel()  # it can no longer be cancelled
        waiting = threading.Lock()
        left = len(parts)

        def part_done(_: "Future[PartScore]") -> None:
            nonlocal left
            with waiting:
                left -= 1
                last = left == 0
            if last:
                self._conclude(parts, result)

        for part in parts:
            part.add_done_callback(part_done)
        return result

    def _ask(self, part: WeightedJudge, request: ScoreRequest) -> "Future[PartScore]":
        future: Future[PartScore] = Future()
        value = part.judge(request)
        if isinstance(value, Future):
            return value
        if not isinstance(value, dict):
            future.set_result(PartScore(value))
            return future
        assert self._pool is not None  # build_scorer starts one for every reward that gives jobs
        try:
            return self._pool.submit(value)
        except TypeError as error:
            future.set_result(
                PartScore(None, f"the example's info cannot be sent to {value['handler']}: {error}")
            )
            return future

    def _conclude(self, parts: "Sequence[Future[PartScore]]", result: "Future[Score]") -> None:
        ended = PartScore(None, "the scorer was closed before it was judged")
        try:
            result.set_result(
                self._score([ended if part.cancelled() else part.result() for part in parts])
            )
        except BaseException as error:  # noqa: BLE001 - a bug: without this the run would wait for ever
            result.set_exception(error)

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
        if not math.isfinite(reward):
            return Score(
                Outcome.COULD_NOT_JUDGE,
                None,
                f"the weighted sum of the rewards is {reward}, which is not finite",
                usage,
            )
        judged = Score.of(reward, self._correct_threshold)
        return replace(judged, usage=usage, parts=tuple(values))

    def probe(self) -> str:
        """Ask the language model that judges, if there is one, about an answer that is right;
        return a sentence for the user, or "".

        Raises EnvironmentFailure if it cannot be asked.
        """
        return self._model.probe() if self._model is not None else ""

    def close(self) -> None:
        """Kill the workers and give up the language model's replies; scores still to come are
        could-not-judge.
        """
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
    function that cannot be loaded or called, EnvironmentFailure without math-verify or without the
    judge's key.
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
        if pool is not None:
            undo.callback(pool.close)
            if functions:
                pool.wait_ready()
        undo.pop_all()
    weights = zip(reward.types, reward.type_weights, strict=True)
    parts = [
        _weighted(kind, weight, reward, config.training.seed, model) for kind, weight in weights
    ]
    return Scorer(parts, reward.correct_threshold, pool, model)


def _pool(
    reward: "Reward", plugins: "Plugins", source: str | None, functions: tuple[str, ...]
) -> WorkerPool | None:
    verify = "math" in reward.types
    if not functions and not verify:
        return None
    if verify and importlib.util.find_spec("math_verify") is None:
        raise EnvironmentFailure(
            '[reward] type = "math" needs the package math-verify, which is not installed here; '
            "install it (pip install 'math-verify[antlr4_13_2]') or use type = \"match\"."
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
    kind: str, weight: float, reward: "Reward", seed: int, model: "LanguageModelJudge | None"
) -> WeightedJudge:
    if kind == "judge" and model is not None:
        return WeightedJudge(model.submit, weight, compares_answers=False)
    if kind == "random":

        def by_chance(request: ScoreRequest) -> float:
            """Return 1 with a probability, as a function of the seed and the completion's
            coordinates alone.
            """
            return float(
                uniform(seed, Stream.REWARD, request.step, request.slot, request.sample, 0)
                < reward.random_p
            )

        return WeightedJudge(by_chance, weight, compares_answers=False)
    builtin = REWARDS.get(kind, BuiltinReward())
    if builtin.judge is not None:
        return WeightedJudge(partial(builtin.judge, reward), weight, builtin.compares_answers)
    return WeightedJudge(
        partial(_user_job, _function_name(kind, reward)), weight, compares_answers=False
    )


def _user_job(function: str, request: ScoreRequest) -> Message:
    return {
        "handler": function,
        "response": request.response,
        "reference": request.reference or "",
        "prompt": request.prompt,
        "example": asdict(request.example),
    }


# ---- the built-in rewards ------------------------------------------------------------------------


def _match(reward: "Reward", request: ScoreRequest) -> float:
    answer = extract_boxed(request.response, reward.after_think)
    if answer is None or not request.reference:
        return 0.0
    return float(answers_match(answer, request.reference, reward.normalize))


def _math(reward: "Reward", request: ScoreRequest) -> float | Message:
    answer = extract_boxed(request.response, reward.after_think)
    if answer is None or not request.reference:
        return 0.0
    decided = decide_by_strings(answer, request.reference)
    if decided is not None:
        return float(decided)
    return {"handler": "verify", "gold": bare(request.reference), "answer": bare(answer)}


@dataclass(frozen=True)
class BuiltinReward:
    judge: Callable[["Reward", ScoreRequest], float | Message] | None = None
    """Compares the answer with the reference; None for `custom`, which calls the user's function,
    `judge`, which asks a language model, and `random`."""
    compares_answers: bool = False


REWARDS: dict[str, BuiltinReward] = {
    "match": BuiltinReward(_match, compares_answers=True),
    "math": BuiltinReward(_math, compares_answers=True),
    "judge": BuiltinReward(),
    "custom": BuiltinReward(),
    "random": BuiltinReward(),
}
"""The built-in names of `[reward] type`."""

"""Many episodes at once. A thread answers each, the environment judges it at its end, and a hung or
failed episode does not affect others.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from time import monotonic
from typing import Any, SupportsFloat

from retrain.environments.base import Environment, Episode, Observation, Result, is_conversation
from retrain.plugins import describe
from retrain.records.redact import reason_of
from retrain.types import MAX_REWARD, ChatMessage, Example, Outcome, Score

MAX_THREADS = 64
"""Maximum number of episodes that threads answer at the same time; the others wait."""
_POLL = 0.2
"""Seconds between two checks for a request to stop the run."""
_CLOSING_S = 60.0


# -- threads ---------------------------------------------------------------------------------------


class ThreadCall:
    """One call on a thread of the pool."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call
        self.future: Future[Any] = Future()
        self.started: float | None = None
        """Monotonic seconds; None while it waits for a thread."""
        self.seconds = 0.0
        """The time that it took."""

    def run(self) -> None:
        self.started = monotonic()
        try:
            result = self.call()
        except BaseException as error:  # noqa: BLE001 - whoever waits for the job is told
            self.seconds = monotonic() - self.started
            self.future.set_exception(error)
        else:
            self.seconds = monotonic() - self.started
            self.future.set_result(result)


class DaemonThreads:
    """At most `limit` threads that take jobs, started on demand. They are daemons: a hung one does
    not keep the process alive.
    """

    def __init__(self, limit: int, name: str) -> None:
        self._limit, self._name = limit, name
        self._jobs: SimpleQueue[ThreadCall | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = 0

    def submit(self, call: Callable[[], Any]) -> ThreadCall:
        job = ThreadCall(call)
        with self._lock:
            self._jobs.put(job)
            if self._idle < self._jobs.qsize() and self._threads < self._limit:
                self._start()
        return job

    def abandon(self, job: ThreadCall) -> None:
        """Give up on a running job: its thread no longer counts, and its result does not matter."""
        with self._lock:
            self._limit += 1
            if self._threads < self._limit and self._jobs.qsize():
                self._start()

    def spawn(self, call: Callable[[], Any]) -> ThreadCall:
        """Run a call on its own thread, so that a hang takes no place from the others."""
        job = ThreadCall(call)
        threading.Thread(target=job.run, name=f"{self._name}-spawned", daemon=True).start()
        return job

    def close(self) -> None:
        """Let the idle threads end."""
        with self._lock:
            for _ in range(self._threads):
                self._jobs.put(None)

    def _start(self) -> None:
        self._threads += 1
        threading.Thread(
            target=self._work, name=f"{self._name}-{self._threads}", daemon=True
        ).start()

    def _work(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            job = self._jobs.get()
            with self._lock:
                self._idle -= 1
            if job is None:
                return
            job.run()


Answer = Observation | Score
"""The answer to a reply: something to reply to, or the score."""


# -- episodes --------------------------------------------------------------------------------------


@dataclass
class _OpenEpisode:
    """An episode between its reset and its score."""

    episode: Episode
    seconds: float = 0.0
    """The environment's time so far."""
    replies: int = 0


class EpisodeHost:
    """Runs the episodes of one environment on threads of its own."""

    def __init__(
        self,
        environment: Environment,
        *,
        max_turns: int,
        timeout_s: float,
        correct_threshold: float,
        threads: DaemonThreads | None = None,
    ) -> None:
        """`max_turns` is the maximum number of replies, 0 for no limit. `timeout_s` is the time
        that the environment may take for one episode.
        """
        self.environment = environment
        self.max_turns, self.timeout_s, self.correct_threshold = (
            max_turns,
            timeout_s,
            correct_threshold,
        )
        self._threads = threads or DaemonThreads(MAX_THREADS, "environment")
        self.open: dict[int, RunningEpisode] = {}
        """The episodes that the environment made and retrain has not closed, by identity."""

    def begin(self, example: Example, seed: int) -> "RunningEpisode":
        return RunningEpisode(self, example, seed)

    def submit(self, call: Callable[[], Any]) -> ThreadCall:
        return self._threads.submit(call)

    def abandon(self, job: ThreadCall) -> None:
        self._threads.abandon(job)

    def spawn(self, call: Callable[[], Any]) -> None:
        self._threads.spawn(call)

    def score(self, result: Result) -> Score:
        if not isinstance(result, Result):
            raise TypeError(f"result returned {type(result).__name__}, and must return a Result")
        if not isinstance(result.reward, SupportsFloat):
            given = type(result.reward).__name__
            raise TypeError(f"the result's reward is {given}, and must be a number")
        if not abs(result.reward) <= MAX_REWARD:
            return could_not_judge(
                f"the environment's reward is {result.reward:g}, and training takes at most"
                f" {MAX_REWARD:g}"
            )
        score = Score.of(float(result.reward), self.correct_threshold)
        metrics = {str(name): float(value) for name, value in result.metrics.items()}
        return Score(
            score.outcome,
            score.reward,
            metrics=metrics,
            turn_rewards=tuple(map(float, result.turn_rewards)),
        )

    def close(self) -> None:
        """Close the environment; print a line if that fails or takes longer than a minute."""
        job = self._threads.spawn(self.environment.close)
        try:
            failure = job.future.exception(_CLOSING_S)
        except TimeoutError:
            failure = TimeoutError(f"it took longer than {_CLOSING_S:g} s")
        if failure is not None:
            print(f"environment: close() failed with {describe(failure)}.", file=sys.stderr)
        self._threads.close()


class RunningEpisode:
    """One episode of a host. Call `open`, then `reply` after each of the model's replies; `answer`
    waits for the result.
    """

    def __init__(self, host: EpisodeHost, example: Example, seed: int) -> None:
        self._host, self._seed = host, seed
        prompt = example.prompt if isinstance(example.prompt, str) else _copied(example.prompt)
        self._example = replace(example, prompt=prompt, info=copy(example.info))
        self._live: _OpenEpisode | None = None
        self._job = host.submit(self._reset)

    def reply(self, text: str, *, last: bool) -> None:
        """Give the environment a reply. With `last`, no other can follow, since tokens ran out."""
        self._job = self._host.submit(partial(self._step, text, last))

    def end(self) -> None:
        """Ask for the score now, since another reply has no room."""
        self._job = self._host.submit(self._conclude)

    @property
    def ready(self) -> bool:
        """True if `answer` would return at once."""
        return self._job.future.done() or self._is_late

    @property
    def _is_late(self) -> bool:
        """The environment has taken more time for this episode than it may."""
        before = self._live.seconds if self._live else 0.0
        return (
            self._job.started is not None
            and monotonic() - self._job.started > self._host.timeout_s - before
        )

    def answer(self, check: Callable[[], None]) -> Answer:
        """Wait for what came of the newest call. A hang or an exception is a score: could not
        judge. `check` raises to stop the run.
        """
        job = self._job
        while True:
            check()
            try:
                failure = job.future.exception(_POLL)
            # This timeout comes from the wait: `exception` returns what the environment raised,
            # SystemExit included.
            except TimeoutError:
                if not self._is_late:
                    continue
                self._host.abandon(job)
                return self._failed(
                    "the environment took longer than [environment] timeout_s ="
                    f" {self._host.timeout_s:g}"
                )
            if failure is not None:
                return self._failed(f"the environment failed with {describe(failure)}")
            if self._live is not None:
                self._live.seconds += job.seconds
            answer: Answer = job.future.result()
            return answer

    def _failed(self, reason: str) -> Score:
        if self._live is not None:
            self._host.spawn(self._close)
        return could_not_judge(reason)

    def _close(self) -> None:
        assert self._live is not None
        # Close it once. Forget it before: a pool of the environment may then give it out again.
        if self._host.open.get(id(self._live.episode)) is self:
            del self._host.open[id(self._live.episode)]
            self._live.episode.close()

    def _reset(self) -> Answer:
        episode = self._host.environment.episode()
        if not isinstance(episode, Episode):
            raise TypeError(
                f"episode returned {type(episode).__name__}, and must return an Episode"
            )
        if self._host.open.setdefault(id(episode), self) is not self:
            raise RuntimeError("episode returned an open Episode, and must return a new one")
        self._live = _OpenEpisode(episode)
        opening = episode.reset(self._example, self._seed)
        if opening is None:
            return Observation([])
        return replace(_checked(opening, "reset"), rewrites=True)

    def _step(self, text: str, last: bool) -> Answer:
        assert self._live is not None
        self._live.replies += 1
        said = self._live.episode.step(text)
        if said is None or last or self._live.replies == self._host.max_turns:
            return self._conclude()
        return _checked(said, "step")

    def _conclude(self) -> Answer:
        assert self._live is not None
        score = self._host.score(self._live.episode.result())
        self._close()
        return score


def play(host: EpisodeHost, example: Example, replies: Sequence[str]) -> Score:
    """Return the score of an episode with these replies."""
    episode = host.begin(example, 0)
    answer = episode.answer(lambda: None)
    for number, reply in enumerate(replies, start=1):
        if isinstance(answer, Score):
            break
        episode.reply(reply, last=number == len(replies))
        answer = episode.answer(lambda: None)
    if isinstance(answer, Score):
        return answer
    return could_not_judge("no reply came")


def _checked(said: object, method: str) -> Observation:
    """Check the value that the environment's `method` returned. Raises TypeError or ValueError for
    what no chat template could write.
    """
    given = said if isinstance(said, Observation) else Observation(said)  # type: ignore[arg-type]  # it is looked at here
    if not is_conversation(given.messages):
        raise TypeError(
            f"{method} returned {type(said).__name__}, and must return a list of messages {{role,"
            " content} of text, or None"
        )
    if not (isinstance(given.tools, list) and all(isinstance(tool, dict) for tool in given.tools)):
        raise TypeError(f"{method} returned tools that are not a list of JSON schemas")
    if given.rewrites and not given.messages:
        raise ValueError(f"{method} returned a rewritten conversation without messages")
    for message in given.messages:
        message["content"].encode()  # lone surrogates have no tokens
    return replace(given, messages=_copied(given.messages))


def _copied(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Copy messages, since an environment may change the objects that it got or gave."""
    return [{**message} for message in messages]


def could_not_judge(reason: str) -> Score:
    return Score(Outcome.COULD_NOT_JUDGE, None, reason_of(reason))

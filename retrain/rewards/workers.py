"""The pool of reward workers, seen from the trainer: processes that a deadline can kill.

One thread here keeps one worker process. It sends a job, waits on the wall clock, and kills and
replaces a worker that exceeds the deadline or the memory limit. The pool never trusts code inside a
worker to stop by itself.
"""

import itertools
import math
import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any

from retrain.errors import ConfigurationError, EnvironmentFailure
from retrain.rewards.forkserver import STARTUP_LIMIT_S, ForkServer, ForkServerLost
from retrain.rewards.score import PartScore
from retrain.rewards.worker import BadMessage, Channel, ChannelClosed, Message, encode
from retrain.system import resident_bytes, usable_cores

MEMORY_LIMIT = 2 << 30
"""Maximum resident bytes of a verifying worker; answers that ended in time took at most 0.1 GiB in
tests.
"""
ADDRESS_SPACE_LIMIT = 4 << 30
"""Maximum bytes that a verifying worker may map: the second limit, for memory that grows faster
than the parent looks."""
_TICK_S = 0.05
"""Interval at which the parent checks the memory of a worker that has not answered."""
_LAST_LOOK_S = 0.005
"""Seconds to read an answer that arrived within its deadline."""
_MAX_AUTOMATIC_WORKERS = 16
_MAX_REPLY = 1 << 16
"""Maximum bytes of a reply; a reward, or the reason for its absence, takes a few hundred."""


@dataclass(frozen=True)
class WorkerSetup:
    """The first message to each worker of a pool: what it must load."""

    verify: bool = False
    """True if the workers run math-verify, so that the fork server imports it and the memory limits
    hold.
    """
    rewards: tuple[str, ...] = ()
    """Names of the user's functions."""
    params: dict[str, Any] = field(default_factory=dict)
    plugins: dict[str, Any] = field(default_factory=dict)
    """The [plugins] section."""
    source: str | None = None
    """The file of the configuration; workers look for user functions in its folder too."""
    secrets: tuple[str, ...] = field(default=(), repr=False)
    """Extra strings to redact from the worker's output, in addition to secrets in its environment.
    """

    @property
    def preload(self) -> list[str]:
        """Modules that the fork server imports once for all workers."""
        wanted = {
            "retrain.rewards.worker": True,
            "retrain.rewards.verification": self.verify,
            "retrain.rewards.custom": bool(self.rewards),
        }
        return [name for name, is_wanted in wanted.items() if is_wanted]

    @property
    def memory_limit(self) -> int | None:
        """The memory limit, which holds for math-verify only: user code may load its own models and
        files.
        """
        return MEMORY_LIMIT if self.verify and not self.rewards else None

    def message(self) -> Message:
        return asdict(self) | {"address_space": ADDRESS_SPACE_LIMIT if self.memory_limit else None}


def automatic_workers() -> int:
    """Return half of the cores that this process may use; sampling needs the rest."""
    return max(1, min(_MAX_AUTOMATIC_WORKERS, usable_cores() // 2))


class WorkerPool:
    """Worker processes that start at once and take jobs in the order of submission. Any thread may
    submit.
    """

    def __init__(self, setup: WorkerSetup, workers: int, deadline_s: float) -> None:
        self._server = ForkServer(setup.preload)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._numbers = itertools.count()
        self._threads = [
            _WorkerThread(setup, self._server, self._jobs, deadline_s, self._closing)
            for _ in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, message: Message) -> "Future[PartScore]":
        """Judge one job. Its deadline starts when a ready worker takes it; every failure is a
        could-not-judge.

        Raises TypeError for a message that JSON cannot hold.
        """
        number = next(self._numbers)
        members = len(message.get("responses", ()))
        job = _Job(number, encode(message | {"number": number}), Future(), members)
        self._jobs.put(job)
        if self._closing.is_set():
            job.future.cancel()
        return job.future

    def wait_ready(self) -> frozenset[str]:
        """Wait for the first worker; return the names of the rewards that take a whole group.

        Raises ConfigurationError if it cannot load what the set-up names, EnvironmentFailure if it
        does not start.
        """
        thread = self._threads[0]
        thread.started.wait(2 * STARTUP_LIMIT_S)
        if thread.refusal:
            raise ConfigurationError(thread.refusal)
        if thread.group_rewards is None:
            raise EnvironmentFailure(
                "[reward] does not load, since"
                f" {thread.failure or 'its worker did not start in time'}; start the run again,"
                " or look at what the machine does."
            )
        return thread.group_rewards

    def close(self) -> None:
        """Kill the workers. This cancels waiting jobs; jobs under way end as could-not-judge."""
        if self._closing.is_set():
            return
        self._closing.set()
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is not None:
                job.future.cancel()
        for _ in self._threads:
            self._jobs.put(None)
        self._server.close()
        for thread in self._threads:
            thread.join()


@dataclass(frozen=True)
class _Job:
    number: int
    """The number that the reply repeats, so that the pool does not take bytes from user code in the
    channel for the next answer.
    """
    message: bytes
    future: "Future[PartScore]"
    members: int
    """Completions that it judges together; 0 for a reward that judges each alone."""


@dataclass(frozen=True)
class _Worker:
    pid: int
    channel: Channel


class _SetupRefusal(Exception):
    """The worker cannot load what its set-up names."""


class _WorkerThread(threading.Thread):
    """A thread that keeps one worker alive and gives it one job at a time."""

    def __init__(
        self,
        setup: WorkerSetup,
        server: ForkServer,
        jobs: "queue.SimpleQueue[_Job | None]",
        deadline_s: float,
        closing: threading.Event,
    ) -> None:
        super().__init__(name="reward-worker", daemon=True)
        self.started = threading.Event()
        self.refusal = self.failure = ""
        self.group_rewards: frozenset[str] | None = None
        """Names of the user's functions that take a whole group; None until a worker is ready."""
        self._setup = setup
        self._server = server
        self._jobs = jobs
        self._deadline_s = deadline_s
        self._closing = closing
        self._worker: _Worker | None = None

    def run(self) -> None:
        self.failure = self._prepare()
        self.started.set()
        while (job := self._jobs.get()) is not None:
            if job.future.set_running_or_notify_cancel():
                try:
                    job.future.set_result(self._judge(job))
                except BaseException as error:  # a bug: without this the run would wait for ever
                    job.future.set_exception(error)
                    raise
                self._prepare()
        if self._worker is not None:
            self._worker.channel.close()

    def _prepare(self) -> str:
        """Start a worker if there is none. Returns why that failed, or "" if a worker is ready."""
        if self._worker is not None:
            return ""
        if self._closing.is_set():
            return "the run is ending"
        try:
            self._worker = self._spawn()
        except _SetupRefusal as error:
            self.refusal = str(error)
            return self.refusal
        # A TimeoutError is an OSError.
        except (ForkServerLost, ChannelClosed, BadMessage, OSError) as error:
            return f"retrain cannot start a reward worker ({error})"
        return ""

    def _spawn(self) -> _Worker:
        pid, channel = self._server.spawn()
        try:
            channel.send(self._setup.message(), STARTUP_LIMIT_S)
            answer = channel.receive(STARTUP_LIMIT_S, _MAX_REPLY)
            if "refused" in answer:
                raise _SetupRefusal(str(answer["refused"]))
            if answer.get("ready") is not True:
                raise BadMessage("its first reply does not say that it is ready")
            self.group_rewards = frozenset(answer["group_rewards"])
        except (ChannelClosed, BadMessage, TimeoutError, _SetupRefusal):
            channel.close()
            self._server.end(pid)
            raise
        return _Worker(pid, channel)

    def _judge(self, job: _Job) -> PartScore:
        reason = self._prepare()
        if self._worker is None:
            return PartScore(None, reason)
        try:
            deadline = time.monotonic() + self._deadline_s
            self._worker.channel.send_encoded(job.message, self._deadline_s)
            return self._wait(self._worker, job, deadline)
        except TimeoutError:
            self._discard()
            return PartScore(
                None,
                "the reward worker did not take its job within deadline_s ="
                f" {self._deadline_s:g}, so retrain killed it",
            )
        except BadMessage as error:
            self._discard()
            return PartScore(None, f"the reward worker's reply is not readable: {error}")
        except ChannelClosed:
            status = self._discard()
            if self._closing.is_set():
                return PartScore(None, "the run is ending")
            how = f"exit code {status}"
            if status is not None and status < 0:
                how = f"signal {-status}"
            return PartScore(None, f"the reward worker died ({how})")

    def _wait(self, worker: _Worker, job: _Job, deadline: float) -> PartScore:
        while True:
            left = deadline - time.monotonic()
            try:
                # After Ctrl-Z and `fg` the time is over, but the answer is there.
                patience = min(max(left, _LAST_LOOK_S), _TICK_S)
                reply = worker.channel.receive(patience, _MAX_REPLY * max(1, job.members))
            except TimeoutError:
                if left <= 0:
                    self._discard()
                    return PartScore(
                        None,
                        f"the reward took longer than deadline_s = {self._deadline_s:g}, so retrain"
                        " killed its worker",
                    )
                # The worker is dead then, but a child that it left may hold its end of the channel.
                if self._closing.is_set():
                    self._discard()
                    return PartScore(None, "the run is ending")
                if self._is_too_large(worker):
                    self._discard()
                    return PartScore(
                        None,
                        f"the reward needed more than {MEMORY_LIMIT / 2**30:g} GiB, so retrain"
                        " killed its worker",
                    )
                continue
            if reply.get("number") != job.number:
                raise BadMessage("it is not the answer to this completion")
            score = _part_score(reply)
            if job.members and score.value is not None:
                raise BadMessage("it is not the answer to a group")
            if "members" in reply:
                score = _group_score(reply["members"], job.members)
            if self._is_too_large(worker, fraction=0.5):
                self._discard()  # sympy's caches only grow
            return score

    def _is_too_large(self, worker: _Worker, fraction: float = 1.0) -> bool:
        limit = self._setup.memory_limit
        return limit is not None and resident_bytes(worker.pid) > fraction * limit

    def _discard(self) -> int | None:
        """Kill the worker and return its exit code."""
        worker, self._worker = self._worker, None
        if worker is None:
            return None
        worker.channel.close()
        return self._server.end(worker.pid)


def _group_score(replies: object, size: int) -> PartScore:
    if not isinstance(replies, list) or len(replies) != size:
        raise BadMessage(f"it is not the answer to a group of {size}")
    if not all(isinstance(reply, dict) for reply in replies):
        raise BadMessage("a member's reply is not a JSON object")
    return PartScore(None, members=tuple(map(_part_score, replies)))


def _part_score(reply: Message) -> PartScore:
    value = reply.get("value")
    if value is None:
        return PartScore(None, str(reply.get("reason", "")))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise BadMessage("its value is not a finite number")
    return PartScore(float(value))

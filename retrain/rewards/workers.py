"""The pool of reward workers, seen from the trainer. One process keeps the workers, and a thread
waits for each of them. worker.py watches their time and memory.
"""

import itertools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from io import BufferedIOBase
from typing import Any

from retrain.errors import ConfigurationError, EnvironmentFailure
from retrain.rewards.score import PartScore
from retrain.rewards.worker import (
    QUESTION,
    STARTUP_LIMIT_S,
    Message,
    encode,
    encode_job,
    read_message,
)
from retrain.system import usable_cores

MEMORY_LIMIT = 2 << 30
"""Maximum resident bytes of a verifying worker; answers that ended in time took at most 0.1 GiB in
tests.
"""
_MAX_AUTOMATIC_WORKERS = 16
_END_S = 2.0
"""Seconds for the process to end."""
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from retrain.rewards.worker"
    " import main; main(*sys.argv[2:])"
)


_Job = tuple["Future[Any]", Callable[[bytes], object], bytes]


@dataclass(frozen=True)
class WorkerSetup:
    """The first message to the processes of a pool: what the workers must load."""

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
    origins: Mapping[str, str] = field(default_factory=dict)
    """The source of each value of the configuration."""
    secrets: tuple[str, ...] = field(default=(), repr=False)
    """Extra strings to redact from the worker's output, in addition to secrets in its environment.
    """

    def message(self, deadline_s: float) -> bytes:
        """Return the first message to the fork server. The memory limit holds for math-verify only:
        user code may load its own models and files.
        """
        limit = MEMORY_LIMIT if self.verify and not self.rewards else None
        return encode(asdict(self) | {"memory_limit": limit, "deadline_s": deadline_s})


class WorkerPool:
    """Worker processes that start at once and take jobs in the order of submission. Any thread may
    submit.
    """

    def __init__(self, setup: WorkerSetup, workers: int, deadline_s: float) -> None:
        """0 workers stands for half of the cores that this process may use; sampling needs the
        rest.
        """
        workers = workers or max(1, min(_MAX_AUTOMATIC_WORKERS, usable_cores() // 2))
        self._start = partial(_fork_server, setup.message(deadline_s), workers, deadline_s)
        self._process, self._lines = self._start()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._is_closing = False
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._ready: Future[Message] = Future()
        self._jobs.put((self._ready, self._ask, QUESTION))
        # Not an executor's threads: Python waits for those, and for all their jobs, before it ends.
        self._threads = [
            threading.Thread(target=self._work, name="reward-worker", daemon=True)
            for _ in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, message: Message) -> "Future[PartScore]":
        """Judge one job. Its deadline starts when a ready worker takes it; every failure is a
        could-not-judge, also that JSON cannot hold the message.
        """
        ended: Future[PartScore] = Future()
        try:
            job = encode_job(next(self._numbers), message)
        except (TypeError, ValueError, RecursionError) as error:
            reason = f"retrain cannot send the example's info to {message['handler']}: {error}"
            ended.set_result(PartScore(None, reason))
            return ended
        self._jobs.put((ended, self._judge, job))
        if self._is_closing:
            ended.cancel()
        return ended

    def wait_ready(self) -> frozenset[str]:
        """Wait for the first worker; return the names of the rewards that take a whole group.

        Raises ConfigurationError if it cannot load what the set-up names, EnvironmentFailure if it
        does not start.
        """
        first = self._ready.result()
        if "is_refused" in first:
            raise ConfigurationError(first["reason"])
        if "reason" in first:
            raise EnvironmentFailure(
                f"[reward] does not load, since {first['reason']}; look at what its import and the"
                " machine do."
            )
        return frozenset(first["group_rewards"])

    def close(self) -> None:
        """Kill the workers. This cancels waiting jobs; jobs under way end as could-not-judge."""
        with self._lock:
            self._is_closing = True
        with suppress(queue.Empty):
            while job := self._jobs.get_nowait():
                job[0].cancel()
        for _ in self._threads:
            self._jobs.put(None)
        _end(self._process)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while job := self._jobs.get():
            ended, do, message = job
            if ended.set_running_or_notify_cancel():
                try:
                    ended.set_result(do(message))
                except BaseException as error:  # a bug: without this the run would wait for ever
                    ended.set_exception(error)
                    raise

    def _judge(self, job: bytes) -> PartScore:
        answer = self._ask(job)
        if "reason" in answer:
            return PartScore(None, answer["reason"])
        parts = tuple(PartScore(*part) for part in answer["parts"])
        return parts[0] if len(parts) == 1 else PartScore(None, members=parts)

    def _ask(self, job: bytes) -> Message:
        """Return the answer to a job, from another fork server if the last one has ended."""
        with self._lock:
            if self._is_closing:
                return {"reason": "the run is ending"}
            if self._process.poll() is not None:
                _end(self._process)
                self._process, self._lines = self._start()
            process, lines = self._process, self._lines
            line = lines.pop()
        try:
            line.write(job)
            line.flush()
            answer = read_message(line)
        except (OSError, EOFError, ValueError):
            _end(process)
            return {
                "reason": "the run is ending" if self._is_closing else "the reward workers died"
            }
        lines.append(line)
        return answer


def _fork_server(
    setup: bytes, workers: int, deadline_s: float
) -> "tuple[subprocess.Popen[bytes], list[BufferedIOBase]]":
    """Start the process that keeps the workers; return it and a line to each worker."""
    pairs = [socket.socketpair() for _ in range(workers)]
    theirs = [far.fileno() for _, far in pairs]
    # -P: `json` is not a file of that name in the current folder.
    command = [sys.executable, "-P", "-u", "-c", _BOOT, json.dumps(sys.path), str(os.getpid())]
    process = subprocess.Popen(
        [*command, *map(str, theirs)],
        stdin=subprocess.DEVNULL,
        stdout=2,  # user code prints progress, but standard output is the run's result
        pass_fds=theirs,
        start_new_session=True,
        env={"OMP_NUM_THREADS": "1"} | os.environ,
    )
    lines: list[BufferedIOBase] = []
    for ours, far in pairs:
        ours.settimeout(2 * STARTUP_LIMIT_S + deadline_s)  # for a server that somebody stops
        lines.append(ours.makefile("rwb"))
        with suppress(OSError):  # `_ask` finds a process that is gone
            lines[-1].write(setup)
            lines[-1].flush()
        ours.close()
        far.close()
    return process, lines


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the fork server, without waiting for imports, and what its session still runs."""
    import psutil

    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid in psutil.pids():
        with suppress(OSError):  # it has ended, or belongs to another user
            if os.getsid(pid) == process.pid:
                os.kill(pid, signal.SIGKILL)

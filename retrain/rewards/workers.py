"""A pool of worker processes that a deadline can kill.

One thread here owns one worker process there: it sends a job, waits on the wall clock, and kills and replaces the worker when
the deadline or the memory limit is passed. Nothing inside a worker is trusted to stop by itself.
"""

import importlib
import itertools
import json
import math
import os
import queue
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NoReturn

from retrain.errors import ConfigurationError
from retrain.processes import die_with_parent, resident_bytes
from retrain.rewards.worker import VERIFICATION_MODULE, BadMessage, Channel, ChannelClosed, Message, encode

STARTUP_LIMIT_S = 120.0
"""A nursery that has not imported its libraries by then is given up."""

_REQUEST = struct.Struct("<ci")
_REPLY = struct.Struct("<i")
_SPAWN, _END = b"s", b"e"
_PARENT_POLL_S = 1.0
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from retrain.rewards.workers import main; main(sys.argv[2:])"


class NurseryLost(RuntimeError):
    """The nursery process is gone or does not answer."""


class Nursery:
    """The parent's side. Any thread may call it."""

    def __init__(self, preload: Sequence[str]) -> None:
        """`preload` names the modules that every worker shares. Returns at once; the import goes on in the process."""
        self._preload = tuple(preload)
        self._lock = threading.Lock()
        self._closed = False
        self._start()

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        self._control.settimeout(STARTUP_LIMIT_S)
        self._ready = False
        command = [sys.executable, "-u", "-c", _BOOT, json.dumps(sys.path), str(theirs.fileno()), str(os.getpid()), *self._preload]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=2,  # what user code prints is progress; standard output is the run's result
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            env={"OMP_NUM_THREADS": "1"} | os.environ,
        )
        theirs.close()

    def spawn(self) -> tuple[int, Channel]:
        """Fork a worker: its process id and the channel to it. Raises NurseryLost after one restart of the nursery."""
        with self._lock:
            try:
                return self._spawn()
            except NurseryLost:
                if self._closed:
                    raise
                self._stop()
                self._start()
                return self._spawn()

    def _spawn(self) -> tuple[int, Channel]:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                return self._ask(_SPAWN, 0, theirs), Channel(ours)
            except NurseryLost:
                ours.close()
                raise

    def end(self, pid: int) -> int | None:
        """Kill a worker with everything it started and return its exit code (negative: the signal); None if nobody knows any more."""
        with self._lock:
            try:
                return self._ask(_END, pid, None)
            except NurseryLost:
                return None  # the workers of a lost nursery die with it

    def _ask(self, operation: bytes, pid: int, passed: socket.socket | None) -> int:
        request = _REQUEST.pack(operation, pid)
        try:
            if not self._ready:
                self._read_reply()
                self._ready = True
            socket.send_fds(self._control, [request], [passed.fileno()] if passed else [])
            return self._read_reply()
        except OSError as error:
            raise NurseryLost(str(error)) from error

    def _read_reply(self) -> int:
        reply = self._control.recv(_REPLY.size, socket.MSG_WAITALL)
        if len(reply) < _REPLY.size:
            raise NurseryLost("the process that starts reward workers ended")
        (value,) = _REPLY.unpack(reply)
        return int(value)

    def _stop(self) -> None:
        self._control.close()
        try:
            self._process.wait(timeout=2 * _PARENT_POLL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """End the nursery and all its workers. One that is still importing is not waited for."""
        self._closed = True
        if not self._ready:
            self._process.kill()
        with self._lock:
            self._stop()


def main(arguments: list[str]) -> None:
    """The process: import, say so, then fork and kill on request until the trainer is gone."""
    descriptor, parent, *preload = arguments
    control = socket.socket(fileno=int(descriptor))
    for name in preload:
        importlib.import_module(name)
    children: set[int] = set()
    try:
        control.sendall(_REPLY.pack(0))
        while os.getppid() == int(parent):
            readable, _, _ = select.select([control], [], [], _PARENT_POLL_S)
            if readable and not _answer(control, children):
                break
    except (BrokenPipeError, ConnectionResetError):
        pass  # the trainer is gone
    finally:
        for pid in children:
            _kill_session(pid)


def _answer(control: socket.socket, children: set[int]) -> bool:
    """Serve one request; False when the trainer closed the connection."""
    request, descriptors, _, _ = socket.recv_fds(control, _REQUEST.size, 1)
    if not request:
        return False
    operation, pid = _REQUEST.unpack(request)
    if operation == _SPAWN:
        reply = _fork(control, descriptors[0])
        children.add(reply)
    else:
        _kill_session(pid)
        reply = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        children.discard(pid)
    control.sendall(_REPLY.pack(reply))
    return True


def _fork(control: socket.socket, descriptor: int) -> int:
    nursery = os.getpid()
    pid = os.fork()
    if pid == 0:
        _be_a_worker(control, descriptor, nursery)
    os.close(descriptor)
    return pid


def _be_a_worker(control: socket.socket, descriptor: int, nursery: int) -> NoReturn:
    """The forked side. It must never return into the nursery's loop, so an exception ends the process here."""
    status = 1
    try:
        control.close()
        os.setsid()
        die_with_parent(nursery)  # elsewhere than on Linux the nursery kills its workers on its way out
        from retrain.rewards.worker import serve

        serve(Channel(socket.socket(fileno=descriptor)))
        status = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(status)


def _kill_session(pid: int) -> None:
    """The worker and whatever it started. One that was forked a moment ago may not lead its session yet."""
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


MEMORY_LIMIT = 2 << 30
"""Bytes resident in a verifying worker at most; the largest seen for an answer that ended in time is 0.1 GiB."""
ADDRESS_SPACE_LIMIT = 4 << 30
"""Bytes a verifying worker may map: the limit behind the limit, for what grows faster than the parent looks."""
_TICK_S = 0.05
"""How often the parent looks at the memory of a worker that has not answered."""
_MAX_AUTOMATIC_WORKERS = 16
_LONGEST_REPLY = 1 << 16
"""Bytes; a reward and the reason why there is none take a few hundred."""


@dataclass(frozen=True)
class Judgement:
    """A worker's verdict: a reward, or None with the reason."""

    value: float | None
    reason: str = ""


@dataclass(frozen=True)
class WorkerSetup:
    """What every worker of a pool is told first."""

    verify: bool = False
    """math-verify is wanted, so the nursery imports it and the memory limits hold."""
    rewards: tuple[str, ...] = ()
    """Names of user functions."""
    params: dict[str, Any] = field(default_factory=dict)
    plugins: dict[str, Any] = field(default_factory=dict)
    """The [plugins] section."""
    source: str | None = None
    """The file of the configuration; user functions are looked for beside it too."""

    @property
    def preload(self) -> list[str]:
        return ["retrain.rewards.worker"] + [VERIFICATION_MODULE] * self.verify + ["retrain.rewards.custom"] * bool(self.rewards)

    @property
    def memory_limit(self) -> int | None:
        """User code may map what it likes: its models and files are the user's business."""
        return MEMORY_LIMIT if self.verify and not self.rewards else None

    def message(self) -> Message:
        limit = ADDRESS_SPACE_LIMIT if self.memory_limit else None
        return {
            "address_space": limit,
            "verify": self.verify,
            "rewards": list(self.rewards),
            "params": self.params,
            "plugins": self.plugins,
            "source": self.source,
        }


def automatic_workers() -> int:
    """Half of the cores that this process may use: sampling needs the rest."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_MAX_AUTOMATIC_WORKERS, cores // 2))


class WorkerPool:
    """Workers that start at once and answer jobs in the order of submission."""

    def __init__(self, setup: WorkerSetup, workers: int, deadline_s: float) -> None:
        self._setup = setup
        self._nursery = Nursery(setup.preload)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._numbers = itertools.count()
        self._keepers = [_Keeper(setup, self._nursery, self._jobs, deadline_s, self._closing) for _ in range(workers)]
        for keeper in self._keepers:
            keeper.start()

    def submit(self, message: Message) -> "Future[Judgement]":
        """Judge one job. The deadline starts when a worker that is ready takes it; what goes wrong is a could-not-judge.

        TypeError, here and now, for a message that is not JSON.
        """
        number = next(self._numbers)
        job = _Job(number, encode(message | {"number": number}), Future())
        self._jobs.put(job)
        if self._closing.is_set():
            job.future.cancel()
        return job.future

    def wait_ready(self) -> None:
        """Wait for the first worker. Raises ConfigurationError where it cannot load what it was told to."""
        keeper = self._keepers[0]
        keeper.started.wait(2 * STARTUP_LIMIT_S)
        if keeper.refusal:
            raise ConfigurationError(keeper.refusal)

    def close(self) -> None:
        """Kill the workers. Jobs that nobody has taken are cancelled; those under way end as could-not-judge."""
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
        for _ in self._keepers:
            self._jobs.put(None)
        self._nursery.close()
        for keeper in self._keepers:
            keeper.join()


@dataclass(frozen=True)
class _Job:
    number: int
    """The reply carries it too: what user code left in the channel is not taken for the next answer."""
    message: bytes
    future: "Future[Judgement]"


@dataclass(frozen=True)
class _Worker:
    pid: int
    channel: Channel


class _Refused(Exception):
    """The worker cannot load what it was told to."""


class _Keeper(threading.Thread):
    """Keeps one worker alive and brings it one job at a time."""

    def __init__(
        self, setup: WorkerSetup, nursery: Nursery, jobs: "queue.SimpleQueue[_Job | None]", deadline_s: float, closing: threading.Event
    ) -> None:
        super().__init__(name="reward-worker", daemon=True)
        self.started = threading.Event()
        self.refusal = ""
        self._setup = setup
        self._nursery = nursery
        self._jobs = jobs
        self._deadline_s = deadline_s
        self._closing = closing
        self._worker: _Worker | None = None

    def run(self) -> None:
        self._prepare()
        self.started.set()
        while (job := self._jobs.get()) is not None:
            if job.future.set_running_or_notify_cancel():
                try:
                    job.future.set_result(self._judge(job))
                except BaseException as error:  # a bug, and the run must hear of it: nobody else will answer
                    job.future.set_exception(error)
                    raise
                self._prepare()
        if self._worker is not None:
            self._worker.channel.close()

    def _prepare(self) -> str:
        """Have a worker that is ready. The reason why there is none, else empty."""
        if self._worker is not None:
            return ""
        if self._closing.is_set():
            return "the run is ending"
        try:
            self._worker = self._spawn()
        except _Refused as error:
            self.refusal = str(error)
            return self.refusal
        except (NurseryLost, ChannelClosed, BadMessage, OSError) as error:
            return f"no reward worker could be started ({error})"
        return ""

    def _spawn(self) -> _Worker:
        pid, channel = self._nursery.spawn()
        try:
            channel.send(self._setup.message())
            answer = channel.receive(STARTUP_LIMIT_S, _LONGEST_REPLY)
            if "refused" in answer:
                raise _Refused(str(answer["refused"]))
            if answer != {"ready": True}:
                raise BadMessage("it does not say that it is ready")
        except (ChannelClosed, BadMessage, TimeoutError, _Refused):
            channel.close()
            self._nursery.end(pid)
            raise
        return _Worker(pid, channel)

    def _judge(self, job: _Job) -> Judgement:
        reason = self._prepare()
        if self._worker is None:
            return Judgement(None, reason)
        try:
            self._worker.channel.send_encoded(job.message)
            return self._wait(self._worker, job.number)
        except BadMessage as error:
            self._discard()
            return Judgement(None, f"the reward worker's reply could not be read: {error}")
        except ChannelClosed:
            status = self._discard()
            how = f"signal {-status}" if status is not None and status < 0 else f"exit code {status}"
            return Judgement(None, "the run is ending" if self._closing.is_set() else f"the reward worker died ({how})")

    def _wait(self, worker: _Worker, number: int) -> Judgement:
        deadline = time.monotonic() + self._deadline_s
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                self._discard()
                return Judgement(None, f"the reward took longer than deadline_s = {self._deadline_s:g} and its worker was killed")
            try:
                judgement = _judgement(worker.channel.receive(min(left, _TICK_S), _LONGEST_REPLY), number)
            except TimeoutError:
                if self._is_too_large(worker):
                    self._discard()
                    return Judgement(None, f"the reward needed more than {MEMORY_LIMIT / 2**30:g} GiB and its worker was killed")
                continue
            if self._is_too_large(worker, fraction=0.5):
                self._discard()  # sympy's caches only grow
            return judgement

    def _is_too_large(self, worker: _Worker, fraction: float = 1.0) -> bool:
        limit = self._setup.memory_limit
        return limit is not None and resident_bytes(worker.pid) > fraction * limit

    def _discard(self) -> int | None:
        """Kill the worker and return its exit code."""
        worker, self._worker = self._worker, None
        if worker is None:
            return None
        worker.channel.close()
        return self._nursery.end(worker.pid)


def _judgement(reply: Message, number: int) -> Judgement:
    """Raises BadMessage unless this is a verdict on the job of that number."""
    if reply.get("number") != number:
        raise BadMessage("it is not the answer to this completion")
    value, reason = reply.get("value"), reply.get("reason", "")
    if value is None:
        return Judgement(None, str(reason))
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadMessage("its value is not a finite number")
    return Judgement(float(value))

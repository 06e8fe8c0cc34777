"""The parallel launcher: each run is a worker process on devices of this machine, and ends when the
campaign's process ends, however it ends.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import IO

from retrain.backends.base import backend_kind
from retrain.campaign.launch import OUTPUT, Job, RunOutcome
from retrain.campaign.manifest import Status
from retrain.campaign.plan import CampaignPlan, CampaignRun
from retrain.config import dump_toml, replaced
from retrain.config.schema import Campaign
from retrain.errors import ConfigurationError

MAX_ANSWER = 1 << 24
"""Bytes of an outcome; what a child that a plugin left writes there without end is not read."""
_CHUNK = 1 << 16
_END_S = 10.0
"""Seconds to wait for a killed worker."""
Devices = tuple[str, ...]
"""Names as torch has them, for example ("cuda:0",); empty leaves the run's configuration
unchanged."""


def share_devices(plan: CampaignPlan) -> list[Devices]:
    """The devices of each worker: groups of `devices_per_run` GPUs, assigned in turn.

    The GPUs are those named by `[backend] devices`, or all of the machine. Without a GPU only
    `max_workers` limits the workers (0: one for each run). Raises ConfigurationError for more
    workers than the GPUs can hold.
    """
    settings = plan.settings
    pool = _pool(plan)
    room = room_on_gpus(plan)
    if room is None:
        return [()] * (settings.max_workers or len(plan.runs))
    groups = _groups(pool, settings)
    workers = settings.max_workers or min(room, len(plan.runs))
    if workers > room:
        raise ConfigurationError(
            f"[campaign] max_workers = {workers} exceeds the {room} runs that fit on {len(pool)}"
            f" GPUs (devices_per_run = {settings.devices_per_run}, workers_per_device ="
            f" {settings.workers_per_device}); lower it, or set workers_per_device ="
            f" {-(-workers // len(groups))} if the memory of one GPU is enough for that."
        )
    return [groups[number % len(groups)] for number in range(workers)]


def room_on_gpus(plan: CampaignPlan) -> int | None:
    """Number of runs that fit on the GPUs at once; None without a GPU. Raises ConfigurationError if
    not even one fits.
    """
    pool = _pool(plan)
    if pool:
        return len(_groups(pool, plan.settings)) * plan.settings.workers_per_device
    return None


def _pool(plan: CampaignPlan) -> Devices:
    if plan.config.is_set("backend.devices"):
        named = plan.config.backend.device_list
        return named if all(name.startswith("cuda") for name in named) else ()
    if not backend_kind(plan.config.backend.backend).in_process:
        return ()
    import torch

    return tuple(f"cuda:{index}" for index in range(torch.cuda.device_count()))


def _groups(pool: Devices, settings: Campaign) -> Sequence[Devices]:
    size = settings.devices_per_run
    groups = [pool[start : start + size] for start in range(0, len(pool) - size + 1, size)]
    if not groups:
        raise ConfigurationError(
            f"[campaign] devices_per_run = {size} exceeds the number of devices"
            f" ({', '.join(pool)}); lower it."
        )
    return groups


# -- workers ---------------------------------------------------------------------------------------


class Subprocesses:
    """One worker for each slot, on the slot's devices; on a CPU the workers share the cores.

    Where that is safe, workers are forked from a parent that holds what they have in common.
    """

    def __init__(self, slots: Sequence[Devices], *, in_process: bool = True) -> None:
        """`in_process`: the runs hold their model on this machine, so that they have one in
        common.
        """
        self._slots = slots
        self.workers = len(slots)
        self._parents: dict[str, ForkParent] = {}
        """By what the base model is."""
        reason = no_fork_reason(slots, in_process=in_process)
        self._forks = not reason
        self.notes = [NOT_FORKED.format(reason=reason) if reason else FORKED]

    def start(self, run: CampaignRun, slot: int) -> Job:
        """Start a worker on the devices of `slot`."""
        devices, threads = self._slots[slot], max(1, (os.cpu_count() or 1) // self.workers)
        if devices:
            run = replace(
                run,
                config=replaced(run.config, {"backend.devices": ",".join(devices)}, origin="file"),
            )
        if self._forks:
            return ForkedRun(run, threads, self._parent(run, threads), self.notes.append)
        return start_worker(run, threads)

    def _parent(self, run: CampaignRun, threads: int) -> "ForkParent":
        """The parent that holds the run's base model, started anew where it was lost."""
        model = run.config.model
        base = model.model_dump_json(include={"model", "revision", "dtype", "load_in_4bit"})
        if base not in self._parents or self._parents[base].lost:
            self._parents[base] = ForkParent(threads)
        return self._parents[base]

    def close(self) -> None:
        for parent in self._parents.values():
            parent.close()


FORKED = (
    "Workers are forked from one process, which loads what they have in common once: libraries,"
    " tokenizer, prompts and the base weights, which all of them read in one memory."
)
NOT_FORKED = "Each worker starts by itself, with its own libraries and model: {reason}."


def no_fork_reason(slots: Sequence[Devices], *, in_process: bool) -> str:
    """Why workers are not forked from one parent; "" if they are."""
    if not in_process:
        return "the backend holds no model on this machine"
    if not sys.platform.startswith("linux"):
        return f"linear algebra does not survive a fork on {sys.platform}"
    if any(slots):
        return "a CUDA context does not survive a fork"
    return ""


def start_worker(run: CampaignRun, threads: int | None) -> "Worker":
    """Start the worker process of a run. `threads` is its OMP_NUM_THREADS unless that is set; None
    does not set it.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    with (run.folder / OUTPUT).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "retrain.campaign.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            env=_environment(threads),
        )
    assert process.stdin is not None
    with contextlib.suppress(
        BrokenPipeError
    ):  # the process has already ended, which `poll` reports
        process.stdin.write(_request(run) + b"\n")
        process.stdin.flush()
    return Worker(process)


def _environment(threads: int | None) -> dict[str, str]:
    """The variables of a worker: those that are set here, and the number of threads."""
    return {**({"OMP_NUM_THREADS": str(threads)} if threads else {}), **os.environ}


def _request(run: CampaignRun) -> bytes:
    path = run.config.source_path
    return json.dumps({"config": dump_toml(run.config), "path": str(path) if path else ""}).encode()


class Worker:
    """A worker process. It has its own session, so that Ctrl-C reaches only the campaign, which
    forwards it.
    """

    def __init__(self, process: "subprocess.Popen[bytes] | ForkedProcess") -> None:
        self._process = process
        assert self._process.stdout is not None
        # A child that a plugin forked and left may hold the pipe for ever, so its end says nothing
        # and a read must not wait for it.
        os.set_blocking(self._process.stdout.fileno(), False)
        self._answer = bytearray()

    def poll(self) -> RunOutcome | None:
        """The run's outcome; None while it is running."""
        code = self._process.poll()
        # also before the end: an answer longer than the pipe would keep the process from
        # ending
        self._receive()
        if code is None:
            return None
        self._close_pipes()
        try:
            values = json.loads(self._answer)
            return RunOutcome(Status(values["status"]), values["reason"])
        except ValueError:  # nothing, or not all of it
            pass
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        return RunOutcome(Status.FAILED, f"its process {how}", lost=True)

    def _receive(self) -> None:
        """Take what has arrived of the answer."""
        assert self._process.stdout is not None
        with contextlib.suppress(BlockingIOError):
            while len(self._answer) < MAX_ANSWER and (
                chunk := os.read(self._process.stdout.fileno(), _CHUNK)
            ):
                self._answer += chunk

    def stop(self, signal_number: int) -> None:
        """Ask the run to save a checkpoint and end."""
        self._process.send_signal(signal_number)

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.wait()
        self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


# -- forked workers --------------------------------------------------------------------------------


class ForkParent:
    """The process that forks workers (`parent`), as the campaign sees it."""

    def __init__(self, threads: int) -> None:
        """`threads` is its workers' OMP_NUM_THREADS unless that is set."""
        self._control, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-u",
                "-m",
                "retrain.campaign.parent",
                str(theirs.fileno()),
                str(os.getpid()),
            ],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            env=_environment(threads),
        )
        theirs.close()

    @property
    def lost(self) -> bool:
        """True if the process has ended, and its workers with it."""
        return self._process.poll() is not None

    def fork(self, run: CampaignRun) -> "ForkedProcess":
        """Ask for the worker of a run, and return at once. Raises OSError where that cannot be
        asked.
        """
        link, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        receiving, sending = os.pipe()
        run.folder.mkdir(parents=True, exist_ok=True)
        with theirs, os.fdopen(sending, "wb") as answer, (run.folder / OUTPUT).open("ab") as log:
            descriptors = [part.fileno() for part in (theirs, answer, log)]
            try:
                socket.send_fds(self._control, [_request(run)], descriptors)
            except OSError:
                link.close()
                os.close(receiving)
                raise
        return ForkedProcess(link, os.fdopen(receiving, "rb", buffering=0))

    def close(self) -> None:
        """End the process and its workers."""
        self._control.close()
        self._process.kill()
        self._process.wait()


class NotForked(Exception):
    """The parent refused to fork; the message says why."""


class ForkedProcess:
    """A worker that is another process's child, with the part of Popen's interface that `Worker`
    uses.
    """

    stdin = None

    def __init__(self, link: socket.socket, stdout: IO[bytes]) -> None:
        """`link` takes a signal's number as a byte, and gives the worker's end as JSON."""
        self._link = link
        self.stdout = stdout
        self._forked = False
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code; None while it runs. Raises NotForked."""
        self._receive(timeout=0.0)
        return self._code

    def wait(self) -> None:
        """Wait for its end, or until its parent is too busy to tell of it."""
        self._receive(timeout=_END_S)

    def _receive(self, timeout: float) -> None:
        """Take what the parent says until the worker has ended or nothing more comes."""
        self._link.settimeout(timeout)
        with contextlib.suppress(BlockingIOError, TimeoutError):
            while self._code is None:
                try:
                    told = json.loads(self._link.recv(1 << 12) or b"{}")
                except ConnectionError:
                    told = {}
                if "forked" in told:
                    self._forked = True
                elif "code" in told or self._forked:
                    # without a word its parent was lost, and the worker was killed with it
                    self._code = told.get("code", -signal.SIGKILL)
                else:
                    raise NotForked(told.get("refused", "the process that forks workers was lost"))

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(OSError):  # it has ended, which `poll` reports
            self._link.send(bytes([number]))

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkedRun:
    """A run in a forked worker, or in a process of its own where its parent refuses."""

    def __init__(
        self, run: CampaignRun, threads: int, parent: ForkParent, say: Callable[[str], None]
    ) -> None:
        self._run, self._threads, self._say = run, threads, say
        try:
            self._worker = Worker(parent.fork(run))
        except OSError as error:
            self._start_apart(str(error))

    def _start_apart(self, reason: str) -> None:
        self._say(f"{self._run.name}: {NOT_FORKED.format(reason=reason)}")
        self._worker = start_worker(self._run, self._threads)

    def poll(self) -> RunOutcome | None:
        """The run's outcome; None while it is running."""
        try:
            return self._worker.poll()
        except NotForked as refused:
            self._start_apart(str(refused))
            return None

    def stop(self, signal_number: int) -> None:
        """Ask the run to save a checkpoint and end."""
        self._worker.stop(signal_number)

    def kill(self) -> None:
        """End the process at once."""
        with contextlib.suppress(NotForked):
            self._worker.kill()

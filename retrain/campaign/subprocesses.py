"""The parallel launcher: each run is a worker process on devices of this machine, and ends when the
campaign's process ends, however it ends.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import IO

from retrain.backends.base import backend_kind
from retrain.campaign.launch import RunOutcome
from retrain.campaign.manifest import Status
from retrain.campaign.plan import CampaignPlan, CampaignRun
from retrain.config import dump_toml, replaced
from retrain.config.schema import Campaign
from retrain.errors import ConfigurationError
from retrain.records.run_folder import OUTPUT

MAX_ANSWER = 1 << 24
"""Bytes of an outcome; what a child that a plugin left writes there without end is not read."""
_CHUNK = 1 << 16
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
    """One worker for each slot, on the slot's devices; on a CPU the workers share the cores."""

    def __init__(self, slots: Sequence[Devices]) -> None:
        self._slots = slots
        self.workers = len(slots)

    def start(self, run: CampaignRun, slot: int) -> "Worker":
        """Start a worker on the devices of `slot`."""
        devices = self._slots[slot]
        if devices:
            run = replace(
                run,
                config=replaced(run.config, {"backend.devices": ",".join(devices)}, origin="file"),
            )
        return start_worker(run, threads=max(1, (os.cpu_count() or 1) // self.workers))

    def close(self) -> None:
        """Nothing is held between runs."""


def start_worker(run: CampaignRun, threads: int | None) -> "Worker":
    """Start the worker process of a run. `threads` is its OMP_NUM_THREADS unless that is set; None
    does not set it.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    with (run.folder / OUTPUT).open("ab") as log:
        return Worker(run, log, {"OMP_NUM_THREADS": str(threads)} if threads else {})


class Worker:
    """A worker process. It has its own session, so that Ctrl-C reaches only the campaign, which
    forwards it.
    """

    def __init__(self, run: CampaignRun, log: IO[bytes], environment: Mapping[str, str]) -> None:
        """`environment` gives variables that are not set here already."""
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "retrain.campaign.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            env={**environment, **os.environ},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        # A child that a plugin forked and left may hold the pipe for ever, so its end says nothing
        # and a read must not wait for it.
        os.set_blocking(self._process.stdout.fileno(), False)
        self._answer = bytearray()
        path = run.config.source_path
        request = {"config": dump_toml(run.config), "path": str(path) if path else ""}
        with contextlib.suppress(
            BrokenPipeError
        ):  # the process has already ended, which `poll` reports
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

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

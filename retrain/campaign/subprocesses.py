"""The parallel launcher: each run is a worker process on this machine, which ends when the campaign's process ends, however it ends."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

from retrain.campaign.devices import Devices, on_devices
from retrain.campaign.launch import OUTPUT, RunOutcome
from retrain.campaign.manifest import Status
from retrain.campaign.plan import CampaignRun
from retrain.config import dump_toml


class Subprocesses:
    """One worker for each slot, on the slot's devices; on a CPU the workers share the cores."""

    def __init__(self, slots: Sequence[Devices]) -> None:
        self._slots = slots
        self.workers = len(slots)

    def start(self, run: CampaignRun, slot: int) -> "Worker":
        """Start a worker on the devices of `slot`."""
        return start_worker(on_devices(run, self._slots[slot]), threads=max(1, (os.cpu_count() or 1) // self.workers))

    def close(self) -> None:
        """Nothing is held between runs."""


def start_worker(run: CampaignRun, threads: int | None) -> "Worker":
    """Start the worker process of a run. `threads` is its OMP_NUM_THREADS unless that is set; None does not set it."""
    run.folder.mkdir(parents=True, exist_ok=True)
    with (run.folder / OUTPUT).open("ab") as log:
        return Worker(run, log, {"OMP_NUM_THREADS": str(threads)} if threads else {})


class Worker:
    """A worker process. It has its own session, so that Ctrl-C reaches only the campaign, which forwards it."""

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
        assert self._process.stdin is not None
        path = run.config.source_path
        request = {"config": dump_toml(run.config), "path": str(path) if path else ""}
        with contextlib.suppress(BrokenPipeError):  # the process has already ended, which `poll` reports
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def poll(self) -> RunOutcome | None:
        """The run's outcome; None while it is running."""
        code = self._process.poll()
        if code is None:
            return None
        assert self._process.stdout is not None
        answer = self._process.stdout.read()
        self._close_pipes()
        if answer:
            values = json.loads(answer)
            return RunOutcome(Status(values["status"]), values["reason"])
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return RunOutcome(Status.FAILED, f"its process {how}", lost=True)

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

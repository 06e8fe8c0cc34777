"""Runs in processes of their own that signals reach at chosen moments."""

import importlib
import os
import pty
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.commands import Command, forked

_BETWEEN_SIGNALS_S = 0.02


@dataclass(frozen=True)
class Placed:
    """Just before, or after, the `call`-th call of a function."""

    module: str
    name: str
    call: int
    after: bool = False

    def __str__(self) -> str:
        return f"{'after' if self.after else 'before'} {self.name} {self.call}"

    def find(self) -> tuple[Any, str, Any]:
        """The function, with the module or class that holds it and its name there."""
        owner: Any = importlib.import_module(self.module)
        *path, name = self.name.split(".")
        for part in path:
            owner = getattr(owner, part)
        return owner, name, getattr(owner, name)

    def arm(self, fire: Callable[[], None], folder: Path) -> None:
        owner, name, real = self.find()
        calls = 0

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == self.call and not self.after:
                fire()
            result = real(*args, **kwargs)
            if calls == self.call and self.after:
                fire()
            return result

        setattr(owner, name, counted)


@dataclass(frozen=True)
class Random:
    """Some time after some step."""

    seed: int

    @property
    def steps(self) -> int:
        """So many are taken before it. With 0 the run may not have begun."""
        return random.Random(self.seed).randrange(0, 7)

    def __str__(self) -> str:
        return f"random {self.seed}"

    def arm(self, fire: Callable[[], None], folder: Path) -> None:
        def wait_and_fire() -> None:
            metrics, wanted = folder / "metrics.jsonl", self.steps
            while not (folder / ".retrain.json").exists() or (count(metrics) < wanted):
                time.sleep(0.002)
            time.sleep(random.Random(self.seed).uniform(0, 0.3))
            fire()

        threading.Thread(target=wait_and_fire, daemon=True).start()


def count(path: Path) -> int:
    """Return the lines of a file; 0 where it is missing, as while a resume replaces it."""
    with suppress(FileNotFoundError):
        return path.read_bytes().count(b"\n")
    return 0


PLACED = (
    Placed(
        "retrain.backends.local.learner", "Learner._update", 6
    ),  # the second of the second step's four updates
    Placed("retrain.run.observer", "StepObserver.observe", 4),
    Placed("retrain.records.jsonl", "JsonlWriter.write", 60),
    Placed("retrain.backends.local.optimizer", "AdapterOptimizer.step", 15, after=True),
    Placed("retrain.advantages.sepa", "SEPAController.observe", 6, after=True),
    # Half of the fourth step's answers are written; nothing of the second evaluation.
    Placed("retrain.tracking.files", "RunFiles._append", 42, after=True),
    Placed("retrain.records.entries", "EvaluationRecord.to_json", 5),
    Placed("retrain.rewards.scoring", "FailureGuard.observe", 7),
    Placed("retrain.records.disk", "sync_folder", 9),
    Placed("retrain.records.checkpoint", "CheckpointStore.save", 2, after=True),
)
_RANDOM = tuple(Random(seed) for seed in range(40))
MOMENTS = (*PLACED[:2], *_RANDOM[:2], *PLACED[2:], *_RANDOM[2:])
"""Ten placed and forty random ones."""


def stop_twice(file: Path, folder: Path, moment: Placed | Random, threads: int) -> int:
    """Run a configuration, send two Ctrl-C 20 ms apart at the moment, and return the exit code of
    the command line.
    """
    process = forked(_run_until_stopped, str(file), str(folder), moment, threads)
    process.join(240)
    assert process.exitcode is not None
    return process.exitcode


def killed(file: Path, folder: Path, steps: int, seconds: float) -> int | None:
    """Run a configuration, or resume what is in the folder, and kill it after `seconds` past its
    `steps`-th step of either stage; None if it was killed, else its exit code. Steps take the time
    that they are told, so that back pressure decides the same in every process.
    """
    process = forked(
        _run_with_told_time,
        str(file),
        ["--resume", str(folder)] if (folder / "config.toml").exists() else [],
    )
    written = [folder / "sft.jsonl", folder / "metrics.jsonl"]
    while process.is_alive() and sum(map(count, written)) < steps:
        time.sleep(0.005)
    process.join(seconds)
    if process.exitcode is not None:
        return process.exitcode
    process.kill()
    process.join()
    return None


def _run_with_told_time(file: str, arguments: list[str]) -> None:
    from retrain.cli.main import main
    from retrain.run.pressure import Pressure

    real = Pressure.observe
    Pressure.observe = lambda self, step, seconds: real(self, step, 0.5 + step.number * 7 % 5)  # type: ignore[method-assign]
    sys.exit(main([file, "--quiet", *arguments]))


def run_quietly(file: str, said: str, threads: int) -> None:
    """Run a configuration in this process, which should be a forked one; errors go to `said`."""
    import torch

    from retrain.cli.main import main

    torch.set_num_threads(threads)
    with Path(said).open("w", encoding="utf-8") as errors, redirect_stderr(errors):
        code = main([file, "--quiet", "--skip-parity"])
    sys.exit(code)


def hang_up(file: Path, folder: Path) -> int:
    """The exit code of a command line whose terminal closes after the second step."""
    terminal, its_end = pty.openpty()
    command = Command(
        [sys.executable, "-m", "retrain", str(file), "--skip-parity"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        terminal=its_end,
    )
    os.close(its_end)
    os.set_blocking(terminal, False)
    while count(folder / "metrics.jsonl") < 2:
        assert command.poll() is None
        with suppress(BlockingIOError):
            os.read(terminal, 1 << 16)  # a terminal that nobody reads holds the run up
        time.sleep(0.01)
    os.close(terminal)
    return command.wait(240)


def _run_until_stopped(file: str, folder: str, moment: Placed | Random, threads: int) -> None:
    def fire() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(_BETWEEN_SIGNALS_S)
        os.kill(os.getpid(), signal.SIGINT)

    import torch

    from retrain.cli.main import main

    torch.set_num_threads(threads)
    moment.arm(fire, Path(folder))
    sys.exit(main([file, "--quiet", "--skip-parity"]))

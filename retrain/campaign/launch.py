"""Launchers: the interface that starts the runs of a campaign, and the launcher that trains them in
this process.

The others are in `subprocesses` (parallel processes on this machine) and `ray_cluster`.
"""

import gc
import sys
import traceback
from collections.abc import Iterator
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    redirect_stderr,
    redirect_stdout,
)
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from retrain.campaign.manifest import Status
from retrain.campaign.plan import CampaignRun
from retrain.config import TrainConfig, replaced
from retrain.errors import Interrupted, RetrainError
from retrain.records.redact import harmless
from retrain.records.run_folder import OUTPUT, RunFolder


@dataclass(frozen=True)
class RunOutcome:
    """The outcome of a run."""

    status: Status
    """DONE, FAILED or INTERRUPTED."""
    reason: str = ""
    """One sentence saying why the run is not done."""
    lost: bool = False
    """The worker ended without an answer: it was killed, or its machine was lost. A restart may
    help."""
    stopped_by: int | None = None
    """The signal that the campaign's own process received while the run had installed its
    handlers."""


class Job(Protocol):
    """A started run."""

    def poll(self) -> RunOutcome | None:
        """The run's outcome; None while it is running."""

    def stop(self, signal_number: int) -> None:
        """Ask the run to save a checkpoint and end."""

    def kill(self) -> None:
        """End the run at once; does nothing if it has ended."""


class Launcher(Protocol):
    """Starts runs, at most `workers` at a time."""

    workers: int

    def start(self, run: CampaignRun, slot: int) -> Job:
        """Start a run. `slot`, from 0 to workers - 1, belongs to no other running run. Raises
        OSError if its folder cannot be written.
        """

    def close(self) -> None:
        """Release what the launcher holds."""


def perform(config: TrainConfig) -> RunOutcome:
    """Train a run in this process, from its checkpoint if it has been started before. A failed run
    is an outcome, not an exception.
    """
    from retrain.run.loop import train

    folder = RunFolder(Path(config.logging.log_dir))
    try:
        train(
            replaced(config, {"resume.from": str(folder.path)}, origin="file")
            if folder.marker.is_file()
            else config
        )
    except Interrupted as error:
        return RunOutcome(Status.INTERRUPTED, str(error), stopped_by=error.exit_code - 128)
    except RetrainError as error:
        print(harmless(f"retrain: {error}"), file=sys.stderr)
        return RunOutcome(Status.FAILED, " ".join(str(error).split()))
    except Exception as error:  # noqa: BLE001 - an unexpected error ends this run alone; its traceback is kept in the run's output
        print(harmless(traceback.format_exc()), file=sys.stderr)
        return RunOutcome(
            Status.FAILED,
            f"{type(error).__name__}: {' '.join(str(error).split())[:300]} (the traceback is in"
            f" {OUTPUT})",
        )
    return RunOutcome(Status.DONE)


@contextmanager
def output_to(folder: Path) -> Iterator[None]:
    """Append everything that Python code prints to the run's output.log."""
    folder.mkdir(parents=True, exist_ok=True)
    with (
        (folder / OUTPUT).open("a", encoding="utf-8", buffering=1) as file,
        redirect_stdout(file),
        redirect_stderr(file),
    ):
        yield


@dataclass(frozen=True)
class EndedJob:
    """A run that has ended when `start` returns."""

    outcome: RunOutcome

    def poll(self) -> RunOutcome:
        return self.outcome

    def stop(self, signal_number: int) -> None: ...

    def kill(self) -> None: ...


def unwritable(run: CampaignRun, error: OSError) -> RunOutcome:
    """The outcome of a run whose output.log cannot be written."""
    return RunOutcome(
        Status.FAILED,
        f"{run.folder / OUTPUT} cannot be written: {error.strerror}; free space there",
    )


class InProcess:
    """Trains one run after the other in this process, and keeps the base model loaded between
    them.
    """

    workers = 1

    def __init__(self, *, loads_models: bool = True) -> None:
        """`loads_models` is False where a remote service holds the model, so that no model library
        is imported.
        """
        self._models: AbstractContextManager[None] = nullcontext()
        if loads_models:
            from retrain.model.load import shared_models

            self._models = shared_models()
        self._models.__enter__()

    def start(self, run: CampaignRun, slot: int) -> EndedJob:
        try:
            with output_to(run.folder):
                outcome = perform(run.config)
        except OSError as error:
            outcome = unwritable(run, error)
        gc.collect()  # frees the optimizer and caches, which are in reference cycles
        return EndedJob(outcome)

    def close(self) -> None:
        self._models.__exit__(None, None, None)

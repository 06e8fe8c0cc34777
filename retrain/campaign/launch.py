"""How a run of a campaign is started, and what becomes of it. The launchers: in this process, as subprocesses, on a Ray cluster."""

import gc
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from retrain.campaign.manifest import Status
from retrain.campaign.plan import CampaignRun
from retrain.config import TrainConfig, replaced
from retrain.errors import Interrupted, RetrainError
from retrain.records.terminal import clean
from retrain.tracking import RunFolder

OUTPUT = "output.log"
"""What a run prints, in its folder."""


@dataclass(frozen=True)
class RunOutcome:
    status: Status
    """DONE, FAILED or INTERRUPTED."""
    reason: str = ""
    """Why it is not done: one sentence."""
    lost: bool = False
    """The worker ended without a word: it was killed, or its machine is gone. Starting again may help."""
    stopped_by: int | None = None
    """The signal, where the campaign's own process got it while the run had the handlers."""


class Job(Protocol):
    """A run that was started."""

    def poll(self) -> RunOutcome | None:
        """None while it runs."""

    def stop(self, signal_number: int) -> None:
        """Ask it to save and end."""

    def kill(self) -> None:
        """End it at once. Safe to call when it has ended."""


class Launcher(Protocol):
    workers: int
    """Runs at the same time at most."""

    def start(self, run: CampaignRun, slot: int) -> Job:
        """`slot` counts from 0 to workers - 1: no two runs that run at the same time have the same."""

    def close(self) -> None: ...


def perform(config: TrainConfig) -> RunOutcome:
    """Train the run in this process: from its checkpoint if it began before, from the start otherwise. Never raises for a failed run."""
    from retrain.run.loop import train

    folder = RunFolder(Path(config.logging.log_dir))
    try:
        train(replaced(config, {"resume.from": str(folder.path)}, origin="file") if folder.marker.is_file() else config)
    except Interrupted as error:
        return RunOutcome(Status.INTERRUPTED, str(error), stopped_by=error.exit_code - 128)
    except RetrainError as error:
        print(clean(f"retrain: {error}"), file=sys.stderr)
        return RunOutcome(Status.FAILED, " ".join(str(error).split()))
    except Exception as error:  # whatever one run dies of, the others go on; its traceback is in its output
        traceback.print_exc()
        return RunOutcome(Status.FAILED, f"{type(error).__name__}: {' '.join(str(error).split())[:300]} (the traceback is in {OUTPUT})")
    return RunOutcome(Status.DONE)


@contextmanager
def output_to(folder: Path) -> Iterator[None]:
    """What Python code prints goes to the run's output.log."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / OUTPUT).open("a", encoding="utf-8", buffering=1) as file, redirect_stdout(file), redirect_stderr(file):
        yield


@dataclass(frozen=True)
class Ended:
    """A job that is over when its start returns."""

    outcome: RunOutcome

    def poll(self) -> RunOutcome:
        return self.outcome

    def stop(self, signal_number: int) -> None: ...

    def kill(self) -> None: ...


def no_output(run: CampaignRun, error: OSError) -> RunOutcome:
    """Of a run whose folder or output cannot be written."""
    return RunOutcome(Status.FAILED, f"{run.folder / OUTPUT} cannot be written: {error.strerror}; free space there")


class InProcess:
    """One run after the other in this process. The model stays loaded from run to run."""

    workers = 1

    def __init__(self) -> None:
        from retrain.model.load import shared_models

        self._models = shared_models()
        self._models.__enter__()

    def start(self, run: CampaignRun, slot: int) -> Ended:
        try:
            with output_to(run.folder):
                outcome = perform(run.config)
        except OSError as error:
            outcome = no_output(run, error)
        gc.collect()  # the run's optimizer and caches, which hold on to each other
        return Ended(outcome)

    def close(self) -> None:
        self._models.__exit__(None, None, None)

"""Share the parts of trackers outside of the run's folder: settings, metric names, the check for an
extra, and their threads.
"""

import contextlib
import importlib
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from retrain.errors import EnvironmentFailure
from retrain.install import install_hint
from retrain.records.entries import GenerationRecord, SftRecord, StepRecord
from retrain.records.evaluation import Evaluation
from retrain.records.redact import Redactor
from retrain.records.run_folder import RunFolder
from retrain.records.summary import RunSummary, SqueezeSummary, TableRow
from retrain.tracking.base import Event, Generations, StartEvent, Tracker
from retrain.tracking.files import kept_generations

if TYPE_CHECKING:
    from retrain.config import TrainConfig


FOLDER = "folder"
"""The entry of a tracker's state with the run's folder; it reveals a copied run."""
STEP_METRIC = "trainer/step"
"""The x axis of training metrics. The trackers' own step counters drop values for steps that a
resumed run repeats.
"""
SFT_METRIC = "sft/step"
"""The x axis of the supervised stage."""
RANK_METRIC = "squeeze/rank"
"""The x axis of a squeeze analysis."""


@dataclass(frozen=True)
class ExternalSettings:
    config: "TrainConfig"
    folder: RunFolder
    run_name: str
    redactor: Redactor
    resumed: Mapping[str, str]
    """The `state` of the run's earlier session; empty for a new run."""
    first_step: int
    """Steps completed when this session starts."""

    @property
    def project(self) -> str:
        return self.redactor.text(self.config.logging.wandb_project or "retrain")

    @property
    def group(self) -> str | None:
        return self.redactor.text(self.config.logging.wandb_group) or None

    @property
    def tags(self) -> list[str]:
        return [self.redactor.text(tag) for tag in self.config.logging.tags]

    def masked_config(self) -> dict[str, Any]:
        return self.redactor.config(self.config).model_dump(
            mode="json", by_alias=True, exclude_none=True
        )

    def masked_rows(self, records: Sequence[GenerationRecord]) -> list[list[Any]]:
        """Return completions as the rows of a table under GENERATION_COLUMNS."""
        return [list(self.redactor.json(record.to_json()).values()) for record in records]


class ExternalTracker(Tracker):
    """A tracker that runs in a thread of its own (`Background`). It may raise any exception of its
    library.

    Another thread reads `state`, also before `StartEvent`, so it uses only what the constructor
    knows.
    """

    def __init__(self, settings: ExternalSettings) -> None:
        self.settings = settings
        self.outbox: queue.SimpleQueue[str] = queue.SimpleQueue()
        """Lines for the person at the screen, which the run's own thread prints."""

    def abandon(self) -> None:
        """Give up after a failure or a timeout: from now on the library must not delay the end of
        the process.
        """


# -- metric names ----------------------------------------------------------------------------------


def metrics(record: StepRecord) -> dict[str, float]:
    """Return the numbers of a step under train/ and its parts entropy/, surprisal/, backpressure/,
    environment/, loss/ and schedule/.
    """
    tables = {
        "environment": record.environment_metrics,
        "loss": record.loss_metrics,
        "schedule": record.scheduled,
    }
    measured = {
        f"train/{part}/{name}": value
        for part, values in tables.items()
        for name, value in (values or {}).items()
    }
    measured |= {f"train/{name}": value for name, value in (record.by_task or {}).items()}
    return measured | {
        metric_name(name): float(value)
        for name, value in record.to_json().items()
        if isinstance(value, int | float)
        and name != "step"
        and not (name == "loss" and record.loss_is_placeholder)
    }


def metric_name(field: str) -> str:
    """Name a field for a tracker: entropy_mean -> train/entropy/mean, exec_entropy_mean ->
    train/entropy/exec_mean, bp_sigma -> train/backpressure/sigma.
    """
    if field.startswith("bp_"):
        return f"train/backpressure/{field.removeprefix('bp_')}"
    for kind in ("entropy", "surprisal"):
        part, found, rest = field.partition(f"{kind}_")
        if found and part in ("", "exec_", "plan_"):
            return f"train/{kind}/{part}{rest}"
    return f"train/{field}"


def sft_metrics(record: SftRecord) -> dict[str, float]:
    """Return the numbers of a supervised step, with its axis."""
    values = record.to_json().items()
    return {f"sft/{name}": float(value) for name, value in values if value is not None}


def evaluation_metrics(result: Evaluation) -> dict[str, float]:
    """Return pass@k with its interval, and the axis of the evaluation's stage."""
    if result.stage == "sft":
        rates = evaluation_metrics(replace(result, stage="rl"))
        named = {f"sft/{name}": value for name, value in rates.items() if name != STEP_METRIC}
        return named | {SFT_METRIC: result.step}
    low, high = result.interval
    values = {f"eval/pass@{k}": value for k, value in sorted(result.pass_at.items())}
    tasks = result.by_task
    if len(tasks) > 1:
        values |= {
            f"eval/{task}/pass@{k}": value
            for task, part in tasks.items()
            for k, value in sorted(part.pass_at.items())
        }
    return values | {"eval/pass@1_low": low, "eval/pass@1_high": high, STEP_METRIC: result.step}


def squeeze_summary(result: SqueezeSummary) -> dict[str, float]:
    return {
        "squeeze/recommended_rank": result.recommended_rank,
        "squeeze/source_rank": result.source_rank,
        "squeeze/threshold": result.threshold,
    }


def squeeze_metrics(row: TableRow) -> dict[str, float]:
    """Return one point of each curve over RANK_METRIC for a rank."""
    return {f"squeeze/variance_{name}": getattr(row, name) for name in ("mean", "min", "max")} | {
        "squeeze/variance_whole": row.energy,
        "squeeze/error": row.error,
    }


def squeeze_table(result: SqueezeSummary) -> tuple[list[str], list[list[float]]]:
    """Return the head and the rows of the analysis as a table."""
    columns = ["rank", *squeeze_metrics(result.table[0])]
    return columns, [[row.rank, *squeeze_metrics(row).values()] for row in result.table]


GENERATION_COLUMNS = tuple(field.name for field in fields(GenerationRecord))


def check_extra(module: str, extra: str = "") -> None:
    """Raise EnvironmentFailure if a tracker's library is missing; import no library."""
    if find_spec(module) is None:
        raise _not_installed(module, module, extra)


def _not_installed(module: str, missing: str | None, extra: str) -> EnvironmentFailure:
    return EnvironmentFailure(
        f"[logging] trackers asks for {module}, which this environment lacks ({missing} is"
        f" missing); {install_hint(extra)}."
    )


def import_extra(module: str, extra: str = "") -> ModuleType:
    """Import a tracker's library; `extra` is "" for a library that comes with retrain itself."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise _not_installed(module, error.name, extra) from error
    except ImportError as error:
        raise EnvironmentFailure(
            f"[logging] trackers asks for {module}, which does not import ({error}); reinstall"
            " it or leave it out."
        ) from error


class Background(Tracker):
    """Hands each event to `sink` in another thread. An event never blocks the caller, and its
    failure never reaches the caller.
    """

    capacity = 1000
    """Length of the queue: enough for minutes without a server, and some megabytes."""
    patience_s = 30.0
    """Seconds for which the end of a run waits for a tracker. This is enough to upload the last
    steps, and bounds the wait for a server that is down.
    """

    def __init__(
        self, name: str, sink: ExternalTracker, log: Callable[[str], None], files: Path
    ) -> None:
        """`files` is the folder to name in a warning: it holds the data that the tracker misses."""
        self._name = name
        self._sink = sink
        self._say = log
        self._files = files
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._complained = False
        self._closed = False

    # -- the caller's thread -----------------------------------------------------------------------

    def emit(self, event: Event) -> None:
        match event:
            case StartEvent():
                # daemon: a tracker that hangs must not keep the process alive
                self._thread = threading.Thread(
                    target=self._work, name=f"tracker-{self._name}", daemon=True
                )
                self._thread.start()
                self._hand_over(event)
            # Cut before the queue, which would hold a whole step's texts.
            case Generations(step, records):
                kept = kept_generations(self._sink.settings.config.logging, step, records)
                if kept:
                    self._hand_over(Generations(step, kept))
            case StepRecord() | Evaluation() | SqueezeSummary() | RunSummary():
                self._hand_over(event)

    def close(self) -> None:
        """Wait until the sink has taken everything, at most `patience_s`."""
        if self._thread is None or self._closed:
            return
        self._closed = True
        self._events.put(None)
        self._thread.join(self.patience_s)
        self._tell_news()
        if self._thread.is_alive():
            self._complain(
                f"{self._name} did not end within {self.patience_s:g} s, so retrain stops"
                " waiting for it"
            )
        if self._thread.is_alive() or self._failure is not None:
            self._sink.abandon()

    def state(self) -> dict[str, str]:
        return self._sink.state() | {FOLDER: str(self._files.resolve())}

    def _hand_over(self, event: Event) -> None:
        self._tell_news()
        if self._thread is None or self._closed or self._failure is not None:
            return
        if self._events.qsize() < self.capacity:
            self._events.put(event)
        else:
            self._complain(
                f"{self._name} is {self.capacity} events behind and drops new ones until it"
                " catches up"
            )

    def _tell_news(self) -> None:
        while not self._sink.outbox.empty():
            self._say(self._sink.outbox.get())
        if self._failure is not None:
            reason = " ".join(str(self._failure).split()).rstrip(".") or "no reason given"
            self._complain(
                f"{self._name} failed and receives nothing more from this run"
                f" ({type(self._failure).__name__}: {reason})"
            )

    def _complain(self, what: str) -> None:
        if not self._complained:
            self._complained = True
            self._say(f"{what}; the run continues, and {self._files} holds all of it.")

    # -- the tracker's thread ----------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while (event := self._events.get()) is not None:
                self._sink.emit(event)
            self._sink.close()
        except Exception as error:  # noqa: BLE001 - a library may raise anything, and none of it may end the run
            self._failure = error
            # Report the first failure; a second one adds no information.
            with contextlib.suppress(Exception):
                self._sink.close()

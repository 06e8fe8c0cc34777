"""Weights & Biases. WANDB_MODE=offline keeps everything on disk until `wandb sync`."""

import atexit
import contextlib
import os
import secrets
import sys
import threading
from collections.abc import Sequence
from typing import Any

import psutil

from retrain.records.entries import GenerationRecord, SftRecord, StepRecord
from retrain.records.evaluation import Evaluation
from retrain.records.summary import RunSummary, SqueezeSummary
from retrain.tracking.base import Event, Generations, StartEvent
from retrain.tracking.external import (
    GENERATION_COLUMNS,
    RANK_METRIC,
    SFT_METRIC,
    STEP_METRIC,
    ExternalSettings,
    ExternalTracker,
    evaluation_metrics,
    import_extra,
    metrics,
    sft_metrics,
    squeeze_metrics,
    squeeze_summary,
    squeeze_table,
)

_RUN_ID = "wandb_run_id"
_INCREMENTS = 100
"""Increments of one table that wandb shows."""
_INIT_S = 10.0
"""Seconds to wait for a server that does not answer; wandb then keeps the run on disk."""
_FINISH_S = 25.0
"""Seconds for uploading the last steps. It is below the background's patience, so that the message
names the command to upload them later. """
_EXIT_S = 2.0
"""Seconds for wandb's service process at the end of ours, once the tracker has failed or hangs."""
_SERVICE = "wandb-core"
"""The program of that process."""
_STORES = ("WANDB_DATA_DIR", "WANDB_CACHE_DIR")
"""Variables of the folders where wandb prepares and keeps tables. By default wandb uses the home
folder, which may refuse writes.
"""
_MAX_TAG_LENGTH = 64
"""Maximum number of characters of a tag that wandb accepts."""


class WandbTracker(ExternalTracker):
    def __init__(self, settings: ExternalSettings) -> None:
        super().__init__(settings)
        # This disables its Sentry reporting.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._wandb = import_extra("wandb")
        self._run: Any = None
        # wandb does not choose the id: retrain may seal the first checkpoint before wandb answers.
        self._run_id = settings.resumed.get(_RUN_ID) or secrets.token_hex(4)
        self._completions: Any = None
        self._unsent_steps = 0
        self._said_table = False
        self._stores: list[str] = []
        """Variables of `_STORES` that hold this run's folder; the next run has its own."""

    def emit(self, event: Event) -> None:
        match event:
            case StartEvent():
                self._start()
            case StepRecord():
                self._run.log(metrics(event) | {STEP_METRIC: event.step})
            case SftRecord():
                self._run.log(sft_metrics(event))
            case Evaluation():
                self._run.log(evaluation_metrics(event))
            case Generations():
                self._add_completions(event.records)
            case SqueezeSummary():
                self._log_squeeze(event)
            case RunSummary():
                self._finish(event)

    def _start(self) -> None:
        self._stores = [name for name in _STORES if name not in os.environ]
        os.environ |= dict.fromkeys(self._stores, str(self.settings.folder.wandb.absolute()))
        excepthook = sys.excepthook
        # The screen is ours, and nobody is there to answer a prompt for a key.
        self._wandb.setup(self._wandb.Settings(silent=True))
        try:
            self._run = self._init(self._run_id)
        except self._wandb.errors.Error as error:
            # wandb may still hold the other id for the run that it could not begin.
            on_disk = secrets.token_hex(4)
            self._run = self._init(on_disk, mode="offline")
            reason = " ".join(str(error).split()).rstrip(".")
            self.outbox.put(
                f"wandb does not answer ({reason}), so the run stays on disk;"
                f" {self._how_to_send(f'offline-run-*-{on_disk}')}."
            )
        # wandb puts one there that prints a traceback without masking its secrets.
        sys.excepthook = excepthook
        self._run.define_metric(STEP_METRIC)
        self._run.define_metric(RANK_METRIC)
        self._run.define_metric(SFT_METRIC)
        for prefix, axis in (
            ("train", STEP_METRIC),
            ("eval", STEP_METRIC),
            ("squeeze", RANK_METRIC),
            ("sft", SFT_METRIC),
        ):
            self._run.define_metric(f"{prefix}/*", step_metric=axis)

    def _init(self, run_id: str, mode: str | None = None) -> Any:
        settings = self.settings
        return self._wandb.init(
            project=settings.project,
            entity=settings.config.logging.wandb_entity or None,
            name=settings.run_name,
            group=settings.group,
            tags=[tag[:_MAX_TAG_LENGTH] for tag in settings.tags] or None,
            dir=str(settings.folder.path),
            config=settings.masked_config(),
            id=run_id,
            resume="allow",
            # A campaign's runs share a process, so another run may still exist.
            reinit="create_new",
            mode=mode,
            settings=self._wandb.Settings(
                # The screen and the machine's description are ours: wandb's own would send the
                # unmasked command line.
                console="off",
                silent=True,
                disable_code=True,
                disable_git=True,
                x_disable_meta=True,
                init_timeout=_INIT_S,
                finish_timeout=_FINISH_S,
                finish_timeout_raises=True,
            ),
        )

    def _add_completions(self, records: Sequence[GenerationRecord]) -> None:
        """Add rows to one growing table, since wandb shows only the newest of several tables under
        one name.
        """
        if self._completions is None:
            self._completions = self._wandb.Table(
                columns=list(GENERATION_COLUMNS), log_mode="INCREMENTAL", allow_mixed_types=True
            )
        for row in self.settings.masked_rows(records):
            self._completions.add_data(*row)
        self._unsent_steps += 1
        recorded = self.settings.config.training.max_steps // max(
            1, self.settings.config.logging.generations_every
        )
        if self._unsent_steps * _INCREMENTS >= recorded:
            self._send_completions()

    def _send_completions(self) -> None:
        if self._unsent_steps:
            # wandb cannot append to a table of an earlier offline session, and would replace it.
            first = self.settings.first_step
            key = f"completions_from_step_{first}" if first else "completions"
            self._log_table(key, self._completions, {STEP_METRIC: self._completions.data[-1][0]})
            self._unsent_steps = 0

    def _log_table(self, key: str, table: Any, at: dict[str, float]) -> None:
        """Log a table. A failure costs only the table: the numbers continue."""
        try:
            self._run.log({key: table} | at)
        except Exception as error:  # noqa: BLE001 - wandb may raise anything here
            reason = " ".join(str(error).split()).rstrip(".")
            if not self._said_table:
                self.outbox.put(f"wandb did not take the table {key} ({reason}); it gets the rest.")
            self._said_table = True

    def _log_squeeze(self, result: SqueezeSummary) -> None:
        for row in result.table:
            self._run.log(squeeze_metrics(row) | {RANK_METRIC: row.rank})
        columns, rows = squeeze_table(result)
        self._log_table("squeeze/table", self._wandb.Table(columns=columns, data=rows), {})
        self._run.summary.update(squeeze_summary(result))

    def _finish(self, summary: RunSummary) -> None:
        self._send_completions()
        values = {
            "status": summary.status,
            "steps": summary.steps,
            "seconds": summary.seconds,
            "tokens": summary.tokens,
        }
        self._run.summary.update(
            self.settings.redactor.json(
                values | ({"reason": summary.reason} if summary.reason else {})
            )
        )
        self._end(0 if summary.status == "done" else 1)

    def close(self) -> None:
        """Finish the wandb run. A run without a `RunSummary` never began, so its exit code is
        1.
        """
        if self._run is not None:
            self._send_completions()
            self._end(1)

    def _end(self, exit_code: int) -> None:
        run, self._run = self._run, None
        try:
            run.finish(exit_code=exit_code)
        except TimeoutError:
            self.outbox.put(
                f"wandb did not accept everything within {_FINISH_S:g} s;"
                f" {self._how_to_send(f'run-*-{self._run_id}')}."
            )
        for name in self._stores:
            os.environ.pop(name, None)

    def _how_to_send(self, folder: str) -> str:
        return (
            f"send it later with `wandb sync --id {self._run_id}"
            f" {self.settings.folder.wandb}/{folder}`"
        )

    def state(self) -> dict[str, str]:
        return {_RUN_ID: self._run_id}

    def abandon(self) -> None:
        """Wait for wandb's service process a limited time when Python exits. The library itself
        waits without a limit, and prints a traceback if that process has died.

        This runs before wandb's own hook (Python calls the last registered hook first), in a thread
        that the exit may leave behind. Python cannot start a thread that late, so this starts it
        now.
        """
        exiting, ended = threading.Event(), threading.Event()

        def end() -> None:
            exiting.wait()
            with contextlib.suppress(Exception):
                self._wandb.teardown()
            ended.set()

        def at_exit() -> None:
            exiting.set()
            if not ended.wait(_EXIT_S):
                # Else it ends by itself, but seconds later, and holds our output open until then.
                for child in psutil.Process().children():
                    with contextlib.suppress(psutil.Error):
                        if child.name() == _SERVICE:
                            child.kill()

        threading.Thread(target=end, name="wandb-exit", daemon=True).start()
        atexit.register(at_exit)

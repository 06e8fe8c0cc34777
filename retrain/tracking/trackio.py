"""Trackio: the same picture as wandb, kept on this machine."""

import sys
from contextlib import redirect_stdout
from typing import Any

from retrain.tracking.external import STEP_METRIC, ExternalSettings, evaluation_metrics, import_extra, metrics
from retrain.tracking.record import EvaluationResult, StepRecord
from retrain.tracking.tracker import Tracker

_RUN_NAME = "trackio_run_name"


class TrackioTracker(Tracker):
    def __init__(self, settings: ExternalSettings) -> None:
        self._settings = settings
        self._trackio = import_extra("trackio", "trackio")
        self._run: Any = None
        self._name = settings.resumed.get(_RUN_NAME, "")

    def start(self, device: str) -> None:
        with redirect_stdout(sys.stderr):  # trackio prints, and standard output is ours
            self._run = self._trackio.init(
                project=self._settings.project,
                name=self._name or self._settings.run_name,
                group=self._settings.config.logging.wandb_group or None,
                config=self._settings.masked_config(),
                resume="allow" if self._name else "never",
            )
        self._name = str(self._run.name)

    def step(self, record: StepRecord) -> None:
        self._run.log(metrics(record) | {STEP_METRIC: record.step}, step=record.step)

    def evaluation(self, result: EvaluationResult) -> None:
        self._run.log(evaluation_metrics(result) | {STEP_METRIC: result.step}, step=result.step)

    def close(self) -> None:
        if self._run is not None:
            with redirect_stdout(sys.stderr):
                self._run.finish()
            self._run = None

    def state(self) -> dict[str, str]:
        return {_RUN_NAME: self._name} if self._name else {}

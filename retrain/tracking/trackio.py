"""Trackio: the same picture as wandb, kept on this machine."""

from typing import Any

from retrain.tracking.external import STEP_METRIC, ExternalSettings, evaluation_metrics, import_extra, metrics
from retrain.tracking.record import EvaluationResult, StepRecord
from retrain.tracking.tracker import Tracker


class TrackioTracker(Tracker):
    def __init__(self, settings: ExternalSettings) -> None:
        self._settings = settings
        self._trackio = import_extra("trackio", "trackio")
        self._run: Any = None

    def start(self, device: str) -> None:
        self._run = self._trackio.init(
            project=self._settings.project,
            name=self._settings.run_name,
            group=self._settings.config.logging.wandb_group or None,
            config=self._settings.masked_config(),
            resume="allow",
        )

    def step(self, record: StepRecord) -> None:
        self._run.log(metrics(record) | {STEP_METRIC: record.step}, step=record.step)

    def evaluation(self, result: EvaluationResult) -> None:
        self._run.log(evaluation_metrics(result) | {STEP_METRIC: result.step}, step=result.step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None

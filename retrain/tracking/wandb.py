"""Weights & Biases. WANDB_MODE=offline keeps everything on disk until `wandb sync`."""

from typing import Any

from retrain.errors import EnvironmentFailure
from retrain.tracking.external import STEP_METRIC, ExternalSettings, evaluation_metrics, import_extra, metrics
from retrain.tracking.record import EvaluationResult, RunSummary, StepRecord
from retrain.tracking.tracker import Tracker

_RUN_ID = "wandb_run_id"


class WandbTracker(Tracker):
    def __init__(self, settings: ExternalSettings) -> None:
        self._settings = settings
        self._wandb = import_extra("wandb", "wandb")
        self._run: Any = None
        self._run_id = settings.resumed.get(_RUN_ID, "")

    def start(self, device: str) -> None:
        logging, settings = self._settings.config.logging, self._settings
        try:
            self._run = self._wandb.init(
                project=settings.project,
                entity=logging.wandb_entity or None,
                name=settings.run_name,
                group=logging.wandb_group or None,
                tags=logging.tags or None,
                dir=str(settings.folder.path),
                config=settings.masked_config(),
                id=self._run_id or None,
                resume="allow" if self._run_id else None,
                # The screen and the machine's description are ours: wandb's own would send the unmasked command line.
                settings=self._wandb.Settings(console="off", silent=True, disable_code=True, disable_git=True, x_disable_meta=True),
            )
        except self._wandb.errors.Error as error:
            raise EnvironmentFailure(
                f"wandb cannot start for [logging] wandb_project = {settings.project!r}: {error}; "
                "set WANDB_API_KEY, or WANDB_MODE=offline to keep the run on disk."
            ) from error
        self._run_id = self._run.id
        self._run.define_metric(STEP_METRIC)
        self._run.define_metric("*", step_metric=STEP_METRIC)

    def step(self, record: StepRecord) -> None:
        self._run.log(metrics(record) | {STEP_METRIC: record.step})

    def evaluation(self, result: EvaluationResult) -> None:
        self._run.log(evaluation_metrics(result) | {STEP_METRIC: result.step})

    def finish(self, summary: RunSummary) -> None:
        self._run.summary.update({"status": summary.status, "steps": summary.steps, "seconds": summary.seconds, "tokens": summary.tokens})
        self._run.finish(exit_code=0)
        self._run = None

    def close(self) -> None:
        """Without `finish` before it the run has failed."""
        if self._run is not None:
            self._run.finish(exit_code=1)
            self._run = None

    def state(self) -> dict[str, str]:
        return {_RUN_ID: self._run_id} if self._run_id else {}

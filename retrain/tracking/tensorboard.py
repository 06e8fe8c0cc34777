"""TensorBoard event files, in `tensorboard/` of the run's folder."""

from typing import Any

from retrain.tracking.external import ExternalSettings, evaluation_metrics, import_extra, metrics
from retrain.tracking.record import EvaluationResult, StepRecord
from retrain.tracking.tracker import Tracker


class TensorboardTracker(Tracker):
    def __init__(self, settings: ExternalSettings) -> None:
        import_extra("tensorboard", "tensorboard")
        self._settings = settings
        self._writer: Any = None

    def start(self, device: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Steps that a resumed run makes again hide what the events said of them before.
        first = self._settings.first_step
        self._writer = SummaryWriter(str(self._settings.folder.tensorboard), purge_step=first or None)

    def step(self, record: StepRecord) -> None:
        self._scalars(metrics(record), record.step)

    def evaluation(self, result: EvaluationResult) -> None:
        self._scalars(evaluation_metrics(result), result.step)

    def _scalars(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

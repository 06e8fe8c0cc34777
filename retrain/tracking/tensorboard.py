"""TensorBoard event files, in `tensorboard/` of the run's folder: `tensorboard --logdir logs`."""

from typing import Any

from retrain.records.entries import SftRecord, StepRecord
from retrain.records.evaluation import Evaluation
from retrain.records.summary import SqueezeSummary
from retrain.tracking.base import Event, Generations
from retrain.tracking.external import (
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
)


class TensorboardTracker(ExternalTracker):
    def __init__(self, settings: ExternalSettings) -> None:
        super().__init__(settings)
        import_extra("tensorboard", "tensorboard")
        self._writers: dict[str, Any] = {}

    def emit(self, event: Event) -> None:
        match event:
            case StepRecord():
                self._scalars(self._writer(), metrics(event), event.step)
            case SftRecord():
                self._scalars(self._writer("sft"), sft_metrics(event), event.step)
            case Evaluation():
                name = "sft" if event.stage == "sft" else "eval"
                self._scalars(self._writer(name), evaluation_metrics(event), event.step)
            case Generations(step, records):
                lines = (
                    f"{record.outcome} {record.prompt_id} ({record.num_tokens}"
                    f" tokens)\n{record.completion}"
                    for record in records
                )
                text = self.settings.redactor.text("\n\n".join(lines))
                # A model's text is no Markdown.
                code = "\n".join(f"    {line}" for line in text.splitlines())
                self._writer().add_text("completions", code, step)
            case SqueezeSummary():
                for row in event.table:
                    self._scalars(self._writer(), squeeze_metrics(row), row.rank)
                self._scalars(self._writer(), squeeze_summary(event), 0)

    def _writer(self, name: str = "") -> Any:
        """Return the writer of training or of evaluations. They are separate since an evaluation
        counts completed steps, so that its step 20 precedes training step 20.
        """
        if name not in self._writers:
            from torch.utils.tensorboard import SummaryWriter

            first = self.settings.first_step
            # The steps that a resumed run repeats hide their earlier events.
            purge = first + 1 if name else first
            self._writers[name] = SummaryWriter(
                str(self.settings.folder.tensorboard / name), purge_step=purge if first else None
            )
        return self._writers[name]

    @staticmethod
    def _scalars(writer: Any, values: dict[str, float], step: int) -> None:
        for name in values.keys() - {STEP_METRIC, SFT_METRIC}:
            writer.add_scalar(name, values[name], step)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

"""Trackio keeps the same metrics as wandb on this machine; `trackio show` opens them."""

import importlib
from typing import Any

from retrain.records.entries import SftRecord, StepRecord
from retrain.records.evaluation import Evaluation
from retrain.records.summary import SqueezeSummary
from retrain.tracking.base import Event, Generations, StartEvent
from retrain.tracking.external import (
    GENERATION_COLUMNS,
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

_RUN_NAME = "trackio_run_name"
_RUN_ID = "trackio_run_id"


class TrackioTracker(ExternalTracker):
    def __init__(self, settings: ExternalSettings) -> None:
        super().__init__(settings)
        self._trackio = import_extra("trackio", "trackio")
        self._run: Any = None
        self._name = settings.resumed.get(_RUN_NAME) or settings.run_name
        self._run_id = settings.resumed.get(_RUN_ID, "")

    def emit(self, event: Event) -> None:
        match event:
            case StartEvent():
                self._start()
            case StepRecord():
                self._run.log(metrics(event) | {STEP_METRIC: event.step}, step=event.step)
            case SftRecord():
                self._run.log(sft_metrics(event), step=event.step)
            case Evaluation():
                self._run.log(evaluation_metrics(event), step=event.step)
            case Generations(step, records):
                table = self._trackio.Table(
                    columns=list(GENERATION_COLUMNS), data=self.settings.masked_rows(records)
                )
                self._run.log({"completions": table}, step=step)
            case SqueezeSummary():
                self._log_squeeze(event)

    def _start(self) -> None:
        # trackio (0.43) prints to standard output, which belongs to the run, and has no switch.
        # Python cannot redirect sys.stdout for one thread.
        for module in ("trackio", "trackio.run", "trackio.utils", "trackio.deploy"):
            vars(importlib.import_module(module))["print"] = lambda *_, **__: None
        self._run = self._trackio.init(
            project=self.settings.project,
            name=self._name,
            group=self.settings.group,
            config=self.settings.masked_config(),
            resume="allow" if self._run_id else "never",
            embed=False,
        )
        if self._run_id:
            # trackio resumes the newest run of that name, which may be a different run.
            self._run.id = self._run_id
        self._run_id = str(self._run.id)

    def _log_squeeze(self, result: SqueezeSummary) -> None:
        for row in result.table:
            self._run.log(squeeze_metrics(row), step=row.rank)
        columns, rows = squeeze_table(result)
        self._run.log(
            squeeze_summary(result)
            | {"squeeze/table": self._trackio.Table(columns=columns, data=rows)},
            step=0,
        )

    def close(self) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()

    def state(self) -> dict[str, str]:
        if self._run_id:
            return {_RUN_NAME: self._name, _RUN_ID: self._run_id}
        return {}

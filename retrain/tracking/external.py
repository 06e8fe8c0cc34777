"""What the trackers outside of the run's folder have in common: settings, metric names, the sentence for a missing extra."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from retrain.errors import EnvironmentFailure
from retrain.tracking.record import EvaluationResult, StepRecord
from retrain.tracking.redact import Redactor
from retrain.tracking.run_folder import RunFolder

if TYPE_CHECKING:
    from retrain.config import TrainConfig

STEP_METRIC = "trainer/step"
"""Our own x axis: steps that a resumed run makes again land on their old place instead of being dropped."""


@dataclass(frozen=True)
class ExternalSettings:
    config: "TrainConfig"
    folder: RunFolder
    condition: str
    redactor: Redactor
    resumed: Mapping[str, str]
    """The `state` of the run's earlier session; empty for a new run."""
    first_step: int
    """Steps completed when this session starts."""

    @property
    def run_name(self) -> str:
        return self.config.logging.wandb_run_name or self.condition

    @property
    def project(self) -> str:
        return self.config.logging.wandb_project or "retrain"

    def masked_config(self) -> dict[str, Any]:
        masked: dict[str, Any] = self.redactor.json(self.config.model_dump(mode="json", by_alias=True, exclude_none=True))
        return masked


def metrics(record: StepRecord) -> dict[str, float]:
    """The numbers of a step under train/, train/entropy/, train/surprisal/ and train/backpressure/; what is absent is left out."""
    return {
        metric_name(name): float(value)
        for name, value in record.to_json().items()
        if isinstance(value, int | float) and name != "step" and not (name == "loss" and record.loss_is_placeholder)
    }


def metric_name(field: str) -> str:
    """exec_entropy_mean -> train/entropy/exec_mean, bp_sigma -> train/backpressure/sigma, grad_norm -> train/grad_norm."""
    if field.startswith("bp_"):
        return f"train/backpressure/{field.removeprefix('bp_')}"
    for kind in ("entropy", "surprisal"):
        if field.startswith((f"exec_{kind}_", f"plan_{kind}_")):
            return f"train/{kind}/{field.replace(f'_{kind}', '', 1)}"
    return f"train/{field}"


def evaluation_metrics(result: EvaluationResult) -> dict[str, float]:
    low, high = result.interval
    values = {f"eval/pass@{k}": value for k, value in sorted(result.pass_at.items())}
    return values | {"eval/pass@1_low": low, "eval/pass@1_high": high}


def import_extra(module: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise EnvironmentFailure(
            f'[logging] trackers asks for {extra}, which is not installed ({error.name} is missing); pip install "retrain[{extra}]".'
        ) from error

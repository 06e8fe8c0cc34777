"""What the trackers outside of the run's folder have in common: settings, metric names, the sentence for a missing extra."""

import importlib
import queue
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import ModuleType
from typing import TYPE_CHECKING, Any

from retrain.errors import EnvironmentFailure
from retrain.records.entries import EvaluationResult, GenerationRecord, SqueezeResult, SqueezeRow, StepRecord
from retrain.records.redact import Redactor
from retrain.records.run_folder import RunFolder
from retrain.tracking.base import Tracker
from retrain.tracking.files import kept_generations

if TYPE_CHECKING:
    from retrain.config import TrainConfig

STEP_METRIC = "trainer/step"
"""Our own x axis: steps that a resumed run makes again land on their old place instead of being dropped."""
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
        return self.redactor.config(self.config).model_dump(mode="json", by_alias=True, exclude_none=True)

    def masked_rows(self, records: Sequence[GenerationRecord]) -> list[list[Any]]:
        """Completions as the rows of a table under GENERATION_COLUMNS."""
        return [list(self.redactor.json(record.to_json()).values()) for record in records]


class ExternalTracker(Tracker):
    """A tracker that runs in a thread of its own (background.py) and may raise whatever its library raises.

    `state` is asked for from another thread and before `start`, so it rests on what the constructor knows.
    """

    def __init__(self, settings: ExternalSettings) -> None:
        self.settings = settings
        self.outbox: queue.SimpleQueue[str] = queue.SimpleQueue()
        """Lines for the person at the screen, which the run's own thread prints."""

    def kept_generations(self, step: int, records: Sequence[GenerationRecord]) -> list[GenerationRecord]:
        return kept_generations(self.settings.config.logging, step, records)

    def abandon(self) -> None:
        """It failed, or nobody waits for it any longer: what its library would still do at the end of the process must not delay that."""


# -- metric names --------------------------------------------------------------------------------------------------------


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


def squeeze_summary(result: SqueezeResult) -> dict[str, float]:
    return {
        "squeeze/recommended_rank": result.recommended_rank,
        "squeeze/source_rank": result.source_rank,
        "squeeze/threshold": result.threshold,
    }


def squeeze_metrics(row: SqueezeRow) -> dict[str, float]:
    """What one rank keeps: a point of each curve over RANK_METRIC."""
    return {f"squeeze/variance_{name}": getattr(row, name) for name in ("mean", "min", "max")} | {
        "squeeze/variance_whole": row.energy,
        "squeeze/error": row.error,
    }


GENERATION_COLUMNS = tuple(field.name for field in fields(GenerationRecord))


def import_extra(module: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise EnvironmentFailure(
            f'[logging] trackers asks for {extra}, which is not installed ({error.name} is missing); pip install "retrain[{extra}]".'
        ) from error
    except ImportError as error:
        raise EnvironmentFailure(
            f"[logging] trackers asks for {extra}, which cannot be imported ({error}); reinstall it or leave it out."
        ) from error

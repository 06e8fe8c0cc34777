"""The record of one step of learning: its updates, and the ratios of learner and sampler."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from retrain.types import Float32Array, StepResult


@dataclass
class Update:
    """One optimizer update, done or skipped."""

    loss: float = math.nan
    grad_norm: float = math.nan
    clipped: float = 0.0
    clippable: float = 0.0
    """Both as in `clip_counts`."""
    nonfinite: str = ""
    """The tensor for which the update was skipped; "" if it was done."""


def step_result(updates: Sequence[Update], log_ratios: Sequence[Float32Array]) -> StepResult:
    """Loss and gradient norm are means over the updates that were done: NaN if all were skipped, None if there were none.

    `log_ratios`: learner - sampler log-prob of the action tokens, each token once.
    """
    done = [update for update in updates if not update.nonfinite]
    skipped = [update for update in updates if update.nonfinite]
    clippable = sum(update.clippable for update in done)
    d = np.concatenate([np.empty(0, np.float32), *log_ratios]).astype(np.float64)
    ratios: dict[str, Any] = dict.fromkeys(("ratio_mean", "ratio_max", "mismatch_k1", "mismatch_k3", "ess"))
    if len(d):
        with np.errstate(over="ignore", invalid="ignore"):
            w = np.exp(d)
            p50, p90, p99 = np.quantile(np.abs(d), (0.5, 0.9, 0.99)).tolist()
            ratios = {
                "log_ratio_mean": float(np.abs(d).mean()),
                "log_ratio_p50": p50,
                "log_ratio_p90": p90,
                "log_ratio_p99": p99,
                "ratio_mean": float(w.mean()),
                "ratio_max": float(w.max()),
                "ratio_min": float(w.min()),
                "mismatch_k1": float(-d.mean()),
                "mismatch_k3": float((np.expm1(d) - d).mean()),
                "ess": float(w.sum() ** 2 / (len(w) * np.square(w).sum())),
            }
    return StepResult(
        loss=_mean([update.loss for update in done]) if updates else None,
        grad_norm=_mean([update.grad_norm for update in done]) if updates else None,
        updates=len(done),
        nonfinite_updates=len(skipped),
        nonfinite_tensor=skipped[0].nonfinite if skipped else "",
        clip_fraction=sum(update.clipped for update in done) / clippable if clippable else None,
        **ratios,
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan

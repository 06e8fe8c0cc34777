"""The conditions under which a step stops the run: updates that are never finite, and a sampler that has left the trained policy."""

from retrain.config.schema import Inference, Lora
from retrain.errors import RunFailed
from retrain.records.checkpoint import TrainerState
from retrain.types import StepResult

_NONFINITE_LIMIT = 3
_MISMATCH_STEPS = 3

_LIMIT_FACTOR = 10
_LIMIT_FLOOR, _LIMIT_FLOOR_HALF = 1e-3, 0.02
"""Rounding grows while a policy sharpens, so ten times a gate that measured 1e-6 would stop sound runs."""


def default_mismatch_limit(gate_mean: float, *, half_precision: bool) -> float:
    """Return the default of [inference] mismatch_limit in nats: ten times the gate's own mean, and above the noise of the precision."""
    return max(_LIMIT_FACTOR * gate_mean, _LIMIT_FLOOR_HALF if half_precision else _LIMIT_FLOOR)


def mismatch_limit(inference: Inference, lora: Lora, gate_mean: float, *, half_precision: bool, samples_ahead: bool) -> float | None:
    """Return the limit of a run in nats; None if there is none.

    Dropout and weights that are one step old move the ratio by themselves, so only a limit that was set holds there.
    """
    if inference.mismatch_limit is not None:
        return inference.mismatch_limit or None
    if lora.dropout or samples_ahead:
        return None
    return default_mismatch_limit(gate_mean, half_precision=half_precision)


def check_updates(state: TrainerState, result: StepResult) -> None:
    """Count the steps in a row without a finite update. Raises RunFailed at the third."""
    state.nonfinite_streak = state.nonfinite_streak + 1 if result.updates == 0 and result.nonfinite_updates else 0
    if state.nonfinite_streak >= _NONFINITE_LIMIT:
        raise RunFailed(
            f"{result.nonfinite_tensor} was not finite in {_NONFINITE_LIMIT} steps in a row; the weights are those of the last finite "
            "update: start a new run from them ([lora] init_from) with a lower [training] lr, [loss] max_grad_norm = 1.0 or "
            '[model] dtype = "fp32".'
        )


def check_mismatch(state: TrainerState, mean: float | None, limit: float | None, resume: str) -> None:
    """Count the steps in a row whose mean |log-ratio| is above `limit`. Raises RunFailed at the third; `resume` continues the run."""
    if limit is None or mean is None:
        return
    state.mismatch_streak = state.mismatch_streak + 1 if not mean <= limit else 0  # NaN counts
    if state.mismatch_streak >= _MISMATCH_STEPS:
        raise RunFailed(
            f"Sampler and learner differed by {mean:.2g} nats per token on average at step {state.step - 1}, above the limit of "
            f"{limit:.2g} for {_MISMATCH_STEPS} steps in a row, and the parity gate had measured {state.gate_mismatch or 0:.1e}: the "
            "sampled policy is not the trained one; look at log_ratio_mean in metrics.jsonl and at the engine, or set "
            f"[inference] mismatch_limit (0 is off) and continue with {resume}."
        )

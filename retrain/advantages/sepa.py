"""SEPA's controller: the pooling strength of the uncertainty of execution tokens, as a function of
the step and of the run so far.

    linear(s) = 0 if s <= delay_steps else min(1, (s - delay_steps) / steps)
    auto(s)   = 1 - min(1, (var_ema / var_0) / var_threshold), and 0 until var_0 is known
    lambda(s) = 0 while the gate is closed, else linear(s), or max(auto(s), linear(s)) with
                schedule = "auto"

The order within a step is resolve, learn, observe, update_auto: a gate that opens in step s acts
from step s + 1. Opening the gate does not restart the ramp, so lambda can jump. auto is not
monotone. If the variance rises again, lambda falls to the linear floor.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from retrain.errors import ConfigurationError

if TYPE_CHECKING:
    from retrain.config.schema import Algorithm, Sepa

_VARIANCE_FLOOR = 1e-8
"""Nats squared; keeps the ratio to var_0 finite for a policy that is sure from the start."""


class SEPAController:
    """Holds the gate and the variance of execution tokens; lambda itself is a function of the step
    and this state.
    """

    def __init__(self, settings: "Sepa") -> None:
        self.settings = settings
        self.gate_open = settings.correct_rate_gate <= 0
        self.gate_step: int | None = None
        """The step whose correct rate opened the gate. It is None before the gate opens, and if the
        gate starts open.
        """
        self.var_ema: float | None = None
        self.var_0: float | None = None
        """The smoothed variance at the end of the warm-up."""
        self.warmup_seen = 0
        """Steps that contributed a variance, up to `warmup`."""

    def resolve(self, step: int) -> float:
        """Return lambda of the 0-based `step`, in [0, 1]."""
        if not self.gate_open:
            return 0.0
        linear = linear_lambda(self.settings, step)
        # auto begins after the warm-up.
        if self.settings.schedule != "auto" or self.var_0 is None or self.var_ema is None:
            return linear
        auto = 1.0 - min(
            1.0, (self.var_ema / max(self.var_0, _VARIANCE_FLOOR)) / self.settings.var_threshold
        )
        return max(auto, linear)

    def observe(self, correct_rate: float | None, step: int) -> None:
        """Open the gate permanently once a step's correct rate reaches the threshold. A rate of
        None or NaN changes nothing.
        """
        if self.gate_open or correct_rate is None or math.isnan(correct_rate):
            return
        if correct_rate >= self.settings.correct_rate_gate:
            self.gate_open = True
            self.gate_step = step

    def update_auto(self, exec_uncertainty: Sequence[float] | npt.NDArray[np.floating]) -> None:
        """Update the variance with the uncertainty of all execution tokens of one step, without
        non-finite values. Call it once per step.
        """
        values = np.asarray(exec_uncertainty, dtype=np.float64)
        values = values[np.isfinite(values)]
        if len(values) == 0:
            return
        variance = float(values.var())
        decay = self.settings.ema_decay
        if self.var_ema is None:
            self.var_ema = variance
        else:
            self.var_ema = decay * self.var_ema + (1.0 - decay) * variance
        if self.var_0 is None:
            self.warmup_seen += 1
            if self.warmup_seen >= self.settings.warmup:
                self.var_0 = max(self.var_ema, _VARIANCE_FLOOR)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores as JSON values, with the settings."""
        return {
            "gate_open": self.gate_open,
            "gate_step": self.gate_step,
            "var_ema": self.var_ema,
            "var_0": self.var_0,
            "warmup_seen": self.warmup_seen,
            "config": self.settings.model_dump(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Restore the result of `state_dict`. Returns a sentence for each setting that differs from
        the stored one.

        Raises ValueError naming a missing or impossible field, and then changes nothing.
        """
        gate_open, gate_step = state.get("gate_open"), state.get("gate_step")
        if not isinstance(gate_open, bool):
            raise ValueError(f"SEPA state: gate_open is {gate_open!r}, it must be true or false")
        warmup_seen = _count(state, "warmup_seen")
        if gate_step is not None:
            gate_step = _count(state, "gate_step")
        # Read these last: nothing has changed so far if one is wrong.
        var_ema, var_0 = (_variance(state, name) for name in ("var_ema", "var_0"))
        self.gate_open, self.gate_step, self.warmup_seen = gate_open, gate_step, warmup_seen
        self.var_ema, self.var_0 = var_ema, var_0
        stored = state.get("config", {})
        return [
            f"[sepa] {key} = {value!r} differs from {stored[key]!r}, with which the checkpoint's"
            " controller ran."
            for key, value in self.settings.model_dump().items()
            if key in stored and stored[key] != value
        ]


def linear_lambda(settings: "Sepa", step: int) -> float:
    """Return the linear ramp at the 0-based `step` without the gate; 0 throughout if steps is 0,
    which means no ramp.
    """
    if step <= settings.delay_steps or settings.steps <= 0:
        return 0.0
    return min(1.0, (step - settings.delay_steps) / settings.steps)


def check_ramp(settings: "Sepa") -> None:
    """Raise ConfigurationError for settings with which a controller in use could never leave 0."""
    if settings.steps <= 0 and settings.schedule == "linear":
        raise ConfigurationError(
            f'[sepa] steps = {settings.steps} with schedule = "linear" turns SEPA off; give'
            ' steps of 1 or more, schedule = "auto", or a transform_mode without SEPA.'
        )


def maximal_lambda(settings: "Sepa", max_steps: int) -> float:
    """Return the largest lambda of the linear ramp within `max_steps`, which is also the floor of
    the auto schedule.
    """
    return linear_lambda(settings, max_steps - 1)


def follows_schedule(algorithm: "Algorithm") -> bool:
    """Return True if the transform of this run is a built-in one that lambda scales."""
    from retrain.advantages.transforms import TRANSFORMS

    spec = TRANSFORMS.get(algorithm.modes[1])
    return spec is not None and spec.uses_sepa_controller


def maximal_lambda_note(algorithm: "Algorithm", settings: "Sepa", max_steps: int) -> str | None:
    """Return a start-up sentence if the ramp ends below 1. Return None if the ramp is complete or
    no built-in transform follows it.

    Only the loaded plugin says whether it follows the schedule.
    """
    largest = maximal_lambda(settings, max_steps)
    if largest >= 1.0 or not follows_schedule(algorithm):
        return None
    bound = "reaches at most" if settings.schedule == "linear" else "is only sure to reach"
    return (
        f"SEPA's lambda {bound} {largest:.3f} in this run. The last step is {max_steps - 1},"
        f" and the ramp ends at step {settings.delay_steps + settings.steps}. Lower [sepa]"
        " steps or delay_steps, or raise max_steps."
    )


def _count(state: Mapping[str, Any], name: str) -> int:
    value = state.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"SEPA state: {name} is {value!r}, it must be a whole number of 0 or more")
    return value


def _variance(state: Mapping[str, Any], name: str) -> float | None:
    value = state.get(name)
    if value is None:
        return None
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or value < 0
    ):
        raise ValueError(
            f"SEPA state: {name} is {value!r}, it must be a finite number of 0 or more, or null"
        )
    return float(value)

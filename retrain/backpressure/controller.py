"""Which batch size comes next, from the throughput measured at those before.

First a sweep over min, 2 min, 4 min, ... max, each size at least twice, then back to the configured size. From there on the fitted law
decides: above the target the batch shrinks to it, far below it grows towards it, by no more than a factor of two at a time.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean
from typing import Any, Protocol

from retrain.backpressure.roofline import Roofline
from retrain.backpressure.scaling_law import WINDOW, Fit, ScalingLaw, Weights, fit_scaling_law

_VISITS = 2
"""Of each size in the sweep: one measurement would not tell noise from shape."""
_LEAST_GAIN = 0.10
"""Without a coherency penalty no optimum is in sight; growth goes on while the last one gave this much."""
_ROUNDING = 1e-9
"""A whole number of prompts but for the last binary digit, as 0.29 * 100 is 28.999999999999996, is that number."""
_ANOMALY = 0.8
"""A smoothed throughput below this fraction of the law's prediction is reported. It changes nothing: noise does it too."""


class Regime(StrEnum):
    WARMUP = "warmup"
    RETROGRADE = "retrograde"
    """Above the target: more concurrency costs throughput, or soon will."""
    BELOW_TARGET = "below_target"
    NEAR_TARGET = "optimal"
    UNBOUNDED = "unbounded"
    """No coherency penalty, so no optimum."""
    UNKNOWN = "unknown"
    """No law, or none that explains the measurements."""


class Action(StrEnum):
    SWEEP = "sweep"
    HOLD = "hold"
    INCREASE = "increase"
    THROTTLE = "throttle"


class BackpressureSettings(Protocol):
    """The `[backpressure]` section."""

    @property
    def warmup_steps(self) -> int: ...
    @property
    def ema_decay(self) -> float: ...
    @property
    def throttle_margin(self) -> float: ...
    @property
    def increase_margin(self) -> float: ...
    @property
    def min_batch_size(self) -> int: ...
    @property
    def max_batch_size(self) -> int: ...
    @property
    def cooldown(self) -> int: ...
    @property
    def min_r2(self) -> float: ...
    @property
    def weights(self) -> Weights: ...


@dataclass(frozen=True)
class Decision:
    """What one step gave. Its fields are what is logged; `record_fields` names them as metrics.jsonl does."""

    action: Action
    regime: Regime
    batch_size: int
    """Used in this step."""
    next_batch_size: int
    throughput: float
    """Smoothed over the steps at this concurrency, tokens per second."""
    law: ScalingLaw | None
    r2: float | None
    utilization: float | None
    """Smoothed throughput over the best that the law predicts up to the largest batch."""
    anomaly: float | None
    """Smoothed throughput over what the law predicts here, where that is far below 1."""

    def record_fields(self, hint: Roofline | None = None) -> dict[str, Any]:
        """The bp_ fields of a StepRecord. Where the batch may grow, a roofline hint names the regime more closely."""
        open_ended = self.regime in (Regime.BELOW_TARGET, Regime.UNBOUNDED)
        law = self.law
        return {
            "bp_action": str(self.action),
            "bp_regime": hint.bound if hint and open_ended else str(self.regime),
            "bp_optimal_concurrency": law.optimum if law and math.isfinite(law.optimum) else None,
            "bp_sigma": law.sigma if law else None,
            "bp_kappa": law.kappa if law else None,
            "bp_r2": self.r2,
            "bp_utilization": self.utilization,
        }


class BackpressureController:
    """One `observe` a step. Group size and configured batch size are fixed; only the batch size moves."""

    def __init__(self, settings: BackpressureSettings, batch_size: int, group_size: int) -> None:
        self.settings = settings
        self.configured = batch_size
        self.group_size = group_size
        self.sizes = sweep_sizes(settings.min_batch_size, settings.max_batch_size)
        self.batch_size = self.sizes[0]
        """Of the next step."""
        self.step_count = 0
        self.observations: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        """(concurrency, tokens per second), oldest first."""
        self.ema = 0.0
        self.ema_p = 0
        """The concurrency that `ema` is of; a smoothed throughput over several would be of none."""
        self.law: ScalingLaw | None = None
        self.r2: float | None = None
        self.since_change = 0
        """Steps at the current size."""

    @property
    def sweep_steps(self) -> int:
        """`warmup_steps`, or more where each size would not be visited often enough."""
        return max(self.settings.warmup_steps, _VISITS * len(self.sizes))

    def observe(self, tokens: int, seconds: float) -> Decision:
        """Take in a step at `batch_size` that sampled `tokens`, prompts and skipped groups included, and say what comes next.

        Skipped groups count because they cost time: without them throughput would fall as accuracy rises. Raises ValueError unless
        tokens and seconds are above 0.
        """
        if not (tokens > 0 and seconds > 0 and math.isfinite(seconds)):
            raise ValueError(f"a step samples tokens and takes time, got {tokens} tokens in {seconds} s")
        used = self.batch_size
        self._measure(used * self.group_size, tokens / seconds)
        self.step_count += 1
        self.since_change += 1
        if self.step_count < self.sweep_steps:
            self._change(self.sizes[self.step_count % len(self.sizes)])
            return self._decision(Action.SWEEP, Regime.WARMUP, used)
        trusted = self._refit()
        if self.step_count == self.sweep_steps:
            self._change(self.configured)
            return self._decision(Action.SWEEP, Regime.WARMUP, used)
        regime, wanted = self._judge(trusted)
        action = Action.HOLD
        if wanted != used and self.since_change >= self.settings.cooldown:
            action = Action.INCREASE if wanted > used else Action.THROTTLE
            self._change(wanted)
        return self._decision(action, regime, used)

    def _measure(self, p: int, throughput: float) -> None:
        decay = self.settings.ema_decay
        self.ema = decay * self.ema + (1 - decay) * throughput if p == self.ema_p else throughput
        self.ema_p = p
        self.observations.append((p, throughput))

    def _change(self, size: int) -> None:
        if size != self.batch_size:
            self.batch_size, self.since_change = size, 0

    def _refit(self) -> bool:
        """Fit the window; a fit that is impossible leaves the law before. False where there is no law to act on."""
        concurrencies, throughputs = zip(*self.observations, strict=True)
        fit: Fit = fit_scaling_law(concurrencies, throughputs, self.settings.weights, self.settings.min_r2)
        if fit.law:
            self.law, self.r2 = fit.law, fit.r2
        return self.r2 is not None and self.r2 >= self.settings.min_r2

    def _judge(self, trusted: bool) -> tuple[Regime, int]:
        """The regime at the current size, and the size that it asks for."""
        if not trusted or self.law is None:
            return Regime.UNKNOWN, self.batch_size
        if math.isinf(self.law.optimum):
            return Regime.UNBOUNDED, self._doubled() if self._last_growth_paid() else self.batch_size
        settings = self.settings
        p, target = self.batch_size * self.group_size, settings.throttle_margin * self.law.optimum
        limits = settings.min_batch_size, settings.max_batch_size
        size = target_batch(self.law.optimum, self.group_size, settings.throttle_margin, *limits)
        if p > target:
            return Regime.RETROGRADE, min(size, self.batch_size)
        if p < settings.increase_margin * target:
            return Regime.BELOW_TARGET, max(self.batch_size, min(size, 2 * self.batch_size))
        return Regime.NEAR_TARGET, self.batch_size

    def _doubled(self) -> int:
        return max(self.batch_size, min(2 * self.batch_size, self.settings.max_batch_size))

    def _last_growth_paid(self) -> bool:
        """Whether the throughput here is well above that at the next smaller concurrency seen; True where none was."""
        p = self.batch_size * self.group_size
        smaller = max((seen for seen, _ in self.observations if seen < p), default=None)
        if smaller is None:
            return True
        return self._mean_at(p) >= (1 + _LEAST_GAIN) * self._mean_at(smaller)

    def _mean_at(self, p: float) -> float:
        return fmean(throughput for seen, throughput in self.observations if seen == p)

    def _decision(self, action: Action, regime: Regime, used: int) -> Decision:
        utilization = anomaly = None
        if self.law:
            utilization = self.ema / self.law.peak(max(self.settings.max_batch_size, used) * self.group_size)
            ratio = self.ema / self.law.throughput(self.ema_p)
            anomaly = ratio if ratio < _ANOMALY else None
        return Decision(action, regime, used, self.batch_size, self.ema, self.law, self.r2, utilization, anomaly)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint stores, as JSON values."""
        return {
            "observations": [list(item) for item in self.observations],
            "step_count": self.step_count,
            "ema": self.ema,
            "ema_p": self.ema_p,
            "law": [self.law.lam, self.law.sigma, self.law.kappa] if self.law else None,
            "r2": self.r2,
            "batch_size": self.batch_size,
            "since_change": self.since_change,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the controller that gave `state` would have. Raises KeyError for a state that is not complete."""
        law = state["law"]
        self.observations = deque(((float(p), float(x)) for p, x in state["observations"]), maxlen=WINDOW)
        self.step_count, self.since_change = state["step_count"], state["since_change"]
        self.ema, self.ema_p, self.batch_size = state["ema"], state["ema_p"], state["batch_size"]
        self.law, self.r2 = ScalingLaw(*law) if law else None, state["r2"]


def target_batch(p_star: float, group_size: int, throttle_margin: float, min_batch_size: int, max_batch_size: int) -> int:
    """Prompts a step that put the concurrency at throttle_margin p*, rounded down, within the limits; the upper one for an infinite p*."""
    wanted = throttle_margin * p_star / group_size
    if wanted >= max_batch_size:
        return max_batch_size
    return max(min_batch_size, math.floor(wanted + _ROUNDING))


def sweep_sizes(smallest: int, largest: int) -> tuple[int, ...]:
    """smallest, twice that, ... below the largest, and the largest."""
    sizes = []
    size = smallest
    while size < largest:
        sizes.append(size)
        size *= 2
    return (*sizes, largest)

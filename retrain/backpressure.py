"""Back pressure: the batch size follows measured throughput by the universal scalability law
(Gunther), with a hint from the roofline.

    X(p) = lambda C(p)
    C(p) = p / (1 + sigma (p - 1) + kappa p (p - 1))
    p*   = sqrt((1 - sigma) / kappa)

p is the concurrency, here the completions of a step; sigma is contention, kappa coherency. The fit
is a linear least-squares problem, since p / X is a parabola A + B p + C p^2. Its coefficients are A
= (1 - sigma) / lambda, B = (sigma - kappa) / lambda, C = kappa / lambda. So lambda = 1 / (A + B +
C), sigma = (B + C) lambda and kappa = C lambda.

A sweep visits min, 2 min, 4 min, ..., max at least twice each, then the batch returns to the
configured size. From then on the fitted law decides. Above the target concurrency the batch shrinks
to it. Far below, the batch grows toward it, by a factor of two at most per change.
"""

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from retrain.config.schema import Backpressure

__all__ = [
    "Action",
    "BackpressureController",
    "Decision",
    "Regime",
    "Roofline",
    "ScalingFit",
    "ScalingLaw",
    "capacity",
    "fit_scaling_law",
    "optimal_concurrency",
    "roofline",
    "target_batch",
]


# -- two models of a step's throughput -------------------------------------------------------------


Floats = npt.NDArray[np.float64]
Weights = Literal["relative", "none"]
Bound = Literal["compute_bound", "memory_bound"]
FitStatus = Literal["ok", "insufficient", "rejected", "unknown"]

WINDOW = 100
"""Observations in a fit: the latest ones."""
MIN_CONCURRENCIES = 3
"""Different p that a fit needs: a parabola has three coefficients."""
_NO_COHERENCY = 1e-10
"""A quadratic term below this fraction of p / X at the largest p is rounding."""


def capacity(p: float, sigma: float, kappa: float) -> float:
    """C(p), throughput relative to one completion at a time. Raises ValueError for p < 0."""
    if not p >= 0:
        raise ValueError(f"a concurrency is 0 or more, got {p}")
    return p / (1 + sigma * (p - 1) + kappa * p * (p - 1))


def optimal_concurrency(sigma: float, kappa: float) -> float:
    """Return p*, where throughput is highest: infinite without a coherency penalty, and 1 if more
    than one completion at a time is always slower.
    """
    if kappa <= 0:
        return math.inf
    return max(1.0, math.sqrt(max(0.0, 1 - sigma) / kappa))


@dataclass(frozen=True)
class ScalingLaw:
    lam: float
    """lambda, the throughput at p = 1."""
    sigma: float
    kappa: float

    @property
    def optimum(self) -> float:
        return optimal_concurrency(self.sigma, self.kappa)

    def throughput(self, p: float) -> float:
        return self.lam * capacity(p, self.sigma, self.kappa)

    def peak(self, p_max: float) -> float:
        """Return the highest throughput at any p from 1 to p_max; finite also without a coherency
        penalty.
        """
        inside = min(self.optimum, p_max)
        return max(self.throughput(p) for p in (1.0, inside, p_max))


@dataclass(frozen=True)
class ScalingFit:
    status: FitStatus
    """With "ok", kappa = 0 and the optimum is infinite without a coherency penalty. With
    "insufficient", fewer than three different p determine no parabola. With "rejected", 1 / lambda
    = A + B + C is not above 0, so no law has these coefficients. With "unknown", the law's R^2 is
    below min_r2. The controller's regime has the same name.
    """
    law: ScalingLaw | None = None
    r2: float | None = None
    """R^2 of the throughput, unweighted."""
    superlinear: bool = False
    """True if the fit gave a sigma below 0, which the result replaces by 0."""


def _parabola(x: Floats, y: Floats, weights: Weights) -> tuple[float, float, float]:
    """Fit y = a + b x + c x^2 with c >= 0, which is 0 where the parabola would bend down."""
    weight = np.ones_like(y)
    if weights == "relative":
        weight = 1 / y
    largest = float(x.max())
    u = x / largest  # whose powers have the same magnitude
    a, b, c = _solve(np.stack([np.ones_like(u), u, u * u], axis=1), y, weight).tolist()
    if c <= _NO_COHERENCY * y.max():
        (a, b), c = _solve(np.stack([np.ones_like(u), u], axis=1), y, weight).tolist(), 0.0
    return a, b / largest, c / largest**2


def fit_scaling_law(
    p: Sequence[float],
    throughput: Sequence[float],
    weights: Weights = "relative",
    min_r2: float = 0.5,
) -> ScalingFit:
    """Fit p / X by a parabola in p, with least squares over the last WINDOW observations.

    Noise in X is multiplicative, so the error of p / X grows with p / X, and "relative" divides by
    it. If the parabola bends down, the coherency penalty is 0, and the function fits a straight
    line. Setting kappa to 0 afterwards would bias the other two parameters. Raises ValueError for
    lists of different length, for a p below 1 and for a throughput that is not above 0.
    """
    x, measured = _checked(p, throughput)
    if len(np.unique(x)) < MIN_CONCURRENCIES:
        return ScalingFit("insufficient")
    a, b, c = _parabola(x, x / measured, weights)
    if not (math.isfinite(a + b + c) and a + b + c > 0):
        return ScalingFit("rejected")
    sigma = (b + c) / (a + b + c)
    law = ScalingLaw(1 / (a + b + c), max(0.0, sigma), c / (a + b + c))
    r2 = _r_squared(law, x, measured)
    return ScalingFit("ok" if r2 >= min_r2 else "unknown", law, r2, superlinear=sigma < 0)


def _checked(p: Sequence[float], throughput: Sequence[float]) -> tuple[Floats, Floats]:
    """Return the last WINDOW observations as arrays. Raises ValueError for impossible ones."""
    if len(p) != len(throughput):
        raise ValueError(f"{len(p)} concurrencies and {len(throughput)} throughputs")
    x = np.asarray(p, dtype=np.float64)[-WINDOW:]
    measured = np.asarray(throughput, dtype=np.float64)[-WINDOW:]
    finite = np.isfinite(x).all() and np.isfinite(measured).all()
    if not (finite and (x >= 1).all() and (measured > 0).all()):
        raise ValueError("a concurrency is 1 or more and a throughput above 0, both finite")
    return x, measured


def _solve(columns: Floats, y: Floats, weight: Floats) -> Floats:
    return np.linalg.lstsq(columns * weight[:, np.newaxis], y * weight, rcond=None)[0].astype(
        np.float64
    )


def _r_squared(law: ScalingLaw, p: Floats, throughput: Floats) -> float:
    predicted = np.array([law.throughput(value) for value in p])
    residual = float(np.square(throughput - predicted).sum())
    total = float(np.square(throughput - throughput.mean()).sum())
    if total == 0:  # constant throughput: a law that predicts it explains everything
        return 1.0 if residual <= 1e-12 * float(np.square(throughput).sum()) else 0.0
    return 1 - residual / total


# -- the roofline ----------------------------------------------------------------------------------
#
# A hint, not acted on, says whether arithmetic or memory limits a step. Source: Williams et al.
# 2009, doi 10.1145/1498765.1498785.


@dataclass(frozen=True)
class Roofline:
    bound: Bound
    intensity: float
    """FLOP per byte moved."""
    ridge: float
    """The intensity above which arithmetic is the limit."""
    utilization: float
    """The attained FLOP/s as a fraction of what the hardware can reach at this intensity."""


def step_flops(
    num_parameters: int, tokens_decoded: int, tokens_trained: int, per_trained_token: float = 6.0
) -> float:
    """2 N FLOP per token of a forward pass and `per_trained_token` N per trained one: 6 where all
    weights have gradients.
    """
    return num_parameters * (2.0 * tokens_decoded + per_trained_token * tokens_trained)


def roofline(
    flops: float, num_bytes: float, seconds: float, peak_gflops: float, peak_bw_gb_s: float
) -> Roofline | None:
    """Return the roofline of a step with `flops` and `num_bytes` of memory traffic, or None if a
    peak is 0, which means unknown.

    Raises ValueError unless bytes and seconds are above 0.
    """
    if not (num_bytes > 0 and seconds > 0):
        raise ValueError(
            f"a step takes time and moves bytes, got {seconds} s and {num_bytes} bytes"
        )
    if peak_gflops <= 0 or peak_bw_gb_s <= 0:
        return None
    intensity, ridge = flops / num_bytes, peak_gflops / peak_bw_gb_s
    attained = flops / seconds / 1e9
    return Roofline(
        bound="compute_bound" if intensity >= ridge else "memory_bound",
        intensity=intensity,
        ridge=ridge,
        utilization=attained / min(peak_gflops, intensity * peak_bw_gb_s) if flops else 0.0,
    )


# -- the next batch size ---------------------------------------------------------------------------


_VISITS = 2
"""Visits to each size in the sweep: one measurement cannot tell noise from shape."""
_MIN_GAIN = 0.10
"""Without a coherency penalty throughput has no maximum; the batch grows while the last growth
raised throughput by this fraction."""
_ROUNDING = 1e-9
"""Added before rounding down, since 0.29 * 100 is 28.999999999999996."""


class Regime(StrEnum):
    WARMUP = "warmup"
    RETROGRADE = "retrograde"
    """Above the target: more concurrency costs throughput, or soon will."""
    BELOW_TARGET = "below_target"
    NEAR_TARGET = "optimal"
    UNBOUNDED = "unbounded"
    """The law has no coherency penalty, so it has no optimum."""
    UNKNOWN = "unknown"
    """No law, or its fit is too poor to act on."""


class Action(StrEnum):
    SWEEP = "sweep"
    HOLD = "hold"
    INCREASE = "increase"
    THROTTLE = "throttle"


@dataclass(frozen=True)
class Decision:
    """The outcome of one step; `record_fields` has the names of metrics.jsonl."""

    action: Action
    regime: Regime
    batch_size: int
    """Prompts in this step."""
    next_batch_size: int
    throughput: float
    """Tokens per second, smoothed over the steps at this concurrency."""
    law: ScalingLaw | None
    r2: float | None
    utilization: float | None
    """Smoothed throughput as a fraction of the law's maximum up to the largest batch."""

    def record_fields(self, hint: Roofline | None = None) -> dict[str, Any]:
        """Return the bp_ fields of a StepRecord. If the batch may grow, the roofline hint replaces
        the regime.
        """
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
    """Chooses the batch size: call `observe` once per step. The group size stays."""

    def __init__(self, settings: "Backpressure", batch_size: int, group_size: int) -> None:
        self.settings = settings
        self.configured = batch_size
        self.group_size = group_size
        self.sizes = sweep_sizes(settings.min_batch_size, settings.max_batch_size)
        self.batch_size = self.sizes[0]
        """Prompts in the next step."""
        self.step_count = 0
        self.observations: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        """(concurrency, tokens per second), oldest first."""
        self.ema = 0.0
        self.ema_p = 0
        """The concurrency of `ema`, which restarts when the concurrency changes."""
        self.law: ScalingLaw | None = None
        self.r2: float | None = None
        self.since_change = 0
        """Steps at the current size."""

    @property
    def sweep_steps(self) -> int:
        """`warmup_steps`, or more if the sweep needs more to visit each size often enough."""
        return max(self.settings.warmup_steps, _VISITS * len(self.sizes))

    def observe(self, tokens: int, seconds: float) -> Decision:
        """Record a step at `batch_size` that processed `tokens`, prompts and skipped groups
        included, and choose the next size.

        Skipped groups count because they cost time: without them throughput would fall as accuracy
        rises. Raises ValueError unless tokens and seconds are above 0.
        """
        if not (tokens > 0 and seconds > 0 and math.isfinite(seconds)):
            raise ValueError(
                f"a step samples tokens and takes time, got {tokens} tokens in {seconds} s"
            )
        used = self.batch_size
        p, throughput, decay = used * self.group_size, tokens / seconds, self.settings.ema_decay
        # Another concurrency has another throughput, so its average restarts.
        if p != self.ema_p:
            self.ema, self.ema_p = throughput, p
        else:
            self.ema = decay * self.ema + (1 - decay) * throughput
        self.observations.append((p, throughput))
        self.step_count += 1
        self.since_change += 1
        # The sweep tries every size before the first fit.
        if self.step_count < self.sweep_steps:
            self._change(self.sizes[self.step_count % len(self.sizes)])
            return self._decision(Action.SWEEP, Regime.WARMUP, used)
        self._fit()
        if self.step_count == self.sweep_steps:
            self._change(self.configured)
            return self._decision(Action.SWEEP, Regime.WARMUP, used)
        regime, wanted = self._judge(
            trusted=self.r2 is not None and self.r2 >= self.settings.min_r2
        )
        action = Action.HOLD
        if wanted != used and self.since_change >= self.settings.cooldown:
            action = Action.INCREASE if wanted > used else Action.THROTTLE
            self._change(wanted)
        return self._decision(action, regime, used)

    def _fit(self) -> None:
        """Fit the law again. The previous one stays where a fit is impossible, or the window has
        lost the sweep: its shape would hang on single measurements.
        """
        visits = Counter(p for p, _ in self.observations)
        if sum(count >= _VISITS for count in visits.values()) < MIN_CONCURRENCIES:
            return
        concurrencies, throughputs = zip(*self.observations, strict=True)
        settings = self.settings
        fit = fit_scaling_law(concurrencies, throughputs, settings.weights, settings.min_r2)
        if fit.law:
            self.law, self.r2 = fit.law, fit.r2

    def _change(self, size: int) -> None:
        if size != self.batch_size:
            self.batch_size, self.since_change = size, 0

    def _judge(self, trusted: bool) -> tuple[Regime, int]:
        """Return the regime at the current size, and the size to move to."""
        settings, p = self.settings, self.batch_size * self.group_size
        if not trusted or self.law is None:
            return Regime.UNKNOWN, self.batch_size
        if math.isinf(self.law.optimum):
            # The configured batch may be above max_batch_size; to grow is not to fall to it.
            doubled = max(self.batch_size, min(2 * self.batch_size, settings.max_batch_size))
            # The next smaller concurrency observed.
            smaller = max((seen for seen, _ in self.observations if seen < p), default=None)
            last_growth_paid = smaller is None or self._mean_at(p) >= (
                1 + _MIN_GAIN
            ) * self._mean_at(smaller)
            return Regime.UNBOUNDED, doubled if last_growth_paid else self.batch_size
        target = settings.throttle_margin * self.law.optimum
        limits = settings.min_batch_size, settings.max_batch_size
        size = target_batch(self.law.optimum, self.group_size, settings.throttle_margin, *limits)
        if p > target:
            return Regime.RETROGRADE, min(size, self.batch_size)
        if p < settings.increase_margin * target:
            return Regime.BELOW_TARGET, max(self.batch_size, min(size, 2 * self.batch_size))
        return Regime.NEAR_TARGET, self.batch_size

    def _mean_at(self, p: float) -> float:
        return fmean(throughput for seen, throughput in self.observations if seen == p)

    def _decision(self, action: Action, regime: Regime, used: int) -> Decision:
        utilization = None
        if self.law:
            utilization = self.ema / self.law.peak(
                max(self.settings.max_batch_size, used) * self.group_size
            )
        return Decision(
            action, regime, used, self.batch_size, self.ema, self.law, self.r2, utilization
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values."""
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
        """Continue as the controller that returned `state` would have. Raises KeyError for an
        incomplete state.
        """
        law = state["law"]
        self.observations = deque(((p, float(x)) for p, x in state["observations"]), maxlen=WINDOW)
        self.step_count, self.since_change = state["step_count"], state["since_change"]
        self.ema, self.ema_p, self.batch_size = state["ema"], state["ema_p"], state["batch_size"]
        self.law, self.r2 = ScalingLaw(*law) if law else None, state["r2"]


def target_batch(
    p_star: float, group_size: int, throttle_margin: float, min_batch_size: int, max_batch_size: int
) -> int:
    """Prompts per step for a concurrency of throttle_margin p*, rounded down, within the limits; an
    infinite p* gives the upper limit.
    """
    wanted = throttle_margin * p_star / group_size
    if wanted >= max_batch_size:
        return max_batch_size
    return max(min_batch_size, math.floor(wanted + _ROUNDING))


def sweep_sizes(smallest: int, largest: int) -> tuple[int, ...]:
    """Return the smallest, twice that, ... below the largest, and the largest."""
    sizes = []
    size = smallest
    while size < largest:
        sizes.append(size)
        size *= 2
    return (*sizes, largest)

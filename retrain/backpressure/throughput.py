"""Two models of a step's throughput: the universal scalability law (Gunther) with its fit to
measurements, and the roofline.

    X(p) = lambda C(p),  C(p) = p / (1 + sigma (p - 1) + kappa p (p - 1)),  p* = sqrt((1 - sigma) /
    kappa)

p is the concurrency, here the completions of a step; sigma is contention, kappa coherency. p / X is
a parabola A + B p + C p^2 with A = (1 - sigma) / lambda, B = (sigma - kappa) / lambda, C = kappa /
lambda, so lambda = 1 / (A + B + C), sigma = (B + C) lambda and kappa = C lambda: a linear
least-squares problem.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

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
    """p*, where throughput is highest: infinite without a coherency penalty, 0 if contention alone
    makes every p > 1 slower.
    """
    if kappa <= 0:
        return math.inf
    return math.sqrt(max(0.0, 1 - sigma) / kappa)


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
        """The highest throughput at any p from 1 to p_max; finite also without a coherency
        penalty.
        """
        inside = min(max(self.optimum, 1.0), p_max)
        return max(self.throughput(p) for p in (1.0, inside, p_max))


@dataclass(frozen=True)
class Fit:
    status: FitStatus
    """ok: kappa = 0 and the optimum is infinite if there is no coherency penalty. insufficient:
    fewer than three different p, so no parabola. rejected: 1 / lambda = A + B + C is not above 0,
    so no law has these coefficients. unknown: there is a law, but its R^2 is below min_r2; the
    controller's regime has the same name."""
    law: ScalingLaw | None = None
    r2: float | None = None
    """R^2 of the throughput, unweighted."""
    superlinear: bool = False
    """sigma came out below 0 and was set to 0."""


def _parabola(x: Floats, y: Floats, weights: Weights) -> tuple[float, float, float]:
    """Fit y = a + b x + c x^2 with c >= 0, which is 0 where the parabola would bend down."""
    weight = 1 / y if weights == "relative" else np.ones_like(y)
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
) -> Fit:
    """Least squares of p / X on a parabola in p, over the last WINDOW observations.

    Noise in X is multiplicative, so the error of p / X grows with p / X, and "relative" divides by
    it. If the parabola bends down there is no coherency penalty, and a straight line is fitted;
    setting kappa to 0 afterwards would bias the other two parameters. Raises ValueError for lists
    of different length, for a p below 1 and for a throughput that is not above 0.
    """
    x, measured = _checked(p, throughput)
    if len(np.unique(x)) < MIN_CONCURRENCIES:
        return Fit("insufficient")
    a, b, c = _parabola(x, x / measured, weights)
    if not (math.isfinite(a + b + c) and a + b + c > 0):
        return Fit("rejected")
    sigma = (b + c) / (a + b + c)
    law = ScalingLaw(1 / (a + b + c), max(0.0, sigma), c / (a + b + c))
    r2 = _r_squared(law, x, measured)
    return Fit("ok" if r2 >= min_r2 else "unknown", law, r2, superlinear=sigma < 0)


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
# Whether a step is bound by arithmetic or by memory: a hint on which nothing acts. Source: Williams
# et al. 2009, doi 10.1145/1498765.1498785.


@dataclass(frozen=True)
class Roofline:
    bound: Bound
    intensity: float
    """FLOP per byte moved."""
    ridge: float
    """The intensity above which arithmetic is the limit."""
    attained_gflops: float
    """GFLOP/s."""
    utilization: float
    """`attained_gflops` as a fraction of what the hardware can reach at this intensity."""


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
    """The roofline of a step with `flops` and `num_bytes` of memory traffic. None if a peak is 0,
    which means unknown.

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
        attained_gflops=attained,
        utilization=attained / min(peak_gflops, intensity * peak_bw_gb_s) if flops else 0.0,
    )

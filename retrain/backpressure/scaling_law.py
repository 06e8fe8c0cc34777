"""The universal scalability law (Gunther) and its fit to measured throughput.

    X(p) = lambda C(p),  C(p) = p / (1 + sigma (p - 1) + kappa p (p - 1)),  p* = sqrt((1 - sigma) / kappa)

p is the concurrency, here the completions of a step; sigma is contention, kappa coherency. p / X is a parabola A + B p + C p^2 with
A = (1 - sigma) / lambda, B = (sigma - kappa) / lambda, C = kappa / lambda, so lambda = 1 / (A + B + C), sigma = (B + C) lambda and
kappa = C lambda: a linear least-squares problem.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Weights = Literal["relative", "none"]
FitStatus = Literal["ok", "insufficient", "rejected", "unknown"]

WINDOW = 100
"""Observations in a fit: the latest ones."""
MIN_CONCURRENCIES = 3
"""A parabola has three coefficients, so it needs as many different p."""
_NO_COHERENCY = 1e-10
"""A quadratic term below this fraction of p / X at the largest p is rounding."""


def capacity(p: float, sigma: float, kappa: float) -> float:
    """C(p), throughput relative to one completion at a time. Raises ValueError for p < 0."""
    if not p >= 0:
        raise ValueError(f"a concurrency is 0 or more, got {p}")
    return p / (1 + sigma * (p - 1) + kappa * p * (p - 1))


def optimal_concurrency(sigma: float, kappa: float) -> float:
    """p*, where throughput is highest: infinite without a coherency penalty, 0 if contention alone makes every p > 1 slower."""
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
        """The highest throughput at any p from 1 to p_max; finite also without a coherency penalty."""
        inside = min(max(self.optimum, 1.0), p_max)
        return max(self.throughput(p) for p in (1.0, inside, p_max))


@dataclass(frozen=True)
class Fit:
    status: FitStatus
    """ok: kappa = 0 and the optimum is infinite if there is no coherency penalty. insufficient: fewer than three different p, so no
    parabola. rejected: 1 / lambda = A + B + C is not above 0, so no law has these coefficients. unknown: there is a law, but its R^2 is
    below min_r2; the controller's regime has the same name."""
    law: ScalingLaw | None = None
    r2: float | None = None
    """R^2 of the throughput, unweighted."""
    superlinear: bool = False
    """sigma came out below 0 and was set to 0."""


def fit_scaling_law(p: Sequence[float], throughput: Sequence[float], weights: Weights = "relative", min_r2: float = 0.5) -> Fit:
    """Least squares of p / X on a parabola in p, over the last WINDOW observations.

    Noise in X is multiplicative, so the error of p / X grows with p / X, and "relative" divides by it. If the parabola bends down there
    is no coherency penalty, and a straight line is fitted; setting kappa to 0 afterwards would bias the other two parameters.
    Raises ValueError for lists of different length, for a p below 1 and for a throughput that is not above 0.
    """
    if len(p) != len(throughput):
        raise ValueError(f"{len(p)} concurrencies and {len(throughput)} throughputs")
    x, y_throughput = np.asarray(p, dtype=np.float64)[-WINDOW:], np.asarray(throughput, dtype=np.float64)[-WINDOW:]
    if not ((x >= 1).all() and np.isfinite(x).all() and (y_throughput > 0).all() and np.isfinite(y_throughput).all()):
        raise ValueError("a concurrency is 1 or more and a throughput above 0, both finite")
    if len(np.unique(x)) < MIN_CONCURRENCIES:
        return Fit("insufficient")
    y = x / y_throughput
    weight = 1 / y if weights == "relative" else np.ones_like(y)
    u = x / x.max()  # whose powers have the same magnitude
    a, b, c = _solve(np.stack([np.ones_like(u), u, u * u], axis=1), y, weight).tolist()
    if c <= _NO_COHERENCY * y.max():
        (a, b), c = _solve(np.stack([np.ones_like(u), u], axis=1), y, weight).tolist(), 0.0
    largest = float(x.max())
    b, c = b / largest, c / largest**2
    if not (math.isfinite(a + b + c) and a + b + c > 0):
        return Fit("rejected")
    sigma = (b + c) / (a + b + c)
    law = ScalingLaw(1 / (a + b + c), max(0.0, sigma), c / (a + b + c))
    r2 = _r_squared(law, x, y_throughput)
    return Fit("ok" if r2 >= min_r2 else "unknown", law, r2, superlinear=sigma < 0)


def _solve(columns: Floats, y: Floats, weight: Floats) -> Floats:
    return np.linalg.lstsq(columns * weight[:, np.newaxis], y * weight, rcond=None)[0].astype(np.float64)


def _r_squared(law: ScalingLaw, p: Floats, throughput: Floats) -> float:
    predicted = np.array([law.throughput(value) for value in p])
    residual = float(np.square(throughput - predicted).sum())
    total = float(np.square(throughput - throughput.mean()).sum())
    if total == 0:  # constant throughput: a law that predicts it explains everything
        return 1.0 if residual <= 1e-12 * float(np.square(throughput).sum()) else 0.0
    return 1 - residual / total

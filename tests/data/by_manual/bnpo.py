"""BNPO (arXiv 2506.02864): rewards are normalized by a Beta distribution fitted to the step's pass rates."""

from math import lgamma

import numpy as np


def bnpo(rewards: list[list[float]]) -> list[list[float]]:
    """[P][G] (R - p) / f(p), f the density of Beta(1 + a/3, 1 + b/3), with a and b by moments."""
    rates = np.array([np.mean(group) for group in rewards])
    mean, variance = rates.mean(), rates.var()
    size = max(mean * (1 - mean) / variance - 1, 0.0) if variance > 0 else 0.0
    a, b = 1 + mean * size / 3, 1 + (1 - mean) * size / 3
    p = rates.clip(1e-3, 1 - 1e-3)
    constant = lgamma(a + b) - lgamma(a) - lgamma(b)
    density = np.exp(constant + (a - 1) * np.log(p) + (b - 1) * np.log(1 - p))
    return [((np.array(r) - m) / d).tolist() for r, m, d in zip(rewards, rates, density)]


bnpo.step_level = True

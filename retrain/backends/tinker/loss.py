"""The loss of a step, computed from the log-probs that the service returns; the service itself reports at most a sum.

importance_sampling: -rho A, ppo: -min(rho A, clip(rho, 1 - low, 1 + high) A), cispo: -clip(rho, low, high) A log pi, with
rho = exp(log pi - log pi of the sampler); the service adds them up over all tokens of all rows.
Shape letter: N action tokens.
"""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from retrain.config.schema import Loss

Values = npt.NDArray[np.float64]


def ratio_bounds(loss: "Loss") -> tuple[float, float] | None:
    """Return lowest and highest ratio, as the service takes them; None where nothing is clipped."""
    low, high = loss.clips
    if loss.mode == "importance_sampling":
        return None
    return (1 - low, 1 + high) if loss.mode == "ppo" else (low, high)


def policy_terms(new: Values, old: Values, advantages: Values, loss: "Loss") -> Values:
    """[N] per-token loss."""
    ratio, bounds = np.exp(new - old), ratio_bounds(loss)
    if bounds is None:
        return -ratio * advantages
    clipped: Values = np.clip(ratio, bounds[0], bounds[1])
    if loss.mode == "cispo":
        return -clipped * advantages * new
    return -np.minimum(ratio * advantages, clipped * advantages)


def clipped_tokens(new: Values, old: Values, advantages: Values, loss: "Loss") -> npt.NDArray[np.bool_]:
    """[N] the clip removed the token's gradient, or in cispo bounded its weight."""
    ratio, bounds = np.exp(new - old), ratio_bounds(loss)
    if bounds is None:
        return np.zeros(len(ratio), bool)
    above, below = ratio > bounds[1], ratio < bounds[0]
    if loss.mode == "cispo":
        return above | below
    return ((advantages > 0) & above) | ((advantages < 0) & below)

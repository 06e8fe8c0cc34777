"""The policy's uncertainty at each token: the signal that GTPO, SEPA and the top-rho mask read.

All of it is about the distribution that the token was drawn from: softmax(logits / temperature),
renormalised where it is truncated. Surprisal is a property of the sampled token, entropy one of the
distribution: neither is called by the other's name.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from retrain.advantages.ragged import Float64Array

CAP = 50.0
"""Cap in nats on what a token of probability near zero can weigh in a completion's mean."""

SURPRISAL = "surprisal"
PREDICTIVE_VARIANCE = "predictive_variance"
SHANNON_ENTROPY = "shannon_entropy"
KINDS = (SURPRISAL, PREDICTIVE_VARIANCE, SHANNON_ENTROPY)
ALIASES: dict[str, str] = {
    "token_surprisal": SURPRISAL,
    "neg_logprob": SURPRISAL,
    "negative_logprob": SURPRISAL,
    "nll": SURPRISAL,
    "entropy": SHANNON_ENTROPY,
    "shannon": SHANNON_ENTROPY,
    "token_entropy": SHANNON_ENTROPY,
    "pred_var": PREDICTIVE_VARIANCE,
    "bernoulli_variance": PREDICTIVE_VARIANCE,
}

Numbers = Sequence[float] | npt.NDArray[np.floating]


def canonical_kind(name: str) -> str:
    """Return the built-in kind that `name` means; any other name is returned unchanged."""
    return ALIASES.get(name, name)


def surprisal(logprobs: Numbers, cap: float = CAP) -> Float64Array:
    """clamp(-lp, 0, cap) in nats, [T] -> [T]; lp = -inf gives the cap, lp > 0 (bf16 noise) gives 0.
    Raises ValueError on NaN.
    """
    return capped(-_checked(logprobs, "log-prob"), cap)


def predictive_variance(logprobs: Numbers) -> Float64Array:
    """p(1 - p) with p = exp(lp) in [0, 1], [T] -> [T]; at most 0.25. Raises ValueError on NaN."""
    p = np.exp(np.minimum(_checked(logprobs, "log-prob"), 0.0))
    return p * (1.0 - p)


def shannon_entropy(entropies: Numbers, cap: float = CAP) -> Float64Array:
    """clamp(H, 0, cap) of entropies that the engine recorded, in nats, [T] -> [T]. Raises
    ValueError on NaN.
    """
    return capped(_checked(entropies, "entropy"), cap)


TOP = 0.05
"""Share of the tokens that `top_share` takes."""


def top_share(logprobs: Numbers) -> float:
    """Return the part that the least likely `TOP` of the tokens [n] have in sum (1 - p)^2, the
    squared gradients of their log-probs at their own logits; 0 where every token is certain.

    Where it is near 1, credit for single tokens can only differ on that few of them.
    """
    energy = np.sort((1 - np.exp(np.minimum(_checked(logprobs, "log-prob"), 0.0))) ** 2)
    total = float(energy.sum())
    count = round(TOP * len(energy))
    return float(energy[len(energy) - count :].sum()) / total if total else 0.0


def capped(uncertainty: Float64Array, cap: float = CAP) -> Float64Array:
    """Clamp to [0, cap]. Raises ValueError on NaN, which a comparison would let pass, or a cap that
    is not positive.
    """
    if not cap > 0:
        raise ValueError(f"cap is {cap}, it must be a positive number")
    return (
        np.clip(_checked(uncertainty, "uncertainty"), 0.0, cap) + 0.0
    )  # + 0.0 turns -0.0 into 0.0


def _checked(values: Numbers, name: str) -> Float64Array:
    array = np.asarray(values, dtype=np.float64)
    for position in np.flatnonzero(np.isnan(array)):
        raise ValueError(f"{name} {position} is NaN")
    return array

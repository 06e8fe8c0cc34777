"""Episode-level advantages: rewards of a group in, one number per completion out. Pure float64
functions.

Names differ over the literature. `grpo` here is the centered reward without the division by the
group's standard deviation, i.e. the advantage of Dr.GRPO (arXiv 2503.20783). The GRPO of arXiv
2402.03300 is `grpo_std`.

Every function returns [] for an empty group, and exact zeros for a group whose rewards are all
equal (`reinforce` apart). A NaN or infinite reward raises ValueError naming the reward's index.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np

from retrain.types import Float64Array


def grpo(rewards: Sequence[float]) -> list[float]:
    """A_i = r_i - mean(r). Its expectation is (G-1)/G times the policy gradient; `rloo` removes the
    factor.
    """
    return _listed(_centered(_checked(rewards)))


def maxrl(rewards: Sequence[float], eps: float = 1e-6) -> list[float]:
    """A_i = (r_i - mean(r)) / (mean(r) + eps), zero where mean(r) <= eps; bounded by [-1, G-1].

    MaxRL, arXiv 2602.02710. With 0/1 rewards the estimator has no bias for the truncated
    maximum-likelihood objective of order G-1, because a group without a success contributes
    nothing. With other rewards it is the self-normalizing estimate of grad log E[r]. Raises
    ValueError for a negative reward: the mean could then be near zero while the rewards are
    informative.
    """
    r = _checked(rewards)
    _check_eps(eps)
    for index in np.flatnonzero(r < 0):
        raise ValueError(
            f"reward {index} is {r[index]:g}, and maxrl needs rewards of 0 or more; shift the"
            " reward or use grpo"
        )
    mean = _mean(r)
    if mean <= eps:
        return [0.0] * len(r)
    return _listed(_centered(r) / (mean + eps))


def none(rewards: Sequence[float]) -> list[float]:
    """A_i = 0: retrain records rewards but does not train on them, for example if a teacher gives
    all credit.
    """
    return [0.0] * len(_checked(rewards))


def rloo(rewards: Sequence[float]) -> list[float]:
    """A_i = r_i - mean of the others = G/(G-1) (r_i - mean(r)); zero for G = 1. Source: arXiv
    2402.14740.
    """
    r = _checked(rewards)
    return _listed(_centered(r) * (len(r) / max(1, len(r) - 1)))


def grpo_std(rewards: Sequence[float], ddof: int = 1, eps: float = 1e-6) -> list[float]:
    """A_i = (r_i - mean(r)) / (std(r) + eps); zero for a constant group and for G <= ddof. Source:
    arXiv 2402.03300.
    """
    r = _checked(rewards)
    if ddof < 0 or ddof != int(ddof):
        raise ValueError(f"ddof is {ddof}, it must be a whole number of 0 or more")
    _check_eps(eps)
    if len(r) <= ddof:
        return [0.0] * len(r)
    return _listed(_scaled(_centered(r), ddof, eps))


def reinforce(rewards: Sequence[float], baseline: float = 0.0) -> list[float]:
    """A_i = r_i - baseline (Williams 1992). Not zero for a uniform group."""
    r = _checked(rewards)
    if not np.isfinite(baseline):
        raise ValueError(f"baseline is {baseline}, it must be a finite number")
    return _listed(r - baseline)


def reinforce_pp(
    groups: Sequence[Sequence[float]],
    token_counts: Sequence[Sequence[int]] | None = None,
    eps: float = 1e-8,
    weight: Literal["sequence", "token"] = "sequence",
) -> list[list[float]]:
    """A'_i = r_i - mean of its group, then (A' - mean) / (std + eps) over all completions of the
    step, population std.

    REINFORCE++ with the group baseline, arXiv 2501.03262. The step's mean and std count each
    completion once, or with weight="token" once per token, with [G] `token_counts` per group. Zeros
    are ordinary values, not a mask.
    """
    _check_eps(eps)
    if weight not in ("sequence", "token"):
        raise ValueError(f'weight is "{weight}", it must be "sequence" or "token"')
    centered = [_centered(r) for r in checked_groups(groups)]
    flat = np.concatenate([*centered, np.zeros(0)])
    weights = np.ones(len(flat))
    if weight == "token":
        if token_counts is None:
            raise ValueError('weight="token" needs the number of tokens of every completion')
        weights = np.array(list(chain.from_iterable(token_counts)), dtype=np.float64)
        if len(weights) != len(flat):
            raise ValueError(f"{len(weights)} token counts for {len(flat)} rewards")
    if weights.sum() == 0:
        return [[0.0] * len(group) for group in groups]
    mean = float(np.average(flat, weights=weights))
    std = float(np.sqrt(np.average((flat - mean) ** 2, weights=weights)))
    if std == 0.0:
        return [[0.0] * len(group) for group in groups]
    return [_listed((group - mean) / (std + eps)) for group in centered]


@dataclass(frozen=True)
class BuiltinAdvantage:
    function: Callable[..., list[float]] | Callable[..., list[list[float]]]
    parameters: frozenset[str]
    """Names that `[algorithm.advantage_params]` may hold."""
    batch_level: bool = False
    """True if the function takes all the groups of a step, with their token counts, instead of one
    group."""
    group_relative: bool = True
    """True if it compares within a group, so that it is zero for every group of one completion."""


ADVANTAGES: dict[str, BuiltinAdvantage] = {
    "grpo": BuiltinAdvantage(grpo, frozenset()),
    "maxrl": BuiltinAdvantage(maxrl, frozenset({"eps"})),
    "rloo": BuiltinAdvantage(rloo, frozenset()),
    "grpo_std": BuiltinAdvantage(grpo_std, frozenset({"ddof", "eps"})),
    "none": BuiltinAdvantage(none, frozenset(), group_relative=False),
    "reinforce": BuiltinAdvantage(reinforce, frozenset({"baseline"}), group_relative=False),
    "reinforce_pp": BuiltinAdvantage(reinforce_pp, frozenset({"eps", "weight"}), batch_level=True),
}


def checked_groups(groups: Sequence[Sequence[float]]) -> list[Float64Array]:
    """Return the rewards as float64. Raises ValueError naming the group and the index of the first
    reward that is not finite.
    """
    checked = []
    for index, group in enumerate(groups):
        try:
            checked.append(_checked(group))
        except ValueError as error:
            raise ValueError(f"group {index}: {error}") from error
    return checked


def _check_eps(eps: float) -> None:
    if not (np.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps is {eps}, it must be 0 or more")


def _checked(rewards: Sequence[float]) -> Float64Array:
    r = np.asarray(rewards, dtype=np.float64)
    for index in np.flatnonzero(~np.isfinite(r)):
        raise ValueError(f"reward {index} is {r[index]}, it must be a finite number")
    return r


def _listed(values: Float64Array) -> list[float]:
    listed: list[float] = values.tolist()
    return listed


def _mean(r: Float64Array) -> float:
    if len(r):
        return float(r.mean())
    return 0.0


def _centered(r: Float64Array) -> Float64Array:
    """Return r - mean(r), exactly zero for a constant group; the computed mean of three times 0.1
    is not 0.1.
    """
    if len(r) == 0 or r.min() == r.max():
        return np.zeros(len(r))
    centered: Float64Array = r - r.mean()
    return centered


def _scaled(centered: Float64Array, ddof: int, eps: float) -> Float64Array:
    if not centered.any():
        return centered
    std = float(np.sqrt((centered**2).sum() / (len(centered) - ddof)))
    return centered / (std + eps)

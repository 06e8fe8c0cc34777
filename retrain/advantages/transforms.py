"""Transforms from a completion's advantage to its tokens' advantages: SEPA, GTPO, HICRA and the
top-rho mask, over flat ragged arrays. They read the policy's uncertainty at each token, which this
module computes too.

The uncertainty refers to the distribution that the sampler drew from: softmax(logits /
temperature), renormalized if truncated. Surprisal is a property of the sampled token, and entropy
is a property of the distribution. retrain never calls one by the other's name.

A TransformSpec says which of SEPA, GTPO and HICRA a transform takes. `[algorithm]
surprisal_mask_rho` sets the mask, whatever the transform. pipeline.py fixes the order: a new
transform is a new spec, not a new order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import floor
from typing import Any

import numpy as np
import numpy.typing as npt

from retrain.advantages.algorithms import Reference, no_reference
from retrain.advantages.step import BoolArray, Int64Array, Segments
from retrain.types import Float64Array

# -- uncertainty -----------------------------------------------------------------------------------


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
    """Return the built-in kind that `name` means, or any other name unchanged."""
    return ALIASES.get(name, name)


def surprisal(logprobs: Numbers, cap: float = CAP) -> Float64Array:
    """clamp(-lp, 0, cap) in nats, [T] -> [T]; lp = -inf gives the cap, lp > 0 (bf16 noise) gives 0.
    Raises ValueError on NaN.
    """
    return capped(-_checked(logprobs, "log-prob"), cap)


def predictive_variance(logprobs: Numbers) -> Float64Array:
    """Return p(1 - p) with p = exp(lp) in [0, 1], [T] -> [T]; at most 0.25. Raises ValueError on
    NaN.
    """
    p = np.exp(np.minimum(_checked(logprobs, "log-prob"), 0.0))
    return p * (1.0 - p)


def shannon_entropy(entropies: Numbers) -> Float64Array:
    """clamp(H, 0, CAP) of entropies that the engine recorded, in nats, [T] -> [T]. Raises
    ValueError on NaN.
    """
    return capped(_checked(entropies, "entropy"), CAP)


def capped(uncertainty: Float64Array, cap: float = CAP) -> Float64Array:
    """Clamp to [0, cap]. Raises ValueError on NaN, which a comparison would let pass, or a cap that
    is not positive.
    """
    if not cap > 0:
        raise ValueError(f"cap is {cap}, it must be a positive number")
    # + 0.0 turns -0.0 into 0.0.
    return np.clip(_checked(uncertainty, "uncertainty"), 0.0, cap) + 0.0


def _checked(values: Numbers, name: str) -> Float64Array:
    array = np.asarray(values, dtype=np.float64)
    for position in np.flatnonzero(np.isnan(array)):
        raise ValueError(f"{name} {position} is NaN")
    return array


# -- transforms ------------------------------------------------------------------------------------


NEGLIGIBLE_MEAN = 1e-7
"""Mean uncertainty in nats below which a completion counts as deterministic and its weights are
uniform."""
INVERSE_FLOOR = 1e-3
"""Smallest divisor of negative = "inverse", in nats of uncertainty, so that even surer tokens get
no larger penalty.
"""

EntropyTransform = Callable[[list[float], list[int], float], Sequence[float]]
"""(entropies [T], planning_mask [T], sepa_lambda) -> [T], for one completion."""
FlatEntropyTransform = Callable[[Float64Array, BoolArray, Segments, float], Float64Array]
"""(uncertainty [n], planning [n], segments, sepa_lambda) -> [n], for all completions of a step."""


@dataclass(frozen=True)
class TransformContext:
    """A transform's view of one group of G completions. T differs between completions."""

    rewards: list[float]
    """[G] rewards."""
    advantages: list[float]
    """[G] episode advantages."""
    logprobs: list[list[float]]
    """[G][T] natural log-probs of the sampled policy."""
    entropies: list[list[float]]
    """[G][T] the configured uncertainty, within [0, 50]."""
    planning_mask: list[list[int]]
    """[G][T] 1 inside a planning phrase."""
    sepa_lambda: float
    step: int
    group: int
    """The group's place in the step."""
    gtpo_beta: float
    hicra_alpha: float
    params: dict[str, Any] = field(default_factory=dict)
    """`[algorithm.transform_params]`"""
    reference: Reference = field(default=no_reference, repr=False, compare=False)
    """What `reference_logprobs` asks."""

    @property
    def reference_logprobs(self) -> list[list[float]]:
        """[G][T] natural log-probs of the sampled tokens by the teacher of `[algorithm]
        teacher`, at the training temperature.
        """
        logprobs: list[list[float]] = self.reference()
        return logprobs


@dataclass(frozen=True)
class TransformOutput:
    token_advs: Sequence[Sequence[float]]
    """[G][T] token advantages."""


@dataclass(frozen=True)
class TransformSpec:
    """The steps of credit assignment that a transform takes, in the order of its fields."""

    name: str
    use_gtpo: bool = False
    """True to weight the tokens of a completion by their uncertainty."""
    needs_planning: bool = False
    """True to find planning phrases; otherwise every token counts as execution."""
    uses_sepa_controller: bool = False
    """True to follow the SEPA schedule; otherwise lambda is 0."""
    entropy_transform: EntropyTransform | None = None
    """Changes the uncertainty of one completion before the weighting."""
    apply_hicra: bool = False
    """True to amplify planning tokens after the weighting."""
    post_process: (
        Callable[[list[list[float]], TransformContext], Sequence[Sequence[float]]] | None
    ) = None
    """(token advantages [G][T], context) -> [G][T], after HICRA, for one group."""
    flat_entropy_transform: FlatEntropyTransform | None = None
    """Changes the uncertainty of all completions at once; it takes precedence over
    `entropy_transform`.
    """
    distils: bool = False
    """True to add the log-ratio of the teacher to the policy, after HICRA."""
    needs_rho: bool = False
    """True if the transform has no effect of its own unless surprisal_mask_rho > 0, so that retrain
    refuses a run without the mask.
    """

    @property
    def needs_uncertainty(self) -> bool:
        return self.use_gtpo or self.post_process is not None


# -- SEPA: what happens to the uncertainty ---------------------------------------------------------


def sepa_pool(
    uncertainty: Float64Array, planning: BoolArray, segments: Segments, lam: float
) -> Float64Array:
    """H' = lam mu + (1 - lam) H on execution tokens, mu their mean in the completion. Keeps the
    completion's mean of H.
    """
    lam = _checked_lambda(lam, uncertainty, planning)
    if lam == 0.0:
        return uncertainty
    return np.where(
        planning,
        uncertainty,
        lam * _execution_means(uncertainty, planning, segments) + (1.0 - lam) * uncertainty,
    )


def sepa_amplify(
    uncertainty: Float64Array, planning: BoolArray, segments: Segments, lam: float
) -> Float64Array:
    """H' = (1 + lam) H - lam mu on execution tokens: the opposite of pooling. May go negative;
    keeps the completion's mean.
    """
    lam = _checked_lambda(lam, uncertainty, planning)
    if lam == 0.0:
        return uncertainty
    return np.where(
        planning,
        uncertainty,
        (1.0 + lam) * uncertainty - lam * _execution_means(uncertainty, planning, segments),
    )


def sepa_amplify_clamped(
    uncertainty: Float64Array, planning: BoolArray, segments: Segments, lam: float
) -> Float64Array:
    """Apply `sepa_amplify` and floor the result at 0, which no longer keeps the mean."""
    return np.maximum(sepa_amplify(uncertainty, planning, segments, lam), 0.0)


def _execution_means(
    uncertainty: Float64Array, planning: BoolArray, segments: Segments
) -> Float64Array:
    """Return [n] the mean uncertainty of the execution tokens of each token's completion."""
    execution = (~planning).astype(np.float64)
    counts = segments.sums(execution)
    means = segments.sums(uncertainty * execution) / np.maximum(counts, 1.0)
    return segments.spread(means)


def _checked_lambda(lam: float, uncertainty: Float64Array, planning: BoolArray) -> float:
    """Clamp lambda to [0, 1]. Raises ValueError for NaN, or for a mask of another length than the
    uncertainty.
    """
    _check_mask(planning, uncertainty)
    if np.isnan(lam):
        raise ValueError("sepa_lambda is NaN")
    return float(min(1.0, max(0.0, lam)))


def _check_mask(planning: BoolArray, values: Float64Array) -> None:
    if len(planning) != len(values):
        raise ValueError(f"{len(planning)} mask entries for {len(values)} tokens")


# -- GTPO: weights from uncertainty ----------------------------------------------------------------


def gtpo_weights(uncertainty: Float64Array, segments: Segments, beta: float) -> Float64Array:
    """Return w_t = max(0, 1 + beta (H_t / mean(H) - 1)) with the mean over the completion; [n] ->
    [n].

    The form of arXiv 2508.04349 for successes, with the mean over one completion instead of over a
    group, for both signs of the advantage. Uniform where mean(H) < 1e-7. For 0 <= beta <= 1 the
    weights of a completion sum to its length. Raises ValueError for a negative beta.
    """
    means = segments.spread(segments.means(uncertainty))
    return _weights(uncertainty, means, beta)


def gtpo_group_weights(
    uncertainty: Float64Array,
    segments: Segments,
    beta: float,
    groups: Int64Array,
    advantages: Float64Array,
) -> Float64Array:
    """Return the weights with the paper's normalization (norm = "group"). Each mean is over the
    completions of the group that reach the same position and have the same sign of advantage.
    `groups` and `advantages` are [N]. Source: arXiv 2508.04349, equations 3 and 5.
    """
    means = np.zeros(segments.total)
    # `spreads` are views, so that filling them fills `means`.
    pieces, spreads = segments.split(uncertainty), segments.split(means)
    cohorts: dict[tuple[int, float], list[int]] = {}
    for index, (group, advantage) in enumerate(zip(groups, advantages, strict=True)):
        cohorts.setdefault((int(group), float(np.sign(advantage))), []).append(index)
    for members in cohorts.values():
        longest = max(len(pieces[index]) for index in members)
        sums, alive = np.zeros(longest), np.zeros(longest)
        for index in members:
            sums[: len(pieces[index])] += pieces[index]
            alive[: len(pieces[index])] += 1.0
        for index in members:
            length = len(pieces[index])
            spreads[index][:] = sums[:length] / alive[:length]
    return _weights(uncertainty, means, beta)


def inverted(
    uncertainty: Float64Array, segments: Segments, advantages: Float64Array
) -> Float64Array:
    """Replace H by 1/H in completions with a negative advantage (negative = "inverse"), so that
    confident mistakes weigh more. Source: arXiv 2508.04349, equation 6.
    """
    negative = segments.spread(advantages) < 0
    return np.where(negative, 1.0 / np.maximum(uncertainty, INVERSE_FLOOR), uncertainty)


def _weights(uncertainty: Float64Array, means: Float64Array, beta: float) -> Float64Array:
    if not (np.isfinite(beta) and beta >= 0):
        raise ValueError(f"gtpo beta is {beta}, it must be 0 or more")
    usable = means >= NEGLIGIBLE_MEAN
    relative = np.where(usable, (uncertainty - means) / np.where(usable, means, 1.0), 0.0)
    return np.maximum(0.0, 1.0 + beta * relative)


# -- HICRA -----------------------------------------------------------------------------------------


def hicra(token_advantages: Float64Array, planning: BoolArray, alpha: float) -> Float64Array:
    """Return A' = A + alpha |A| on planning tokens, [n] -> [n]. Source: arXiv 2509.03646.

    Rewards planning more and punishes it less. It is not zero-sum: it adds alpha |A| to every
    planning token. Raises ValueError for alpha outside [0, 1], where the sign of an advantage would
    flip, or a mask of another length.
    """
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"hicra alpha is {alpha}, it must lie in [0, 1]")
    _check_mask(planning, token_advantages)
    for position in np.flatnonzero(~np.isfinite(token_advantages)):
        raise ValueError(
            f"token advantage {position} is {token_advantages[position]}, it must be a finite"
            " number"
        )
    return np.where(planning, token_advantages + alpha * np.abs(token_advantages), token_advantages)


# -- the top-rho mask ------------------------------------------------------------------------------


@dataclass(frozen=True)
class TopRho:
    keep: BoolArray
    """[n] True for the tokens that the mask keeps."""
    thresholds: list[float | None]
    """Threshold tau of each pool: the mask keeps a token of at least this uncertainty. The value is
    None for a pool without tokens, or with the mask off.
    """


def kept_count(n: int, rho: float) -> int:
    """Return k = max(1, floor(rho n)) for n tokens, and 0 for none."""
    return max(1, floor(rho * n + 1e-9)) if n else 0  # without the addend 0.29 * 100 would be 28


def top_rho(uncertainty: Float64Array, pools: Int64Array, num_pools: int, rho: float) -> TopRho:
    """Keep in each pool the tokens whose uncertainty reaches the k-th largest. It keeps all ties at
    tau, so order does not matter.

    `pools` [n] numbers the pool of each token: one for the step, a group, or a completion each. The
    mask keeps a token with -1, which is outside every pool. rho = 0 switches the mask off. Raises
    ValueError for rho outside [0, 1] or a NaN.
    """
    if not 0.0 <= rho <= 1.0:
        raise ValueError(f"surprisal_mask_rho is {rho}, it must lie in [0, 1]")
    if np.isnan(uncertainty).any():
        raise ValueError(f"uncertainty {int(np.flatnonzero(np.isnan(uncertainty))[0])} is NaN")
    keep = np.ones(len(uncertainty), dtype=np.bool_)
    if rho == 0.0:
        return TopRho(keep, [None] * num_pools)
    thresholds: list[float | None] = []
    # One pool, the usual case, needs no sort.
    order = np.argsort(pools, kind="stable") if num_pools > 1 else np.flatnonzero(pools == 0)
    edges = np.searchsorted(pools[order], np.arange(num_pools + 1))
    for start, stop in pairwise(edges):
        members = order[start:stop]
        if len(members) == 0:
            thresholds.append(None)
            continue
        values = uncertainty[members]
        k = kept_count(len(values), rho)
        tau = float(np.partition(values, len(values) - k)[len(values) - k])
        keep[members] = values >= tau
        thresholds.append(tau)
    return TopRho(keep, thresholds)


# -- the transforms --------------------------------------------------------------------------------


def _sepa(name: str, change: FlatEntropyTransform) -> TransformSpec:
    return TransformSpec(
        name,
        use_gtpo=True,
        needs_planning=True,
        uses_sepa_controller=True,
        flat_entropy_transform=change,
    )


TRANSFORMS: dict[str, TransformSpec] = {
    spec.name: spec
    for spec in (
        TransformSpec("none"),
        TransformSpec("gtpo", use_gtpo=True),
        TransformSpec("hicra", needs_planning=True, apply_hicra=True),
        TransformSpec("gtpo_hicra", use_gtpo=True, needs_planning=True, apply_hicra=True),
        _sepa("gtpo_sepa", sepa_pool),
        _sepa("gtpo_sepa_amp", sepa_amplify),
        _sepa("gtpo_sepa_amp_c", sepa_amplify_clamped),
        TransformSpec("entropy_mask", use_gtpo=True, needs_rho=True),
        TransformSpec("distill", distils=True),
    )
}

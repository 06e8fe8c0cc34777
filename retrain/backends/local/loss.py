"""Policy losses: pure functions over the action tokens of a batch.

Tensors are flat, [N] over the action tokens of all sequences one after the other; `lengths` says how many belong to each.
A loss is a weighted sum of per-token terms, and the weights carry the whole normalisation. They are computed once for an
optimizer batch, before its first backward and from the rows of all processes, so that neither micro-batches nor processes
can change the gradient.

Sources: importance sampling and CISPO as Tinker defines them, PPO (1707.06347), dual clip (1912.09729), DAPO's higher upper
clip (2503.14476), GSPO (2507.18071), CISPO (2506.13585), Dr. GRPO's constant denominator (2503.20783).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from retrain.config.schema import Loss

KLEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True)
class ActionTokens:
    """The action tokens of some sequences, [N] each. Only `new` and `entropy` carry gradient."""

    new: Tensor
    """Log-probs of the policy that learns."""
    old: Tensor
    """Log-probs that the ratio is taken against: the sampler's, or the learner's own before the first update."""
    sampler: Tensor
    """Log-probs that the sampler recorded; differs from `old` only where old log-probs are recomputed."""
    advantages: Tensor
    weights: Tensor
    """Weights of the policy terms: `sequence_weights` of the whole optimizer batch, one per token."""
    lengths: Sequence[int]
    """Action tokens of each sequence; a sequence is never split."""
    reference: Tensor | None = None
    """Log-probs of the frozen base; needed where kl_coef is not 0."""
    entropy: Tensor | None = None
    """Needed where entropy_coef is not 0."""
    regulariser_weights: Tensor | None = None
    """Weights of the KL and entropy terms, which more rows may have; None means `weights`."""


# --- ratios and weights --------------------------------------------------------------------------------------------


def ratio(new: Tensor, old: Tensor, log_ratio_clamp: float) -> Tensor:
    """[N] exp(new - old), the log-ratio clamped to +-log_ratio_clamp; outside the clamp there is no gradient."""
    return (new - old).clamp(-log_ratio_clamp, log_ratio_clamp).exp()


def sequence_means(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """[sequences] mean over each sequence's tokens; 0 for an empty one."""
    counts = torch.tensor(lengths, dtype=torch.int64, device=values.device)
    return torch.segment_reduce(values, "sum", lengths=counts, initial=0.0) / counts.clamp(min=1)


def gspo_ratio(new: Tensor, old: Tensor, lengths: Sequence[int], log_ratio_clamp: float) -> Tensor:
    """[sequences] s_i = exp(mean_t log ratio): the geometric mean of the token ratios (GSPO)."""
    return sequence_means((new - old).clamp(-log_ratio_clamp, log_ratio_clamp), lengths).exp()


def cispo_weight(new: Tensor, old: Tensor, low: float, high: float, log_ratio_clamp: float) -> Tensor:
    """[N] the ratio clipped to [low, high], detached: it weighs the log-prob's gradient and never cuts it off (CISPO)."""
    return ratio(new, old, log_ratio_clamp).clamp(low, high).detach()


def tis_weight(train: Tensor, sampler: Tensor, cap: float, log_ratio_clamp: float) -> Tensor:
    """[N] truncated importance sampling: min(exp(train - sampler), cap), detached."""
    return ratio(train, sampler, log_ratio_clamp).clamp(max=cap).detach()


def icepop_weight(train: Tensor, sampler: Tensor, low: float, high: float, log_ratio_clamp: float) -> Tensor:
    """[N] exp(train - sampler) where it lies in [low, high], else 0: a token that the two disagree on is left out. Detached."""
    weight = ratio(train, sampler, log_ratio_clamp)
    return torch.where((weight >= low) & (weight <= high), weight, 0.0).detach()


def kl_term(new: Tensor, reference: Tensor, estimator: KLEstimator, log_ratio_clamp: float) -> Tensor:
    """[N] per-token estimate of KL(policy || reference) from tokens of the policy (Schulman's k1, k2, k3).

    As values all three estimate it. As loss terms, the tokens held fixed, their expected gradients differ: 0 for k1, the
    gradient of KL(policy || reference) for k2, and of KL(reference || policy) for k3.
    """
    difference = (new - reference).clamp(-log_ratio_clamp, log_ratio_clamp)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    return torch.expm1(-difference) + difference


# --- the policy terms ----------------------------------------------------------------------------------------------


def clipped_terms(ratios: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float = 0.0) -> Tensor:
    """[N] -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), bounded by -dual_clip * A where A < 0 and dual_clip is on."""
    gain = torch.minimum(ratios * advantages, ratios.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip > 0:
        gain = torch.where(advantages < 0, torch.maximum(gain, dual_clip * advantages), gain)
    return -gain


def detached_ratios(tokens: ActionTokens, settings: "Loss") -> Tensor:
    """[N] the ratios that the clip reads, without gradient: a token's own, or in gspo the one of its sequence."""
    new = tokens.new.detach()
    if settings.mode != "gspo":
        return ratio(new, tokens.old, settings.log_ratio_clamp)
    whole = gspo_ratio(new, tokens.old, tokens.lengths, settings.log_ratio_clamp)
    counts = torch.tensor(tokens.lengths, dtype=torch.int64, device=whole.device)
    return whole.repeat_interleave(counts, output_size=len(new))  # else the host waits for the sum of the counts


def gspo_terms(tokens: ActionTokens, settings: "Loss") -> Tensor:
    """[N] the clip acts on the sequence's ratio, and every token of a sequence has the same gradient weight.

    The forward value of each token's ratio is s_i, its gradient s_i * d log pi_t (GSPO-token), so that advantages may differ
    by token; with equal advantages and the sequence mean this is GSPO's own gradient.
    """
    ratios = detached_ratios(tokens, settings) * (tokens.new - tokens.new.detach()).exp()
    return clipped_terms(ratios, tokens.advantages, *settings.clips)


def policy_terms(tokens: ActionTokens, settings: "Loss") -> Tensor:
    """[N] per-token policy loss of the configured mode, before correction and normalisation."""
    if settings.mode == "gspo":
        return gspo_terms(tokens, settings)
    if settings.mode == "cispo":
        weight = cispo_weight(tokens.new, tokens.old, *settings.clips, settings.log_ratio_clamp)
        return -weight * tokens.advantages * tokens.new
    ratios = ratio(tokens.new, tokens.old, settings.log_ratio_clamp)
    if settings.mode == "ppo":
        return clipped_terms(ratios, tokens.advantages, *settings.clips, settings.dual_clip)
    return -ratios * tokens.advantages


def correction_weight(tokens: ActionTokens, settings: "Loss") -> Tensor | None:
    """[N] detached weight for the mismatch between the learner's old log-probs and the sampler's; None where it is off."""
    clamp = settings.log_ratio_clamp
    if settings.correction == "tis":
        return tis_weight(tokens.old, tokens.sampler, settings.correction_cap, clamp)
    if settings.correction == "icepop":
        return icepop_weight(tokens.old, tokens.sampler, settings.correction_low, settings.correction_high, clamp)
    return None


def policy_loss(tokens: ActionTokens, settings: "Loss") -> Tensor:
    """Return the scalar to minimise: sum of weights * policy * correction + regulariser_weights * (kl_coef * KL - entropy_coef *
    entropy).
    """
    terms = policy_terms(tokens, settings)
    correction = correction_weight(tokens, settings)
    if correction is not None:
        terms = terms * correction
    loss = (terms * tokens.weights).sum()
    weights = tokens.weights if tokens.regulariser_weights is None else tokens.regulariser_weights
    if settings.kl_coef:
        if tokens.reference is None:
            raise ValueError("kl_coef needs the reference log-probs")
        divergence = kl_term(tokens.new, tokens.reference, settings.kl_estimator, settings.log_ratio_clamp)
        loss = loss + settings.kl_coef * (divergence * weights).sum()
    if settings.entropy_coef:
        if tokens.entropy is None:
            raise ValueError("entropy_coef needs the entropies")
        loss = loss - settings.entropy_coef * (tokens.entropy * weights).sum()
    return loss


# --- what the clip did ---------------------------------------------------------------------------------------------


def clipped_tokens(tokens: ActionTokens, settings: "Loss") -> Tensor:
    """[N] of bool: the clip took the token's policy gradient away, or in cispo bounded its weight; in importance_sampling and ppo the
    clamp of the log-ratio counts as one.
    """
    ratios, (low, high) = detached_ratios(tokens, settings), settings.clips
    if settings.mode == "cispo":
        return (ratios < low) | (ratios > high)
    up, down = tokens.advantages > 0, tokens.advantages < 0
    outside = (up & (ratios > 1 + high)) | (down & (ratios < 1 - low))
    if settings.mode == "gspo":
        return outside
    beyond = (tokens.new.detach() - tokens.old).abs() > settings.log_ratio_clamp
    if settings.mode == "importance_sampling":
        return beyond
    doubly = down & (ratios > settings.dual_clip) if settings.dual_clip > 0 else torch.zeros_like(beyond)
    return outside | doubly | beyond


def clip_counts(tokens: ActionTokens, settings: "Loss") -> Tensor:
    """[2] float: clipped tokens, and all tokens with a policy gradient to lose. In gspo sequences, each with the share of its tokens: it is
    clipped as a whole unless its tokens' advantages differ in sign.
    """
    active = (tokens.advantages != 0) & (tokens.weights != 0)
    counts = torch.stack([clipped_tokens(tokens, settings) & active, active]).float()
    if settings.mode == "gspo":
        clipped, present = (sequence_means(row, tokens.lengths) for row in counts)
        counts = torch.stack([clipped / present.clamp(min=1e-9), (present > 0).float()])
    return counts.sum(dim=1)

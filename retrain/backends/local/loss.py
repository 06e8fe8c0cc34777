"""Policy losses: pure functions over the action tokens of a batch.

Tensors are flat, [N] over the action tokens of all sequences one after the other; `lengths` says
how many belong to each. A loss is a weighted sum of per-token terms, and the weights carry the
whole normalization. The learner computes the weights once per optimizer batch, before its first
backward, from the rows of all processes. Micro-batches and processes therefore cannot change the
gradient.

Sources: importance sampling and CISPO as Tinker defines them, PPO (1707.06347), dual clip
(1912.09729), DAPO's higher upper clip (2503.14476), GSPO (2507.18071), CISPO (2506.13585), Dr.
GRPO's constant denominator (2503.20783), SAPO (2511.20347), GMPO (2507.20673), DPPO (2602.04879).
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from retrain.backends.losses import LOSSES, ActionTokens

if TYPE_CHECKING:
    from retrain.config.schema import Loss

KLEstimator = Literal["k1", "k2", "k3"]


# --- ratios and weights ---------------------------------------------------------------------------


def ratio(new: Tensor, old: Tensor, log_ratio_clamp: float) -> Tensor:
    """Return [N] exp(new - old), with the log-ratio clamped to +-log_ratio_clamp. Outside the
    clamp the gradient is 0.
    """
    return (new - old).clamp(-log_ratio_clamp, log_ratio_clamp).exp()


def sequence_means(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return [sequences] mean over each sequence's tokens; 0 for an empty one."""
    counts = torch.tensor(lengths, dtype=torch.int64, device=values.device)
    return torch.segment_reduce(values, "sum", lengths=counts, initial=0.0) / counts.clamp(min=1)


def spread(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return [N] the value of each token's sequence, from [sequences]."""
    counts = torch.tensor(lengths, dtype=torch.int64, device=values.device)
    # Without the size the host would wait for the sum of the counts.
    return values.repeat_interleave(counts, output_size=sum(lengths))


def gspo_ratio(new: Tensor, old: Tensor, lengths: Sequence[int], log_ratio_clamp: float) -> Tensor:
    """Return [sequences] s_i = exp(mean_t log ratio): the geometric mean of the token ratios
    (GSPO).
    """
    return sequence_means((new - old).clamp(-log_ratio_clamp, log_ratio_clamp), lengths).exp()


def cispo_weight(
    new: Tensor, old: Tensor, low: float, high: float, log_ratio_clamp: float
) -> Tensor:
    """Return [N] the ratio clipped to [low, high], detached: it weighs the log-prob's gradient and
    never cuts it off (CISPO).
    """
    return ratio(new, old, log_ratio_clamp).clamp(low, high).detach()


def sequence_ratio(
    train: Tensor, sampler: Tensor, lengths: Sequence[int], log_ratio_clamp: float
) -> Tensor:
    """Return [N] exp(sum_t (train - sampler)) of each token's sequence, the sum clamped to
    +-log_ratio_clamp; detached.
    """
    counts = torch.tensor(lengths, dtype=torch.int64, device=train.device)
    sums = torch.segment_reduce((train - sampler).detach(), "sum", lengths=counts, initial=0.0)
    return spread(sums.clamp(-log_ratio_clamp, log_ratio_clamp).exp(), lengths)


def kl_term(
    new: Tensor, reference: Tensor, estimator: KLEstimator, log_ratio_clamp: float
) -> Tensor:
    """Return [N] per-token estimate of KL(policy || reference) from tokens of the policy
    (Schulman's k1, k2, k3).

    All three values estimate this KL. Their gradients as loss terms, with fixed tokens, have
    different expectations. With k1 the expectation is 0. With k2 it is the gradient of KL(policy ||
    reference), and with k3 the gradient of KL(reference || policy).
    """
    difference = (new - reference).clamp(-log_ratio_clamp, log_ratio_clamp)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    return torch.expm1(-difference) + difference


# --- the policy terms -----------------------------------------------------------------------------


def clipped_terms(
    ratios: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> Tensor:
    """Return [N] -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), bounded by -dual_clip * A
    where A < 0 and dual_clip is on.
    """
    gain = torch.minimum(
        ratios * advantages, ratios.clamp(1 - clip_low, 1 + clip_high) * advantages
    )
    if dual_clip > 0:
        gain = torch.where(advantages < 0, torch.maximum(gain, dual_clip * advantages), gain)
    return -gain


def detached_ratios(tokens: ActionTokens, settings: "Loss") -> Tensor:
    """Return [N] the ratios that the clip reads, without gradient: a token's own ratio, or in gspo
    the ratio of its sequence.
    """
    new = tokens.new.detach()
    if settings.mode != "gspo":
        return ratio(new, tokens.old, settings.log_ratio_clamp)
    return spread(
        gspo_ratio(new, tokens.old, tokens.lengths, settings.log_ratio_clamp), tokens.lengths
    )


def gspo_terms(tokens: ActionTokens, settings: "Loss") -> Tensor:
    """Return [N] terms whose clip acts on the sequence's ratio, so that every token of a sequence
    has the same gradient weight.

    The forward value of each token's ratio is s_i, and its gradient s_i * d log pi_t (GSPO-token),
    so advantages may differ by token. With equal advantages and the sequence mean this is GSPO's
    own gradient.
    """
    ratios = detached_ratios(tokens, settings) * (tokens.new - tokens.new.detach()).exp()
    return clipped_terms(ratios, tokens.advantages, *settings.clips)


def sapo_terms(tokens: ActionTokens, settings: "Loss") -> Tensor:
    """Return [N] -A f(rho), f(rho) = 4 / tau * sigmoid(tau (rho - 1)). The value of tau is tau_pos
    where A > 0 and tau_neg elsewhere (SAPO, 2511.20347).

    f'(1) = 1: on policy the gradient equals importance sampling's, and off policy it fades in both
    directions.
    """
    chosen = {**LOSSES["sapo"].parameters, **settings.params}
    ratios = ratio(tokens.new, tokens.old, settings.log_ratio_clamp)
    tau = torch.full_like(ratios, chosen["tau_neg"]).masked_fill(
        tokens.advantages > 0, chosen["tau_pos"]
    )
    return -tokens.advantages * torch.sigmoid(tau * (ratios - 1)) * (4 / tau)


def gmpo_log_ratios(tokens: ActionTokens, settings: "Loss") -> Tensor:
    """Return [N] log-ratios, at most clip_high where A > 0 and at least -clip_low elsewhere: GMPO
    clips one side, in log space.
    """
    low, high = settings.clips
    clamp = settings.log_ratio_clamp
    log_ratios = (tokens.new - tokens.old).clamp(-clamp, clamp)
    return torch.where(
        tokens.advantages > 0, log_ratios.clamp(max=high), log_ratios.clamp(min=-low)
    )


def gmpo_terms(tokens: ActionTokens, settings: "Loss") -> Tensor:
    """Return [N] -A times the geometric mean of the sequence's clipped ratios, with the gradient
    through the token's own (GMPO, 2507.20673).

    Advantages may differ by token, as in gspo. With equal advantages and the sequence mean the
    gradient equals the gradient of GMPO. A clipped token loses its gradient and still counts in the
    mean.
    """
    clipped = gmpo_log_ratios(tokens, settings)
    means = spread(sequence_means(clipped.detach(), tokens.lengths).exp(), tokens.lengths)
    return -tokens.advantages * means * (clipped - clipped.detach()).exp()


def dppo_kept(tokens: ActionTokens, settings: "Loss") -> Tensor:
    """Return [N] of bool: True if the token's probability rises at most clip_high (A > 0) or falls
    at most clip_low (A < 0).
    """
    low, high = settings.clips
    moved = tokens.new.detach().exp() - tokens.old.exp()
    return torch.where(tokens.advantages > 0, moved <= high, moved >= -low)


def dppo_terms(tokens: ActionTokens, settings: "Loss") -> Tensor:
    """Return [N] -min(rho, cap) A log pi of the tokens inside the trust region, the weight detached
    (DPPO with the binary total variation, 2602.04879).
    """
    cap = settings.params.get("cap", LOSSES["dppo"].parameters["cap"])
    weight = ratio(tokens.new.detach(), tokens.old, settings.log_ratio_clamp).clamp(max=cap)
    return -torch.where(dppo_kept(tokens, settings), weight, 0.0) * tokens.advantages * tokens.new


TERMS: dict[str, Callable[[ActionTokens, "Loss"], Tensor]] = {
    "gspo": gspo_terms,
    "sapo": sapo_terms,
    "gmpo": gmpo_terms,
    "dppo": dppo_terms,
}


def policy_terms(tokens: ActionTokens, settings: "Loss") -> Tensor:
    """Return [N] per-token policy loss of a built-in mode, before correction and normalization."""
    if settings.mode in TERMS:
        return TERMS[settings.mode](tokens, settings)
    if settings.mode == "cispo":
        weight = cispo_weight(tokens.new, tokens.old, *settings.clips, settings.log_ratio_clamp)
        return -weight * tokens.advantages * tokens.new
    ratios = ratio(tokens.new, tokens.old, settings.log_ratio_clamp)
    if settings.mode == "ppo":
        return clipped_terms(ratios, tokens.advantages, *settings.clips, settings.dual_clip)
    return -ratios * tokens.advantages


def correction_weight(tokens: ActionTokens, settings: "Loss") -> Tensor | None:
    """Return [N] detached weight for the mismatch between the old log-probs of learner and sampler;
    None if it is off.

    tis weighs tokens by min(ratio, correction_cap). icepop weighs them by a ratio in
    [correction_low, correction_high], else by 0. Both seq_tis and seq_mask weigh completions by the
    product of their ratios. With seq_tis, correction_cap truncates it. With seq_mask, a completion
    outside of [correction_low, correction_high] drops out. The correction geometric keeps or drops
    completions by the geometric mean, which does not depend on their length. Source of these three:
    "When Speed Kills Stability", Liu, Li et al. 2025, and verl's rollout correction.
    """
    kind, pair = settings.correction, (tokens.old.detach(), tokens.sampler)
    lengths, clamp = tokens.lengths, settings.log_ratio_clamp
    if kind == "none":
        return None
    if kind == "geometric":
        ratios = spread(gspo_ratio(*pair, lengths, clamp), lengths)
    elif kind in ("seq_tis", "seq_mask"):
        ratios = sequence_ratio(*pair, lengths, clamp)
    else:
        ratios = ratio(*pair, clamp)
    inside = (ratios >= settings.correction_low) & (ratios <= settings.correction_high)
    if kind in ("tis", "seq_tis"):
        return ratios.clamp(max=settings.correction_cap)
    if kind == "geometric":
        return inside.to(ratios.dtype)
    return torch.where(inside, ratios, 0.0)


def policy_loss(
    tokens: ActionTokens,
    settings: "Loss",
    terms: Tensor | None = None,
    correction: Tensor | None = None,
) -> Tensor:
    """Return the scalar to minimize: sum of weights * policy * correction + regularizer_weights *
    (kl_coef * KL - entropy_coef * entropy).

    `terms` and `correction`, [N] each, come from plugins. By default they come from the built-in
    functions of `settings`.
    """
    if terms is None:
        terms = policy_terms(tokens, settings)
    if correction is None:
        correction = correction_weight(tokens, settings)
    if correction is not None:
        terms = terms * correction
    loss = (terms * tokens.weights).sum()
    weights = tokens.weights if tokens.regularizer_weights is None else tokens.regularizer_weights
    if settings.kl_coef:
        if tokens.reference is None:
            raise ValueError("kl_coef needs the reference log-probs")
        divergence = kl_term(
            tokens.new, tokens.reference, settings.kl_estimator, settings.log_ratio_clamp
        )
        loss = loss + settings.kl_coef * (divergence * weights).sum()
    if settings.entropy_coef:
        if tokens.entropy is None:
            raise ValueError("entropy_coef needs the entropies")
        loss = loss - settings.entropy_coef * (tokens.entropy * weights).sum()
    return loss


# --- what the clip did ----------------------------------------------------------------------------


def clipped_tokens(tokens: ActionTokens, settings: "Loss") -> Tensor:
    """Return [N] of bool: True if the clip took the token's policy gradient away, or in cispo
    bounded its weight. In importance_sampling and ppo the clamp of the log-ratio counts as a clip.

    In gmpo the clip is one-sided in log space. In dppo a token counts if its probability left the
    trust region.
    """
    ratios, (low, high) = detached_ratios(tokens, settings), settings.clips
    if settings.mode == "cispo":
        return (ratios < low) | (ratios > high)
    if settings.mode == "dppo":
        return ~dppo_kept(tokens, settings)
    up, down = tokens.advantages > 0, tokens.advantages < 0
    outside = (up & (ratios > 1 + high)) | (down & (ratios < 1 - low))
    if settings.mode == "gspo":
        return outside
    log_ratios = tokens.new.detach() - tokens.old
    beyond = log_ratios.abs() > settings.log_ratio_clamp
    if settings.mode in ("importance_sampling", "sapo"):
        return beyond
    if settings.mode == "gmpo":
        return (up & (log_ratios > high)) | (down & (log_ratios < -low)) | beyond
    if settings.dual_clip > 0:
        doubly = down & (ratios > settings.dual_clip)
    else:
        doubly = torch.zeros_like(beyond)
    return outside | doubly | beyond


def clip_counts(tokens: ActionTokens, settings: "Loss", clipped: Tensor | None = None) -> Tensor:
    """Return [2] float: clipped tokens, and all tokens with a policy gradient to lose. In gspo the
    function counts sequences, each with the share of its tokens. The clip acts on a whole sequence
    unless its tokens' advantages differ in sign.

    `clipped` [N] of bool comes from a plugin; None means the tokens of the built-in clip.
    """
    active = (tokens.advantages != 0) & (tokens.weights != 0)
    if clipped is None:
        clipped = clipped_tokens(tokens, settings)
    counts = torch.stack([clipped & active, active]).float()
    if settings.mode == "gspo":
        clipped, present = (sequence_means(row, tokens.lengths) for row in counts)
        counts = torch.stack([clipped / present.clamp(min=1e-9), (present > 0).float()])
    return counts.sum(dim=1)

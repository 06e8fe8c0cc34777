"""Scores that tell draws from the learner's distribution from others: the two moments of a token's
log-prob, and likelihood ratios of tempered samplers, from one row of logits each.

For p = softmax(logits / T) of entropy H and a token x drawn from it, D = -log p(x) - H has mean 0,
and variance V = sum p (log p + H)^2. A sampler at the temperature T / (1 - l) draws from
q_l = p^(1 - l) / Z_l, Z_l = sum p^(1 - l); under it D has the mean l V + O(l^2).

The place of x in p's cumulative distribution, in order of id, is M = F(x-) + p(x) / 2 - 1/2, with
mean 0 and variance (1 - sum p^3) / 12. A product of two M has mean 0 if the tokens are independent.
"""

import torch
from torch import Tensor

from retrain.model.head import (
    Head,
    chunk_bytes_on,
    chunk_rows,
    exponentials,
    kept_counts,
    shifted_logits,
)
from retrain.model.truncation import keep_only

DISTANCES = (0.025, 0.05, 0.1, 0.2, 0.4)
"""Distances d beyond the tolerance l0 at which likelihood ratios are taken, each twice the one
before."""
_BLOCK_BYTES = {"cpu": 1 << 20}
"""Bytes of logits whose scores are computed together, by device; elsewhere a whole chunk. On a CPU
a dozen passes over them then stay in its cache."""
_MIN_LOG = -87.0
"""Log-probs are held above it: a token below adds less than e^-50 to a sum."""


def tempered_scores(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    tolerance: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> Tensor:
    """[N, 14] float32 of the tokens `targets` [N] after `hidden` [N, H]: D, V, then
    log q_l(x) - log q_l0(x) for each of DISTANCES at l = l0 + d, and for each at l = -(l0 + d)
    against -l0, where l0 is the `tolerance`; then M and its variance.

    The distribution is cut by `top_k`, `top_p` and `min_p` themselves, whatever the sampler says
    that it kept: one that cuts otherwise must not be believed. A token that is cut off takes the
    last place of the set.
    """
    scores = []
    device = hidden.device.type
    rows = chunk_rows(head.weight.shape[0], _BLOCK_BYTES.get(device, chunk_bytes_on(device)))
    for part, z in shifted_logits(head, hidden, temperature):
        if top_k or top_p < 1 or min_p:
            keep_only(z, targets[part], kept_counts(z, top_k, top_p, min_p))
        own = targets[part]
        scores += [
            _of_block(z[start : start + rows], own[start : start + rows], tolerance)
            for start in range(0, len(z), rows)
        ]
    return torch.cat(scores)


def _of_block(z: Tensor, targets: Tensor, tolerance: float) -> Tensor:
    """[R, 14] from `z` [R, V], whose maximum is at most 0; `z` is overwritten."""
    p = exponentials(z)
    total = p.sum(-1, keepdim=True)
    p /= total
    logprobs = z.sub_(total.log()).clamp_(min=_MIN_LOG)
    own = logprobs.gather(-1, targets.unsqueeze(-1))[:, 0]
    mean = (p * logprobs).sum(-1)  # -H
    scores = [mean - own, (p * (logprobs - mean.unsqueeze(-1)).square()).sum(-1)]
    for sign in (1, -1):
        # Sums of p^(1 - l) for all l: each distance is twice the one before, so its factor is the
        # square.
        at_tolerance = exponentials((1 - sign * tolerance) * logprobs)
        factor = torch.exp(-sign * DISTANCES[0] * logprobs)
        before = at_tolerance.sum(-1).log()
        for distance in DISTANCES:
            after = (at_tolerance * factor).sum(-1).log()
            scores.append(before - after - sign * distance * own)
            factor.square_()
    scores += [_place(p, targets, own), (1 - p.pow(3).sum(-1)).clamp(min=0) / 12]
    return torch.stack(scores, dim=-1)


def _place(p: Tensor, targets: Tensor, own: Tensor) -> Tensor:
    """[R] M of the targets, whose log-probs are `own`."""
    before = torch.arange(p.shape[1], device=p.device) < targets.unsqueeze(-1)
    return (p * before).sum(-1) + own.exp() / 2 - 0.5

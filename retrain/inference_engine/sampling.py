"""From logits to a token, its log-prob and the entropy, in one place and one pass over chunks of
rows.

The sampled distribution is softmax(logits / temperature), over the whole vocabulary or renormalized
over the tokens that the cuts of `model/truncation.py` keep. The token is its inverse CDF at a
uniform from the counter-based noise. A completion's tokens therefore do not depend on the rest of
the batch. Shape letters: R rows, V vocabulary, N blocks of the vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from retrain.model.budget import sampling_chunk_bytes
from retrain.model.head import chunk_rows, exponentials
from retrain.model.truncation import KeptSets, TruncationSettings, running_sums


def upload(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy to the device, on CUDA without waiting for earlier kernels. CUDA stages pageable memory
    before the call returns, so `array` may change afterwards.
    """
    return torch.from_numpy(array).to(device, non_blocking=device.type == "cuda")


_BLOCK = 256
"""The CDF has two levels, blocks and the tokens of one block. Weights and the sum of a block are
float32. Running sums, over the blocks and within one, are float64. A single float32 running sum
over 152k tokens would lose the small probabilities.
"""
_LOG_FLOOR = -1e4
"""Stands for -inf: its exponential is 0 in float32, and 0 * floor is 0 where 0 * -inf is NaN."""
_LOG_SMALLEST = -87.0
"""About the smallest normal float32, which no uniform reaches."""


COLUMNS = 4
"""Columns of a table of draws: token, log-prob, entropy, and the number of kept tokens for
truncated rows. A log-prob that is not finite says that the row's logits held NaN or +inf.
"""


def draw(
    logits: Tensor,
    temperatures: Tensor,
    uniforms: Tensor,
    cuts: TruncationSettings | None = None,
    *,
    greedy: bool = False,
    kept_sets: type[KeptSets] = KeptSets,
) -> Tensor:
    """Return [R, 4] draws of one token per row of `logits` [R, V], at `temperatures` [R] with
    `uniforms` [R] in (0, 1). `greedy`: some temperatures may be 0.

    The log-prob refers to the sampled distribution. The entropy of this distribution is H =
    logsumexp(z) - sum softmax(z) z in nats. Both are 0 for greedy rows. The draw never selects a
    token of probability zero (logit -inf, underflow, or cut off). Equal cumulative sums go to the
    lower id. With `FixedKeptSets` no operation waits for the host or has a data-dependent shape, so
    CUDA can capture a graph of the draw.
    """
    rows, vocabulary = logits.shape
    chunk = chunk_rows(vocabulary, sampling_chunk_bytes(logits.device.type))
    table = torch.zeros(rows, COLUMNS, dtype=torch.float64, device=logits.device)
    for start in range(0, rows, chunk):
        part = slice(start, start + chunk)
        is_greedy, divisors = None, temperatures[part]
        if greedy:
            is_greedy = divisors == 0
            divisors = torch.where(is_greedy, 1.0, divisors)
        # The same expression as in the learner: logits / temperature in float32.
        z = logits[part].float() / divisors[:, None]
        kept = None if cuts is None else partial(kept_sets.of_cuts, cuts=cuts(part))
        for number, column in enumerate(_draw_scaled(z, uniforms[part], is_greedy, kept)):
            table[part, number : number + 1] = column
    return table


def _draw_scaled(
    z: Tensor,
    uniforms: Tensor,
    greedy: Tensor | None,
    keep: Callable[[Tensor, Tensor], KeptSets] | None,
) -> tuple[Tensor, ...]:
    """Return the columns [r, 1] of the draws of z = logits / temperature [r, V] in float32.

    `greedy` [r] bool, or None if no row is. `keep` receives z - max z [r, V] and the sum of its
    exponentials [r].
    """
    rows, vocabulary = z.shape
    size = min(_BLOCK, vocabulary)
    blocks = -(-vocabulary // size)
    shifted = _shifted(z, blocks * size)
    weights, kept = _weights(shifted, vocabulary, keep)
    cumulative = F.pad(running_sums(_block_sums(weights, blocks)), (1, 0))
    total = cumulative[:, -1:]
    tokens = _invert(weights.view(rows, blocks, size), cumulative, uniforms[:, None])
    tokens.clamp_(max=vocabulary - 1)

    if greedy is not None:
        tokens = torch.where(greedy[:, None], _best(shifted[:, :vocabulary]), tokens)
    log_total = total.log()
    logprobs = shifted.gather(1, tokens).double() - log_total
    # From here on `shifted` is spent: its memory holds the entropy's moments.
    moments = _block_sums(shifted.mul_(weights), blocks).sum(-1, keepdim=True)
    entropies = (log_total - moments / total).clamp_(min=0.0)
    if greedy is not None:
        certain = greedy[:, None] & logprobs.isfinite()
        logprobs, entropies = (each.masked_fill_(certain, 0.0) for each in (logprobs, entropies))
    if kept is None:
        return tokens, logprobs, entropies
    return tokens, logprobs, entropies, kept.counts[:, None]


def _block_sums(values: Tensor, blocks: int) -> Tensor:
    """Return the sums [r, N] of N equal blocks of values [r, width], in float64."""
    return values.view(len(values), blocks, -1).sum(-1).double()


def _best(shifted: Tensor) -> Tensor:
    """Return [r, 1] the lowest id among the largest logits, which are zeros."""
    last = shifted.shape[1] - 1
    ids = torch.arange(last + 1, device=shifted.device)
    return torch.where(shifted == 0, ids, last).amin(-1, keepdim=True)


def _shifted(z: Tensor, width: int) -> Tensor:
    """Return z - max z [r, width], the floor beyond the vocabulary and where no uniform reaches."""
    shifted = torch.empty(len(z), width, dtype=torch.float32, device=z.device)
    shifted[:, z.shape[1] :] = _LOG_FLOOR
    torch.ops.aten.sub.out(z, z.amax(-1, keepdim=True), out=shifted[:, : z.shape[1]])
    return F.threshold(shifted, _LOG_SMALLEST, _LOG_FLOOR, inplace=True)


def _weights(
    shifted: Tensor, vocabulary: int, keep: Callable[[Tensor, Tensor], KeptSets] | None
) -> tuple[Tensor, KeptSets | None]:
    """Return softmax times its total [r, width], 0 beyond the kept sets, and these sets."""
    weights = exponentials(shifted)
    if keep is None:
        return weights, None
    kept = keep(shifted[:, :vocabulary], weights.sum(-1, dtype=torch.float64))
    weights[:, :vocabulary].masked_fill_(kept.beyond(shifted[:, :vocabulary]), 0.0)
    return weights, kept


def _invert(weights: Tensor, cumulative: Tensor, uniforms: Tensor) -> Tensor:
    """Return token ids [r, 1]: the first token whose cumulative weight reaches uniform * total.

    `weights` [r, N, block] and `cumulative` [r, N + 1] from 0 to the total. The targets lie in (0,
    total], so the token that reaches a target has a positive weight. The two `minimum` keep this
    true where rounding would step past the end.
    """
    blocks, size = weights.shape[1:]
    total = cumulative[:, -1:]
    target = torch.minimum(uniforms * total, total)
    # The clamp is for NaN rows.
    block = torch.searchsorted(cumulative[:, 1:].contiguous(), target).clamp_(max=blocks - 1)
    own = weights.gather(1, block[:, :, None].expand(-1, 1, size)).squeeze(1)
    inner = running_sums(own.double())
    rest = torch.minimum(target - cumulative.gather(1, block), inner[:, -1:])
    return block * size + torch.searchsorted(inner, rest)

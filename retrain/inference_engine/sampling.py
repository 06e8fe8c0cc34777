"""From logits to a token, its log-prob and the entropy, in one place and one pass over chunks of
rows.

The sampled distribution is softmax(logits / temperature), over the whole vocabulary or renormalised
over the tokens that the cuts of `model/truncation.py` keep; the token is its inverse CDF at a
uniform from the counter-based noise, so a completion's tokens do not depend on what else is in the
batch. Shape letters: R rows, V vocabulary, N blocks of the vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from retrain.model.budget import sampling_chunk_bytes
from retrain.model.head import chunk_rows, exponentials
from retrain.model.truncation import Cuts, KeptSets, running_sums


def upload(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy to the device, on CUDA without waiting for the kernels before it: pageable memory is
    staged before the call returns, so `array` may change then.
    """
    return torch.from_numpy(array).to(device, non_blocking=device.type == "cuda")


_BLOCK = 256
"""The CDF has two levels, blocks and the tokens of one block. Weights and the sum of a block are
float32; running sums, over the blocks and within one, are float64: a single float32 running sum
over 152k tokens would lose the small probabilities."""
_LOG_FLOOR = -1e4
"""Stands for -inf: its exponential is 0 in float32, and 0 * floor is 0 where 0 * -inf is NaN."""
_LOG_SMALLEST = -87.0
"""About the smallest normal float32, which no uniform reaches."""


@dataclass(frozen=True)
class Draws:
    """The tokens drawn for R rows. A log-prob that is not finite says that the row's logits held
    NaN or +inf.
    """

    tokens: npt.NDArray[np.int64]
    """[R]"""
    logprobs: npt.NDArray[np.float32]
    """[R] natural log of the token's probability under the sampled distribution; 0 for greedy
    rows."""
    entropies: npt.NDArray[np.float32]
    """[R] nats, of the sampled distribution (H = logsumexp(z) - sum softmax(z) z); 0 for greedy
    rows."""
    kept: npt.NDArray[np.int32] | None = None
    """[R] tokens that the sampled distribution kept; None where nothing was cut."""

    @classmethod
    def of_columns(cls, columns: npt.NDArray[np.float64]) -> "Draws":
        """Take [R, 3 or 4]: token, log-prob, entropy, and tokens kept where rows are truncated."""
        return cls(
            columns[:, 0].astype(np.int64),
            columns[:, 1].astype(np.float32),
            columns[:, 2].astype(np.float32),
            columns[:, 3].astype(np.int32) if columns.shape[1] > 3 else None,
        )


def draw(
    logits: Tensor,
    temperatures: npt.NDArray[np.float32],
    uniforms: npt.NDArray[np.float64],
    cuts: Cuts | None = None,
) -> Draws:
    """Sample one token per row of `logits` [R, V], at `temperatures` [R] (0 is greedy) with
    `uniforms` [R] in (0, 1).

    A token of probability zero (logit -inf, underflow, or cut off) is never drawn. Equal cumulative
    sums go to the lower id.
    """
    if logits.device.type == "mps":  # MPS has no float64
        logits = logits.cpu()
    rows, vocabulary = logits.shape
    chunk = chunk_rows(vocabulary, sampling_chunk_bytes(logits.device.type))
    columns = 3 if cuts is None else 4
    # One transfer to the host for all of them.
    packed = torch.empty(rows, columns, dtype=torch.float64, device=logits.device)
    for start in range(0, rows, chunk):
        part = slice(start, min(start + chunk, rows))
        noise = upload(uniforms[part], logits.device)
        of_chunk = None if cuts is None else cuts[part]
        _draw_chunk(logits[part], temperatures[part], noise, of_chunk, packed[part])
    return Draws.of_columns(packed.cpu().numpy())


def _draw_chunk(
    logits: Tensor,
    temperatures: npt.NDArray[np.float32],
    uniforms: Tensor,
    cuts: Cuts | None,
    out: Tensor,
) -> None:
    """Fill `out` [r, 3 or 4] with token, log-prob and entropy of each row, and with how many tokens
    the cuts keep.
    """

    def keep(z: Tensor, weights: Tensor) -> KeptSets:
        assert cuts is not None
        return KeptSets.of_cuts(z, weights.sum(-1, dtype=torch.float64), cuts)

    greedy = None
    if not temperatures.all():
        greedy = upload(temperatures == 0, logits.device)
    columns = draw_scaled(
        _scaled(logits, temperatures), uniforms, greedy, None if cuts is None else keep
    )
    for number, column in enumerate(columns):
        out[:, number : number + 1] = column


def _scaled(logits: Tensor, temperatures: npt.NDArray[np.float32]) -> Tensor:
    """Return logits / temperature in float32, the same expression as the learner's; greedy rows are
    left as they are.
    """
    z = logits.float()
    if (temperatures == 1).all():
        return z
    divisors = np.where(temperatures == 0, np.float32(1), temperatures)
    return z / upload(divisors, logits.device)[:, None]


def draw_scaled(
    z: Tensor,
    uniforms: Tensor,
    greedy: Tensor | None,
    keep: Callable[[Tensor, Tensor], KeptSets] | None,
) -> tuple[Tensor, ...]:
    """Draw token, log-prob and entropy, [r, 1] each, and with `keep` the number of tokens kept, of
    z = logits / temperature [r, V] in float32.

    `uniforms` [r]; `greedy` [r] bool, or None where no row is. `keep` is given z - max z [r, V] and
    its exponentials. Nothing here waits for the host or has a shape that depends on a value, so a
    graph can be captured of it.
    """
    rows, vocabulary = z.shape
    size = min(_BLOCK, vocabulary)
    blocks = -(-vocabulary // size)
    shifted = _shifted(z, blocks * size)
    weights, kept = _weights(shifted, vocabulary, keep)
    blocked = weights.view(rows, blocks, size)
    cumulative = F.pad(running_sums(blocked.sum(-1).double()), (1, 0))
    total = cumulative[:, -1:]
    tokens = _invert(blocked, cumulative, uniforms[:, None])
    tokens.clamp_(max=vocabulary - 1)

    log_total = total.log()
    logprobs = shifted.gather(1, tokens).double() - log_total
    best = None
    if greedy is not None:
        best = _best(shifted[:, :vocabulary])
    # From here on `shifted` is spent: the entropy's moments are computed in its memory.
    moments = shifted.mul_(weights).view(rows, blocks, size).sum(-1).double().sum(-1, keepdim=True)
    entropies = (log_total - moments / total).clamp_(min=0.0)
    columns = tokens, logprobs, entropies
    if greedy is not None and best is not None:
        columns = _certain(columns, greedy[:, None], best)
    if kept is None:
        return columns
    return (*columns, kept.counts[:, None])


def _certain(
    columns: tuple[Tensor, Tensor, Tensor], greedy: Tensor, best: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Give `greedy` rows [r, 1] their `best` token, with log-prob and entropy 0 unless the logits
    are not finite.
    """
    tokens, logprobs, entropies = columns
    certain = greedy & logprobs.isfinite()
    return (
        torch.where(greedy, best, tokens),
        logprobs.masked_fill(certain, 0.0),
        entropies.masked_fill(certain, 0.0),
    )


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
    kept = keep(shifted[:, :vocabulary], weights)
    weights[:, :vocabulary].masked_fill_(kept.beyond(shifted[:, :vocabulary]), 0.0)
    return weights, kept


def _best(shifted: Tensor) -> Tensor:
    """Return the lowest id [r, 1] among the largest logits, which `shifted` [r, V] has as zeros."""
    last = shifted.shape[1] - 1
    ids = torch.arange(last + 1, device=shifted.device)
    return torch.where(shifted == 0, ids, last).amin(-1, keepdim=True)


def _invert(weights: Tensor, cumulative: Tensor, uniforms: Tensor) -> Tensor:
    """Return token ids [r, 1]: the first token whose cumulative weight reaches uniform * total.

    `weights` [r, N, block] and `cumulative` [r, N + 1] from 0 to the total. The targets lie in (0,
    total], so the token that reaches one has a positive weight; the two `minimum` keep that true
    where rounding would step past the end.
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

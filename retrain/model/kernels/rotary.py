"""The adapter's part of queries, keys and values, the norm of query and key heads, their rotary embedding and the write to the pages as
one kernel.

Shape letters: N rows with one token each, Q and K query and key-value heads, D head size, P pages, T tokens of a page, R ranks.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from retrain.model.kernels.adapters import ROWS, low_rank, ranks_at_once
from retrain.model.kernels.rounding import factors, rounded


@triton.jit
def _turn_and_store(
    qkv, reduced, up, cos, sin, weight, queries, keys, values, places, rows, row_stride, reduced_stride, eps,
    Q: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr,
    R: tl.constexpr, RANKS: tl.constexpr, FACTORS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of some rows, in two halves. Queries go to `queries`, keys and values to the rows' places in the pages."""
    dtype: tl.constexpr = qkv.dtype.element_ty
    size: tl.constexpr = 2 * HALF
    row, head = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (at < HALF)[None, :]
    source = qkv + row[:, None] * row_stride + head * size + at[None, :]
    left = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if R:
        outputs: tl.constexpr = (Q + 2 * K) * size
        of_head = up + head * size
        left = rounded(left + low_rank(reduced, of_head, row, at, rows, HALF, reduced_stride, outputs, R, RANKS, FACTORS), dtype)
        right = rounded(right + low_rank(reduced, of_head + HALF, row, at, rows, HALF, reduced_stride, outputs, R, RANKS, FACTORS), dtype)
    place = (tl.load(places + row, mask=row < rows, other=0) * (K * size))[:, None] + at[None, :]
    if head >= Q + K:
        target = values + place + (head - Q - K) * size
        tl.store(target, left.to(dtype), mask=inside)
        tl.store(target + HALF, right.to(dtype), mask=inside)
    else:
        if HAS_NORM:
            squares = tl.sum(left * left, axis=1) + tl.sum(right * right, axis=1)
            scale = (1.0 / tl.sqrt_rn(squares / size + eps))[:, None]
            factor = weight + head * size + at
            left = rounded(left * scale, dtype) * tl.load(factor, mask=at < HALF, other=0.0).to(tl.float32)[None, :]
            right = rounded(right * scale, dtype) * tl.load(factor + HALF, mask=at < HALF, other=0.0).to(tl.float32)[None, :]
            left, right = rounded(left, dtype), rounded(right, dtype)
        angle = row[:, None] * size + at[None, :]
        cos_left = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
        cos_right = tl.load(cos + angle + HALF, mask=inside, other=0.0).to(tl.float32)
        sin_left = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
        sin_right = tl.load(sin + angle + HALF, mask=inside, other=0.0).to(tl.float32)
        turned_left = rounded(rounded(left * cos_left, dtype) - right * sin_left, dtype).to(dtype)
        turned_right = rounded(rounded(right * cos_right, dtype) + left * sin_right, dtype).to(dtype)
        if head < Q:
            target = queries + row[:, None] * (Q * size) + head * size + at[None, :]
            tl.store(target, turned_left, mask=inside)
            tl.store(target + HALF, turned_right, mask=inside)
        else:
            target = keys + place + (head - Q) * size
            tl.store(target, turned_left, mask=inside)
            tl.store(target + HALF, turned_right, mask=inside)


def turn_and_store(
    qkv: Tensor,
    pending: tuple[Tensor, Tensor] | None,
    heads: Sequence[int],
    rotary: tuple[Tensor, Tensor],
    norm: tuple[Tensor, float] | None,
    pages: tuple[Tensor, Tensor],
    places: Tensor,
) -> Tensor:
    """Queries [N, Q, D] of `qkv` [N, (Q + 2 K) D], whose rows may lie apart; keys and values go to `places` [N] of pages [P, T, K, D].

    `pending`: [N, R] and [R, (Q + 2 K) D], whose product is added. `heads`: Q and K. `rotary`: cos and sin [N, 1, D]. `norm`: weights
    [Q + K, D] and eps.
    """
    (queries, key_heads), size = heads[:2], pages[0].shape[-1]
    out = torch.empty(len(qkv), queries, size, dtype=qkv.dtype, device=qkv.device)
    weight, eps = (qkv, 0.0) if norm is None else norm
    reduced, up = pending or (qkv, qkv[:0])
    _turn_and_store[triton.cdiv(len(qkv), ROWS), queries + 2 * key_heads](
        qkv, reduced, up, *rotary, weight, out, *pages, places, len(qkv), qkv.stride(0), reduced.stride(0), eps,
        Q=queries, K=key_heads, HALF=size // 2, HAS_NORM=norm is not None,
        R=len(up), RANKS=ranks_at_once(up), FACTORS=factors(qkv), ROWS=ROWS, BLOCK=max(16, triton.next_power_of_2(size // 2)),
    )  # fmt: skip
    return out

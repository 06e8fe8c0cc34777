"""The norm of query and key heads, their rotary embedding and the write to the pages as one kernel.

Shape letters: N rows with one token each, Q and K query and key-value heads, D head size, P pages, T tokens of a page.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from retrain.model.kernels.rounding import rounded

_HEADS = 16
"""Heads of one program."""


@triton.jit
def _turn_and_store(
    qkv, cos, sin, weight, queries, keys, values, places, row_stride, eps,
    Q: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some heads of one row, in two halves. Queries go to `queries`, keys and values to the row's place in the pages."""
    dtype: tl.constexpr = qkv.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    inside = (head < Q + 2 * K) & (at < HALF)
    source = qkv + row * row_stride + head * (2 * HALF) + at
    left = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    value_left, value_right = left, right
    turning = inside & (head < Q + K)
    if HAS_NORM:
        squares = tl.sum(left * left, axis=1) + tl.sum(right * right, axis=1)
        scale = (1.0 / tl.sqrt_rn(squares / (2 * HALF) + eps))[:, None]
        of_head = weight + head * (2 * HALF) + at
        left = rounded(rounded(left * scale, dtype) * tl.load(of_head, mask=turning, other=0.0).to(tl.float32), dtype)
        right = rounded(rounded(right * scale, dtype) * tl.load(of_head + HALF, mask=turning, other=0.0).to(tl.float32), dtype)
    angle = row * (2 * HALF) + at
    cos_left = tl.load(cos + angle, mask=at < HALF, other=0.0).to(tl.float32)
    cos_right = tl.load(cos + angle + HALF, mask=at < HALF, other=0.0).to(tl.float32)
    sin_left = tl.load(sin + angle, mask=at < HALF, other=0.0).to(tl.float32)
    sin_right = tl.load(sin + angle + HALF, mask=at < HALF, other=0.0).to(tl.float32)
    turned_left = rounded(rounded(left * cos_left, dtype) - right * sin_left, dtype)
    turned_right = rounded(rounded(right * cos_right, dtype) + left * sin_right, dtype)

    is_query, is_key = inside & (head < Q), turning & (head >= Q)
    target = queries + row * (Q * 2 * HALF) + head * (2 * HALF) + at
    tl.store(target, turned_left.to(dtype), mask=is_query)
    tl.store(target + HALF, turned_right.to(dtype), mask=is_query)
    place = tl.load(places + row) * (K * 2 * HALF)
    target = keys + place + (head - Q) * (2 * HALF) + at
    tl.store(target, turned_left.to(dtype), mask=is_key)
    tl.store(target + HALF, turned_right.to(dtype), mask=is_key)
    is_value = inside & (head >= Q + K)
    target = values + place + (head - Q - K) * (2 * HALF) + at
    tl.store(target, value_left.to(dtype), mask=is_value)
    tl.store(target + HALF, value_right.to(dtype), mask=is_value)


def turn_and_store(
    qkv: Tensor,
    heads: Sequence[int],
    rotary: tuple[Tensor, Tensor],
    norm: tuple[Tensor, float] | None,
    pages: tuple[Tensor, Tensor],
    places: Tensor,
) -> Tensor:
    """Queries [N, Q, D] of `qkv` [N, (Q + 2 K) D], whose rows may lie apart; keys and values go to `places` [N] of pages [P, T, K, D].

    `heads`: Q and K. `rotary`: cos and sin [N, 1, D]. `norm`: weights [Q + K, D] and eps.
    """
    (queries, key_heads), size = heads[:2], pages[0].shape[-1]
    out = torch.empty(len(qkv), queries, size, dtype=qkv.dtype, device=qkv.device)
    weight, eps = (qkv, 0.0) if norm is None else norm
    _turn_and_store[len(qkv), triton.cdiv(queries + 2 * key_heads, _HEADS)](
        qkv, *rotary, weight, out, *pages, places, qkv.stride(0), eps,
        Q=queries, K=key_heads, HALF=size // 2, HAS_NORM=norm is not None, HEADS=_HEADS, BLOCK=triton.next_power_of_2(size // 2),
    )  # fmt: skip
    return out

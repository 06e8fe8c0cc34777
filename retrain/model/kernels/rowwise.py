"""Kernels over the rows of a layer: the RMS norm with the residual sum before it, the norm and
rotary embedding of queries and keys, and silu(gate) * up. Each but the write to the pages has its
gradient.

For a step of decoding one kernel adds the adapter's part to queries, keys and values, norms and
turns the heads, and writes to the pages. The activation adds the adapter's part to both of its
operands. Shape letters: N rows with one token each, H hidden size, Q and K query and key-value
heads, D head size, P pages, T tokens of a page, I inner size, R ranks.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from retrain.model.kernels.products import ROWS, factors, low_rank, ranks_at_once, read, rounded

# -- norm ------------------------------------------------------------------------------------------


@triton.jit
def _add_norm(
    residual, update, weight, out, scales, update_stride, size, eps, HAS_UPDATE: tl.constexpr,
    KEEPS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One row. The sum is rounded before its norm, the normed value before its weight, as where
    each is an operator.

    KEEPS: `scales` takes one over the root mean square.
    """
    dtype: tl.constexpr = residual.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    x = read(residual + row * size + at, inside)
    if HAS_UPDATE:
        x = rounded(
            x + read(update + row * update_stride + at, inside),
            dtype,
        )
        tl.store(residual + row * size + at, x.to(dtype), mask=inside)
    scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=0) / size + eps)
    if KEEPS:
        tl.store(scales + row, scale)
    normed = rounded(x * scale, dtype) * read(weight + at, inside)
    tl.store(out + row * size + at, rounded(normed, dtype).to(dtype), mask=inside)


def add_norm(residual: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """The normed sum [N, H] of `residual` [N, H], which becomes the sum, and `update` [N, H], whose
    rows may lie apart.
    """
    out = torch.empty_like(residual)
    rows, size = residual.shape
    added = residual if update is None else update
    _add_norm[rows,](
        residual, added, weight, out, out, added.stride(0), size, eps,
        HAS_UPDATE=update is not None, KEEPS=False, BLOCK=triton.next_power_of_2(size), num_warps=8,
    )  # fmt: skip
    return out


def norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The normed x [N, H], and [N, 1] float32, one over the root mean square of each row."""
    x = x.contiguous()
    rows, size = x.shape
    out, scales = torch.empty_like(x), x.new_empty(rows, 1, dtype=torch.float32)
    _add_norm[rows,](
        x, x, weight, out, scales, 0, size, eps, HAS_UPDATE=False, KEEPS=True,
        BLOCK=triton.next_power_of_2(size), num_warps=8
    )  # fmt: skip
    return out, scales


@triton.jit
def _norm_gradient(grad, x, weight, scales, out, size, BLOCK: tl.constexpr):
    """One row: s * (g w - x s^2 mean(x g w)), with g w rounded as its operator would."""
    dtype: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    value = read(x + row * size + at, inside)
    weighted = read(grad + row * size + at, inside)
    weighted = rounded(weighted * read(weight + at, inside), dtype)
    scale = tl.load(scales + row)
    mean = tl.sum(value * weighted, axis=0) * scale * scale / size
    tl.store(
        out + row * size + at,
        rounded((weighted - value * mean) * scale, dtype).to(dtype),
        mask=inside,
    )


def norm_gradient(grad: Tensor, x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Return the gradient of x [N, H]. `grad` is the normed x's, `scales` are `norm`'s."""
    grad, x, out = (
        grad.contiguous(),
        x.contiguous(),
        torch.empty_like(x, memory_format=torch.contiguous_format),
    )
    rows, size = x.shape
    _norm_gradient[rows,](
        grad, x, weight, scales, out, size, BLOCK=triton.next_power_of_2(size), num_warps=8
    )
    return out


# -- rotary embedding ------------------------------------------------------------------------------


@triton.jit
def normed_halves(left, right, scale, weight, at, HALF: tl.constexpr, dtype: tl.constexpr):
    """Both halves [rows, HALF] of a head times `scale` [rows] and its `weight` [2 HALF], each
    product rounded.
    """
    inside, by = at < HALF, scale[:, None]
    left = rounded(left * by, dtype) * read(weight + at, inside)[None, :]
    right = rounded(right * by, dtype) * read(weight + HALF + at, inside)[None, :]
    return rounded(left, dtype), rounded(right, dtype)


@triton.jit
def rotated_halves(
    left, right, way, cos, sin, row, at, inside, HALF: tl.constexpr, dtype: tl.constexpr
):
    """Both halves [rows, HALF] rotated by the angles of their rows, or back where `way` is -1; the
    product with the cosine is rounded.
    """
    angle = row[:, None] * (2 * HALF) + at[None, :]
    cos_left = read(cos + angle, inside)
    cos_right = read(cos + angle + HALF, inside)
    sin_left = read(sin + angle, inside) * way
    sin_right = read(sin + angle + HALF, inside) * way
    rotated = rounded(rounded(left * cos_left, dtype) - right * sin_left, dtype)
    return rotated, rounded(rounded(right * cos_right, dtype) + left * sin_right, dtype)


@triton.jit
def _apply_rope_and_store_kv(
    qkv, reduced, up, cos, sin, weight, queries, keys, values, slot_mapping, rows, row_stride,
    reduced_stride, eps,
    Q: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr,
    R: tl.constexpr, RANKS: tl.constexpr, FACTORS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of some rows, in two halves. Queries go to `queries`, keys and values to the rows'
    slots in the pages.
    """
    dtype: tl.constexpr = qkv.dtype.element_ty
    size: tl.constexpr = 2 * HALF
    row, head = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (at < HALF)[None, :]
    source = qkv + row[:, None] * row_stride + head * size + at[None, :]
    left = read(source, inside)
    right = read(source + HALF, inside)
    if R:
        outputs: tl.constexpr = (Q + 2 * K) * size
        of_head = up + head * size
        left = rounded(
            left
            + low_rank(
                reduced, of_head, row, at, rows, HALF, reduced_stride, outputs, R, RANKS, FACTORS
            ),
            dtype,
        )
        right = rounded(
            right
            + low_rank(
                reduced,
                of_head + HALF,
                row,
                at,
                rows,
                HALF,
                reduced_stride,
                outputs,
                R,
                RANKS,
                FACTORS,
            ),
            dtype,
        )
    slot = tl.load(slot_mapping + row, mask=row < rows, other=0)
    place = (slot * (K * size))[:, None] + at[None, :]
    # Values are neither normed nor rotated.
    if head >= Q + K:
        target = values + place + (head - Q - K) * size
        tl.store(target, left.to(dtype), mask=inside)
        tl.store(target + HALF, right.to(dtype), mask=inside)
    else:
        if HAS_NORM:
            scale = 1.0 / tl.sqrt_rn(
                (tl.sum(left * left, axis=1) + tl.sum(right * right, axis=1)) / size + eps
            )
            left, right = normed_halves(left, right, scale, weight + head * size, at, HALF, dtype)
        left, right = rotated_halves(left, right, 1.0, cos, sin, row, at, inside, HALF, dtype)
        if head < Q:
            target = queries + row[:, None] * (Q * size) + head * size + at[None, :]
            tl.store(target, left.to(dtype), mask=inside)
            tl.store(target + HALF, right.to(dtype), mask=inside)
        else:
            target = keys + place + (head - Q) * size
            tl.store(target, left.to(dtype), mask=inside)
            tl.store(target + HALF, right.to(dtype), mask=inside)


def apply_rope_and_store_kv(
    qkv: Tensor,
    pending: tuple[Tensor, Tensor] | None,
    heads: Sequence[int],
    rotary: tuple[Tensor, Tensor],
    norm: tuple[Tensor, float] | None,
    pages: tuple[Tensor, Tensor],
    slot_mapping: Tensor,
) -> Tensor:
    """Queries [N, Q, D] of `qkv` [N, (Q + 2 K) D], whose rows may lie apart; keys and values go to
    `slot_mapping` [N] of pages [P, T, K, D].

    `pending`: [N, R] and [R, (Q + 2 K) D], whose product is added. `heads`: Q and K. `rotary`: cos
    and sin [N, 1, D]. `norm`: weights [Q + K, D] and eps.
    """
    (queries, key_heads), size = heads[:2], pages[0].shape[-1]
    out = torch.empty(len(qkv), queries, size, dtype=qkv.dtype, device=qkv.device)
    weight, eps = (qkv, 0.0) if norm is None else norm
    reduced, up = pending or (qkv, qkv[:0])
    _apply_rope_and_store_kv[triton.cdiv(len(qkv), ROWS), queries + 2 * key_heads](
        qkv, reduced, up, *rotary, weight, out, *pages, slot_mapping, len(qkv), qkv.stride(0),
        reduced.stride(0), eps,
        Q=queries, K=key_heads, HALF=size // 2, HAS_NORM=norm is not None,
        R=len(up), RANKS=ranks_at_once(up), FACTORS=factors(qkv), ROWS=ROWS, BLOCK=max(16,
        triton.next_power_of_2(size // 2)),
    )  # fmt: skip
    return out


@triton.jit
def _apply_rope(
    x, cos, sin, weight, out, scales, rows, row_stride, head_stride, eps, HALF: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One head of some rows, in two halves; `scales` takes one over the root mean square of
    each.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    size: tl.constexpr = 2 * HALF
    row, head = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (at < HALF)[None, :]
    source = x + row[:, None] * row_stride + head * head_stride + at[None, :]
    left, right = (
        read(source, inside),
        read(source + HALF, inside),
    )
    scale = 1.0 / tl.sqrt_rn(
        (tl.sum(left * left, axis=1) + tl.sum(right * right, axis=1)) / size + eps
    )
    place = row * tl.num_programs(1) + head
    tl.store(scales + place, scale, mask=row < rows)
    left, right = normed_halves(left, right, scale, weight + head * size, at, HALF, dtype)
    left, right = rotated_halves(left, right, 1.0, cos, sin, row, at, inside, HALF, dtype)
    target = out + place[:, None] * size + at[None, :]
    tl.store(target, left.to(dtype), mask=inside)
    tl.store(target + HALF, right.to(dtype), mask=inside)


def apply_rope(
    x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(x [N, heads, D], normed and rotated by cos and sin [N, 1, D]; the scales of its norm [N,
    heads, 1] float32); weight [heads, D].
    """
    rows, heads, size = x.shape
    out, scales = x.new_empty(x.shape), x.new_empty(rows, heads, 1, dtype=torch.float32)
    _apply_rope[triton.cdiv(rows, ROWS), heads](
        x, cos, sin, weight, out, scales, rows, x.stride(0), x.stride(1), eps,
        HALF=size // 2, ROWS=ROWS, BLOCK=triton.next_power_of_2(size // 2),
    )  # fmt: skip
    return out, scales


@triton.jit
def _apply_rope_gradient(
    grad, x, cos, sin, weight, scales, out, rows, grad_row_stride, grad_head_stride, row_stride,
    head_stride,
    HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of some rows, in two halves: rotated back, then the gradient of the norm as
    above.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    size: tl.constexpr = 2 * HALF
    row, head = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (at < HALF)[None, :]
    source = grad + row[:, None] * grad_row_stride + head * grad_head_stride + at[None, :]
    left, right = (
        read(source, inside),
        read(source + HALF, inside),
    )
    left, right = rotated_halves(left, right, -1.0, cos, sin, row, at, inside, HALF, dtype)
    factor = weight + head * size + at
    left = rounded(left * read(factor, at < HALF)[None, :], dtype)
    right = rounded(right * read(factor + HALF, at < HALF)[None, :], dtype)
    source = x + row[:, None] * row_stride + head * head_stride + at[None, :]
    value_left = read(source, inside)
    value_right = read(source + HALF, inside)
    place = row * tl.num_programs(1) + head
    scale = tl.load(scales + place, mask=row < rows, other=0.0)
    mean = (
        (tl.sum(value_left * left, axis=1) + tl.sum(value_right * right, axis=1))
        * scale
        * scale
        / size
    )[:, None]
    target = out + place[:, None] * size + at[None, :]
    tl.store(
        target, rounded((left - value_left * mean) * scale[:, None], dtype).to(dtype), mask=inside
    )
    tl.store(
        target + HALF,
        rounded((right - value_right * mean) * scale[:, None], dtype).to(dtype),
        mask=inside,
    )


def apply_rope_gradient(
    grad: Tensor, x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor, scales: Tensor
) -> Tensor:
    """Return the gradient of x [N, heads, D]. `grad` is the one of `apply_rope`'s first result."""
    grad = grad if grad.stride(2) == 1 else grad.contiguous()
    (rows, heads, size), out = x.shape, x.new_empty(x.shape)
    _apply_rope_gradient[triton.cdiv(rows, ROWS), heads](
        grad, x, cos, sin, weight, scales, out, rows, grad.stride(0), grad.stride(1), x.stride(0),
        x.stride(1),
        HALF=size // 2, ROWS=ROWS, BLOCK=triton.next_power_of_2(size // 2),
    )  # fmt: skip
    return out


# -- activation ------------------------------------------------------------------------------------


_BLOCK = 1024


@triton.jit
def _gate(
    gates, reduced, up, out, rows, row_stride, reduced_stride, size,
    R: tl.constexpr, RANKS: tl.constexpr, FACTORS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of some rows. Sums and silu are rounded before what follows, as where each is an
    operator.
    """
    dtype: tl.constexpr = gates.dtype.element_ty
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (at < size)[None, :]
    source = gates + row[:, None] * row_stride + at[None, :]
    gate = read(source, inside)
    factor = read(source + size, inside)
    if R:
        gate = rounded(
            gate
            + low_rank(
                reduced, up, row, at, rows, size, reduced_stride, 2 * size, R, RANKS, FACTORS
            ),
            dtype,
        )
        factor = rounded(
            factor
            + low_rank(
                reduced, up + size, row, at, rows, size, reduced_stride, 2 * size, R, RANKS, FACTORS
            ),
            dtype,
        )
    active = rounded(gate / (1.0 + tl.exp(-gate)), dtype)
    tl.store(
        out + row[:, None] * size + at[None, :],
        rounded(active * factor, dtype).to(dtype),
        mask=inside,
    )


def gate(gates: Tensor, pending: tuple[Tensor, Tensor] | None) -> Tensor:
    """[N, I] of gate and up side by side in [N, 2 I], whose rows may lie apart; `pending`: [N, R]
    and [R, 2 I], whose product is added.
    """
    rows, size = len(gates), gates.shape[1] // 2
    out = torch.empty(rows, size, dtype=gates.dtype, device=gates.device)
    reduced, up = pending or (gates, gates[:0])
    # With an adapter a block holds a matrix product, which has 16 rows at least.
    tall, wide = (ROWS, 64) if pending else (1, _BLOCK)
    _gate[triton.cdiv(rows, tall), triton.cdiv(size, wide)](
        gates, reduced, up, out, rows, gates.stride(0), reduced.stride(0), size,
        R=len(up), RANKS=ranks_at_once(up), FACTORS=factors(gates), ROWS=tall, BLOCK=wide,
    )  # fmt: skip
    return out


@triton.jit
def _gate_gradient(grad, gates, out, row_stride, size, BLOCK: tl.constexpr):
    """A block of one row. silu and the gradient of its output are rounded, as where each is an
    operator.
    """
    dtype: tl.constexpr = gates.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    source, target = gates + row * row_stride + at, out + row * 2 * size + at
    gate = read(source, inside)
    factor = read(source + size, inside)
    of_inner = read(grad + row * size + at, inside)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    of_active = rounded(of_inner * factor, dtype)
    tl.store(
        target,
        rounded(of_active * sigmoid * (1.0 + gate * (1.0 - sigmoid)), dtype).to(dtype),
        mask=inside,
    )
    tl.store(
        target + size,
        rounded(of_inner * rounded(gate / (1.0 + tl.exp(-gate)), dtype), dtype).to(dtype),
        mask=inside,
    )


def gate_gradient(grad: Tensor, gates: Tensor) -> Tensor:
    """Return the gradient of `gates` [N, 2 I]. `grad` [N, I] is the one of `gate`'s result."""
    rows, size = grad.shape
    out = torch.empty(rows, 2 * size, dtype=gates.dtype, device=gates.device)
    _gate_gradient[rows, triton.cdiv(size, _BLOCK)](
        grad.contiguous(), gates, out, gates.stride(0), size, BLOCK=_BLOCK
    )
    return out

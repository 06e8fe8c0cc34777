"""silu(gate) * up as one kernel, which adds the adapter's part to both. N rows, I inner size, R ranks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from retrain.model.kernels.adapters import ROWS, low_rank, ranks_at_once
from retrain.model.kernels.rounding import factors, rounded


@triton.jit
def _gate(
    gates, reduced, up, out, rows, row_stride, reduced_stride, size,
    R: tl.constexpr, RANKS: tl.constexpr, FACTORS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of some rows. Sums and silu are rounded before what follows, as where each is an operator."""
    dtype: tl.constexpr = gates.dtype.element_ty
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (at < size)[None, :]
    source = gates + row[:, None] * row_stride + at[None, :]
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(source + size, mask=inside, other=0.0).to(tl.float32)
    if R:
        gate = rounded(gate + low_rank(reduced, up, row, at, rows, size, reduced_stride, 2 * size, R, RANKS, FACTORS), dtype)
        factor = rounded(factor + low_rank(reduced, up + size, row, at, rows, size, reduced_stride, 2 * size, R, RANKS, FACTORS), dtype)
    active = rounded(gate / (1.0 + tl.exp(-gate)), dtype)
    tl.store(out + row[:, None] * size + at[None, :], rounded(active * factor, dtype).to(dtype), mask=inside)


def gate(gates: Tensor, pending: tuple[Tensor, Tensor] | None) -> Tensor:
    """[N, I] of gate and up side by side in [N, 2 I], whose rows may lie apart; `pending`: [N, R] and [R, 2 I], whose product is added."""
    rows, size = len(gates), gates.shape[1] // 2
    out = torch.empty(rows, size, dtype=gates.dtype, device=gates.device)
    reduced, up = pending or (gates, gates[:0])
    tall, wide = (ROWS, 64) if pending else (1, 1024)
    _gate[triton.cdiv(rows, tall), triton.cdiv(size, wide)](
        gates, reduced, up, out, rows, gates.stride(0), reduced.stride(0), size,
        R=len(up), RANKS=ranks_at_once(up), FACTORS=factors(gates), ROWS=tall, BLOCK=wide,
    )  # fmt: skip
    return out

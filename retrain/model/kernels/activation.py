"""silu(gate) * up as one kernel, which adds the adapter's part to both, and its gradient. N rows, I
inner size, R ranks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from retrain.model.kernels.adapters import ROWS, low_rank, ranks_at_once
from retrain.model.kernels.rounding import factors, rounded

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
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(source + size, mask=inside, other=0.0).to(tl.float32)
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
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(source + size, mask=inside, other=0.0).to(tl.float32)
    of_inner = tl.load(grad + row * size + at, mask=inside, other=0.0).to(tl.float32)
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
    """The gradient of `gates` [N, 2 I], given that of `gate`'s result [N, I]."""
    rows, size = grad.shape
    out = torch.empty(rows, 2 * size, dtype=gates.dtype, device=gates.device)
    _gate_gradient[rows, triton.cdiv(size, _BLOCK)](
        grad.contiguous(), gates, out, gates.stride(0), size, BLOCK=_BLOCK
    )
    return out

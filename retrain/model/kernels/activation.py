"""silu(gate) * up as one kernel. N rows, I inner size."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from retrain.model.kernels.rounding import rounded

_BLOCK = 1024


@triton.jit
def _gate(gates, out, row_stride, size, BLOCK: tl.constexpr):
    """A block of one row; silu is rounded before the product, as where each is an operator."""
    dtype: tl.constexpr = gates.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gates + row * row_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gates + row * row_stride + size + at, mask=inside, other=0.0).to(tl.float32)
    active = rounded(gate / (1.0 + tl.exp(-gate)), dtype)
    tl.store(out + row * size + at, rounded(active * up, dtype).to(dtype), mask=inside)


def gate(gates: Tensor) -> Tensor:
    """[N, I] of gate and up side by side in [N, 2 I], whose rows may lie apart."""
    rows, size = len(gates), gates.shape[1] // 2
    out = torch.empty(rows, size, dtype=gates.dtype, device=gates.device)
    _gate[rows, triton.cdiv(size, _BLOCK)](gates, out, gates.stride(0), size, BLOCK=_BLOCK)
    return out

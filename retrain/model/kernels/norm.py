"""The residual sum and its RMS norm as one kernel. N rows, H hidden size."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from retrain.model.kernels.rounding import rounded


@triton.jit
def _add_norm(residual, update, weight, out, update_stride, size, eps, HAS_UPDATE: tl.constexpr, BLOCK: tl.constexpr):
    """One row. The sum is rounded before its norm, the normed value before its weight, as where each is an operator."""
    dtype: tl.constexpr = residual.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    x = tl.load(residual + row * size + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_UPDATE:
        x = rounded(x + tl.load(update + row * update_stride + at, mask=inside, other=0.0).to(tl.float32), dtype)
        tl.store(residual + row * size + at, x.to(dtype), mask=inside)
    scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=0) / size + eps)
    normed = rounded(x * scale, dtype) * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + at, rounded(normed, dtype).to(dtype), mask=inside)


def add_norm(residual: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """The normed sum [N, H] of `residual` [N, H], which becomes the sum, and `update` [N, H], whose rows may lie apart."""
    out = torch.empty_like(residual)
    rows, size = residual.shape
    added = residual if update is None else update
    _add_norm[rows,](
        residual, added, weight, out, added.stride(0), size, eps,
        HAS_UPDATE=update is not None, BLOCK=triton.next_power_of_2(size), num_warps=8,
    )  # fmt: skip
    return out

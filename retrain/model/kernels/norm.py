"""The RMS norm, with the residual sum before it, as one kernel, and its gradient. N rows, H hidden
size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from retrain.model.kernels.rounding import rounded


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
    x = tl.load(residual + row * size + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_UPDATE:
        x = rounded(
            x + tl.load(update + row * update_stride + at, mask=inside, other=0.0).to(tl.float32),
            dtype,
        )
        tl.store(residual + row * size + at, x.to(dtype), mask=inside)
    scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=0) / size + eps)
    if KEEPS:
        tl.store(scales + row, scale)
    normed = rounded(x * scale, dtype) * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
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
    """One row: s * (g w - x s^2 mean(x g w)), of which g w is rounded, as where it is an
    operator.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(x + row * size + at, mask=inside, other=0.0).to(tl.float32)
    weighted = tl.load(grad + row * size + at, mask=inside, other=0.0).to(tl.float32)
    weighted = rounded(
        weighted * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32), dtype
    )
    scale = tl.load(scales + row)
    mean = tl.sum(value * weighted, axis=0) * scale * scale / size
    tl.store(
        out + row * size + at,
        rounded((weighted - value * mean) * scale, dtype).to(dtype),
        mask=inside,
    )


def norm_gradient(grad: Tensor, x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """The gradient of x [N, H], given that of the normed x and the `scales` of `norm`."""
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

"""Adding to each row the update of its own adapter (the expansion of SGMV, arXiv 2310.18547).

Shape letters: N rows, O outputs, R ranks of all adapters.
"""

import triton
import triton.language as tl
from torch import Tensor

from retrain.model.kernels.rounding import rounded
from retrain.model.projection import AdapterStack

_BLOCK = 256
_RANKS = 16
"""Ranks added at a time, in their order."""


@triton.jit
def _add_row_updates(
    y, reduced, up, slots, first, counts, y_stride, reduced_stride, up_stride, size, RANKS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A block of outputs of one row; the sum over the ranks is float32, and rounded once."""
    dtype: tl.constexpr = y.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    slot = tl.load(slots + row) + 1
    begin, count = tl.load(first + slot), tl.load(counts + slot)
    target = y + row * y_stride + at
    total = tl.load(target, mask=inside, other=0.0).to(tl.float32)
    for start in range(0, count, RANKS):
        rank = start + tl.arange(0, RANKS)
        held = rank < count
        weight = tl.load(reduced + row * reduced_stride + begin + rank, mask=held, other=0.0).to(tl.float32)
        factors = tl.load(up + (begin + rank)[:, None] * up_stride + at[None, :], mask=held[:, None] & inside[None, :], other=0.0)
        total += tl.sum(weight[:, None] * factors.to(tl.float32), axis=0)
    tl.store(target, rounded(total, dtype).to(dtype), mask=inside)


def add_row_updates(y: Tensor, reduced: Tensor, stack: AdapterStack, slots: Tensor) -> Tensor:
    """`y` [N, O] plus, for each row, its `reduced` [N, R] times the up factors of the adapter in `slots` [N], below 0 none."""
    rows, size = y.shape
    _add_row_updates[rows, triton.cdiv(size, _BLOCK)](
        y, reduced, stack.up, slots, stack.first, stack.counts, y.stride(0), reduced.stride(0), stack.up.stride(0), size,
        RANKS=_RANKS, BLOCK=_BLOCK,
    )  # fmt: skip
    return y

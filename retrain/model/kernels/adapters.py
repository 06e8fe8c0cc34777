"""The adapter's part of a product: within the kernel that reads the product, and for rows that have
adapters of their own.

Shape letters: N rows, O outputs, R ranks, of all adapters where there are several.
"""

import triton
import triton.language as tl
from torch import Tensor

from retrain.model.kernels.rounding import rounded

ROWS = 16
"""Rows of a program that adds a `low_rank` product, the fewest of a matrix product."""
_BLOCK = 256
_RANKS = 16
"""Ranks added at a time, in their order."""


@triton.jit
def low_rank(
    reduced, up, row, at, rows, size, reduced_stride, up_stride, R: tl.constexpr,
    RANKS: tl.constexpr, FACTORS: tl.constexpr
):  # fmt: skip
    """`reduced` [N, R] times `up` [R, O] in float32, of the rows `row` below `rows` and the outputs
    `at` below `size`.
    """
    total = tl.zeros([row.shape[0], at.shape[0]], tl.float32)
    for start in range(0, R, RANKS):
        rank = start + tl.arange(0, RANKS)
        source = reduced + row[:, None] * reduced_stride + rank[None, :]
        left = tl.load(source, mask=(row < rows)[:, None] & (rank < R)[None, :], other=0.0)
        right = tl.load(
            up + rank[:, None] * up_stride + at[None, :],
            mask=(rank < R)[:, None] & (at < size)[None, :],
            other=0.0,
        )
        total += tl.dot(left.to(FACTORS), right.to(FACTORS), input_precision="ieee")
    return total


def ranks_at_once(up: Tensor) -> int:
    """Return RANKS of `low_rank` for factors [R, O]."""
    power: int = triton.next_power_of_2(len(up))
    return min(64, max(16, power))


@triton.jit
def _add_row_updates(
    y, reduced, up, slots, first, counts, y_stride, reduced_stride, up_stride, size,
    RANKS: tl.constexpr, BLOCK: tl.constexpr
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
        weight = tl.load(reduced + row * reduced_stride + begin + rank, mask=held, other=0.0).to(
            tl.float32
        )
        factors = tl.load(
            up + (begin + rank)[:, None] * up_stride + at[None, :],
            mask=held[:, None] & inside[None, :],
            other=0.0,
        )
        total += tl.sum(weight[:, None] * factors.to(tl.float32), axis=0)
    tl.store(target, rounded(total, dtype).to(dtype), mask=inside)


def add_row_updates(
    y: Tensor, reduced: Tensor, up: Tensor, first: Tensor, counts: Tensor, slots: Tensor
) -> Tensor:
    """`y` [N, O] plus, for each row, its `reduced` [N, R] times the factors `up` [R, O] of the
    adapter in `slots` [N], -1 none.

    The expansion of SGMV, arXiv 2310.18547. Its ranks are `counts`[slot + 1] from `first`[slot + 1]
    on.
    """
    rows, size = y.shape
    _add_row_updates[rows, triton.cdiv(size, _BLOCK)](
        y, reduced, up, slots, first, counts, y.stride(0), reduced.stride(0), up.stride(0), size,
        RANKS=_RANKS, BLOCK=_BLOCK,
    )  # fmt: skip
    return y

"""The adapter's part of a product, within the kernel that reads the product.

Shape letters: N rows, O outputs, R ranks.
"""

import triton
import triton.language as tl
from torch import Tensor

ROWS = 16
"""Rows of a program that adds a `low_rank` product, the fewest of a matrix product."""


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

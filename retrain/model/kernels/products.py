"""Parts of products within a Triton kernel: the dtypes of what is multiplied, the adapter's part,
and a product with a weight in 8-bit floats (e4m3), which are widened on the way from memory.

Where intermediate values are float32 they are rounded to the dtype of a tensor. The bits of an
8-bit float are read as integers, so no GPU needs to know the format. Shape letters: N rows, I
inputs, O outputs, R ranks.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """`x` in float32, rounded to the nearest number of `dtype`, halves to even, so that its
    conversion to `dtype` is exact.

    bfloat16 by its bits: Triton's interpreter would cut them off, and kernel and test are to have
    the same arithmetic.
    """
    if dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
        return tl.where(x != x, x, nearest)
    return x.to(dtype).to(tl.float32)


@triton.jit
def read(place, inside):
    """The numbers at `place` in float32, 0 where it is not `inside`."""
    return tl.load(place, mask=inside, other=0.0).to(tl.float32)


def factors(x: Tensor) -> Any:
    """Return the dtype in which a kernel multiplies numbers of `x`: its own, for the matrix units,
    or float32, where products are the same.

    Triton's interpreter, on a CPU, multiplies no bfloat16.
    """
    own = {torch.float16: tl.float16} | ({torch.bfloat16: tl.bfloat16} if x.is_cuda else {})
    return own.get(x.dtype, tl.float32)


# -- the adapter's part ----------------------------------------------------------------------------


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


# -- weights in 8 bits -----------------------------------------------------------------------------


_INPUTS = 128


@triton.jit
def _widened(bits):
    """Float32 of e4m3: sign, exponent and mantissa moved to their places, and the difference of the
    exponents' biases made up.
    """
    wide = bits.to(tl.uint32)
    return (((wide & 0x80) << 24) | ((wide & 0x7F) << 20)).to(
        tl.float32, bitcast=True
    ) * 1.329227995784916e36  # 2**120


@triton.jit
def _product(
    x, weight, scale, bias, out, rows, inputs, outputs, x_stride,
    HAS_BIAS: tl.constexpr, FACTORS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):  # fmt: skip
    """A block of rows and outputs; the sum over all inputs is float32, in their order, and rounded
    once.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    at = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    here, held = at < outputs, row < rows
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, inputs, INPUTS):
        place = start + tl.arange(0, INPUTS)
        inside = place < inputs
        values = tl.load(
            x + row[:, None].to(tl.int64) * x_stride + place[None, :],
            mask=held[:, None] & inside[None, :],
            other=0.0,
        )
        bits = tl.load(
            weight + at[None, :].to(tl.int64) * inputs + place[:, None],
            mask=here[None, :] & inside[:, None],
            other=0,
        )
        total += tl.dot(values.to(FACTORS), _widened(bits).to(FACTORS), input_precision="ieee")
    total *= read(scale + at, here)[None, :]
    if HAS_BIAS:
        total += read(bias + at, here)[None, :]
    target = out + row[:, None].to(tl.int64) * outputs + at[None, :]
    tl.store(target, rounded(total, dtype).to(dtype), mask=held[:, None] & here[None, :])


def scaled_product(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """[N, O] of x [N, I] and a weight [O, I] in 8 bits whose outputs have scales [O, 1]; the rows
    of x may lie apart.

    The blocks are narrow where there are few outputs, so that every multiprocessor has some (not
    measured on a GPU).
    """
    rows, (outputs, inputs) = len(x), weight.shape
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    tall, wide = (
        min(64, max(16, triton.next_power_of_2(rows))),
        64 if outputs >= 8192 else 32 if outputs >= 4096 else 16,
    )
    _product[triton.cdiv(outputs, wide), triton.cdiv(rows, tall)](
        x, weight.view(torch.uint8), scale, scale if bias is None else bias, out, rows, inputs,
        outputs, x.stride(0),
        HAS_BIAS=bias is not None, FACTORS=factors(x), ROWS=tall, OUTPUTS=wide, INPUTS=_INPUTS,
        num_stages=4,
    )  # fmt: skip
    return out

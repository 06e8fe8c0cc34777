"""Rounding to the dtype of a tensor within a Triton kernel, where intermediate values are float32."""

import triton
import triton.language as tl


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """`x` in float32, rounded to the nearest number of `dtype`, halves to even, so that its conversion to `dtype` is exact.

    bfloat16 by its bits: Triton's interpreter would cut them off, and kernel and test are to have the same arithmetic.
    """
    if dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
        return tl.where(x != x, x, nearest)
    return x.to(dtype).to(tl.float32)

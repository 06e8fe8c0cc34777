"""Dtypes within a Triton kernel: of what is multiplied, and rounding to the dtype of a tensor where
intermediate values are float32.
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


def factors(x: Tensor) -> Any:
    """Return the dtype in which a kernel multiplies numbers of `x`: its own, for the matrix units,
    or float32, where products are the same.

    Triton's interpreter, on a CPU, multiplies no bfloat16.
    """
    own = {torch.float16: tl.float16} | ({torch.bfloat16: tl.bfloat16} if x.is_cuda else {})
    return own.get(x.dtype, tl.float32)

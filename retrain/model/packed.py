"""A weight in the layout that oneDNN's kernels read, for products with few rows on a CPU.

A plain product lays the whole weight out anew at every call, which with 32 rows takes as long as the multiplication itself; packed once,
it is read as it lies. The operators are those that torch's own compiler emits for a frozen linear layer.
"""

import platform
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

_FEWEST_ELEMENTS = 150_000
"""For a smaller weight the operator's overhead exceeds what it saves (measured on two cores, 8 to 128 rows)."""


class PackedWeight:
    """The product of a weight [O, I] and a bias [O] that do not change, without gradient. A weight that is not packed is kept as it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._bias = bias
        self._packed = _packable(weight)
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight) if self._packed else weight

    def product(self, x: Tensor) -> Tensor:
        """[..., O] from [..., I]."""
        if not self._packed:
            return F.linear(x, self._weight, self._bias)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return product


@cache
def computes_bf16() -> bool:
    """True if this processor has units for bfloat16 (AMX, avx512_bf16); without them oneDNN is many times slower than in float32."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # torch does not annotate it
        return False
    if platform.machine().lower() in ("x86_64", "amd64"):  # oneDNN says yes on every AVX-512 processor
        return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _packable(weight: Tensor) -> bool:
    """Large enough, on a CPU that computes in its dtype, in a torch that has oneDNN and these operators."""
    return (
        weight.numel() >= _FEWEST_ELEMENTS
        and weight.device.type == "cpu"
        and (weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and computes_bf16()))
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch does not annotate it
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )

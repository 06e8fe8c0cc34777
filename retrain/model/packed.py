"""Frozen weights in another form: prepacked for small-batch products on a CPU.

A plain product on a CPU repacks the whole weight at every call. With 32 rows that takes as long as
the multiplication, so this module repacks once. Shape letters: N tokens, I inputs, O outputs.
"""

import platform
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

_MIN_ELEMENTS = 150_000
"""Smallest weight to pack. For a smaller weight the operator's overhead exceeds its gain (measured
on two cores, 8 to 128 rows).
"""


class PackedWeight:
    """The product with a weight [O, I] and a bias [O] that do not change, in the layout that
    oneDNN's kernels read.

    It uses the operators that torch's own compiler emits for a frozen linear layer. A weight that
    oneDNN does not pack keeps its layout.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._bias = bias
        self._packed = packs(weight.numel(), weight.device, weight.dtype)
        self._weight: Tensor = (
            torch.ops.mkldnn._reorder_linear_weight(weight) if self._packed else weight
        )

    def product(self, x: Tensor) -> Tensor:
        if not self._packed:
            return F.linear(x, self._weight, self._bias)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        return product


def packs(elements: int, device: torch.device, dtype: torch.dtype) -> bool:
    """True for a large weight on a CPU that computes in its dtype, in a torch that has oneDNN and
    the operators for it.
    """
    return (
        elements >= _MIN_ELEMENTS
        and device.type == "cpu"
        and (dtype == torch.float32 or (dtype == torch.bfloat16 and computes_bf16()))
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch does not annotate it
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def dense_product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Return [N, O] of x [N, I], a weight [O, I], which may be a transposed view, and a bias [O];
    without gradient. `out` [N, O] is memory that it may use.

    torch multiplies by MKL. On AMD's processors MKL takes 8 to 17% longer than oneDNN with the same
    unpacked weight (Zen 4, SmolLM2-135M's shapes, `benchmarks/floor.py`).
    """
    if (
        weight.dtype == torch.float32
        and packs(weight.numel(), weight.device, weight.dtype)
        and _is_amd()
    ):
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
    if out is None:
        return F.linear(x, weight, bias)
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


@cache
def _is_amd() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.is_file() and "AuthenticAMD" in cpuinfo.read_text("utf-8", errors="replace")


@cache
def computes_bf16() -> bool:
    """Return True if this processor has units for bfloat16 (AMX, avx512_bf16); without them oneDNN
    is many times slower than in float32.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # torch does not annotate it
        return False
    # oneDNN says yes on every AVX-512 processor.
    if platform.machine().lower() in ("x86_64", "amd64"):
        return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def in_block(path: str) -> bool:
    """Return True for the path of a module inside a list of decoder blocks."""
    return any(part.isdigit() for part in path.split("."))

"""Frozen weights in another form: prepacked for small-batch products on a CPU, or held in 8 bits.

A plain product on a CPU repacks the whole weight at every call. With 32 rows that takes as long as
the multiplication, so it is done once.

In 8 bits (e4m3, arXiv 2209.05433) a weight has one scale for each output. A scale is a power of
two, so weight times scale is exact in bfloat16 and float32: sampler and learner compute with the
same numbers, whether a product scales before or after it sums. A float format loses nothing by a
coarse scale. Shape letters: N tokens, I inputs, O outputs.
"""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakIdKeyDictionary

from retrain.errors import ConfigurationError

_MIN_ELEMENTS = 150_000
"""For a smaller weight the operator's overhead exceeds what it saves (measured on two cores, 8 to
128 rows)."""

_kept: "WeakIdKeyDictionary | None" = None
"""Inside `shared_packs`: the packed copies, by frozen parameter."""


class PackedWeight:
    """The product with a weight [O, I] and a bias [O] that do not change, in the layout that
    oneDNN's kernels read.

    The operators are those that torch's own compiler emits for a frozen linear layer. A weight that
    is not packed is kept as it is.
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


@contextmanager
def shared_packs() -> Iterator[None]:
    """Keep packed copies of a model's frozen weights as long as the model lives, so that every run
    inside reads one copy.
    """
    global _kept  # noqa: PLW0603 - one store per process, which the parent of forked runs opens
    before, _kept = _kept, WeakIdKeyDictionary()
    try:
        yield
    finally:
        _kept = before


def kept_pack(layer: Tensor, weight: Tensor, bias: Tensor | None) -> PackedWeight:
    """Return the packed weight, kept for `layer`, the first frozen parameter of a joined weight."""
    if _kept is None:
        return PackedWeight(weight, bias)
    if layer not in _kept:
        _kept[layer] = PackedWeight(weight, bias)
    pack: PackedWeight = _kept[layer]
    return pack


def dense_product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """[N, O] of x [N, I], a weight [O, I], which may be a transposed view, and a bias [O]; without
    gradient. `out` [N, O] is memory that it may use.

    torch multiplies by MKL, which on AMD's processors takes 8 to 17% longer than oneDNN does with
    the same weight, not packed (Zen 4, SmolLM2-135M's shapes, `benchmarks/floor.py`).
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


# -- weights in 8 bits -----------------------------------------------------------------------------


FLOAT8 = torch.float8_e4m3fn
_MAX_FLOAT8 = 448.0
"""Largest finite number of e4m3."""


class Float8Linear(nn.Linear):
    """A linear layer of a frozen model, `linear` itself being left alone. Gradients flow to its
    input only.
    """

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would make weights first
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        weight, scale = quantised(linear.weight.detach())
        self.weight = nn.Parameter(weight, requires_grad=False)
        """[O, I] in 8 bits."""
        self.scale = nn.Parameter(scale, requires_grad=False)
        """[O, 1] in the dtype of the products."""

    def forward(self, input: Tensor) -> Tensor:
        apply: Any = _Product.apply  # which torch does not annotate
        output: Tensor = apply(input, self.weight, self.scale, self.bias)
        return output


class _Product(torch.autograd.Function):
    """A linear layer that widens its weights again for the backward pass instead of keeping
    them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight, scale)
        return F.linear(x, dequantised(weight, scale), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        return grad_output @ dequantised(*ctx.saved_tensors).to(grad_output.dtype), None, None, None


@torch.no_grad()
def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(values [O, I] in 8 bits, scale [O, 1] in the dtype of `weight` [O, I]); the scales are the
    smallest that reach every weight.
    """
    mantissa, exponent = torch.frexp(weight.float().abs().amax(dim=1, keepdim=True) / _MAX_FLOAT8)
    scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int()).masked_fill_(
        mantissa == 0, 1.0
    )
    return (weight.float() / scale).to(FLOAT8), scale.to(weight.dtype)


def dequantised(weight: Tensor, scale: Tensor) -> Tensor:
    """[O, I] in the dtype of `scale` [O, 1], without rounding."""
    return weight.to(scale.dtype).mul_(scale)


def scaled_product(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """[N, O] of x [N, I] and a weight [O, I] in 8 bits whose outputs have scales [O, 1]."""
    return F.linear(x, dequantised(weight, scale), bias)


def in_block(path: str) -> bool:
    """Return True for the path of a module inside one of a decoder's lists of blocks."""
    return any(part.isdigit() for part in path.split("."))


def hold_layers_in_float8(decoder: nn.Module, name: str) -> None:
    """Put a `Float8Linear` in the place of every linear layer of the blocks. Embeddings, head,
    norms and biases stay as they are.

    Raises ConfigurationError where the blocks of the model `name` have no linear layers.
    """
    linears = [
        (path, module)
        for path, module in decoder.named_modules()
        if type(module) is nn.Linear and in_block(path)
    ]
    if not linears:
        raise ConfigurationError(
            '[model] dtype = "fp8" holds linear layers in 8 bits, and the blocks of [model] model'
            f' = "{name}" have none; use "auto".'
        )
    for path, linear in linears:
        parent, _, child = path.rpartition(".")
        setattr(decoder.get_submodule(parent), child, Float8Linear(linear))


def widened_bytes(decoder: nn.Module) -> int:
    """Count the bytes of the layers that are widened together: at most three, since a fused
    product joins three at most.
    """
    sizes = [
        module.weight.numel() * module.scale.dtype.itemsize
        for module in decoder.modules()
        if isinstance(module, Float8Linear)
    ]
    return 3 * max(sizes, default=0)

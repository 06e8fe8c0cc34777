"""Frozen linear layers whose weights are held in 8 bits (e4m3, arXiv 2209.05433), with one scale
for each output.

A scale is a power of two, so weight times scale is exact in bfloat16 and float32. Sampler and
learner therefore compute with the same numbers, whether a product multiplies by the scale before or
after it sums; and a float format loses nothing by a coarse scale. Shape letters: N tokens, I
inputs, O outputs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from retrain.errors import ConfigurationError

FLOAT8 = torch.float8_e4m3fn
_LARGEST = 448.0
"""Largest finite number of e4m3."""


class Float8Linear(nn.Linear):
    """A linear layer of a frozen model, `linear` itself being left alone. Gradients flow to its
    input only.
    """

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would make weights first
        self.in_features, self.out_features, self.bias = (
            linear.in_features,
            linear.out_features,
            linear.bias,
        )
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
    mantissa, exponent = torch.frexp(weight.float().abs().amax(dim=1, keepdim=True) / _LARGEST)
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


def hold_layers_in_float8(decoder: nn.Module, name: str) -> None:
    """Put a `Float8Linear` in the place of every linear layer of the blocks. Embeddings, head,
    norms and biases stay as they are.

    Raises ConfigurationError where the blocks of the model `name` have no linear layers.
    """
    linears = [
        (path, module)
        for path, module in decoder.named_modules()
        if type(module) is nn.Linear and any(part.isdigit() for part in path.split("."))
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
    """Count the bytes of the largest layers that are wide at a time: a fused product joins at most
    three of them with one input.
    """
    sizes = [
        module.weight.numel() * module.scale.dtype.itemsize
        for module in decoder.modules()
        if isinstance(module, Float8Linear)
    ]
    return 3 * max(sizes, default=0)

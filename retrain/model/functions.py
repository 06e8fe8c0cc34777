"""The pieces of a dense decoder layer as differentiable functions that keep little for the backward
pass. A whole layer keeps its input alone.

The backward pass computes a frozen norm or activation again from its input. Gradients go to the
residual stream and to the adapters; frozen weights have none. Shape letters: N tokens, H hidden
size, I inputs and O outputs of a projection.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from retrain.model.projection import Projection

_FUSED_NORM = {"cuda"}
"""Devices on which torch has the norm as one kernel."""


class Norm:
    """RMS norm with a frozen weight: x / sqrt(mean(x^2) + eps) * weight, the statistics in float32
    (arXiv 1910.07467).
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps

    @classmethod
    def of(cls, module: Any) -> "Norm":
        """Return the norm of a transformers module."""
        return cls(module.weight, module.variance_epsilon)

    def scale(self, x: Tensor) -> Tensor:
        """Return [.., 1] float32, one over the root mean square of x [.., H]."""
        mean = (
            torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
            .square_()
            .div_(x.shape[-1])
        )
        inverse: Tensor = mean.add_(self.eps).rsqrt_()
        return inverse

    def __call__(self, x: Tensor, scale: Tensor) -> Tensor:
        return (x * scale).to(x.dtype).mul_(self.weight)

    def forward(self, ctx: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return (normed x, `scale`); without a backward pass the scale may be None. The normed x
        has the same bits either way, so that recomputing old log-probs is exact.
        """
        if x.device.type not in _FUSED_NORM:
            scale = self.scale(x)
            return self(x, scale), scale
        output = F.rms_norm(x, x.shape[-1:], eps=self.eps).mul_(self.weight)
        return output, None if isinstance(ctx, _NoContext) else self.scale(x)

    def input_gradient(self, grad_output: Tensor, x: Tensor, scale: Tensor) -> Tensor:
        """Return the gradient of x [.., H] given g = grad_output [.., H]: s * (g w - x s^2 mean(x g
        w)).
        """
        weighted = (grad_output * self.weight).float()
        mean = (
            torch.einsum("...h,...h->...", x.float(), weighted)
            .unsqueeze(-1)
            .mul_(scale.square())
            .div_(x.shape[-1])
        )
        return weighted.addcmul_(x.float(), mean, value=-1).mul_(scale).to(x.dtype)


def normed(x: Tensor, norm: Norm) -> Tensor:
    """Return [N, H] from [N, H]."""
    return _run(_NormFunction, x, norm)


def project(x: Tensor, projection: Projection) -> Tensor:
    """Return [N, O] from [N, I]."""
    return _run(_Project, x, None, projection, *_trained(projection))


def norm_project(x: Tensor, norm: Norm, projection: Projection) -> Tensor:
    """Return [N, O], the projection of the normed residual stream [N, H]."""
    return _run(_Project, x, norm, projection, *_trained(projection))


def gated_mlp(x: Tensor, norm: Norm, gate_up: Projection, down: Projection) -> Tensor:
    """Return [N, H] down(silu(gate) * up) of the normed residual stream [N, H] (SwiGLU, arXiv
    2002.05202).
    """
    return _run(_GatedMLP, x, norm, gate_up, down, *_trained(gate_up), *_trained(down))


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, norm: Norm | None) -> Tensor:
    """Apply the rotary embedding by cos and sin [N, 1, D], whose halves are equal, to x [N, heads,
    D] (arXiv 2104.09864). A norm acts first, head by head.
    """
    return _run(_Rope, x, cos, sin, norm)


def _run(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """Apply the function. Without gradients it saves nothing for a backward pass, since saving
    costs as much as a small operation.
    """
    if torch.is_grad_enabled():
        return function.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]  # torch does not annotate apply
    return function.forward(_NoContext(), *arguments)  # type: ignore[no-any-return]  # torch does not annotate forward


class _NoContext:
    """The context of a function without a backward pass."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        pass


def _trained(projection: Projection) -> list[nn.Parameter]:
    return projection.parameters if projection.adapted else []


def _wanted(ctx: Any, first: int, projection: Projection) -> bool:
    """Return True if a parameter of the projection needs a gradient; the first one is the
    function's input number `first`.
    """
    return any(ctx.needs_input_grad[first : first + len(_trained(projection))])


class _NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Norm) -> Tensor:
        output, scale = norm.forward(ctx, x)
        ctx.save_for_backward(x, scale)
        ctx.norm = norm
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        x, scale = ctx.saved_tensors
        return ctx.norm.input_gradient(grad_output, x, scale), None


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm: Norm | None, projection: Projection, *parameters: Tensor
    ) -> Tensor:
        source, scale = _normed(ctx, x, norm)
        product, reduced = projection.product(source)
        ctx.save_for_backward(x, scale, reduced)
        ctx.norm, ctx.projection = norm, projection
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, reduced = ctx.saved_tensors
        grad_source, grad_params = ctx.projection.gradients(
            grad_output,
            lambda: x if ctx.norm is None else ctx.norm(x, scale),
            reduced,
            # The first layer does not want it, since nothing trains below it.
            wants_input=ctx.needs_input_grad[0],
            wants_params=_wanted(ctx, 3, ctx.projection),
        )
        return _before_norm(ctx.norm, grad_source, x, scale), None, None, *grad_params


def _normed(ctx: Any, x: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor | None]:
    """Return `Norm.forward`, or x itself without a norm."""
    if norm is None:
        return x, None
    return norm.forward(ctx, x)


def _before_norm(norm: Norm | None, grad: Tensor | None, x: Tensor, scale: Tensor) -> Tensor | None:
    """Return the gradient of x from `grad`, the gradient of `_normed`; None if that is None."""
    if norm is None or grad is None:
        return grad
    return norm.input_gradient(grad, x, scale)


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm: Norm, gate_up: Projection, down: Projection, *parameters: Tensor
    ) -> Tensor:
        normed_x, scale = norm.forward(ctx, x)
        gates, reduced = gate_up.product(normed_x)
        product, reduced_inner = down.product(gated(gates))
        ctx.save_for_backward(x, scale, gates, reduced, reduced_inner)
        ctx.norm, ctx.gate_up, ctx.down = norm, gate_up, down
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, gates, reduced, reduced_inner = ctx.saved_tensors
        grad_gates, grad_down = _gate_gradients(ctx, grad_output, gates, reduced_inner)
        grad_normed, grad_gate_up = ctx.gate_up.gradients(
            grad_gates,
            lambda: ctx.norm(x, scale),
            reduced,
            wants_params=_wanted(ctx, 4, ctx.gate_up),
        )
        grad_x = ctx.norm.input_gradient(grad_normed, x, scale)
        return grad_x, None, None, None, *grad_gate_up, *grad_down


def gated(gates: Tensor) -> Tensor:
    """Return silu(gate) * up [N, I] of both side by side."""
    gate, up = gates.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _gate_gradients(
    ctx: Any, grad_output: Tensor, gates: Tensor, reduced: Tensor | None
) -> tuple[Tensor, list[Tensor | None]]:
    """Gradients of the gates and of the down projection's adapter, from the output's gradient."""
    trained = _wanted(ctx, 4 + len(_trained(ctx.gate_up)), ctx.down)
    gate, up = gates.chunk(2, dim=-1)
    active = F.silu(gate)
    grad_inner, grad_down = ctx.down.gradients(
        grad_output, lambda: active * up, reduced, wants_params=trained
    )
    return gate_gradient(grad_inner, gates, active), grad_down


def gate_gradient(grad: Tensor, gates: Tensor, active: Tensor) -> Tensor:
    """Return the gradient of `gates` [N, 2 I] from `grad`, the gradient of `gated`. Overwrites
    `grad`. `active` is silu(gate).
    """
    gate, up = gates.chunk(2, dim=-1)
    grad_gates = torch.empty_like(gates)
    torch.mul(grad, active, out=grad_gates[:, gate.shape[1] :])
    grad_gates[:, : gate.shape[1]] = torch.ops.aten.silu_backward(grad.mul_(up), gate)
    return grad_gates


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, norm: Norm | None) -> Tensor:
        ctx.norm = norm
        normed_x, scale = _normed(ctx, x, norm)
        ctx.save_for_backward(cos, sin, x if norm else None, scale)
        return _rotated(normed_x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, None, None, None]:
        cos, sin, x, scale = ctx.saved_tensors
        grad = _before_norm(ctx.norm, _rotated(grad_output, cos, -sin), x, scale)
        return grad, None, None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    output = x * cos
    output[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    output[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return output


# -- whole layers ----------------------------------------------------------------------------------


def recomputed(layer: Callable[..., Any], hidden: Tensor, *others: Any, **named: Any) -> Any:
    """Return `layer(hidden, *others, **named)`, of which the backward pass keeps the inputs alone
    and runs the layer again.
    """
    return checkpoint(
        layer, hidden, *others, use_reentrant=False, preserve_rng_state=False, **named
    )

"""Linear layers that read the same input as one matrix product, with their LoRA adapters.

The frozen weights of q, k and v (or gate and up) lie one after the other in one tensor. The model's
own parameters become views of it. Every other user of the model shares this copy. These weights
never include the adapter. A sampler on a CPU may read a scratch copy made from the pristine weights
(`refresh`). In float32 this copy includes the adapter. In bfloat16, which would round the adapter
away, the adapter's up factors are further columns, so that one product sums both in float32. Shape
letters: N tokens, I inputs, O outputs of all layers together, R ranks of an adapter's parts
together.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retrain.model.packed import (
    PackedWeight,
    dense_product,
    packs,
)

WEIGHTS: set[type[Tensor]] = {nn.Parameter}
"""Types of the weights that one tensor may join: not a DTensor, since a process holds only a part
of it.
"""


class _Factors(NamedTuple):
    down: Tensor
    """[R, I] in the dtype of the weights."""
    up: Tensor
    """[R, O], scaled. Block k holds the up factor of layer k in the columns of its outputs, and
    zeros elsewhere.
    """


def lora_parts(module: Any) -> tuple[nn.Linear, Any | None]:
    """Return (the frozen layer, the peft layer around it or None)."""
    if hasattr(module, "lora_A"):
        return (module.base_layer, module)
    return (module, None)


def fusable(module: nn.Module) -> bool:
    """True for a linear layer, bare or with one plain LoRA adapter, whose weight is not a shard (a
    DTensor).
    """
    base, lora = lora_parts(module)
    return (
        type(base) is nn.Linear
        and type(base.weight) in WEIGHTS
        and base.weight.is_floating_point()
        and (
            lora is None
            or (
                len(lora.lora_A) == 1
                and not lora.merged
                and not any(getattr(lora, "use_dora", {}).values())
            )
        )
    )


class Projection:
    """Some `fusable` layers with one input."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._bases, self._loras = zip(*map(lora_parts, modules), strict=True)
        self.outputs: list[int] = [base.out_features for base in self._bases]
        self.weight = _share_storage([base.weight for base in self._bases])
        """[O, I]"""
        self.bias = _joined_bias(self._bases)
        """[O] or None"""
        self._read_adapters()
        self._trained = any(base.weight.requires_grad for base in self._bases)
        self._merges = bool(self.downs) and (
            self.weight.dtype == torch.float32
            or packs(self.weight.numel(), self.weight.device, self.weight.dtype)
        )
        """True if a copy contains the adapter, or in bfloat16 its up factors."""
        self.copy: PackedWeight | None = None
        """[O, I] for products without gradient, while a sampler reads it."""
        self.factors: _Factors | None = None
        """The model's own adapter, as of the last `refresh`."""

    def _read_adapters(self) -> None:
        adapters = [(lora, next(iter(lora.lora_A))) for lora in self._loras if lora is not None]
        self.downs: list[nn.Parameter] = [lora.lora_A[name].weight for lora, name in adapters]
        """[r, I] each."""
        self.ups: list[nn.Parameter] = [lora.lora_B[name].weight for lora, name in adapters]
        """[o, r] each."""
        self.scales: list[float] = [lora.scaling[name] for lora, name in adapters]
        ends = accumulate(self.outputs)
        self.slices = [
            slice(end - outputs, end)
            for end, outputs, lora in zip(ends, self.outputs, self._loras, strict=True)
            if lora is not None
        ]
        """The place of each adapter's outputs in O."""

    @property
    def adapted(self) -> bool:
        """True if the forward pass applies the adapter now; peft's `disable_adapter` switches it
        off.
        """
        return bool(self.downs) and not any(
            lora.disable_adapters for lora in self._loras if lora is not None
        )

    @torch.no_grad()
    def refresh(self, *, copy: bool) -> None:
        """Update `factors` and `copy` after the adapter's parameters, or without one the weights,
        changed; `copy` says whether to hold a copy of the weights.
        """
        if self.downs:
            self._write_factors()
        elif self._trained and self.bias is not None:
            self.bias = _joined_bias(self._bases)
        if not copy or self._merges or self._trained:
            self.copy = None  # free it before making another
        if copy and self._merges:
            assert self.factors is not None
            if self.weight.dtype == torch.float32:
                weight = torch.addmm(self.weight, self.factors.up.T, self.factors.down)
            else:
                weight = torch.cat([self.weight, self.factors.up.T], dim=1)
            self.copy = PackedWeight(weight, self.bias)
        elif copy and self.copy is None:
            self.copy = PackedWeight(self.weight, self.bias)

    def _write_factors(self) -> None:
        """Write all adapters' factors side by side, over the last ones if there are any."""
        if self.factors is None:
            rank, (width, inputs) = sum(map(len, self.downs)), self.weight.shape
            self.factors = _Factors(
                self.weight.new_empty(rank, inputs), self.weight.new_zeros(rank, width)
            )
        start = 0
        for a, b, scale, outputs in zip(
            self.downs, self.ups, self.scales, self.slices, strict=True
        ):
            part = slice(start, start + len(a))
            self.factors.down[part] = a
            self.factors.up[part, outputs] = (b.T * scale).to(self.factors.up)
            start = part.stop

    def product(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return (y [N, O], reduced) of x [N, I], with the adapter as of the last `refresh`, or
        without a disabled adapter.

        `reduced` [N, R] is x times the down factors, for `gradients`; None without an adapter to
        differentiate.
        """
        if self.copy is not None and self._merges and self.weight.dtype != torch.float32:
            return self.copy.product(self._with_reduced(x)), None
        if self.adapted and self.copy is not None and self._merges:
            return self.copy.product(x), None
        if not self.adapted:
            return self._frozen_product(x), None
        assert self.factors is not None
        y, reduced = self._frozen_product(x), F.linear(x, self.factors.down)
        return y.addmm_(reduced, self.factors.up), reduced

    def _with_reduced(self, x: Tensor) -> Tensor:
        """Return [N, I + R]: x [N, I] and its product with the down factors, or zeros for a
        disabled adapter.
        """
        assert self.factors is not None
        down = self.factors.down
        reduced = F.linear(x, down) if self.adapted else x.new_zeros(len(x), len(down))
        return torch.cat([x, reduced], dim=1)

    def _frozen_product(self, x: Tensor) -> Tensor:
        """Return [N, O] without any adapter."""
        if self.copy is not None and not self._merges:
            return self.copy.product(x)
        return dense_product(x, self.weight, self.bias)

    def gradients(
        self,
        grad_output: Tensor,
        x: Callable[[], Tensor],
        reduced: Tensor | None,
        *,
        wants_input: bool = True,
        wants_params: bool = True,
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Return the gradients of the input [N, I] and of `parameters`, given grad_output [N, O];
        None for unwanted gradients.

        `x` returns the input if a gradient needs it; `reduced` is the second value of `product`.
        """
        grad_x = dense_product(grad_output, self.weight.T) if wants_input else None
        none: list[Tensor | None] = [None] * (len(self.parameters) * self.adapted)
        if reduced is None:
            return grad_x, none
        assert self.factors is not None
        grad_reduced = F.linear(grad_output, self.factors.up)
        if grad_x is not None:
            grad_x.addmm_(grad_reduced, self.factors.down)
        if not wants_params:
            return grad_x, none
        grad_downs = grad_reduced.T @ x()  # [R, I]
        grads: list[Tensor | None] = []
        start = 0
        for down, scale, outputs in zip(self.downs, self.scales, self.slices, strict=True):
            part = slice(start, start + down.shape[0])
            grad_up = grad_output[:, outputs].T @ reduced[:, part]
            grads += [grad_downs[part].to(down.dtype), (grad_up * scale).to(down.dtype)]
            start = part.stop
        return grad_x, grads

    @property
    def parameters(self) -> list[nn.Parameter]:
        """A and B of each adapter in turn."""
        return list(chain.from_iterable(zip(self.downs, self.ups, strict=True)))


@torch.no_grad()
def _share_storage(weights: Sequence[nn.Parameter]) -> Tensor:
    """Concatenate the weights and make each a view of the result. A second call changes nothing."""
    if len(weights) == 1:
        return weights[0].data
    first = weights[0]
    rows, inputs = sum(map(len, weights)), first.shape[1]
    size = rows * inputs * first.element_size()
    # The weights are in line already if each begins at the end of the previous weight, in one
    # storage.
    ends = [weight.data_ptr() + weight.nbytes for weight in weights]
    in_line = all(
        end == following.data_ptr() for end, following in zip(ends, weights[1:], strict=False)
    )
    if in_line and first.untyped_storage().nbytes() >= size:
        return first.data.as_strided((rows, inputs), first.stride())
    joined = torch.cat([weight.data for weight in weights])
    for weight, part in zip(
        weights, torch.split(joined, [len(weight) for weight in weights]), strict=True
    ):
        weight.data = part
    return joined


def _joined_bias(layers: Sequence[nn.Linear]) -> Tensor | None:
    biases = [layer.bias for layer in layers]
    if all(bias is None for bias in biases):
        return None
    like = next(bias for bias in biases if bias is not None)
    parts = [
        like.new_zeros(layer.out_features) if bias is None else bias.data
        for layer, bias in zip(layers, biases, strict=True)
    ]
    return torch.cat(parts)

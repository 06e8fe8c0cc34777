"""Linear layers that read the same input as one matrix product, with their LoRA adapters.

The frozen weights of q, k and v (or gate and up) are laid one after the other in one tensor, and the model's own parameters become
views of it: one copy, shared with whoever else uses the model. The adapter is never added to them. A sampler in float32 on a CPU may
read a scratch copy with the adapter merged in (`refresh`), made from the pristine weights; elsewhere merging would round it away.
Shape letters: N tokens, I inputs, O outputs of all layers together, R ranks of all adapters together.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retrain.fused.packed import PackedWeight


def lora_parts(module: Any) -> tuple[nn.Linear, Any | None]:
    """(the frozen layer, the peft layer around it or None)."""
    return (module.base_layer, module) if hasattr(module, "lora_A") else (module, None)


def fusable(module: nn.Module) -> bool:
    """A plain linear layer, bare or with one plain LoRA adapter on it."""
    base, lora = lora_parts(module)
    if type(base) is not nn.Linear or not base.weight.is_floating_point():
        return False
    return lora is None or (len(lora.lora_A) == 1 and not lora.merged and not any(getattr(lora, "use_dora", {}).values()))


class Projection:
    """Some `fusable` layers with one input."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        bases, self._loras = zip(*map(lora_parts, modules), strict=True)
        self.outputs: list[int] = [base.out_features for base in bases]
        self.weight = _share_storage([base.weight for base in bases])
        """[O, I]"""
        self.bias = _joined_bias(bases)
        """[O] or None"""
        adapters = [(lora, next(iter(lora.lora_A))) for lora in self._loras if lora is not None]
        self.downs: list[nn.Parameter] = [lora.lora_A[name].weight for lora, name in adapters]
        """[r, I] each."""
        self.ups: list[nn.Parameter] = [lora.lora_B[name].weight for lora, name in adapters]
        """[o, r] each."""
        self.scales: list[float] = [lora.scaling[name] for lora, name in adapters]
        ends = [sum(self.outputs[: index + 1]) for index in range(len(modules))]
        self.slices = [
            slice(end - outputs, end) for end, outputs, lora in zip(ends, self.outputs, self._loras, strict=True) if lora is not None
        ]
        """Where the outputs of each adapter lie in O."""
        self.merged: PackedWeight | None = None
        """[O, I] with the adapter, for products without gradient, while a sampler reads it."""
        self.down: Tensor | None = None
        """[R, I] in the dtype of the weights."""
        self.up: Tensor | None = None
        """[R, O], scaled: block k holds adapter k's rows at its outputs, zeros elsewhere."""

    @property
    def adapted(self) -> bool:
        """Whether the adapter takes part in the forward pass now; peft's `disable_adapter` switches it off."""
        return bool(self.downs) and not any(lora.disable_adapters for lora in self._loras if lora is not None)

    @torch.no_grad()
    def refresh(self, *, merge: bool) -> None:
        """Follow the adapter's parameters after they changed. `merge`: hold the weights with the adapter too."""
        if not self.downs:
            return
        ranks = [down.shape[0] for down in self.downs]
        if self.down is None or self.up is None:
            self.down = self.weight.new_empty(sum(ranks), self.weight.shape[1])
            self.up = self.weight.new_zeros(sum(ranks), self.weight.shape[0])
        start = 0
        for down, up, scale, outputs, rank in zip(self.downs, self.ups, self.scales, self.slices, ranks, strict=True):
            self.down[start : start + rank] = down
            self.up[start : start + rank, outputs] = up.T * scale
            start += rank
        self.merged = PackedWeight(torch.addmm(self.weight, self.up.T, self.down)) if merge else None

    def product(self, x: Tensor) -> Tensor:
        """[N, O] from [N, I], with the adapter as it was refreshed, or without it while it is switched off."""
        if not self.adapted:
            return F.linear(x, self.weight, self.bias)
        if self.merged is not None:
            return self.merged.product(x, self.bias)
        assert self.down is not None and self.up is not None
        return torch.addmm(F.linear(x, self.weight, self.bias), F.linear(x, self.down), self.up)

    def input_gradient(self, gradient: Tensor) -> Tensor:
        """[N, I] from the gradient [N, O] of the output."""
        if not self.adapted:
            return gradient @ self.weight
        assert self.down is not None and self.up is not None
        return torch.addmm(gradient @ self.weight, F.linear(gradient, self.up), self.down)

    def parameter_gradients(self, x: Tensor, gradient: Tensor) -> list[Tensor]:
        """Of `parameters`, from the input [N, I] and the gradient [N, O] of the output."""
        assert self.down is not None and self.up is not None
        hidden = F.linear(x, self.down)  # [N, R]
        downs = F.linear(gradient, self.up).T @ x  # [R, I]
        gradients, start = [], 0
        for down, scale, outputs in zip(self.downs, self.scales, self.slices, strict=True):
            part = slice(start, start + down.shape[0])
            ups = gradient[:, outputs].T @ hidden[:, part]
            gradients += [downs[part].to(down.dtype), (ups * scale).to(down.dtype)]
            start = part.stop
        return gradients

    @property
    def parameters(self) -> list[nn.Parameter]:
        """A and B of each adapter in turn."""
        return [parameter for pair in zip(self.downs, self.ups, strict=True) for parameter in pair]


@torch.no_grad()
def _share_storage(weights: Sequence[nn.Parameter]) -> Tensor:
    """One tensor of all weights, of which each becomes a view. A second call finds them so already."""
    if len(weights) == 1:
        return weights[0].data
    first = weights[0]
    size = sum(weight.nbytes for weight in weights)
    ends = [weight.data_ptr() + weight.nbytes for weight in weights]
    in_line = all(end == following.data_ptr() for end, following in zip(ends, weights[1:], strict=False))
    if in_line and first.untyped_storage().nbytes() >= size:
        return first.data.as_strided((sum(map(len, weights)), first.shape[1]), first.stride())
    joined = torch.cat([weight.data for weight in weights])
    for weight, part in zip(weights, torch.split(joined, [len(weight) for weight in weights]), strict=True):
        weight.data = part
    return joined


def _joined_bias(layers: Sequence[nn.Linear]) -> Tensor | None:
    biases = [layer.bias for layer in layers]
    if all(bias is None for bias in biases):
        return None
    parts = [layer.weight.new_zeros(layer.out_features) if bias is None else bias.data for layer, bias in zip(layers, biases, strict=True)]
    return torch.cat(parts)

"""Linear layers that read the same input as one matrix product, with their LoRA adapters.

The frozen weights of q, k and v (or gate and up) are laid one after the other in one tensor, and the model's own parameters become
views of it: one copy, shared with whoever else uses the model. The adapter is never added to them. A sampler on a CPU may read a scratch
copy made from the pristine weights (`refresh`): in float32 with the adapter merged in, in bfloat16, which would round it away, without.
Further adapters can be held beside the model's own (`load`), for batches whose rows are under different ones.
Shape letters: N tokens, I inputs, O outputs of all layers together, R ranks of an adapter's parts together.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retrain.model.packed import PackedWeight


class AdapterLayer(Protocol):
    """What a LoRA adapter adds to one linear layer: scale * b @ a."""

    @property
    def name(self) -> str: ...
    @property
    def a(self) -> Tensor:
        """[r, I]."""
        ...

    @property
    def b(self) -> Tensor:
        """[o, r]."""
        ...

    @property
    def scale(self) -> float: ...


class _Factors(NamedTuple):
    down: Tensor
    """[R, I] in the dtype of the weights."""
    up: Tensor
    """[R, O], scaled: block k holds adapter k's rows at its outputs, zeros elsewhere."""


def lora_parts(module: Any) -> tuple[nn.Linear, Any | None]:
    """(the frozen layer, the peft layer around it or None)."""
    return (module.base_layer, module) if hasattr(module, "lora_A") else (module, None)


def fusable(module: nn.Module) -> bool:
    """A plain linear layer, bare or with one plain LoRA adapter on it, that is here whole: of a sharded one the weight is a DTensor."""
    base, lora = lora_parts(module)
    if type(base) is not nn.Linear or type(base.weight) is not nn.Parameter or not base.weight.is_floating_point():
        return False
    return lora is None or (len(lora.lora_A) == 1 and not lora.merged and not any(getattr(lora, "use_dora", {}).values()))


class Projection:
    """Some `fusable` layers with one input."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = tuple(modules)
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
        self._places = [slice(end - outputs, end) for end, outputs in zip(ends, self.outputs, strict=True)]
        self.slices = [place for place, lora in zip(self._places, self._loras, strict=True) if lora is not None]
        """Where the outputs of each adapter lie in O."""
        self.copy: PackedWeight | None = None
        """[O, I] for products without gradient, while a sampler reads it."""
        self._merged = False
        """Whether the adapter is in the copy."""
        self.factors: _Factors | None = None
        """Of the model's own adapter, as it was refreshed."""
        self._slots: dict[int, _Factors] = {}
        """Of the adapters beside it, by their number."""
        self.rows: Mapping[int, Tensor] | None = None
        """While a mixed batch is computed: the numbers of the rows under each adapter, 0 for the model's own."""

    @property
    def adapted(self) -> bool:
        """Whether the adapter takes part in the forward pass now; peft's `disable_adapter` switches it off."""
        return bool(self.downs) and not any(lora.disable_adapters for lora in self._loras if lora is not None)

    @torch.no_grad()
    def refresh(self, copy: Literal["none", "merged", "plain"]) -> None:
        """Follow the adapter's parameters after they changed, and hold such a copy of the weights."""
        if self.downs:
            updates = zip(self.downs, self.ups, self.scales, self.slices, strict=True)
            self.factors = self._stacked(list(updates), self.factors)
        if copy != "plain" or self._merged:
            self.copy, self._merged = None, False
        if copy == "merged" and self.factors is not None:
            self.copy = PackedWeight(torch.addmm(self.weight, self.factors.up.T, self.factors.down), self.bias)
            self._merged = True
        elif copy != "none" and self.copy is None:
            self.copy = PackedWeight(self.weight, self.bias)

    @torch.no_grad()
    def load(self, slot: int, layers: Mapping[int, AdapterLayer]) -> None:
        """Hold one more adapter under a number, in place of one that had it: for each of the layers that it adapts, by their place here."""
        updates = [(layer.a, layer.b, layer.scale, self._places[place]) for place, layer in layers.items()]
        self._slots.pop(slot, None)
        if updates:
            self._slots[slot] = self._stacked(updates)

    def _stacked(self, updates: Sequence[tuple[Tensor, Tensor, float, slice]], out: _Factors | None = None) -> _Factors:
        """One pair of factors of all updates (a, b, scale, outputs), written over `out` if given."""
        ranks = [a.shape[0] for a, *_ in updates]
        if out is None:
            outputs_of_all, inputs = self.weight.shape
            out = _Factors(self.weight.new_empty(sum(ranks), inputs), self.weight.new_zeros(sum(ranks), outputs_of_all))
        start = 0
        for (a, b, scale, outputs), rank in zip(updates, ranks, strict=True):
            out.down[start : start + rank] = a
            out.up[start : start + rank, outputs] = (b.T * scale).to(out.up)
            start += rank
        return out

    def product(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """[N, O] from [N, I], with the adapter as it was refreshed, or without it while it is switched off.

        With it x [N, R] under its down factors, which `gradients` needs again; None where no backward pass can follow.
        """
        if self.rows is not None:
            return self._mixed_product(x, self.rows), None
        if self.adapted and self.copy is not None and self._merged:
            return self.copy.product(x), None
        product = self._frozen_product(x)
        if not self.adapted:
            return product, None
        assert self.factors is not None
        reduced = F.linear(x, self.factors.down)
        return product.addmm_(reduced, self.factors.up), reduced

    def _frozen_product(self, x: Tensor) -> Tensor:
        """[N, O] without any adapter."""
        return F.linear(x, self.weight, self.bias) if self.copy is None or self._merged else self.copy.product(x)

    def _mixed_product(self, x: Tensor, rows: Mapping[int, Tensor]) -> Tensor:
        """One product with the weights for all rows, and a small one for those of each adapter (arXiv 2310.18547)."""
        y = self._frozen_product(x)
        for slot, members in rows.items():
            factors = self._slots.get(slot) if slot else self.factors
            if factors is not None:
                y.index_add_(0, members, F.linear(x[members], factors.down) @ factors.up)
        return y

    def gradients(
        self, gradient: Tensor, x: Callable[[], Tensor], reduced: Tensor | None, *, of_input: bool = True, of_parameters: bool = True
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """That of the input [N, I], and those of `parameters`, from the gradient [N, O] of a product; None for what is not wanted.

        `x` gives the input, if it is needed; `reduced` is what the product gave.
        """
        if reduced is None:
            return gradient @ self.weight if of_input else None, [None] * len(self.parameters) if self.adapted else []
        assert self.factors is not None
        of_reduced = F.linear(gradient, self.factors.up)
        of_x = (gradient @ self.weight).addmm_(of_reduced, self.factors.down) if of_input else None
        return of_x, list(self._parameter_gradients(gradient, x(), reduced, of_reduced) if of_parameters else [None] * len(self.parameters))

    def _parameter_gradients(self, gradient: Tensor, x: Tensor, reduced: Tensor, of_reduced: Tensor) -> Iterator[Tensor]:
        downs = of_reduced.T @ x  # [R, I]
        start = 0
        for down, scale, outputs in zip(self.downs, self.scales, self.slices, strict=True):
            part = slice(start, start + down.shape[0])
            ups = gradient[:, outputs].T @ reduced[:, part]
            yield from (downs[part].to(down.dtype), (ups * scale).to(down.dtype))
            start = part.stop

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

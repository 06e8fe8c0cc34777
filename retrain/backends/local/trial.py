"""The adapter that the parity gate tries: seeded changes with a visible effect on every adapted
layer, taken back byte for byte.

At a fresh start every lora_B is 0, so an engine that ignores, mis-scales or mis-maps the adapter
would agree with the learner.
"""

from typing import Any, Self

import torch
from torch import nn

from retrain.backends.base import TrialAdapter
from retrain.model.adapter import Adapter
from retrain.model.dropout import uniform_words
from retrain.noise import Stream

_DEPTHS = 4
"""Runs of consecutive layers that are groups."""


class LocalTrialAdapter(TrialAdapter):
    """Adds to each lora_B uniform values so large that the change of a layer's output is about
    `strength` times its input.

    With s the adapter's scale and A [r, I], the change s B A x has in each component a root mean
    square of s std(B) |A| rms(x), |A| the Frobenius norm: B is drawn with a standard deviation of
    strength / (s |A|).
    """

    def __init__(self, adapter: Adapter, seed: int) -> None:
        adapted = [
            (name, module)
            for name, module in adapter.peft_model.named_modules()
            if hasattr(module, "lora_B")
        ]
        self._layers = [
            _Layer(name, module, seed, number) for number, (name, module) in enumerate(adapted)
        ]
        self._members: dict[str, set[int]] = {}
        for number, layer in enumerate(self._layers):
            part = _DEPTHS * number // len(self._layers)
            for group in (layer.projection, f"part {part + 1} of {_DEPTHS} of the layers"):
                self._members.setdefault(group, set()).add(number)
        self.groups = tuple(self._members)

    def __enter__(self) -> Self:
        for layer in self._layers:
            layer.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.set(0.0)

    @torch.no_grad()
    def set(self, strength: float, without: str = "") -> None:
        left_out = self._members[without] if without else set()
        for number, layer in enumerate(self._layers):
            layer.change(0.0 if number in left_out else strength)


class _Layer:
    def __init__(self, name: str, module: Any, seed: int, number: int) -> None:
        self.projection = name.rpartition(".")[2]
        (adapter,) = module.lora_A
        down: nn.Parameter = module.lora_A[adapter].weight
        self.up: nn.Parameter = module.lora_B[adapter].weight
        self._saved = self._trial = torch.empty(0)
        self._seed, self._number = seed, number
        size = module.scaling[adapter] * float(down.detach().norm())
        self._width = 0.0
        if size:
            self._width = 3**0.5 / size
        """Half the range of uniform values whose standard deviation is 1 / (s |A|)."""

    def begin(self) -> None:
        self._saved = self.up.detach().clone()
        words = uniform_words(
            self._seed, Stream.PARITY, 1, 0, self._number, self.up.numel(), self.up.device
        )
        unit = (words.double() + 0.5) / 2**31 - 1  # in (-1, 1)
        self._trial = (self._width * unit).view_as(self.up).to(self._saved)

    def change(self, strength: float) -> None:
        self.up.copy_(
            torch.add(self._saved, self._trial, alpha=strength) if strength else self._saved
        )

"""The change of a local adapter that the parity gate tries, and takes back byte for byte: a seeded
one with a visible effect on every adapted layer.

At a fresh start every lora_B is 0, so an engine that ignores, mis-scales or mis-maps the adapter
would agree with the learner.
"""

from typing import Any, Self

import torch
from torch import Tensor, nn

from retrain.backends.base import TrialAdapter
from retrain.model.adapter import Adapter, symmetric_uniforms
from retrain.noise import Stream

_DEPTHS = 4
"""Runs of consecutive layers that are groups."""


class LocalTrialAdapter(TrialAdapter):
    """Adds to each lora_B uniform values so large that the change of a layer's output is about
    `strength` times its input.
    """

    def __init__(self, adapter: Adapter, seed: int) -> None:
        adapted = [
            (name.rpartition(".")[2], module)
            for name, module in adapter.peft_model.named_modules()
            if hasattr(module, "lora_B")
        ]
        self._changes = [
            _trial_change(module, seed, number) for number, (_, module) in enumerate(adapted)
        ]
        self._saved: list[Tensor] = []
        self._members: dict[str, set[int]] = {"": set()}
        """The numbers of each group's changes."""
        for number, (projection, _) in enumerate(adapted):
            part = _DEPTHS * number // len(adapted)
            for group in (projection, f"part {part + 1} of {_DEPTHS} of the layers"):
                self._members.setdefault(group, set()).add(number)
        self.groups = tuple(filter(None, self._members))

    def __enter__(self) -> Self:
        self._saved = [parameter.detach().clone() for parameter, _ in self._changes]
        return self

    def __exit__(self, *_: object) -> None:
        self.set(0.0)

    @torch.no_grad()
    def set(self, strength: float, without: str = "") -> None:
        left_out = self._members[without]
        kept = zip(self._changes, self._saved, strict=True)
        for number, ((parameter, change), saved) in enumerate(kept):
            parameter.copy_(saved)
            if strength and number not in left_out:
                parameter.add_(change, alpha=strength)


def _trial_change(module: Any, seed: int, number: int) -> tuple[nn.Parameter, Tensor]:
    """Return a layer's lora_B [O, r], and what strength 1 adds to it: uniform values between -w and
    w, where w = sqrt(3) / (s |A|).

    s is the adapter's scale and |A| the Frobenius norm of lora_A [r, I]. Such values have the
    standard deviation 1 / (s |A|), and a B of that deviation gives s B A x the root mean square of
    x in each component.
    """
    (adapter,) = module.lora_A
    up: nn.Parameter = module.lora_B[adapter].weight
    size = module.scaling[adapter] * float(module.lora_A[adapter].weight.detach().norm())
    width = 0.0
    if size:
        width = 3**0.5 / size
    unit = symmetric_uniforms(seed, Stream.PARITY, 1, number, up)
    return up, (width * unit).to(up)

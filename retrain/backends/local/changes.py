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


class LocalTrialAdapter(TrialAdapter):
    """Adds to each lora_B uniform values so large that the change of a layer's output is about
    `strength` times its input.
    """

    def __init__(self, adapter: Adapter, seed: int) -> None:
        adapted = [one for one in adapter.peft_model.modules() if hasattr(one, "lora_B")]
        self._changes = [
            _trial_change(module, seed, number) for number, module in enumerate(adapted)
        ]
        self._saved: list[Tensor] = []

    def __enter__(self) -> Self:
        self._saved = [parameter.detach().clone() for parameter, _ in self._changes]
        return self

    def __exit__(self, *_: object) -> None:
        self.set(0.0)

    @torch.no_grad()
    def set(self, strength: float) -> None:
        for (parameter, change), saved in zip(self._changes, self._saved, strict=True):
            parameter.copy_(saved)
            if strength:
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

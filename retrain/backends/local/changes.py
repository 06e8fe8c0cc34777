"""Changes of a local adapter that the parity gate tries, and takes back byte for byte: seeded ones
with a visible effect on every adapted layer, and those that take back what was learned.

At a fresh start every lora_B is 0, so an engine that ignores, mis-scales or mis-maps the adapter
would agree with the learner.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from retrain.backends.base import LAST_UPDATE, WHOLE_ADAPTER, TrialAdapter
from retrain.backends.local.optimizer import AdapterOptimizer
from retrain.model.adapter import Adapter, symmetric_uniforms
from retrain.noise import Stream

_DEPTHS = 4
"""Runs of consecutive layers that are groups."""


class AdapterChange(TrialAdapter):
    """Adds to each parameter its own change, times the strength."""

    groups: tuple[str, ...] = ()

    def __init__(self, changes: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        self._changes = changes
        self._saved: list[Tensor] = []
        self._members: dict[str, set[int]] = {"": set()}
        """The numbers of each group's changes."""

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


class LocalTrialAdapter(AdapterChange):
    """Adds to each lora_B uniform values so large that the change of a layer's output is about
    `strength` times its input.
    """

    def __init__(self, adapter: Adapter, seed: int) -> None:
        adapted = [
            (name.rpartition(".")[2], module)
            for name, module in adapter.peft_model.named_modules()
            if hasattr(module, "lora_B")
        ]
        super().__init__(
            [_trial_change(module, seed, number) for number, (_, module) in enumerate(adapted)]
        )
        for number, (projection, _) in enumerate(adapted):
            part = _DEPTHS * number // len(adapted)
            run = f"part {part + 1} of {_DEPTHS} of the layers"
            for group in (projection, run, f"{projection} in {run}"):
                self._members.setdefault(group, set()).add(number)
        named = [*filter(None, self._members)]
        self.fine_groups = tuple(group for group in named if " in part " in group)
        self.groups = tuple(group for group in named if group not in self.fine_groups)


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


def learned_changes(optimizer: AdapterOptimizer) -> dict[str, TrialAdapter]:
    """Return the changes of `Backend.learned`."""
    parameters = optimizer.parameters
    update = [(parameters[name], -moved) for name, moved in optimizer.last_update().items()]
    if not update:
        return {}
    whole = [(own, -own.detach()) for name, own in parameters.items() if ".lora_B." in name]
    return {LAST_UPDATE: AdapterChange(update), WHOLE_ADAPTER: AdapterChange(whole)}

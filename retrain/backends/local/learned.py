"""Changes that take back what a local adapter has learned: the tests of the engine's adapter try
them.
"""

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor, nn

from retrain.backends.base import LAST_UPDATE, WHOLE_ADAPTER, TrialAdapter
from retrain.backends.local.optimizer import AdapterOptimizer


class LearnedChange(TrialAdapter):
    """Adds to each parameter its own change, times the strength."""

    groups = ()

    def __init__(self, parameters: Mapping[str, nn.Parameter], changes: Mapping[str, Tensor]):
        self._changes = [(parameters[name], change) for name, change in changes.items()]
        self._saved: list[Tensor] = []

    def __enter__(self) -> Self:
        self._saved = [parameter.detach().clone() for parameter, _ in self._changes]
        return self

    def __exit__(self, *_: object) -> None:
        self.set(0.0)

    @torch.no_grad()
    def set(self, strength: float, without: str = "") -> None:  # noqa: ARG002 - has no groups
        for (parameter, change), saved in zip(self._changes, self._saved, strict=True):
            parameter.copy_(torch.add(saved, change, alpha=strength) if strength else saved)


def learned_changes(optimizer: AdapterOptimizer) -> dict[str, TrialAdapter]:
    """Return the changes of `Backend.learned`."""
    parameters = optimizer.parameters
    update = {name: -moved for name, moved in optimizer.last_update().items()}
    if not update:
        return {}
    whole = {name: -own.detach() for name, own in parameters.items() if ".lora_B." in name}
    return {
        LAST_UPDATE: LearnedChange(parameters, update),
        WHOLE_ADAPTER: LearnedChange(parameters, whole),
    }

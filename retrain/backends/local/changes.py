"""The change of the trained weights that the parity gate tries, and takes back byte for byte: a
seeded one with a visible effect on every layer.

At a fresh start every lora_B is 0, so an engine that ignores, mis-scales or mis-maps the adapter
would agree with the learner.
"""

from typing import Self

import torch
from torch import Tensor

from retrain.backends.base import TrialAdapter
from retrain.model.weights import TrainedWeights

_DEPTHS = 4
"""Runs of consecutive layers that are groups."""


class LocalTrialAdapter(TrialAdapter):
    """Adds uniform values to matrices, so large that the change of a layer's output is about
    `strength` times its input.
    """

    def __init__(self, weights: TrainedWeights, seed: int) -> None:
        self._changes = weights.trial_changes(seed)
        self._saved: list[Tensor] = []
        self._members: dict[str, set[int]] = {"": set()}
        """The numbers of each group's changes."""
        for number, change in enumerate(self._changes):
            part = _DEPTHS * number // len(self._changes)
            for group in (change.name, f"part {part + 1} of {_DEPTHS} of the layers"):
                self._members.setdefault(group, set()).add(number)
        self.groups = tuple(filter(None, self._members))

    def __enter__(self) -> Self:
        self._saved = [change.parameter.detach().clone() for change in self._changes]
        return self

    def __exit__(self, *_: object) -> None:
        self.set(0.0)

    @torch.no_grad()
    def set(self, strength: float, without: str = "") -> None:
        left_out = self._members[without]
        kept = zip(self._changes, self._saved, strict=True)
        for number, ((_, parameter, change), saved) in enumerate(kept):
            parameter.copy_(saved)
            if strength and number not in left_out:
                parameter.add_(change, alpha=strength)

"""The parity gate's trial change of the trained weights, a seeded change with a visible effect on
every layer. The gate takes it back byte for byte.

At a fresh start every lora_B is 0, so an engine that ignores, mis-scales or mis-maps the adapter
would agree with the learner.
"""

from typing import Self

import torch
from torch import Tensor

from retrain.backends.base import TrialAdapter
from retrain.model.weights import TrainedWeights


class LocalTrialAdapter(TrialAdapter):
    """Adds uniform values to matrices, so large that the change of a layer's output is about
    `strength` times its input.
    """

    def __init__(self, weights: TrainedWeights, seed: int) -> None:
        self._changes = weights.trial_changes(seed)
        self._saved: list[Tensor] = []

    def __enter__(self) -> Self:
        self._saved = [change.parameter.detach().clone() for change in self._changes]
        return self

    def __exit__(self, *_: object) -> None:
        self.set(0.0)

    @torch.no_grad()
    def set(self, strength: float) -> None:
        for (parameter, change), saved in zip(self._changes, self._saved, strict=True):
            parameter.copy_(saved)
            if strength:
                parameter.add_(change, alpha=strength)

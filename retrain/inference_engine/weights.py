"""The weights that the engine decodes with: the learner's own, or a second copy in another dtype that follows them."""

from copy import deepcopy

import torch
from torch import nn

WeightsVersion = tuple[tuple[int, int], ...]


def weights_version(model: nn.Module) -> WeightsVersion:
    """Changes whenever a trained weight is written in place or replaced."""
    return tuple((parameter.data_ptr(), parameter._version) for parameter in model.parameters() if parameter.requires_grad)


class CastCopy:
    """`inference.dtype` other than the model's: the whole model once more in that dtype.

    A copy and not autocast, which would convert every frozen weight again for every token. The learner keeps the exact
    weights; sampler and learner then differ by the dtype's rounding, which the parity gate bounds.
    """

    def __init__(self, source: nn.Module, dtype: torch.dtype) -> None:
        self._source = source
        self.model = deepcopy(source).requires_grad_(False)
        for parameter in self.model.parameters():  # buffers stay: rotary frequencies are float32 in every dtype
            parameter.data, parameter.grad = parameter.data.to(dtype), None

    def follow(self) -> None:
        """Copy the trained weights."""
        with torch.no_grad():
            for target, source in zip(self.model.parameters(), self._source.parameters(), strict=True):
                if source.requires_grad:
                    target.copy_(source)

"""Running sums by operators that every device has in a deterministic form."""

import torch
import torch.nn.functional as F
from torch import Tensor

BY_PRODUCT = {"cuda"}
"""Devices whose `cumsum` of floats raises under `torch.use_deterministic_algorithms`, which is set for the whole process while a learner
on another device takes a step."""
_WIDEST, _BLOCK = 1024, 256


def running_sums(x: Tensor) -> Tensor:
    """[r, n] sums of x [r, n] >= 0 up to each place, never falling."""
    if x.device.type not in BY_PRODUCT:
        return x.cumsum(-1)
    count = x.shape[-1]
    if count <= _WIDEST:
        return (x @ torch.ones(count, count, dtype=x.dtype, device=x.device).triu_()).cummax(-1).values
    inner = running_sums(F.pad(x, (0, -count % _BLOCK)).view(-1, _BLOCK)).view(len(x), -1, _BLOCK)
    before = F.pad(running_sums(inner[:, :, -1]), (1, -1))
    return (inner + before[:, :, None]).flatten(1)[:, :count].cummax(-1).values

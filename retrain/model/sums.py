"""Running sums by operators that every device has in a deterministic form, and exponentials that no processor computes slowly."""

import torch
import torch.nn.functional as F
from torch import Tensor

BY_PRODUCT = {"cuda"}
"""Devices whose `cumsum` of floats raises under `torch.use_deterministic_algorithms`, which is set for the whole process while a learner
on another device takes a step."""
_WIDEST, _BLOCK = 1024, 256
_LOG_SMALLEST, _SMALLEST = -87.0, 2e-38
"""The smallest normal float32 is 1.2e-38, whose logarithm is -87.3."""


def exponentials(x: Tensor, out: Tensor | None = None) -> Tensor:
    """exp(x) of x <= 0, in `out` if given; 0 where float32 holds it with fewer digits or not at all. NaN stays.

    MKL, which computes it on a CPU, takes 8 to 25 times as long for each such number.
    """
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return torch.exp(x, out=out)
    return F.threshold(torch.clamp(x, min=_LOG_SMALLEST, out=out).exp_(), _SMALLEST, 0.0, inplace=True)


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

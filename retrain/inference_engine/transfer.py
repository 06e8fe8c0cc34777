"""Host arrays to the device that computes."""

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def upload(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """On CUDA without waiting for the kernels before it: pageable memory is staged before the call returns, so `array` may change then."""
    return torch.from_numpy(array).to(device, non_blocking=device.type == "cuda")

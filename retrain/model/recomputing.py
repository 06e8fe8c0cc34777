"""A layer whose activations are computed again in the backward pass; only its input is kept, on the
device or in the host's memory.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def recomputed(
    layer: Callable[..., Any], hidden: Tensor, *others: Any, offloaded: bool, **named: Any
) -> Any:
    """`layer(hidden, *others, **named)`. `offloaded`: the hidden states wait in the host's memory
    for the backward pass.
    """
    if not offloaded:
        return checkpoint(
            layer, hidden, *others, use_reentrant=False, preserve_rng_state=False, **named
        )

    def run(held: _Offloaded, *others: Any, **named: Any) -> Any:
        return layer(held.take(), *others, **named)

    return checkpoint(
        run, _Offloaded(hidden), *others, use_reentrant=False, preserve_rng_state=False, **named
    )


class _Offloaded:
    """A tensor that is on its device when it is first taken, and a copy of what the host kept from
    then on.

    Copies are in the order of the device's own work, which waits for them (an estimate: 2 ms for
    16,000 tokens of a 4B model's layer), and the host waits for none: its memory is pinned on CUDA.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._first: Tensor | None = tensor
        self._device, self._wants_gradient = tensor.device, tensor.requires_grad
        self._host = torch.empty_like(
            tensor, device="cpu", requires_grad=False, pin_memory=tensor.is_cuda
        )
        self._host.copy_(tensor.detach(), non_blocking=True)

    def take(self) -> Tensor:
        first, self._first = self._first, None
        if first is not None:
            return first
        return self._host.to(self._device, non_blocking=True, copy=True).requires_grad_(
            self._wants_gradient
        )

"""Triton kernels between the matrix products of whole sequences, for prompts and for learning, and
the probe that they pass before use.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from retrain.model.functions import LayerKernels, Norm, apply_rope, gate_gradient, gated, normed
from retrain.model.probe import Make, choose, compare, numbers

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Largest difference on the probe, whose numbers are about 1: a few roundings."""


Case = Callable[[LayerKernels | None], Sequence[Tensor]]
"""The results of one kernel, or of torch's operators."""


class TritonLayers:
    """One kernel each."""

    def __init__(self) -> None:
        from retrain.model.kernels import rowwise

        self.norm, self.norm_gradient = rowwise.norm, rowwise.norm_gradient
        self.apply_rope, self.apply_rope_gradient = rowwise.apply_rope, rowwise.apply_rope_gradient
        self.gate, self.gate_gradient = partial(rowwise.gate, pending=None), rowwise.gate_gradient


def layer_kernels(
    device: torch.device, dtype: torch.dtype, log: Callable[[str], None]
) -> LayerKernels | None:
    """Return the kernels of a device that has Triton's. None, and why in a line to `log`, if they
    fail or differ from torch's operators.
    """
    kernels, reason = choose(TritonLayers, partial(differences, device=device, dtype=dtype))
    if reason:
        log(f"Learning uses torch's operators: {reason}.")
    return kernels


def differences(kernels: LayerKernels, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Name the kernels that differ from torch's operators on a probe by more than rounding."""
    make = numbers(device, dtype)
    cases = _norm_cases(make) | _rope_cases(make) | _gate_cases(make)
    return compare(None, kernels, cases, _TOLERANCE)


def _norm_cases(make: Make) -> dict[str, Case]:
    x, weight, grad = make(18, 40), make(40), make(18, 40)
    return _normed_cases("norm", x, weight, grad, normed)


def _rope_cases(make: Make) -> dict[str, Case]:
    x, weight, grad = make(18, 5, 8), make(3, 8), make(18, 3, 8)
    rotary = make(18, 1, 4).repeat(1, 1, 2), make(18, 1, 4).repeat(1, 1, 2)

    def rotated(x: Tensor, norm: Norm) -> Tensor:
        return apply_rope(x[:, :3], *rotary, norm)

    return _normed_cases("apply_rope", x, weight, grad, rotated)


def _normed_cases(
    name: str, x: Tensor, weight: Tensor, grad: Tensor, function: Callable[[Tensor, Norm], Tensor]
) -> dict[str, Case]:
    """Two cases of a function of x and a norm: its output and its gradient."""

    def results(kernels: LayerKernels | None) -> tuple[Tensor, Tensor]:
        norm, leaf = Norm(weight, 1e-6), x.clone().requires_grad_()
        norm.kernels = kernels
        with torch.enable_grad():
            output = function(leaf, norm)
        return output, torch.autograd.grad(output, leaf, grad)[0]

    return {name: lambda of: results(of)[:1], f"{name}_gradient": lambda of: results(of)[1:]}


def _gate_cases(make: Make) -> dict[str, Case]:
    gates, grad = make(18, 48), make(18, 24)

    def gradient(kernels: LayerKernels | None) -> list[Tensor]:
        if kernels is not None:
            return [kernels.gate_gradient(grad, gates)]
        active = torch.nn.functional.silu(gates[:, :24])
        return [gate_gradient(grad.clone(), gates, active)]

    return {"gate": lambda of: [gated(gates, of)], "gate_gradient": gradient}

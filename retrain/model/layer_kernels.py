"""Triton kernels between the matrix products of whole sequences, for prompts and for learning, and
the probe that they pass before use.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from retrain.model.functions import LayerKernels, Norm, gate_gradient, gated, normed, rotate
from retrain.model.step_kernels import tried

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Largest difference on the probe, whose numbers are about 1: a few roundings."""


class TritonLayers:
    """One kernel each."""

    def __init__(self) -> None:
        from retrain.model.kernels import activation, norm, rotary

        self.norm, self.norm_gradient = norm.norm, norm.norm_gradient
        self.turn, self.turn_gradient = rotary.turn, rotary.turn_gradient
        self.gate, self.gate_gradient = (
            partial(activation.gate, pending=None),
            activation.gate_gradient,
        )


def layer_kernels(
    device: torch.device, dtype: torch.dtype, say: Callable[[str], None]
) -> LayerKernels | None:
    """Return the kernels of a device that has Triton's. None, and why in a line to `say`, if they
    fail or differ from torch's operators.
    """
    kernels, reason = tried(TritonLayers, partial(differences, device=device, dtype=dtype))
    if reason:
        say(f"Learning uses torch's operators: {reason}.")
    return kernels


def differences(kernels: LayerKernels, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Name the kernels that differ from torch's operators on a probe by more than rounding."""
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    x, heads, gates, grads = (
        make(18, 40),
        make(18, 5, 8),
        make(18, 48),
        (make(18, 40), make(18, 3, 8), make(18, 24)),
    )
    rotary, weights = (
        (make(18, 1, 4).repeat(1, 1, 2), make(18, 1, 4).repeat(1, 1, 2)),
        (make(40), make(3, 8)),
    )

    def results(of: LayerKernels | None) -> dict[str, Tensor]:
        norms = [Norm.of(weight, 1e-6) for weight in weights]
        for norm in norms:
            norm.kernels = of
        with torch.enable_grad():
            leaves = x.clone().requires_grad_(), heads.clone().requires_grad_()
            outputs = normed(leaves[0], norms[0]), rotate(leaves[1][:, :3], *rotary, norms[1])
            of_norm, of_turn = torch.autograd.grad(outputs, leaves, grads[:2])
        found = {
            "norm": outputs[0],
            "norm_gradient": of_norm,
            "turn": outputs[1],
            "turn_gradient": of_turn,
        }
        active = torch.nn.functional.silu(gates[:, :24])
        of_gates = (
            gate_gradient(grads[2].clone(), gates, active)
            if of is None
            else of.gate_gradient(grads[2], gates)
        )
        return found | {"gate": gated(gates, of), "gate_gradient": of_gates}

    expected, limit = results(None), _TOLERANCE[dtype]
    return [
        name
        for name, own in results(kernels).items()
        if not torch.allclose(own.float(), expected[name].float(), rtol=limit, atol=limit)
    ]

"""Triton kernels between the matrix products of whole sequences, for prompts and for learning, and the probe that they pass before use."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from retrain.model.functions import LayerKernels, Norm, gate_gradient, gated, normed, rotate

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Largest difference on the probe, whose numbers are about 1: a few roundings."""


class TritonLayers:
    """One kernel each, launched on the device of its tensors."""

    def __init__(self) -> None:
        from retrain.model.kernels import activation, norm, rotary

        self._activation, self._norm, self._rotary = activation, norm, rotary

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        with _on(x):
            return self._norm.norm(x, weight, eps)

    def norm_gradient(self, grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        with _on(x):
            return self._norm.norm_gradient(grad, x, weight, scale)

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        with _on(x):
            return self._rotary.turn(x, cos, sin, weight, eps)

    def turn_gradient(self, grad: Tensor, x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        with _on(x):
            return self._rotary.turn_gradient(grad, x, cos, sin, weight, scale)

    def gate(self, gates: Tensor) -> Tensor:
        with _on(gates):
            return self._activation.gate(gates, None)

    def gate_gradient(self, grad: Tensor, gates: Tensor) -> Tensor:
        with _on(gates):
            return self._activation.gate_gradient(grad, gates)


def _on(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which is not the learner's where it has another one than the sampler."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def layer_kernels(device: torch.device, dtype: torch.dtype, say: Callable[[str], None]) -> LayerKernels | None:
    """Return the kernels of a device where Triton compiles. None, and why in a line to `say`, if they differ from torch's operators."""
    kernels = TritonLayers()
    wrong = differences(kernels, device, dtype)
    if not wrong:
        return kernels
    say(f"Learning uses torch's operators: on a probe Triton's kernels differ from them ({', '.join(wrong)}).")
    return None


def differences(kernels: LayerKernels, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Name the kernels that differ from torch's operators on a probe by more than rounding."""
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    x, heads, gates, grads = make(18, 40), make(18, 5, 8), make(18, 48), (make(18, 40), make(18, 3, 8), make(18, 24))
    rotary, weights = (make(18, 1, 4).repeat(1, 1, 2), make(18, 1, 4).repeat(1, 1, 2)), (make(40), make(3, 8))

    def results(of: LayerKernels | None) -> dict[str, Tensor]:
        norms = [Norm.of(weight, 1e-6) for weight in weights]
        for norm in norms:
            norm.kernels = of
        with torch.enable_grad():
            leaves = x.clone().requires_grad_(), heads.clone().requires_grad_()
            outputs = normed(leaves[0], norms[0]), rotate(leaves[1][:, :3], *rotary, norms[1])
            of_norm, of_turn = torch.autograd.grad(outputs, leaves, grads[:2])
        found = {"norm": outputs[0], "norm_gradient": of_norm, "turn": outputs[1], "turn_gradient": of_turn}
        active = torch.nn.functional.silu(gates[:, :24])
        of_gates = gate_gradient(grads[2].clone(), gates, active) if of is None else of.gate_gradient(grads[2], gates)
        return found | {"gate": gated(gates, of), "gate_gradient": of_gates}

    expected, limit = results(None), _TOLERANCE[dtype]
    return [
        name for name, own in results(kernels).items() if not torch.allclose(own.float(), expected[name].float(), rtol=limit, atol=limit)
    ]

"""Muon (Jordan et al. 2024), the optimizer that makes the lab's model in a third of AdamW's sequences.

The momentum of each matrix is replaced by the nearest semi-orthogonal one, found with five Newton-Schulz iterations. torch.optim.Muon
does this in bfloat16, which a CPU emulates: 0.7 s a step here against 0.05 s in float32 with matrices of one shape batched.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic that drives every singular value near 1."""


class Muon:
    """For two-dimensional weights of hidden layers; embeddings and norms want AdamW."""

    def __init__(self, weights: Iterable[Tensor], momentum: float = 0.95) -> None:
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for weight in weights:
            by_shape.setdefault(weight.shape, []).append(weight)
        self.stacks = list(by_shape.values())
        self.momenta = [torch.zeros(len(stack), *stack[0].shape) for stack in self.stacks]
        self.momentum = momentum

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """One update with Nesterov momentum; clears the gradients."""
        for stack, momentum in zip(self.stacks, self.momenta, strict=True):
            gradient = torch.stack([weight.grad for weight in stack if weight.grad is not None])
            momentum.lerp_(gradient, 1 - self.momentum)
            direction = orthogonalize(gradient.lerp(momentum, self.momentum))
            rows, columns = direction.shape[1:]
            scale = max(1.0, rows / columns) ** 0.5
            for weight, update in zip(stack, direction, strict=True):
                weight.sub_(update, alpha=learning_rate * scale)
                weight.grad = None


def orthogonalize(stack: Tensor) -> Tensor:
    """[n, rows, columns] -> the same with singular values near 1."""
    a, b, c = NEWTON_SCHULZ
    tall = stack.shape[1] > stack.shape[2]
    x = stack.mT if tall else stack
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x

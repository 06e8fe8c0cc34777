"""Singular values of one layer's update B A, from QR of both factors and the SVD of the r x r core.

Shapes: A [rank, d_in], B [d_out, rank]. With A^T = Q_a R_a and B = Q_b R_b the product is Q_b (R_b
R_a^T) Q_a^T, so the SVD of the core R_b R_a^T holds all of it: exact for every rank, in float64,
without the d_out x d_in matrix.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor


class Factors(NamedTuple):
    """The thin SVD B A = left diag(values) right^T in float64, with m = min(rank, d_in, d_out)."""

    left: Tensor
    """[d_out, m], orthonormal columns."""
    values: Tensor
    """[m] singular values, descending."""
    right: Tensor
    """[d_in, m], orthonormal columns."""


@dataclass(frozen=True)
class LayerSpectrum:
    """The singular values of one layer's update."""

    name: str
    rank: int
    singular_values: tuple[float, ...]
    """Singular values of B A without its scale, descending; min(rank, d_in, d_out) of them."""
    scale: float = 1.0
    """s of the update s B A. It cancels in `retained` and weighs the layers against each other."""

    @property
    def effective_rank(self) -> int:
        """The highest rank of an update with these shapes; below `rank` if the layer is narrower
        than its adapter.
        """
        return len(self.singular_values)

    @property
    def is_zero(self) -> bool:
        """True for an untrained layer (B = 0 at the start), which has no variance to retain or
        lose.
        """
        return self.scale * self.singular_values[0] == 0.0

    @cached_property
    def _cumulative(self) -> tuple[float, ...]:
        """The cumulative sums of squares, relative to the largest value, so that tiny adapters do
        not underflow.
        """
        return tuple(
            accumulate((value / self.singular_values[0]) ** 2 for value in self.singular_values)
        )

    @property
    def energy(self) -> float:
        """The squared Frobenius norm of the update, scale included."""
        if self.is_zero:
            return 0.0
        return (self.scale * self.singular_values[0]) ** 2 * self._cumulative[-1]

    def retained(self, k: int) -> float:
        """Return V(k), the fraction of the sum of squared singular values in the first k; sqrt(1 -
        V) is the relative Frobenius error.

        1 from the effective rank on. Raises ValueError for k < 1 and for a layer of zeros.
        """
        if k < 1:
            raise ValueError(f"rank {k} is not a rank; give 1 or more")
        if self.is_zero:
            raise ValueError(f"the update of {self.name} is zero, so it has no variance")
        if k >= self.effective_rank:
            return 1.0
        return self._cumulative[k - 1] / self._cumulative[-1]

    def lost(self, k: int) -> float:
        """Return 1 - V(k), summed over the values that rank k cuts off, so that a small loss keeps
        its digits; 0 for a layer of zeros.

        Its square root is the relative Frobenius error of the update at rank k. Raises ValueError
        for k < 1.
        """
        if k < 1:
            raise ValueError(f"rank {k} is not a rank; give 1 or more")
        if self.is_zero:
            return 0.0
        cut = self.singular_values[k:]
        return (
            math.fsum((value / self.singular_values[0]) ** 2 for value in cut)
            / self._cumulative[-1]
        )

    def smallest_rank(self, threshold: float) -> int:
        """Return the smallest k with V(k) at or above the threshold; 1 for a layer of zeros, which
        loses nothing at any rank.
        """
        if self.is_zero:
            return 1
        return next(
            k for k in range(1, self.effective_rank + 1) if reaches(self.retained(k), threshold)
        )


def reaches(retained: float, threshold: float) -> bool:
    return retained >= threshold - _ROUNDING


_ROUNDING = 1e-12
"""A V(k) that is below the threshold only by the rounding of its sum counts as reaching it."""


def layer_spectrum(
    lora_a: Tensor, lora_b: Tensor, *, name: str = "layer", scale: float = 1.0
) -> LayerSpectrum:
    """Compute the spectrum of B A from A [rank, d_in] and B [d_out, rank]. Raises ValueError for
    wrong shapes, nan and inf.
    """
    values = torch.linalg.svdvals(_core(*_triangles(lora_a, lora_b, name)))
    return LayerSpectrum(name, lora_a.shape[0], tuple(values.tolist()), scale)


def factorise(lora_a: Tensor, lora_b: Tensor, name: str) -> Factors:
    """Compute the SVD of B A as thin factors. Raises the errors of `layer_spectrum`."""
    a, b = _checked(lora_a, lora_b, name)
    q_a, r_a = torch.linalg.qr(a.T)
    q_b, r_b = torch.linalg.qr(b)
    u, values, vh = torch.linalg.svd(_core(r_a, r_b), full_matrices=False)
    return Factors(q_b @ u, values, q_a @ vh.T)


def product_norm(lora_a: Tensor, lora_b: Tensor) -> float:
    """Return the Frobenius norm of B A."""
    return float(torch.linalg.matrix_norm(_core(*_triangles(lora_a, lora_b, "product"))))


def _triangles(lora_a: Tensor, lora_b: Tensor, name: str) -> tuple[Tensor, Tensor]:
    a, b = _checked(lora_a, lora_b, name)
    return torch.linalg.qr(a.T, mode="r").R, torch.linalg.qr(b, mode="r").R


def _core(r_a: Tensor, r_b: Tensor) -> Tensor:
    return r_b @ r_a.T


def _checked(lora_a: Tensor, lora_b: Tensor, name: str) -> tuple[Tensor, Tensor]:
    if (
        lora_a.ndim != 2
        or lora_b.ndim != 2
        or lora_a.shape[0] != lora_b.shape[1]
        or 0 in (*lora_a.shape, *lora_b.shape)
    ):
        raise ValueError(
            f"{name}: lora_A {list(lora_a.shape)} and lora_B {list(lora_b.shape)} must be [rank,"
            " in] and [out, rank]"
        )
    if not (torch.isfinite(lora_a).all() and torch.isfinite(lora_b).all()):
        raise ValueError(f"{name}: lora_A or lora_B holds nan or inf")
    return lora_a.double(), lora_b.double()

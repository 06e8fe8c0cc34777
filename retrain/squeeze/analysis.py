"""The rank that an adapter uses: the variance that each rank keeps, over its layers, and the
smallest rank that keeps enough.

The singular values of one layer's update B A come from QR of both factors and the SVD of the r x r
core. Shapes: A [rank, d_in], B [d_out, rank]. With A^T = Q_a R_a and B = Q_b R_b the product is Q_b
(R_b R_a^T) Q_a^T. The SVD of the core R_b R_a^T is therefore exact for every rank, in float64,
without the d_out x d_in matrix.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from retrain.errors import ConfigurationError, EnvironmentFailure, UntrainedAdapter
from retrain.records.summary import SqueezeSummary, TableRow
from retrain.squeeze.adapter import LoraAdapter, read_adapter

# -- one layer -------------------------------------------------------------------------------------


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
        """The highest rank of an update with these shapes, below `rank` if the layer is narrower
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
        """Return V(k), the fraction of the sum of squared singular values in the first k. sqrt(1 -
        V) is the relative Frobenius error. V is 1 from the effective rank on. Raises ValueError for
        k < 1 and for a layer of zeros.
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
        its digits. A layer of zeros has 0.

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
        """Return the smallest k with V(k) at or above the threshold, or 1 for a layer of zeros."""
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
    values = torch.linalg.svdvals(_core(lora_a, lora_b, name))
    return LayerSpectrum(name, lora_a.shape[0], tuple(values.tolist()), scale)


def factorise(lora_a: Tensor, lora_b: Tensor, name: str) -> Factors:
    """Compute the SVD of B A as thin factors. Raises the errors of `layer_spectrum`."""
    a, b = _checked(lora_a, lora_b, name)
    q_a, r_a = torch.linalg.qr(a.T)
    q_b, r_b = torch.linalg.qr(b)
    u, values, vh = torch.linalg.svd(r_b @ r_a.T, full_matrices=False)
    return Factors(q_b @ u, values, q_a @ vh.T)


def product_norm(lora_a: Tensor, lora_b: Tensor) -> float:
    """Return the Frobenius norm of B A."""
    return float(torch.linalg.matrix_norm(_core(lora_a, lora_b, "product")))


def _core(lora_a: Tensor, lora_b: Tensor, name: str) -> Tensor:
    a, b = _checked(lora_a, lora_b, name)
    core: Tensor = torch.linalg.qr(b, mode="r").R @ torch.linalg.qr(a.T, mode="r").R.T
    return core


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


# -- an adapter ------------------------------------------------------------------------------------


Rule = Literal["mean", "min"]


@dataclass(frozen=True)
class Analysis:
    """The ranks of an adapter and the rank to keep."""

    adapter: Path
    source_rank: int
    """The largest rank of a layer."""
    recommended_rank: int
    rule: Rule
    threshold: float
    table: tuple[TableRow, ...]
    layers: tuple[LayerSpectrum, ...]

    @property
    def zero_layers(self) -> tuple[str, ...]:
        return tuple(layer.name for layer in self.layers if layer.is_zero)

    def summary(self) -> SqueezeSummary:
        """Return the values that the trackers show."""
        return SqueezeSummary(self.source_rank, self.recommended_rank, self.threshold, self.table)

    def ranks_per_layer(self) -> dict[str, int]:
        """Return, for each layer, the smallest rank at which that layer reaches the threshold."""
        return {layer.name: layer.smallest_rank(self.threshold) for layer in self.layers}

    def to_json(self) -> dict[str, Any]:
        """Return the entry `squeeze` of a campaign's manifest."""
        return {
            "recommended_rank": self.recommended_rank,
            "rule": self.rule,
            "threshold": self.threshold,
            "source_rank": self.source_rank,
            "zero_layers": len(self.zero_layers),
            "table": [asdict(row) for row in self.table],
        }


def analyze_adapter(
    adapter_path: str | Path,
    *,
    min_variance_retention: float = 0.95,
    target_ranks: Sequence[int] = (),
    source_rank: int = 0,
    rule: Rule = "mean",
    device: str = "cpu",
) -> Analysis:
    """Compute the singular values of every layer of the PEFT folder, the table over `target_ranks`,
    and the recommended rank.

    Empty `target_ranks` mean 1, 2, 4, ... below the source rank, and the source rank. If no rank
    keeps enough, the source rank gets a row and the recommendation. A `source_rank` other than 0
    must equal the rank of the adapter. Raises ConfigurationError for an adapter that is not plain
    LoRA or not trained, and for ranks that do not fit it.
    """
    adapter = read_adapter(Path(adapter_path))
    return analyze(
        adapter, min_variance_retention, target_ranks, source_rank, rule, svd_device(device)
    )


def analyze(
    adapter: LoraAdapter,
    threshold: float,
    target_ranks: Sequence[int],
    source_rank: int,
    rule: Rule,
    device: torch.device,
) -> Analysis:
    """Do what `analyze_adapter` does for an adapter in memory."""
    if source_rank and source_rank != adapter.rank:
        raise ConfigurationError(
            f"[squeeze] source_rank = {source_rank}, and {adapter.folder} has rank {adapter.rank};"
            " set it to that, or to 0 to read it."
        )
    ranks = powers_of_two(adapter.rank)
    if target_ranks:
        ranks = checked_ranks(target_ranks, adapter.rank)
    layers = tuple(
        layer_spectrum(layer.a.to(device), layer.b.to(device), name=layer.name, scale=layer.scale)
        for layer in adapter.layers
    )
    trained = [layer for layer in layers if not layer.is_zero]
    if not trained:
        raise UntrainedAdapter(
            f"{adapter.folder} has no rank to recommend, since all its updates are zero. Train"
            " it first."
        )
    retained = [{k: layer.retained(k) for k in ranks} for layer in trained]
    recommended = recommend_rank(retained, ranks, threshold, rule, adapter.rank)
    table = tuple(_row(k, trained) for k in sorted({*ranks, recommended}))
    return Analysis(adapter.folder, adapter.rank, recommended, rule, threshold, table, layers)


def recommend_rank(
    layers: Sequence[Mapping[int, float] | None],
    ranks: Sequence[int],
    threshold: float,
    rule: Rule = "mean",
    source_rank: int | None = None,
) -> int:
    """Return the smallest of `ranks` at which the mean over the layers of V(k), or the smallest
    V(k), reaches the threshold.

    Each of `layers` maps ranks to V, at least up to the layer's own rank; None is a layer of zeros,
    which does not count. If no rank reaches the threshold, the result is `source_rank`, by default
    the last of `ranks`. Raises ValueError for an unknown rule, a threshold outside (0, 1], and if
    every layer is zero.
    """
    if rule not in ("mean", "min"):
        raise ValueError(f'rule {rule!r} is not known; allowed: "mean" or "min"')
    if not 0 < threshold <= 1:
        raise ValueError(
            f"min_variance_retention = {threshold} is out of range; allowed: above 0 and at most 1"
        )
    source = source_rank
    if source is None:
        source = max(ranks)
    trained = [layer for layer in layers if layer is not None]
    if not trained:
        raise ValueError("the adapter is untrained: every layer is zero")
    for k in checked_ranks(ranks, source):
        # The last rank that a layer names keeps all of it.
        values = [1.0 if k > max(layer) else layer[k] for layer in trained]
        kept = math.fsum(values) / len(values)
        if rule == "min":
            kept = min(values)
        if reaches(kept, threshold):
            return k
    return source


def checked_ranks(ranks: Sequence[int], source_rank: int) -> tuple[int, ...]:
    """Return `ranks` if they rise and lie between 1 and `source_rank`. Raises ConfigurationError, a
    ValueError, otherwise.
    """
    rising = all(low < high for low, high in pairwise(ranks))
    if not ranks or not rising or ranks[0] < 1 or ranks[-1] > source_rank:
        raise ConfigurationError(
            f"[squeeze] target_ranks = {list(ranks)}: give different ranks in rising order, from 1"
            f" to {source_rank}, the adapter's rank."
        )
    return tuple(ranks)


def powers_of_two(source_rank: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... below the source rank, and the source rank."""
    return (
        *(2**power for power in range(source_rank.bit_length()) if 2**power < source_rank),
        source_rank,
    )


def svd_device(name: str) -> torch.device:
    """Return the device of `[squeeze] device`. Raises EnvironmentFailure if it is absent."""
    from retrain.model.devices import is_present, present_devices

    device = torch.device(name.replace("gpu", "cuda"))
    if device.type == "mps":
        raise ConfigurationError(
            '[squeeze] device = "mps" has no float64, which the singular values need; use "cpu".'
        )
    if not is_present(device):
        raise EnvironmentFailure(
            f'[squeeze] device = "{name}": this machine has no such device'
            f" ({present_devices()}). Choose another."
        )
    return device


def _row(k: int, trained: Sequence[LayerSpectrum]) -> TableRow:
    values = [layer.retained(k) for layer in trained]
    # Relative to the largest, since the squares of tiny updates would be 0.
    largest = max(layer.energy for layer in trained)
    weights = [layer.energy / largest for layer in trained]
    whole = math.fsum(weights)
    energy = math.fsum(v * weight for v, weight in zip(values, weights, strict=True)) / whole
    lost = (
        math.fsum(layer.lost(k) * weight for layer, weight in zip(trained, weights, strict=True))
        / whole
    )
    return TableRow(
        k, math.fsum(values) / len(values), min(values), max(values), energy, math.sqrt(lost)
    )

"""The rank that an adapter uses: the variance that each rank keeps, over its layers, and the
smallest rank that keeps enough.

The singular values of one layer's update B A come from QR of both factors and the SVD of the r x r
core. Shapes: A [rank, d_in], B [d_out, rank]. With A^T = Q_a R_a and B = Q_b R_b the product is Q_b
(R_b R_a^T) Q_a^T. The SVD of the core R_b R_a^T is therefore exact for every rank, in float64,
without the d_out x d_in matrix.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import hypot
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor

from retrain.errors import ConfigurationError, EnvironmentFailure, UntrainedAdapter
from retrain.records.summary import SqueezeSummary, TableRow
from retrain.squeeze.adapter import check_factors, read_adapter

# -- one layer -------------------------------------------------------------------------------------


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
        return not self._norm()

    @property
    def energy(self) -> float:
        """The squared Frobenius norm of the update, scale included."""
        return self._norm() ** 2

    def _norm(self, cut: int = 0) -> float:
        """Return the Frobenius norm of the update without its first `cut` singular values, scale
        included.
        """
        return abs(self.scale) * hypot(*self.singular_values[cut:])

    def retained(self, k: int) -> float:
        """Return V(k), the fraction of the sum of squared singular values in the first k. sqrt(1 -
        V) is the relative Frobenius error. V is 1 from the effective rank on. Raises ValueError for
        k < 1 and for a layer of zeros.
        """
        if self.is_zero:
            raise ValueError(f"the update of {self.name} is zero, so it has no variance")
        return 1.0 - self.lost(k)

    def lost(self, k: int) -> float:
        """Return 1 - V(k) from the values that rank k cuts off, so that a small loss keeps its
        digits. A layer of zeros has 0.

        Its square root is the relative Frobenius error of the update at rank k. Raises ValueError
        for k < 1.
        """
        if k < 1:
            raise ValueError(f"rank {k} is not a rank; give 1 or more")
        return 0.0 if self.is_zero else (self._norm(k) / self._norm()) ** 2

    def smallest_rank(self, threshold: float) -> int:
        """Return the smallest k with V(k) at or above the threshold, or 1 for a layer of zeros."""
        return next(
            k for k in range(1, self.effective_rank + 1) if _reaches(1 - self.lost(k), threshold)
        )


def _reaches(retained: float, threshold: float) -> bool:
    """A V(k) that is below the threshold only by the rounding of its sum reaches it."""
    return retained >= threshold - 1e-12


def layer_spectrum(
    lora_a: Tensor, lora_b: Tensor, *, name: str = "layer", scale: float = 1.0
) -> LayerSpectrum:
    """Compute the spectrum of B A from A [rank, d_in] and B [d_out, rank]. Raises ValueError for
    wrong shapes, nan and inf.
    """
    _, values, _ = factorize(lora_a, lora_b, name)
    return LayerSpectrum(name, lora_a.shape[0], tuple(values.tolist()), scale)


def factorize(lora_a: Tensor, lora_b: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the thin SVD B A = left diag(values) right^T in float64. With m = min(rank, d_in,
    d_out), left is [d_out, m], values [m] descending, and right [d_in, m]. Raises the errors of
    `layer_spectrum`.
    """
    check_factors(name, lora_a, lora_b)
    q_a, r_a = torch.linalg.qr(lora_a.double().T)
    q_b, r_b = torch.linalg.qr(lora_b.double())
    u, values, vh = torch.linalg.svd(r_b @ r_a.T, full_matrices=False)
    return q_b @ u, values, q_a @ vh.T


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

    Empty `target_ranks` mean 1, 2, 4, ... and the source rank. If no rank keeps enough, the
    recommendation is the source rank. A `source_rank` other than 0 must equal the rank of the
    adapter. Raises ConfigurationError for an adapter that is not plain LoRA or not trained, and for
    ranks that do not fit it.
    """
    adapter = read_adapter(Path(adapter_path), svd_device(device))
    if source_rank not in (0, adapter.rank):
        raise ConfigurationError(
            f"[squeeze] source_rank = {source_rank}, and {adapter.folder} has rank {adapter.rank};"
            " set it to that, or to 0 to read it."
        )
    ranks = tried_ranks(target_ranks, adapter.rank)
    layers = tuple(
        layer_spectrum(layer.a, layer.b, name=layer.name, scale=layer.scale)
        for layer in adapter.layers
    )
    trained = [layer for layer in layers if not layer.is_zero]
    if not trained:
        raise UntrainedAdapter(
            f"{adapter.folder} has no rank to recommend, since all its updates are zero. Train"
            " it first."
        )
    retained = [{k: layer.retained(k) for k in ranks} for layer in trained]
    recommended = recommend_rank(retained, ranks, min_variance_retention, rule, adapter.rank)
    table = tuple(_row(k, trained) for k in sorted({*ranks, recommended}))
    return Analysis(
        adapter.folder, adapter.rank, recommended, rule, min_variance_retention, table, layers
    )


def recommend_rank(
    layers: Sequence[Mapping[int, float]],
    ranks: Sequence[int],
    threshold: float,
    rule: Rule,
    source_rank: int,
) -> int:
    """Return the first of the rising `ranks` at which V(k) reaches the threshold, in the mean over
    the layers or in the worst layer.

    Each of `layers` maps every rank to V. If no rank reaches the threshold, the result is
    `source_rank`. Raises ValueError for an unknown rule and a threshold outside (0, 1].
    """
    if rule not in ("mean", "min"):
        raise ValueError(f'rule {rule!r} is not known; allowed: "mean" or "min"')
    if not 0 < threshold <= 1:
        raise ValueError(
            f"min_variance_retention = {threshold} is out of range; allowed: above 0 and at most 1"
        )
    decide = min if rule == "min" else fmean
    reached = (k for k in ranks if _reaches(decide(v[k] for v in layers), threshold))
    return next(reached, source_rank)


def tried_ranks(target_ranks: Sequence[int], source_rank: int) -> tuple[int, ...]:
    """Return `target_ranks`; without any, 1, 2, 4, ... below the source rank, and the source rank.
    Raises ConfigurationError, a ValueError, unless they rise and lie between 1 and `source_rank`.
    """
    powers = (2**power for power in range((source_rank - 1).bit_length()))
    ranks = tuple(target_ranks) or (*powers, source_rank)
    if list(ranks) != sorted(set(ranks)) or ranks[0] < 1 or ranks[-1] > source_rank:
        raise ConfigurationError(
            f"[squeeze] target_ranks = {list(ranks)}: give different ranks in rising order, from 1"
            f" to {source_rank}, the adapter's rank."
        )
    return ranks


def svd_device(name: str) -> str:
    """Return torch's name of `[squeeze] device`. Raises EnvironmentFailure if it is absent."""
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
    return str(device)


def _row(k: int, trained: Sequence[LayerSpectrum]) -> TableRow:
    values = [layer.retained(k) for layer in trained]
    # The layers' updates are blocks of one matrix, whose norms add in squares.
    error = hypot(*(layer._norm(k) for layer in trained)) / hypot(*(one._norm() for one in trained))
    return TableRow(k, fmean(values), min(values), max(values), 1 - error**2, error)

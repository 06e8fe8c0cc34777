"""The rank that an adapter uses: the variance that each rank keeps, over its layers, and the
smallest rank that keeps enough.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch

from retrain.errors import ConfigurationError, EnvironmentFailure, UntrainedAdapter
from retrain.records.summary import SqueezeSummary, TableRow
from retrain.squeeze.adapter import LoraAdapter, read_adapter
from retrain.squeeze.spectrum import LayerSpectrum, layer_spectrum, reaches

Rule = Literal["mean", "min"]


@dataclass(frozen=True)
class Analysis:
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
        """For each layer, the smallest rank at which that layer reaches the threshold."""
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

    Empty `target_ranks` mean 1, 2, 4, ... below the source rank, and the source rank. A
    `source_rank` other than 0 must be the adapter's. Raises ConfigurationError for an adapter that
    is not plain LoRA or not trained, and for ranks that do not fit it.
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
    if target_ranks:
        ranks = checked_ranks(target_ranks, adapter.rank)
    else:
        ranks = powers_of_two(adapter.rank)
    layers = tuple(
        layer_spectrum(layer.a.to(device), layer.b.to(device), name=layer.name, scale=layer.scale)
        for layer in adapter.layers
    )
    trained = [layer for layer in layers if not layer.is_zero]
    if not trained:
        raise UntrainedAdapter(
            f"{adapter.folder} is untrained: all its updates are zero, so no rank can be"
            " recommended; train it first."
        )
    retained = [{k: layer.retained(k) for k in ranks} for layer in trained]
    recommended = recommend_rank(retained, ranks, threshold, rule, adapter.rank)
    table = tuple(_row(k, trained) for k in ranks)
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
    if source_rank is None:
        source = max(ranks)
    else:
        source = source_rank
    trained = [layer for layer in layers if layer is not None]
    if not trained:
        raise ValueError("the adapter is untrained: every layer is zero")
    for k in checked_ranks(ranks, source):
        values = [
            1.0 if k > max(layer) else layer[k] for layer in trained
        ]  # the last rank that a layer names keeps all of it
        if rule == "min":
            kept = min(values)
        else:
            kept = math.fsum(values) / len(values)
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
            '[squeeze] device = "mps" has no float64, which the singular values are computed in;'
            ' use "cpu".'
        )
    if not is_present(device):
        raise EnvironmentFailure(
            f'[squeeze] device = "{name}": this machine has no such device ({present_devices()});'
            " name one of these."
        )
    return device


def _row(k: int, trained: Sequence[LayerSpectrum]) -> TableRow:
    values = [layer.retained(k) for layer in trained]
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

"""Compression of an adapter to a lower rank: each layer's update keeps its first singular values,
at the same scale.

Truncation acts on B A, and the model's update is s B A, so s must not change. Hence alpha' = alpha
k / r, and alpha sqrt(k / r) for rank-stabilized LoRA, where s = alpha / sqrt(r). A fraction is
valid for alpha', since peft only divides it.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import hypot, sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from retrain.errors import ConfigurationError, RunFailed
from retrain.records.disk import replacing_folder
from retrain.records.run_folder import kind_of, mark
from retrain.squeeze.adapter import (
    CARD_FILE,
    CONFIG_FILE,
    WEIGHTS_FILE,
    LoraAdapter,
    LoraLayer,
    read_adapter,
    weight_names,
)
from retrain.squeeze.analysis import factorize, layer_spectrum, svd_device

Factors = tuple[Tensor, Tensor, Tensor]
"""The result of `factorize`: left, values, right."""


@dataclass(frozen=True)
class Compression:
    """A compressed adapter on the disk, read back and compared with its source."""

    folder: Path
    source_rank: int
    ranks: dict[str, int]
    """Rank of each layer by name."""
    relative_error: float
    """Frobenius norm of the dropped part, relative to the whole update (all layers as one)."""
    storage_error: float
    """Frobenius norm of stored minus truncated update, relative to the whole update: the rounding
    to the source's dtype."""
    source_parameters: int
    parameters: int

    @property
    def rank(self) -> int:
        """The largest rank of a layer."""
        return max(self.ranks.values())

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        del values["folder"]
        return {"rank": self.rank, **values}


def compressed_alpha(
    alpha: float, source_rank: int, target_rank: int, use_rslora: bool = False
) -> float:
    """Return the alpha that keeps the update's scale; an int if it is whole. Raises ValueError
    unless 1 <= target <= source.
    """
    if not 1 <= target_rank <= source_rank:
        raise ValueError(
            f"target rank {target_rank} is out of range; allowed: 1 to the source rank,"
            f" {source_rank}"
        )
    # multiply before dividing, so that 64 * 8 / 32 is exactly 16
    exact = alpha * target_rank / source_rank
    if use_rslora:
        exact = alpha * sqrt(target_rank / source_rank)
    return int(exact) if exact == int(exact) else exact


def compress_adapter(
    adapter_path: str | Path,
    output_path: str | Path,
    target_rank: int | Mapping[str, int],
    *,
    device: str = "cpu",
    overwrite: bool = False,
) -> Compression:
    """Write the adapter at `target_rank`, one for all layers or one by layer name, as a PEFT folder
    in the source's dtype.

    A layer whose own rank is lower keeps it. `overwrite` replaces a folder that this function
    wrote. Raises ConfigurationError for a wrong rank or folder, and RunFailed if the written
    adapter differs from the computed adapter.
    """
    adapter, output = read_adapter(Path(adapter_path), svd_device(device)), Path(output_path)
    check_output(adapter.folder, output, overwrite)
    ranks = ranks_of(adapter, target_rank)
    factors = [factorize(layer.a, layer.b, layer.name) for layer in adapter.layers]
    pairs = list(zip(adapter.layers, factors, strict=True))
    tensors, cut, whole = dict(adapter.others), list[float](), list[float]()
    for layer, found in pairs:
        cut.append(layer.scale * float(found[1][ranks[layer.name] :].norm()))
        whole.append(layer.scale * float(found[1].norm()))
        new = truncated(layer, found, ranks[layer.name])
        tensors |= zip(weight_names(layer.name), new, strict=True)
    # The layers' updates are blocks of one matrix, whose norms add in squares.
    total = hypot(*whole) or 1.0
    error = hypot(*cut) / total
    _write(output, tensors, _settings(adapter, ranks), _card(adapter, ranks, error))
    stored = read_adapter(output, svd_device(device))
    written = zip(pairs, stored.layers, strict=True)
    rounding = hypot(*(_rounding(output, *pair, layer) for pair, layer in written))
    return Compression(
        output,
        adapter.rank,
        ranks,
        error,
        rounding / total,
        adapter.num_parameters,
        stored.num_parameters,
    )


def truncated(layer: LoraLayer, factors: Factors, k: int) -> tuple[Tensor, Tensor]:
    """Return A' [k, d_in] and B' [d_out, k] from the first k singular values, in the source's
    dtype. Each of the two contains the square roots of the values.

    A layer of zeros keeps the first rows of A, so that it remains trainable.
    """
    left, values, right = factors
    root = values[:k].sqrt()
    a, b = (right[:, :k] * root).T if values[0] else layer.a[:k], left[:, :k] * root
    return a.to("cpu", layer.a.dtype).contiguous(), b.to("cpu", layer.b.dtype).contiguous()


def _rounding(output: Path, source: LoraLayer, factors: Factors, stored: LoraLayer) -> float:
    """Return the Frobenius norm of a stored update minus the truncated one, which bounds the
    largest difference of a single weight. Raises RunFailed if it is more than rounding.
    """
    left, values, right = (part[..., : stored.rank] for part in factors)
    a = torch.cat([stored.a.double(), right.T])
    b = torch.cat([stored.scale * stored.b.double(), -source.scale * left * values], dim=1)
    difference = sqrt(layer_spectrum(a, b).energy)
    # Half a unit of rounding on each factor, and as much again for all else.
    allowed = 4 * torch.finfo(stored.a.dtype).eps * abs(source.scale) * float(values.sum())
    if difference > allowed:
        raise RunFailed(
            f"{output}: the update of {source.name} differs from the truncated one by"
            f" {difference:.3g}, and rounding to"
            f" {str(stored.a.dtype).removeprefix('torch.')} explains {allowed:.3g}. Do not"
            " use this folder."
        )
    return difference


def ranks_of(adapter: LoraAdapter, target: int | Mapping[str, int]) -> dict[str, int]:
    """Return the rank of each layer. Raises ConfigurationError for a rank that does not fit, and
    for names that do not match the layers.
    """
    names = {layer.name for layer in adapter.layers}
    wanted = dict.fromkeys(names, target) if isinstance(target, int) else target
    for wrong in sorted(names ^ wanted.keys()):
        raise ConfigurationError(
            f"Ranks by layer must name each layer of {adapter.folder} once; {wrong} is missing"
            " or unknown."
        )
    for name, rank in wanted.items():
        if not 1 <= rank <= adapter.rank:
            where = "[squeeze] compress_to" if isinstance(target, int) else name
            raise ConfigurationError(
                f"{where} = {rank} is out of range; allowed: 1 to {adapter.rank}, the rank of"
                f" {adapter.folder}."
            )
    return {
        layer.name: min(wanted[layer.name], *layer.a.shape, *layer.b.shape)
        for layer in adapter.layers
    }


# -- files -----------------------------------------------------------------------------------------


def check_output(source: Path, output: Path, overwrite: bool) -> None:
    """Raise ConfigurationError if `output` is the source's folder, or a folder with files that
    retrain may not replace.
    """
    where = f'[squeeze] output_path = "{output}"'
    if output.resolve() == source.resolve():
        raise ConfigurationError(f"{where} is the adapter itself; choose another folder.")
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if kind_of(output) != "squeeze":
        raise ConfigurationError(
            f"{where} exists and does not come from a squeeze job, so retrain does not"
            " overwrite it; choose another folder."
        )
    if not overwrite:
        raise ConfigurationError(
            f"{where} already holds a compressed adapter; replace it with --overwrite, or choose"
            " another folder."
        )


def _write(output: Path, tensors: dict[str, Tensor], settings: dict[str, Any], card: str) -> None:
    from safetensors.torch import save_file

    # check_output has verified that the replaced folder is ours or empty.
    with replacing_folder(output) as aside:
        mark(aside, "squeeze")
        save_file(tensors, aside / WEIGHTS_FILE, metadata={"format": "pt"})
        text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
        (aside / CONFIG_FILE).write_text(text, encoding="utf-8")
        (aside / CARD_FILE).write_text(card, encoding="utf-8")


def _settings(adapter: LoraAdapter, ranks: Mapping[str, int]) -> dict[str, Any]:
    """Return the source's settings with the new ranks and alphas; patterns hold only the layers
    that differ from the default.
    """
    alphas = {
        layer.name: compressed_alpha(layer.alpha, layer.rank, ranks[layer.name], layer.use_rslora)
        for layer in adapter.layers
    }
    largest = max(ranks, key=lambda name: ranks[name])
    settings = dict(adapter.settings)
    for key, pattern, values in (
        ("r", "rank_pattern", ranks),
        ("lora_alpha", "alpha_pattern", alphas),
    ):
        settings[key] = values[largest]
        # an expression that peft matches with this module only
        settings[pattern] = {
            f"^{re.escape(name)}": value
            for name, value in values.items()
            if value != values[largest]
        }
    return settings


def rank_words(ranks: Mapping[str, int]) -> str:
    low, high = min(ranks.values()), max(ranks.values())
    return f"rank {high}" if low == high else f"ranks {low} to {high}"


def _card(adapter: LoraAdapter, ranks: Mapping[str, int], error: float) -> str:
    base = adapter.settings.get("base_model_name_or_path")
    return (
        f"---\nbase_model: {json.dumps(base)}\nlibrary_name: peft\ntags:\n- lora\n-"
        f" retrain\n---\n\n# LoRA adapter for {base}, {rank_words(ranks)}\n\nCompressed by retrain"
        f" from an adapter of rank {adapter.rank}: the update of each layer is truncated to its"
        " first singular values, at the same scale. Relative Frobenius error of the whole update:"
        f" {error:.2%}. The source's optimizer state does not fit; continue training with a new"
        " one.\n"
    )

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
from itertools import chain
from math import fsum, hypot, sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from retrain.errors import ConfigurationError, RunFailed
from retrain.records.disk import replacing_folder
from retrain.records.run_folder import MARKER, mark
from retrain.squeeze.adapter import (
    CARD_FILE,
    CONFIG_FILE,
    WEIGHTS_FILE,
    LoraAdapter,
    LoraLayer,
    read_adapter,
    weight_names,
)
from retrain.squeeze.analysis import Factors, factorise, product_norm, svd_device
from retrain.system import read_object


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
    if exact == int(exact):
        return int(exact)
    return exact


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
    adapter = read_adapter(Path(adapter_path))
    return compress(
        adapter, Path(output_path), target_rank, svd_device(device), overwrite=overwrite
    )


def compress(
    adapter: LoraAdapter,
    output: Path,
    target_rank: int | Mapping[str, int],
    device: torch.device,
    *,
    overwrite: bool,
) -> Compression:
    """Do what `compress_adapter` does for an adapter in memory."""
    check_output(adapter.folder, output, overwrite)
    ranks = ranks_of(adapter, target_rank)
    tensors = dict(adapter.others)
    cut, whole = [], []
    for layer in adapter.layers:
        factors = factorise(layer.a.to(device), layer.b.to(device), layer.name)
        key_a, key_b = weight_names(layer.name)
        tensors[key_a], tensors[key_b] = truncated(layer, factors, ranks[layer.name])
        cut.append(
            layer.scale * float(torch.linalg.vector_norm(factors.values[ranks[layer.name] :]))
        )
        whole.append(layer.scale * float(torch.linalg.vector_norm(factors.values)))
    # The layers' updates are blocks of one matrix, whose norms add in squares.
    total = hypot(*whole)
    settings = _settings(adapter, ranks)
    error = hypot(*cut) / total if total else 0.0
    _write(output, tensors, settings, _card(adapter, ranks, error))
    storage = _verify(adapter, output, ranks, device)
    keys = chain.from_iterable(weight_names(layer.name) for layer in adapter.layers)
    written = sum(tensors[key].numel() for key in keys)
    return Compression(
        output,
        adapter.rank,
        ranks,
        error,
        storage / total if total else 0.0,
        adapter.num_parameters,
        written,
    )


def truncated(layer: LoraLayer, factors: Factors, k: int) -> tuple[Tensor, Tensor]:
    """Return A' [k, d_in] and B' [d_out, k] from the first k singular values, in the source's
    dtype. Each of the two contains the square roots of the values.

    A layer of zeros keeps the first rows of A, so that it remains trainable.
    """
    if not factors.values[0]:
        return layer.a[:k].contiguous(), torch.zeros(layer.b.shape[0], k, dtype=layer.b.dtype)
    root = factors.values[:k].sqrt()
    a = (factors.right[:, :k] * root).T
    b = factors.left[:, :k] * root
    return a.to("cpu", layer.a.dtype).contiguous(), b.to("cpu", layer.b.dtype).contiguous()


def ranks_of(adapter: LoraAdapter, target: int | Mapping[str, int]) -> dict[str, int]:
    """Return the rank of each layer. Raises ConfigurationError for a rank that does not fit, and
    for names that do not match the layers.
    """
    names = {layer.name for layer in adapter.layers}
    if not isinstance(target, int) and set(target) != names:
        wrong = sorted(names ^ set(target))
        raise ConfigurationError(
            f"Ranks by layer must name each layer of {adapter.folder} once; {wrong[0]} is missing"
            " or unknown."
        )
    wanted = dict.fromkeys(names, target) if isinstance(target, int) else target
    for name, rank in wanted.items():
        if not 1 <= rank <= adapter.rank:
            where = "[squeeze] compress_to" if isinstance(target, int) else name
            raise ConfigurationError(
                f"{where} = {rank} is out of range; allowed: 1 to {adapter.rank}, the rank of"
                f" {adapter.folder}."
            )
    return {layer.name: min(wanted[layer.name], layer.effective_rank) for layer in adapter.layers}


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
    marker = output / MARKER
    if not marker.is_file() or read_object(marker).get("kind") != "squeeze":
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
    default_rank = max(ranks.values())
    alphas = {
        layer.name: compressed_alpha(layer.alpha, layer.rank, ranks[layer.name], layer.use_rslora)
        for layer in adapter.layers
    }
    default_alpha = next(alphas[name] for name, rank in ranks.items() if rank == default_rank)
    return adapter.settings | {
        "r": default_rank,
        "lora_alpha": default_alpha,
        "rank_pattern": {
            _exactly(name): rank for name, rank in ranks.items() if rank != default_rank
        },
        "alpha_pattern": {
            _exactly(name): alpha for name, alpha in alphas.items() if alpha != default_alpha
        },
    }


def _exactly(name: str) -> str:
    """Return the expression that peft matches with this module only."""
    return f"^{re.escape(name)}"


def _card(adapter: LoraAdapter, ranks: Mapping[str, int], error: float) -> str:
    base = adapter.settings.get("base_model_name_or_path")
    low, high = min(ranks.values()), max(ranks.values())
    return (
        f"---\nbase_model: {json.dumps(base)}\nlibrary_name: peft\ntags:\n- lora\n-"
        f" retrain\n---\n\n# LoRA adapter for {base},"
        f" {f'rank {high}' if low == high else f'ranks {low} to {high}'}\n\nCompressed by retrain"
        f" from an adapter of rank {adapter.rank}: the update of each layer is truncated to its"
        " first singular values, at the same scale. Relative Frobenius error of the whole update:"
        f" {error:.2%}. The source's optimizer state does not fit; continue training with a new"
        " one.\n"
    )


# -- verification ----------------------------------------------------------------------------------


def _verify(
    adapter: LoraAdapter, output: Path, ranks: Mapping[str, int], device: torch.device
) -> float:
    """Read the written adapter and compare every layer's update with the truncated one; return the
    Frobenius norm of all differences.

    The norm bounds the largest difference of a single weight. Raises RunFailed if a layer differs
    by more than rounding.
    """
    stored = {layer.name: layer for layer in read_adapter(output).layers}
    squares = []
    for source in adapter.layers:
        layer, k = stored[source.name], ranks[source.name]
        factors = factorise(source.a.to(device), source.b.to(device), source.name)
        kept = factors.values[:k]
        a = torch.cat([layer.a.to(device).double(), factors.right[:, :k].T])
        b = torch.cat(
            [layer.scale * layer.b.to(device).double(), -source.scale * factors.left[:, :k] * kept],
            dim=1,
        )
        difference = product_norm(a, b)
        # Half a unit of rounding on each factor, and as much again for all else.
        allowed = 4 * torch.finfo(layer.a.dtype).eps * abs(source.scale) * float(kept.sum())
        if difference > allowed:
            raise RunFailed(
                f"{output}: the update of {source.name} differs from the truncated one by"
                f" {difference:.3g}, and rounding to"
                f" {str(layer.a.dtype).removeprefix('torch.')} explains {allowed:.3g}. Do not"
                " use this folder."
            )
        squares.append(difference**2)
    return sqrt(fsum(squares))

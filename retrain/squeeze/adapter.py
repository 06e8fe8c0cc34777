"""Reading a LoRA adapter from a PEFT folder: `adapter_config.json` and
`adapter_model.safetensors`.
"""

import re
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from retrain.errors import ConfigurationError
from retrain.system import ParseError, parse_json

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
CARD_FILE = "README.md"

_A, _B = ".lora_A.weight", ".lora_B.weight"
_FACTOR = re.compile(r"base_model\.model\.(.+)\.lora_[AB]\.weight")

_VARIANTS = (
    "use_dora", "use_qalora", "lora_bias", "target_parameters", "use_bdlora", "arrow_config",
    "monteclora_config", "velora_config",
    "kasa_config",
)  # fmt: skip
"""Settings with which the update is more than s B A."""
_BASE_CHANGING = ("pissa", "corda", "olora", "loftq", "mica", "lora_ga")
"""Values of `init_lora_weights` for which peft changes the base weights when it loads an adapter,
by an amount that depends on the rank."""


@dataclass(frozen=True)
class LoraLayer:
    """One adapted linear layer: its update is `scale` B A."""

    name: str
    """Path of the module in the base model."""
    a: Tensor
    """[rank, d_in]"""
    b: Tensor
    """[d_out, rank]"""
    alpha: float
    use_rslora: bool

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def scale(self) -> float:
        return self.alpha / (sqrt(self.rank) if self.use_rslora else self.rank)


@dataclass(frozen=True)
class LoraAdapter:
    folder: Path
    settings: dict[str, Any]
    """The content of adapter_config.json."""
    layers: tuple[LoraLayer, ...]
    """The adapted layers, sorted by name."""
    others: dict[str, Tensor]
    """Tensors that a change of rank leaves alone: modules saved whole, biases."""

    @property
    def rank(self) -> int:
        """The largest rank of a layer."""
        return max(layer.rank for layer in self.layers)

    @property
    def num_parameters(self) -> int:
        return sum(layer.a.numel() + layer.b.numel() for layer in self.layers)


def weight_names(layer: str) -> tuple[str, str]:
    """Return the names of A and B in the file."""
    return f"base_model.model.{layer}{_A}", f"base_model.model.{layer}{_B}"


def read_adapter(folder: Path, device: str = "cpu") -> LoraAdapter:
    """Read a plain LoRA adapter onto a device. Raises ConfigurationError for any other folder, so
    as not to drop a part of an adapter silently.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    settings = _read_settings(folder)
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise ConfigurationError(
            f"{folder} holds no {WEIGHTS_FILE}; save the adapter as safetensors (retrain does"
            " not read pickled weights)."
        )
    try:
        tensors = load_file(path, device)
    except SafetensorError as error:
        raise ConfigurationError(
            f"{path} is not a safetensors file ({error}); save the adapter again."
        ) from error
    found = {key: _FACTOR.fullmatch(key) for key in tensors}
    others = {key: tensors[key] for key in tensors if not found[key]}
    odd = [key for key in others if "lora_" in key]
    if odd:
        raise ConfigurationError(
            f"{path} holds {odd[0]}, which is not a factor of a linear layer; retrain squeezes"
            " only plain LoRA on linear layers."
        )
    names = sorted({match[1] for match in found.values() if match})
    if not names:
        raise ConfigurationError(
            f"{path} holds no LoRA factors (…{_A}, …{_B}); name a LoRA adapter."
        )
    layers = tuple(_layer(path, name, tensors, settings) for name in names)
    return LoraAdapter(folder, settings, layers, others)


def _read_settings(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    try:
        settings = parse_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigurationError(
            f"{folder} is not a PEFT adapter (no {CONFIG_FILE}); name the folder of one, such as a"
            " run's checkpoints/final."
        ) from error
    except ParseError as error:
        raise ConfigurationError(f"{path} {error}; save the adapter again.") from error
    if not isinstance(settings, dict):
        settings = {}
    if settings.get("peft_type") != "LORA":
        raise ConfigurationError(
            f"{path} has peft_type {settings.get('peft_type')!r}; retrain squeezes only LORA"
            " adapters."
        )
    if not {type(settings.get(key)) for key in ("r", "lora_alpha")} <= {int, float}:
        raise ConfigurationError(
            f"{path} lacks a number for r or lora_alpha, so the update's scale is unknown; save the"
            " adapter again."
        )
    for key in filter(settings.get, _VARIANTS):
        raise ConfigurationError(
            f"{path} has {key} = {settings[key]!r}: its update is not B A alone, so retrain"
            " cannot reduce its rank."
        )
    init = settings.get("init_lora_weights")
    if str(init).lower().startswith(_BASE_CHANGING):
        raise ConfigurationError(
            f"{path} has init_lora_weights = {init!r}, which changes the base model depending"
            " on the rank. Convert the adapter to plain LoRA (in peft"
            " path_initial_model_for_weight_conversion)."
        )
    return settings


def _layer(
    path: Path, name: str, tensors: dict[str, Tensor], settings: dict[str, Any]
) -> LoraLayer:
    for key in weight_names(name):
        if key not in tensors:
            raise ConfigurationError(f"{path} lacks {key}; save the adapter again.")
    a, b = (tensors[key] for key in weight_names(name))
    check_factors(f"{path}: {name}", a, b)
    stated = _of_pattern(settings.get("rank_pattern"), name, settings["r"])
    if stated != a.shape[0]:
        raise ConfigurationError(
            f"{path}: {name} has rank {a.shape[0]}, and {CONFIG_FILE} says {stated}, so its"
            " scale is unknown. Save the adapter again."
        )
    alpha = _of_pattern(settings.get("alpha_pattern"), name, settings["lora_alpha"])
    return LoraLayer(name, a, b, float(alpha), bool(settings.get("use_rslora")))


def check_factors(where: str, a: Tensor, b: Tensor) -> None:
    """Raise ConfigurationError, a ValueError, unless A and B are finite factors of a linear
    layer.
    """
    if not (a.ndim == b.ndim == 2 and a.shape[0] == b.shape[1] and a.numel() and b.numel()):
        raise ConfigurationError(
            f"{where} has lora_A {list(a.shape)} and lora_B {list(b.shape)}, not the"
            " factors [rank, in] and [out, rank] of a linear layer."
        )
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        raise ConfigurationError(
            f"{where} holds nan or inf, so it has no spectrum. Use an earlier checkpoint."
        )


def _of_pattern(pattern: dict[str, float] | None, name: str, default: float) -> float:
    """Return the value that peft uses for a module: the first expression that matches the end of
    its path decides.
    """
    if not pattern:
        return default
    from peft.utils.other import get_pattern_key

    return pattern.get(get_pattern_key(pattern.keys(), name), default)

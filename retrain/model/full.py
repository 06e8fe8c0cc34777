"""All weights of a language model as the weights that a run trains.

The optimizer's weights are float32. If the model computes in half precision, its own weights are
casts of them, and gradients accumulate in float32.
"""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from retrain.model.adapter import Adapter, symmetric_uniforms, towers
from retrain.model.text import base_name
from retrain.model.weights import Change, TrainedWeights
from retrain.noise import Stream
from retrain.types import WHOLE_MODEL

if TYPE_CHECKING:
    from retrain.config import TrainConfig
    from retrain.config.schema import Model
    from retrain.model.load import BaseModel

CONFIG_FILE = "config.json"
CARD_FILE = "README.md"


def trained_weights(base: "BaseModel", config: "TrainConfig") -> TrainedWeights:
    """Make the weights that `[model] train` names trainable in `base`."""
    if config.model.train == "full":
        return AllWeights(base, config.model, keeps_base=config.reads_base)
    return Adapter(base, config.model, config.lora, config.training.seed)


def full_bytes(weights: int, device_type: str, frozen: int) -> int:
    """Return the bytes of so many trained weights: float32, gradient and two moments. They include
    a copy in the model's dtype for the sampler, and `frozen` more copies.
    """
    copy = 2 if device_type == "cuda" else 4
    return (4 * 4 + copy * (1 + frozen)) * weights


class AllWeights(TrainedWeights):
    """The parameters of the language model, tied ones once, under the model's own names."""

    file = WHOLE_MODEL
    frozen_layers = False

    def __init__(self, base: "BaseModel", model: "Model", *, keeps_base: bool) -> None:
        """`keeps_base` holds a copy of the weights as they are now, for `disabled`."""
        self.model, self._decoder = base.model, base.decoder
        self.name = base_name(model.model)
        others = {
            id(parameter)
            for name in towers(base)
            for parameter in base.decoder.get_submodule(name).parameters()
        }
        self._forward = {
            name: parameter.requires_grad_()
            for name, parameter in base.model.named_parameters()
            if id(parameter) not in others
        }
        self._masters = self._forward
        if base.dtype != torch.float32:
            self._masters = {name: nn.Parameter(own.data) for name, own in self._forward.items()}
            for name, own in self._forward.items():
                own.data = own.data.to(base.dtype)
                own.register_post_accumulate_grad_hook(partial(_add_to, self._masters[name]))
        embeddings = {
            id(module.weight) for module in base.model.modules() if isinstance(module, nn.Embedding)
        }
        self.undecayed = {
            name for name, own in self._forward.items() if own.ndim < 2 or id(own) in embeddings
        }
        self._base: dict[str, Tensor] = {}
        if keeps_base:
            self._base = {name: own.detach().clone() for name, own in self._forward.items()}

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return self._masters

    @property
    def beside(self) -> Sequence[nn.Parameter]:
        return ()

    @torch.no_grad()
    def written(self) -> None:
        if self._masters is not self._forward:
            for name, own in self._forward.items():
                own.copy_(self._masters[name])

    def disabled(self) -> AbstractContextManager[None]:
        return self.holding(self._base)

    @contextmanager
    def holding(self, weights: dict[str, Tensor]) -> Iterator[None]:
        own = [parameter.data for parameter in self._forward.values()]
        try:
            for name, parameter in self._forward.items():
                parameter.data = weights[name]
            yield
        finally:
            for parameter, data in zip(self._forward.values(), own, strict=True):
                parameter.data = data

    def trial_changes(self, seed: int) -> list[Change]:
        """Change one matrix of each layer, taking the kinds of matrices in turn.

        With I inputs, uniform values between -w and w, w = sqrt(3 / I), have the standard deviation
        1 / sqrt(I). The change of the output is therefore as large as the input.
        """
        from transformers.modeling_layers import GradientCheckpointingLayer

        kind, changes = GradientCheckpointingLayer, []
        layers = [module for module in self._decoder.modules() if isinstance(module, kind)]
        for number, layer in enumerate(layers or [self._decoder]):
            matrices = [found for found in layer.parameters() if found.ndim == 2]
            matrix = matrices[number % len(matrices)]
            unit = symmetric_uniforms(seed, Stream.PARITY, 1, number, matrix)
            change = (math.sqrt(3 / matrix.shape[1]) * unit).to(matrix)
            changes.append(Change(matrix, change))
        return changes

    # -- files -------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write model.safetensors, unless it is there, config.json and a model card. It never
        writes the file in place, since the file may be a link.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / self.file).exists():
            self.write(folder / self.file)
        config: Any = self.model.config
        settings = json.loads(config.to_json_string()) | {
            "architectures": [type(self.model).__name__],
            "dtype": "float32",
        }
        text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
        (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
        (folder / CARD_FILE).write_text(self._card(), encoding="utf-8")

    def keep_start(self, folder: Path) -> None:
        start = self.read(folder / self.file)
        self._start = {name: start[name].to(own) for name, own in self._forward.items()}

    def _card(self) -> str:
        return (
            f"---\nbase_model: {json.dumps(self.name)}\nlibrary_name: transformers\npipeline_tag:"
            " text-generation\ntags:\n- reinforcement-learning\n- retrain\n---\n\n# All weights of"
            f" {self.name}, trained\n\nTrained with reinforcement learning from verifiable rewards"
            " by retrain. The weights are float32; `retrain export RUN` writes a model folder with"
            " its tokenizer.\n"
        )


def _add_to(master: nn.Parameter, own: Tensor) -> None:
    """Add the gradient of a half-precision weight to its float32 weight's."""
    assert master.grad is not None
    assert own.grad is not None
    master.grad.add_(own.grad)
    own.grad = None

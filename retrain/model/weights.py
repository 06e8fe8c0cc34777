"""The weights that a run trains, as learner, optimizer and engine see them: a LoRA adapter
(`adapter.py`), or all weights of the language model (`full.py`).
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from retrain.model.load import BaseModel


class Change(NamedTuple):
    """A change of one matrix that the parity gate tries."""

    parameter: nn.Parameter
    change: Tensor
    """The change at strength 1, which changes the layer's output by about the size of its input."""


class TrainedWeights(ABC):
    file: str
    """The name of the parameters' file."""
    model: nn.Module
    """The model that the engine samples from."""
    frozen_layers = True
    """True if the layers themselves have frozen weights, so that the fused forward gives every
    gradient.
    """
    drops = False
    """Dropout acts in training passes."""
    undecayed: Collection[str] = ()
    """Names of parameters without weight decay."""
    _start: dict[str, Tensor]
    """The weights of `keep_start`."""

    @property
    @abstractmethod
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that the optimizer steps, in float32, by their names in the file."""

    @property
    @abstractmethod
    def beside(self) -> Sequence[nn.Parameter]:
        """The parameters that the trained weights add to the loaded model."""

    @property
    def is_dropping(self) -> bool:
        return False

    def dropping(
        self,
        step: int,  # noqa: ARG002 - part of the interface
        rows: Sequence[int],  # noqa: ARG002
        device: torch.device,  # noqa: ARG002
        lengths: Sequence[int] | None,  # noqa: ARG002
    ) -> AbstractContextManager[None]:
        """Apply the dropout masks of a step inside, for rows of these numbers and lengths."""
        return nullcontext()

    def computing(self, base: "BaseModel") -> AbstractContextManager[object]:  # noqa: ARG002
        """Let the model compute in its own dtype inside."""
        return nullcontext()

    def written(self) -> None:  # noqa: B027 - most have nothing to follow
        """Follow a write to `parameters`."""

    @abstractmethod
    def disabled(self) -> AbstractContextManager[None]:
        """Make the model equal the loaded base inside."""

    @abstractmethod
    def holding(self, weights: dict[str, Tensor]) -> AbstractContextManager[None]:
        """Use other weights inside, and restore the exact bytes afterwards."""

    def keep_start(self, folder: Path) -> None:
        """Keep the weights that `save` wrote to `folder` for `started`."""
        self._start = self.read(folder / self.file)

    def started(self) -> AbstractContextManager[None]:
        """Give the model the weights of `keep_start` inside."""
        return self.holding(self._start)

    @abstractmethod
    def trial_changes(self, seed: int) -> list[Change]:
        """Return a seeded change for every layer, with a visible effect."""

    def trainable_line(self) -> str:
        trainable = sum(parameter.numel() for parameter in self.parameters.values())
        total = sum(parameter.numel() for parameter in self.model.parameters())
        return (
            f"trainable params: {trainable:,d} || all params: {total:,d} || trainable%:"
            f" {100 * trainable / total:.4f}"
        )

    def digest(self) -> str:
        """Hash the bytes of all parameters with sha256."""
        found = hashlib.sha256()
        for parameter in self.parameters.values():
            bits = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8)
            found.update(bits.numpy().data)
        return found.hexdigest()

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the parameters, their settings and a model card."""

    def write(self, path: Path) -> None:
        """Write the parameters to a file of safetensors."""
        from safetensors.torch import save_file

        weights = {
            name: parameter.detach().cpu().contiguous()
            for name, parameter in self.parameters.items()
        }
        save_file(weights, path, metadata={"format": "pt"})

    def read(self, path: Path) -> dict[str, Tensor]:
        """Read what `write` wrote; ValueError if it is of other weights."""
        from safetensors.torch import load_file

        weights = load_file(path)
        problem = difference(weights, self.parameters)
        if problem:
            raise ValueError(f"{path}: {problem}")
        return weights

    @torch.no_grad()
    def set(self, weights: Mapping[str, Tensor]) -> None:
        """Write other values into the parameters."""
        for name, parameter in self.parameters.items():
            parameter.copy_(weights[name])
        self.written()

    def load(self, folder: Path) -> None:
        """Load what `save` wrote; ValueError if it is of other weights."""
        self.set(self.read(folder / self.file))


def difference(weights: dict[str, Tensor], parameters: dict[str, nn.Parameter]) -> str:
    """Say how the tensors of a file differ from the parameters here; "" if they fit."""
    for name in sorted(weights.keys() | parameters.keys()):
        if name not in parameters:
            return f"{name} is in the file, but not among the trained weights here"
        if name not in weights:
            return f"{name} is among the trained weights here, but not in the file"
        if weights[name].shape != parameters[name].shape:
            return (
                f"{name} has shape {list(weights[name].shape)} in the file and"
                f" {list(parameters[name].shape)} here"
            )
    return ""

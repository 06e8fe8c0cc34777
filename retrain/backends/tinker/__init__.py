"""The Tinker backend: weights, gradients and sampling on a service."""

from typing import TYPE_CHECKING, Any

from retrain.backends.base import Backend
from retrain.backends.tinker.facts import TinkerFacts
from retrain.types import MachineChoices

if TYPE_CHECKING:
    from retrain.config import TrainConfig


class Tinker(TinkerFacts):
    @classmethod
    def open(cls, config: "TrainConfig", choices: MachineChoices | None, **given: Any) -> Backend:  # noqa: ARG003 - a remote backend makes none
        from retrain.backends.tinker.backend import TinkerBackend

        return TinkerBackend(config, **given)

"""The local backend: learner and sampler on this machine."""

from typing import TYPE_CHECKING, Any

from retrain.backends.base import Backend
from retrain.backends.local.facts import LocalFacts
from retrain.types import MachineChoices

if TYPE_CHECKING:
    from retrain.config import TrainConfig


class Local(LocalFacts):
    @classmethod
    def open(cls, config: "TrainConfig", choices: MachineChoices | None, **given: Any) -> Backend:
        from retrain.backends.local.backend import LocalBackend

        return LocalBackend.open(config, choices, **given)

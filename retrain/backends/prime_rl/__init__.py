"""The PRIME-RL backend: gradients in PRIME-RL's trainer, completions from its servers."""

from typing import TYPE_CHECKING, Any

from retrain.backends.base import Backend
from retrain.backends.prime_rl.facts import PrimeRLFacts
from retrain.types import MachineChoices

if TYPE_CHECKING:
    from retrain.config import TrainConfig


class PrimeRL(PrimeRLFacts):
    @classmethod
    def open(cls, config: "TrainConfig", choices: MachineChoices | None, **given: Any) -> Backend:  # noqa: ARG003 - a remote backend makes none
        from retrain.backends.prime_rl.backend import PrimeRLBackend

        return PrimeRLBackend(config, **given)

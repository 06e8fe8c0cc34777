"""Training backends. `build_backend` makes the one that the configuration names and says what it loads."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from retrain.backends.base import Backend, BackendCapabilities
from retrain.errors import ConfigurationError
from retrain.distributed import ALONE, World
from retrain.types import MachineChoices

if TYPE_CHECKING:
    from retrain.config import TrainConfig

__all__ = ["Backend", "BackendCapabilities", "build_backend"]


def build_backend(
    config: "TrainConfig", eos_ids: Sequence[int], choices: MachineChoices | None, say: Callable[[str], None], world: World = ALONE
) -> Backend:
    """`choices` are the stored ones of a resumed run, None at its first start."""
    if config.backend.backend == "local":
        return _local(config, eos_ids, choices, say, world)
    if world.size > 1:
        raise ConfigurationError(
            f'[backend] backend = {config.backend.backend!r} under torchrun: only backend = "local" learns in several processes.'
        )
    from retrain.backends.declared import backend_class
    from retrain.plugins import user_code

    make = backend_class(config)
    with user_code(f'building [backend] backend = "{config.backend.backend}"', ConfigurationError):
        return make(config, choices, eos_ids=eos_ids)  # type: ignore[call-arg]


def _local(
    config: "TrainConfig", eos_ids: Sequence[int], choices: MachineChoices | None, say: Callable[[str], None], world: World
) -> Backend:
    from retrain.backends.local.backend import LocalBackend
    from retrain.model.devices import choose_device, half_precision_note

    device, note, sampler = choose_device(config, world)
    for line in filter(None, (note, half_precision_note(config, device))):
        say(line)
    say(f"Loading train model: {config.model.model} on {device}...")
    backend = LocalBackend(config, choices, eos_ids=eos_ids, world=world)
    for line in backend.notes:
        say(line)
    say(backend.trainable_parameters_line())
    say(f"LocalTrainHelper ready (engine={config.inference.engine}, split_mode={sampler is not None}).")
    return backend

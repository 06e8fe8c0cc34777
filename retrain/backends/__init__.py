"""Training backends. `build_backend` makes the one that the configuration names and says what it loads."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from retrain.backends.base import Backend, BackendCapabilities
from retrain.errors import ConfigurationError
from retrain.parallel import ALONE, World
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
    from retrain.plugins import load_plugin

    make = load_plugin("backend", config.backend.backend, config)
    backend = make(config, choices, eos_ids=eos_ids)
    if not isinstance(backend, Backend):
        raise ConfigurationError(
            f"[backend] backend = {config.backend.backend!r} gives {type(backend).__name__}, which is no subclass of "
            "retrain.backends.Backend; derive it from that class."
        )
    return backend


def _local(
    config: "TrainConfig", eos_ids: Sequence[int], choices: MachineChoices | None, say: Callable[[str], None], world: World
) -> Backend:
    from retrain.backends.local.backend import LocalBackend
    from retrain.backends.local.devices import choose_device

    device, note, sampler = choose_device(config, world)
    if note:
        say(note)
    say(f"Loading train model: {config.model.model} on {device}...")
    backend = LocalBackend(config, choices, eos_ids=eos_ids, world=world)
    for line in backend.notes:
        if line != note:
            say(line)
    say(backend.trainable_parameters_line())
    say(f"LocalTrainHelper ready (engine={config.inference.engine}, split_mode={sampler is not None}).")
    return backend

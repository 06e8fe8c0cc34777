"""The local backend: learner and sampler on this machine. Here is what it declares, without
torch.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from retrain.backends.base import Backend, BackendCapabilities
from retrain.distributed import ALONE, World
from retrain.inference_engine.base import About
from retrain.types import MachineChoices

if TYPE_CHECKING:
    from retrain.config import TrainConfig


class Local(Backend):
    capabilities = BackendCapabilities(
        per_token_advantages=True, synchronous_loss=True, exact_resume=True, own_loss=True
    )
    about = About(
        "PyTorch and PEFT on this machine", "this machine", ("torch", "transformers", "peft")
    )
    in_process = True

    @classmethod
    def open(
        cls,
        config: "TrainConfig",
        choices: MachineChoices | None,
        *,
        eos_ids: Sequence[int],
        log: Callable[[str], None],
        world: World = ALONE,
    ) -> Backend:
        from retrain.backends.local.backend import LocalBackend
        from retrain.model.devices import choose_device, half_precision_note

        device, note, sampler = choose_device(config.backend, world)
        precision = half_precision_note(config.model, config.inference, device)
        for line in filter(None, (note, precision)):
            log(line)
        log(f"Loading train model: {config.model.model} on {device}...")
        make = cls if issubclass(cls, LocalBackend) else LocalBackend
        backend = make(config, choices, eos_ids=eos_ids, world=world)
        for line in backend.notes:
            log(line)
        log(backend.trainable_parameters_line())
        log(
            f"LocalTrainHelper ready (engine={config.inference.engine},"
            f" split_mode={sampler is not None})."
        )
        return backend

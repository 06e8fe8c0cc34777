"""Which device and data type a run uses, and what it is told when they are not there."""

from typing import TYPE_CHECKING, NamedTuple

import torch

from retrain.distributed import ALONE, World
from retrain.errors import ConfigurationError, EnvironmentFailure
from retrain.model.packed import computes_bf16

if TYPE_CHECKING:
    from retrain.config import TrainConfig


class DeviceChoice(NamedTuple):
    device: torch.device
    """Of the learner, and of the sampler where it has none of its own."""
    note: str
    """One line to print where the default device is absent; empty otherwise."""
    sampler: torch.device | None = None
    """Split mode: a device of the sampler's own."""


def choose_device(config: "TrainConfig", world: World = ALONE) -> DeviceChoice:
    """The devices of `[backend] devices`: one, or in split mode the sampler's and then the learner's.

    The unset default falls back to cpu; a named device that is absent is refused.
    In a parallel run each process of a computer takes the GPU of its own number.
    """
    names = config.backend.device_list
    if len(names) > 1 and world.size > 1:
        raise ConfigurationError(
            f'[backend] devices = "{config.backend.devices}" under torchrun: each process takes one GPU, so leave the key out.'
        )
    device = torch.device(names[-1])
    if world.size > 1 and device.type == "cuda":
        device = torch.device("cuda", world.local_rank)
    sampler = torch.device(names[0]) if len(names) > 1 else None
    if is_present(device) and (sampler is None or is_present(sampler)):
        return DeviceChoice(device, "", sampler)
    if config.is_set("backend.devices"):
        raise EnvironmentFailure(
            f'[backend] devices = "{config.backend.devices}": this machine has no such device ({present_devices()}); name one of these, '
            "or leave the key out to fall back to cpu."
        )
    return DeviceChoice(torch.device("cpu"), f'No device "{config.backend.devices}" here, and [backend] devices is not set: using cpu.')


def is_present(device: torch.device) -> bool:
    if device.type == "cuda":
        return (device.index or 0) < torch.cuda.device_count()
    if device.type == "mps":
        return torch.backends.mps.is_available()
    return True


def present_devices() -> str:
    """The devices of this machine in the configuration's words."""
    names = ["cpu"]
    if torch.backends.mps.is_available():
        names.append("mps")
    names.extend(f"gpu:{index}" for index in range(torch.cuda.device_count()))
    return "it has " + ", ".join(names)


def choose_dtype(config: "TrainConfig", device: torch.device) -> torch.dtype:
    """Of the frozen weights: auto is bf16 on CUDA and fp32 elsewhere. Adapter weights are fp32 always."""
    if config.model.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if config.model.dtype == "bf16" else torch.float32


def half_precision_note(config: "TrainConfig", device: torch.device) -> str:
    """One line to print where bf16 is asked for on a processor that has no units for it; empty otherwise."""
    keys = [key for key, dtype in (("[model]", config.model.dtype), ("[inference]", config.inference.dtype)) if dtype == "bf16"]
    if not keys or device.type != "cpu" or computes_bf16():
        return ""
    return f'{" and ".join(keys)} dtype = "bf16": this processor has no bf16 units and computes it many times slower than fp32.'

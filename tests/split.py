"""Split mode where both devices are this CPU; the threads and the copies are real."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import retrain.backends.local.backend
import retrain.model.devices
import retrain.model.memory
from retrain.model.devices import DeviceChoice


@contextmanager
def two_devices() -> Iterator[None]:
    cpu = torch.device("cpu")
    with pytest.MonkeyPatch.context() as patch:
        for module in (retrain.model.devices, retrain.backends.local.backend, retrain.model.memory):
            patch.setattr(
                module, "choose_device", lambda config, world=None: DeviceChoice(cpu, "", cpu)
            )
        yield

"""A frozen base in parts: each rank holds 1/N of every layer, and all of a layer while it runs (FSDP2, ZeRO stage 3).

Embeddings, head and last norm stay whole on every rank: the learner reads the head's weight outside of any layer, tied weights are both
at once, and in a model that needs several GPUs they are a few per cent. The base is frozen, so the backward pass reduces nothing.
Every pass is collective, so all ranks make equally many (`World.any_rank`).
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from retrain.distributed import ALONE, World
from retrain.errors import ConfigurationError

if TYPE_CHECKING:
    from retrain.config.schema import Backend
    from retrain.model.load import BaseModel

_GATHERED = 2
"""Layers that are whole at once: the one that runs and the next one, which is gathered meanwhile."""


def shards_of(backend: "Backend", world: World) -> World:
    """Return the ranks that hold the base in parts; ALONE if each holds all of it."""
    if not backend.shard_base:
        return ALONE
    if world.size == 1:
        raise ConfigurationError(
            "[backend] shard_base = true splits the frozen weights over the processes of torchrun, and this run has one process; "
            "start the run by torchrun --nproc-per-node N -m retrain, or leave shard_base false."
        )
    return world


def shard(model: nn.Module, decoder: nn.Module, device: torch.device, world: World, name: str) -> None:
    """Move a frozen `model` to `device`: 1/N of every layer, and all of the rest. One layer at a time is whole there.

    Collective. Call it before the adapter is attached, so that FSDP leaves the adapter's parameters alone.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (world.size,))
    blocks = layers(decoder)
    if not blocks:
        raise ConfigurationError(
            f'[backend] shard_base = true: no layers were found in [model] model = "{name}"; set shard_base = false, or use a model of '
            "transformers."
        )
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    whole = [parameter for parameter in model.parameters() if not is_sharded(parameter)]
    fully_shard(decoder, mesh=mesh, ignored_params=set(decoder.parameters()) & set(whole))  # the root, which orders the layers' gathers
    for tensor in (*whole, *model.buffers()):
        tensor.data = tensor.data.to(device, copy=True)  # a copy on a CPU too, so that nothing maps the file


def layers(decoder: nn.Module) -> list[nn.Module]:
    """Return the blocks of a transformers model that can be gathered or checkpointed one by one."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)]


def is_sharded(tensor: Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def held_bytes(base: "BaseModel") -> int:
    """Count the bytes of the frozen weights on one rank, gathered layers included; also for a model on the meta device."""
    total = _frozen_bytes(base.model)
    if base.shards.size == 1:
        return total
    each = [_frozen_bytes(layer) for layer in layers(base.decoder)]
    parts = sum(-(-layer // base.shards.size) for layer in each)
    return total - sum(each) + parts + sum(sorted(each)[-_GATHERED:])


def _frozen_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters() if not parameter.requires_grad)

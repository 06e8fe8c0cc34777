"""A frozen base in parts: of every layer each process holds 1/N, and all of it while that layer runs (FSDP2, ZeRO stage 3).

Embeddings, head and last norm stay whole everywhere: the learner reads the head's weight outside of any layer, tied ones are both at
once, and of a model that needs several GPUs they are a few per cent. Nothing is reduced in the backward pass, since the base is frozen.
Every pass is collective, so all ranks make equally many (`World.any_rank`).
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from retrain.distributed import ALONE, World
from retrain.errors import ConfigurationError

if TYPE_CHECKING:
    from retrain.config import TrainConfig
    from retrain.model.load import BaseModel

_GATHERED = 2
"""Layers that are whole at once: one that runs, and the next one, gathered meanwhile."""


def shards_of(config: "TrainConfig", world: World) -> World:
    """The processes that hold the base in parts; ALONE where each holds all of it."""
    if not config.backend.shard_base:
        return ALONE
    if world.size == 1:
        raise ConfigurationError(
            "[backend] shard_base = true shares the frozen weights among the processes of torchrun, and there is one process here; "
            "start the run by torchrun --nproc-per-node N -m retrain, or leave shard_base false."
        )
    return world


def shard(model: nn.Module, decoder: nn.Module, device: torch.device, world: World, name: str) -> None:
    """Leave 1/N of every layer of a frozen `model` on `device`, and all of the rest. A layer at a time is whole there.

    Collective. Before the adapter is attached, whose parameters are then no business of FSDP's.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (world.size,))
    blocks = layers(decoder)
    if not blocks:
        raise ConfigurationError(
            f'[backend] shard_base = true: no layers are found in [model] model = "{name}"; set it false, or use a model of transformers.'
        )
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    whole = [parameter for parameter in model.parameters() if not is_sharded(parameter)]
    fully_shard(decoder, mesh=mesh, ignored_params=set(decoder.parameters()) & set(whole))  # the root, which orders the layers' gathers
    for tensor in (*whole, *model.buffers()):
        tensor.data = tensor.data.to(device, copy=True)  # a copy on a CPU as well, so that no map of the file is left


def layers(decoder: nn.Module) -> list[nn.Module]:
    """Of a transformers model: the blocks that can be gathered or checkpointed one by one."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)]


def is_sharded(tensor: Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def held_bytes(base: "BaseModel") -> int:
    """Of the frozen weights in one process, the layers included that are gathered; the same for a model on the meta device."""
    total = _frozen_bytes(base.model)
    if base.shards.size == 1:
        return total
    each = [_frozen_bytes(layer) for layer in layers(base.decoder)]
    parts = sum(-(-layer // base.shards.size) for layer in each)
    return total - sum(each) + parts + sum(sorted(each)[-_GATHERED:])


def _frozen_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters() if not parameter.requires_grad)

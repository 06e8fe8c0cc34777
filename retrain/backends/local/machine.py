"""What is chosen from the machine at the first step and used as stored ever after.

Every choice depends on the model, the configuration and the device's total memory, never on what happens to be free, so two
fresh runs of one configuration on one machine choose the same.
"""

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from retrain.inference_engine.budget import plan_decode
from retrain.tokenization import context_length
from retrain.types import MachineChoices

if TYPE_CHECKING:
    from retrain.backends.local.model import BaseModel
    from retrain.config import TrainConfig

_LEARNING_SHARE = 0.35
"""Of the memory beside the weights, for the activations of one micro-batch."""
_DECODE_SHARE = 0.35
"""Of the same, for keys and values. What is left is for logits, gradients and fragmentation."""
_CPU_SHARE = 0.8
"""Of a computer's memory, for all of this: it has other work."""
_MERGED_SHARE = 0.2
"""Of the same, for a second copy of the weights with the adapter merged in: on a CPU the small products of an adapter cost most."""
_PROBE_TOKENS = 64
_PROMPT_ALLOWANCE = 1024
"""Prompt tokens assumed beside max_tokens when asking whether the longest row fits."""
_MOST_TOKENS = {"cpu": 4096, "cuda": 32768}
"""Caps for the automatic choice, where memory would allow more; estimates, not tuned."""


def choose(config: "TrainConfig", base: "BaseModel") -> MachineChoices:
    spare = spare_bytes(base)
    tokens, checkpointing = _learning_choices(config, base, int(spare * _LEARNING_SHARE))
    decode = plan_decode(
        base.model.config,
        device_type=base.device.type,
        memory_bytes=int(spare * _DECODE_SHARE),
        tokens_per_row=longest_row(config, base),
        compute_bytes=base.dtype.itemsize,
        kv_cache_dtype=config.inference.kv_cache_dtype,
    )
    return MachineChoices(
        threads=torch.get_num_threads(),
        decode_rows=decode.rows,
        decode_tokens=decode.tokens,
        micro_batch_tokens=tokens,
        gradient_checkpointing=checkpointing,
        merge_adapter=base.device.type == "cpu" and base.dtype == torch.float32 and _weight_bytes(base) <= spare * _MERGED_SHARE,
    )


def spare_bytes(base: "BaseModel") -> int:
    """Memory of the device beside the frozen weights; of a computer, the share that a run may take."""
    weights = _weight_bytes(base)
    if base.device.type == "cuda":
        return max(0, int(torch.cuda.get_device_properties(base.device).total_memory) - weights)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(0, int(total * _CPU_SHARE) - weights)


def _weight_bytes(base: "BaseModel") -> int:
    return sum(int(tensor.nbytes) for tensor in base.model.parameters())


def longest_row(config: "TrainConfig", base: "BaseModel") -> int:
    """Tokens of the longest prompt and completion that must fit: prompts are not known here, so an allowance is made."""
    wanted = config.training.max_tokens + _PROMPT_ALLOWANCE
    return min(wanted, context_length(base.model.config) or wanted)


def _learning_choices(config: "TrainConfig", base: "BaseModel", memory: int) -> tuple[int, bool]:
    """(micro_batch_tokens, gradient_checkpointing). Checkpointing is a third more work, so only where the longest row needs it."""
    wanted, tokens = config.training.gradient_checkpointing, config.training.micro_batch_tokens
    if wanted != "auto" and tokens:
        return tokens, wanted
    per_token = activation_bytes_per_token(base)
    checkpointing = per_token * max(longest_row(config, base), tokens) > memory if wanted == "auto" else wanted
    if tokens:
        return tokens, checkpointing
    kept = _checkpointed_bytes_per_token(base, per_token) if checkpointing else per_token
    return max(1, min(_MOST_TOKENS.get(base.device.type, 4096), memory // kept)), checkpointing


def activation_bytes_per_token(base: "BaseModel") -> int:
    """Bytes that a forward pass keeps for its backward, a token: measured on a few tokens, so it holds for any architecture."""
    kept: dict[int, int] = {}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in base.model.parameters()}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    probe = torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64, device=base.device)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        hidden = base.hidden_states(probe)
    del hidden
    return max(1, sum(kept.values()) // _PROBE_TOKENS)


def _checkpointed_bytes_per_token(base: "BaseModel", per_token: int) -> int:
    """The input of every layer, and one layer's activations while it runs again."""
    text: Any = base.model.config.get_text_config()
    return int(text.num_hidden_layers * text.hidden_size * base.dtype.itemsize + per_token // text.num_hidden_layers + 1)

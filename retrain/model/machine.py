"""What is chosen from the machine at the first step and used as stored ever after.

Every choice depends on the model, the configuration and the device's total memory, never on what happens to be free, so two
fresh runs of one configuration on one machine choose the same.
"""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from retrain.errors import EnvironmentFailure
from retrain.model.budget import plan_decode
from retrain.model.footprint import Footprint, footprint
from retrain.model.packed import computes_bf16
from retrain.model.text import context_length
from retrain.types import MachineChoices

if TYPE_CHECKING:
    from retrain.config import TrainConfig
    from retrain.model.load import BaseModel

_LEARNING_SHARE = 0.35
"""Of the memory beside the weights, for the activations of one micro-batch."""
_DECODE_SHARE = 0.65
"""Of the same, for keys and values, which take turns with the activations. What is left is for the optimizer, logits and fragmentation."""
_CPU_SHARE = 0.8
"""Of a computer's memory, for all of this: it has other work."""
_MERGED_SHARE = 0.2
"""Of the same, for a second copy of the weights that samples, in the layout of products with few rows; in float32 with the adapter."""
PROMPT_ALLOWANCE = 1024
"""Prompt tokens assumed beside max_tokens when asking whether the longest row fits."""
_MOST_TOKENS = {"cpu": 1280, "cuda": 32768}
"""Caps for the automatic choice, where memory would allow more. A CPU: a group of 8 x 128 tokens and its prompt."""


@dataclass(frozen=True)
class Machine:
    device_type: str
    memory: int
    """Bytes of the device, or of the computer."""
    threads: int
    """Of torch on the processor."""

    @classmethod
    def of(cls, device: torch.device) -> "Machine":
        if device.type == "cuda":
            memory = int(torch.cuda.get_device_properties(device).total_memory)
        else:
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return cls(device.type, memory, torch.get_num_threads())

    @property
    def usable(self) -> int:
        """Bytes that a run may take."""
        return self.memory if self.device_type == "cuda" else int(self.memory * _CPU_SHARE)


def choose(config: "TrainConfig", base: "BaseModel") -> MachineChoices:
    return plan(config, base.model.config, footprint(base, config), Machine.of(base.device))


def plan(config: "TrainConfig", model_config: Any, size: Footprint, machine: Machine) -> MachineChoices:
    """The choices for a model of this size on this machine. Raises EnvironmentFailure where not even one completion fits."""
    _check_adapter(config, size, machine)
    spare = max(0, machine.usable - size.weights)
    longest = longest_row(config, model_config)
    tokens, checkpointing = _learning_choices(config, size, longest, machine.device_type, int(spare * _LEARNING_SHARE))
    decode = plan_decode(
        model_config,
        device_type=machine.device_type,
        memory_bytes=int(spare * _DECODE_SHARE),
        tokens_per_row=longest,
        compute_bytes=size.dtype.itemsize,
        kv_cache_dtype=config.inference.kv_cache_dtype,
    )
    return MachineChoices(
        threads=machine.threads,
        decode_rows=decode.rows,
        decode_tokens=decode.tokens,
        micro_batch_tokens=tokens,
        gradient_checkpointing=checkpointing,
        merge_adapter=machine.device_type == "cpu"
        and (size.dtype == torch.float32 or computes_bf16())
        and size.weights <= spare * _MERGED_SHARE,
    )


def _check_adapter(config: "TrainConfig", size: Footprint, machine: Machine) -> None:
    """Raises EnvironmentFailure for an adapter that the whole machine could not hold with its gradient and two moments, in float32."""
    learned = 4 * 4 * size.num_trainable
    if learned > machine.memory:
        raise EnvironmentFailure(
            f"[model] lora_rank = {config.model.lora_rank} gives an adapter of {size.num_trainable:,} parameters, which take "
            f"{learned / 2**30:,.0f} GiB with their gradient and two moments, and {machine.device_type} has "
            f"{machine.memory / 2**30:,.0f} GiB; lower lora_rank."
        )


def longest_row(config: "TrainConfig", model_config: Any, prompt_tokens: int = PROMPT_ALLOWANCE) -> int:
    """Tokens of the longest prompt and completion that must fit; where prompts are not known, an allowance is made."""
    wanted = config.training.max_tokens + prompt_tokens
    return min(wanted, context_length(model_config) or wanted)


def _learning_choices(config: "TrainConfig", size: Footprint, longest: int, device_type: str, memory: int) -> tuple[int, bool]:
    """(micro_batch_tokens, gradient_checkpointing). Checkpointing is a third more work, so only where the longest row needs it."""
    wanted, tokens = config.training.gradient_checkpointing, config.training.micro_batch_tokens
    checkpointing = size.kept_per_token * max(longest, tokens) > memory if wanted == "auto" else wanted
    kept = size.checkpointed_per_token if checkpointing else size.kept_per_token
    return tokens or max(1, min(_MOST_TOKENS.get(device_type, 2048), memory // kept)), checkpointing

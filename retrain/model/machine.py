"""Choices made from the machine at the first step, then stored with the run.

They depend on the model, the configuration and the device's total memory, never on its free memory.
Two fresh runs of one configuration on one machine therefore choose the same. A measurement decides
one choice: several workers with one thread, or one worker with several threads (`threads_pay`). The
number of workers changes no byte; the number of threads may.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch

from retrain.config.mixture import longest_environment
from retrain.config.names import part_class
from retrain.distributed import ALONE, World
from retrain.errors import EnvironmentFailure
from retrain.model.budget import (
    PREFILL_TOKENS,
    PROMPT_ALLOWANCE,
    context_length,
    longest_row,
    longest_sampled,
    plan_decode,
)
from retrain.model.devices import engine_options
from retrain.model.footprint import Footprint, footprint
from retrain.model.head import chunk_bytes_on
from retrain.model.packed import computes_bf16
from retrain.model.pool import can_fork
from retrain.system import total_memory
from retrain.types import MachineChoices

if TYPE_CHECKING:
    from retrain.config import TrainConfig
    from retrain.model.load import BaseModel

_LEARNING_SHARE = 0.35
"""Share of the memory left by the weights that the activations of one micro-batch may take."""
_DECODE_SHARE = 0.65
"""Share of the same for keys and values, which take turns with the activations. The rest is for the
optimizer, logits and fragmentation."""
_CUDA_SHARE = 0.92
"""Share, on a GPU, of the memory left by all permanent tensors. Activations and pages take turns,
so either may use this share. Fragmentation and captured steps take the rest.
"""
_CONTEXT = {"cuda": 5 << 28, "cpu": 12 << 20}
"""Bytes that operators take in addition to tensors. On a GPU they hold the context, its kernels and
the libraries' workspaces: 1.25 GiB, an estimate without a measurement on every card.
"""
_CPU_SHARE = 0.8
"""Share of a computer's memory that a run may take in all; the computer has other work."""
_MERGED_SHARE = 0.2
"""Share for the sampler's prepacked copy of the weights, which in float32 includes the adapter."""
_LARGE, _LARGE_ROWS = 64 << 20, 16
"""Bytes of a model whose products take most of the time even for few rows, and the rows of its
pieces. A step of 32 completions then has work for two workers.
"""
_PROBE_TOKENS, _PROBES = 32, 3
_THREADS_PAY = 0.9
"""Share of the ideal speed-up that threads must reach. Workers reach nearly as much, and keep it
when other work arrives later."""
_MAX_TOKENS = {"cpu": 1280, "cuda": 16384}
"""Caps for the automatic choice, where memory would allow more. A CPU: a group of 8 x 128 tokens
and its prompt. A GPU computes no faster with more (an estimate), and what they would take may hold
pages."""


@dataclass(frozen=True)
class Machine:
    device_type: str
    memory: int
    """Bytes of the device, or the bytes of the computer that this process may take."""
    threads: int
    """torch's intra-op threads on the processor."""

    @classmethod
    def of(cls, device: torch.device) -> "Machine":
        if device.type == "cuda":
            memory = int(torch.cuda.get_device_properties(device).total_memory)
        else:
            memory = total_memory()
        return cls(device.type, memory, torch.get_num_threads())

    @property
    def usable(self) -> int:
        """Bytes that a run may take."""
        if self.device_type == "cuda":
            return self.memory - self.context
        return int(self.memory * _CPU_SHARE)

    @property
    def context(self) -> int:
        return min(_CONTEXT.get(self.device_type, 0), self.memory)


@dataclass(frozen=True)
class Budget:
    """The bytes of a machine for a run, and the lengths that they must hold."""

    config: "TrainConfig"
    model_config: Any
    """The configuration that transformers reads."""
    size: Footprint
    machine: Machine
    prompt_tokens: int = PROMPT_ALLOWANCE
    """Tokens of the longest prompt."""

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest trained row."""
        config, context = self.config, context_length(self.model_config)
        return longest_row(
            config.training, longest_environment(config), context, self.prompt_tokens
        )

    @cached_property
    def longest_sampled(self) -> int:
        config, context = self.config, context_length(self.model_config)
        return longest_sampled(
            config.training,
            config.evaluation,
            longest_environment(config),
            context,
            self.prompt_tokens,
        )

    @property
    def spare(self) -> int:
        """Bytes left by the weights."""
        return max(0, self.machine.usable - self.size.weights - self.size.full_bytes)

    @property
    def learning(self) -> int:
        """Bytes for the activations of a micro-batch."""
        if self.machine.device_type != "cuda":
            return int(self.spare * _LEARNING_SHARE)
        size = self.size
        stays = size.trained_bytes + size.adapter_copies + 2 * chunk_bytes_on("cuda")
        return int(max(0, self.spare - stays) * _CUDA_SHARE)

    @property
    def decoding(self) -> int:
        """Bytes for keys and values."""
        if self.machine.device_type != "cuda":
            return int(self.spare * _DECODE_SHARE)
        return max(0, self.learning - self.prompt_pass)

    @property
    def prompt_pass(self) -> int:
        """Bytes of a packed pass over prompts, in addition to their keys and values."""
        return self.prefill_tokens * self.size.gradients_per_token

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens of one packed pass."""
        return min(PREFILL_TOKENS, self.config.training.batch_size * self.prompt_tokens)

    @cached_property
    def paged(self) -> bool:
        """True if the sampler of a run on the local backend holds keys and values in pages; as
        `TorchEngine` decides it.
        """
        if not part_class("engine", self.config.inference.engine).decodes_here:
            return False  # the server holds the keys, and this process may lack its values
        options = engine_options(self.config.inference, self.machine.device_type, self.size.dtype)
        return options.paged and options.kv_storage is None and self.size.layer_weights > 0

    @property
    def copied(self) -> int:
        """Bytes of the weights that the sampler may copy into another layout."""
        return self.size.weights or self.size.layer_weights + self.size.head_weights

    @property
    def merges(self) -> bool:
        """True if the sampler may hold a prepacked copy of the weights, in float32 with the adapter
        in it.
        """
        multiplies = self.size.dtype == torch.float32 or computes_bf16()
        fits = self.copied <= self.spare * _MERGED_SHARE
        return self.machine.device_type == "cpu" and multiplies and fits

    def left_for_pages(self, choices: MachineChoices) -> int:
        """Return the bytes left for pages of keys and values while the learner holds the
        activations of a micro-batch, or of a longer longest row.
        """
        kept = self.size.activations_per_token(checkpointing=choices.gradient_checkpointing)
        tokens = max(choices.micro_batch_tokens, self.longest)
        return self.learning - tokens * (kept + self.size.gradients_per_token)


def budget_of(config: "TrainConfig", base: "BaseModel") -> Budget:
    """Return the budget of the machine that holds `base` with its adapter."""
    return Budget(config, base.model.config, footprint(base, config), Machine.of(base.device))


def choose(
    budget: Budget,
    base: "BaseModel",
    world: World = ALONE,
    stored: MachineChoices | None = None,
) -> MachineChoices:
    """Return `plan`, or a plan for one worker of several threads if a measurement favors it.

    `stored` are the choices of a resumed run, which stay except for the number of workers.
    """
    choices = plan(budget, world)
    if stored:
        return replace(stored, workers=choices.workers if stored.threads == 1 else 1)
    if choices.workers > 1 and threads_pay(base):
        return plan(budget, world, shares=False)
    return choices


@torch.no_grad()
def threads_pay(base: "BaseModel") -> bool:
    """Return True if an operator's threads reach most of the ideal speed-up; they need large
    products and free cores.
    """
    threads = torch.get_num_threads()
    ids = torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64)
    seconds = {threads: math.inf, 1: math.inf}
    try:
        for _ in range(_PROBES):
            for count in seconds:
                torch.set_num_threads(count)
                start = monotonic()
                base.hidden_states(ids)
                seconds[count] = min(seconds[count], monotonic() - start)
    finally:
        torch.set_num_threads(threads)
    return seconds[1] / seconds[threads] >= _THREADS_PAY * threads


def plan(budget: Budget, world: World = ALONE, *, shares: bool = True) -> MachineChoices:
    """Return the choices of a run. On a CPU that `shares`, as many workers as memory allows.

    Raises EnvironmentFailure where not even one completion fits.
    """
    config, size, machine = budget.config, budget.size, budget.machine
    _check_trained(config, size, machine)
    tokens, checkpointing = _learning_choices(budget)
    decode = plan_decode(
        budget.model_config,
        device_type=machine.device_type,
        memory_bytes=budget.decoding,
        tokens_per_row=budget.longest_sampled,
        compute_bytes=size.dtype.itemsize,
        kv_cache_dtype=config.inference.kv_cache_dtype,
        paged=budget.paged,
    )
    merges, rows = budget.merges, decode.rows
    if budget.copied > _LARGE:
        rows = min(rows, _LARGE_ROWS)
    kept = size.activations_per_token(checkpointing=checkpointing)
    # torchrun's processes share the work already, and a sampler next to the learner computes at the
    # same time.
    alone = world.size == 1 and len(config.backend.device_list) == 1
    # With trained weights each piece's gradient would go through a pipe.
    shares &= alone and machine.device_type == "cpu" and can_fork() and not size.full_bytes
    workers = min(
        machine.threads * shares,
        decode.tokens // (rows * budget.longest_sampled),
        budget.learning // (kept * max(tokens, budget.longest)),
        *[int(budget.spare * _MERGED_SHARE) // budget.copied] * merges,
    )
    threads = 1
    # Fewer workers than that would leave more than half of the processor idle.
    if workers < 1 or 2 * workers < machine.threads:
        rows, workers, threads = decode.rows, 1, machine.threads
    return MachineChoices(
        threads=threads,
        decode_rows=rows,
        decode_tokens=decode.tokens,
        micro_batch_tokens=tokens,
        gradient_checkpointing=checkpointing,
        merge_adapter=merges,
        workers=workers,
    )


def _check_trained(config: "TrainConfig", size: Footprint, machine: Machine) -> None:
    """Raise EnvironmentFailure for weights whose training the whole machine could not hold."""
    rank, held = config.model.lora_rank, size.full_bytes or size.trained_bytes
    learned, there = (number / 2**30 for number in (held, machine.memory))
    if size.full_bytes and held > machine.usable:
        raise EnvironmentFailure(
            f'[model] train = "full" takes {learned:,.1f} GiB for {size.num_trainable:,}'
            " weights with gradients, moments and copies, and a run may take"
            f" {machine.usable / 2**30:,.1f} GiB of {machine.device_type}. Use a smaller"
            ' [model] model, or set train = "lora".'
        )
    if learned > there:
        raise EnvironmentFailure(
            f"[model] lora_rank = {rank} gives an adapter of {size.num_trainable:,} parameters."
            f" They take {learned:,.0f} GiB with their gradient and two moments, and"
            f" {machine.device_type} has {there:,.0f} GiB; lower lora_rank."
        )


def _learning_choices(budget: Budget) -> tuple[int, bool]:
    """Return (micro_batch_tokens, gradient_checkpointing).

    Checkpointing is a third more work, so only where the longest row needs it.
    """
    training, size, memory = budget.config.training, budget.size, budget.learning
    wanted, tokens = training.gradient_checkpointing, training.micro_batch_tokens
    device_type, longest = budget.machine.device_type, max(budget.longest, tokens)
    # A processor's share leaves room for the gradients.
    beside = size.gradients_per_token if device_type == "cuda" else 0
    checkpointing = wanted is True
    if wanted == "auto":
        checkpointing = (size.kept_per_token + beside) * longest > memory
    kept = size.activations_per_token(checkpointing=checkpointing) + beside
    return tokens or max(1, min(_MAX_TOKENS.get(device_type, 2048), memory // kept)), checkpointing

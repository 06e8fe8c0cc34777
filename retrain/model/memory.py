"""Predict a run's memory by part, before its weights are loaded: the line at its start, and what
`explain` prints.

Sizes are counted on the model without weights, and the budgets are those that the run itself
chooses from the machine.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from retrain.distributed import ALONE, World
from retrain.model.budget import (
    PAGE_TOKENS,
    PROMPT_ALLOWANCE,
    STORE_SHARE,
    DecodeLimits,
    kv_bytes_per_token,
    sampling_chunk_bytes,
)
from retrain.model.devices import choose_device, choose_dtype
from retrain.model.footprint import Footprint, PredictionError, footprint, weightless_model
from retrain.model.head import chunk_bytes_on
from retrain.model.machine import Budget, Machine, plan
from retrain.model.packed import computes_bf16
from retrain.model.text import load_model_config
from retrain.types import MachineChoices

if TYPE_CHECKING:
    from retrain.config import TrainConfig

__all__ = ["GIB", "Memory", "Part", "PredictionError", "byte_words", "predict_memory"]

GIB = 2**30
_FLOAT = 4
_SAMPLING_TENSORS = 4
"""Float32 tensors of [chunk, vocabulary] that live together in the sampler: logits, shifted ones,
their exponentials, products."""
_LEARNING_TENSORS, _LEARNING_ENTROPY_TENSORS = 2, 5
"""The same in the learner: its chunk is overwritten step by step, but for an entropy's gradient."""
_TRUNCATING_TENSORS = 3
"""More of them, in either, where kept sets reach far into the vocabulary: its largest logits in
order with their ids, and a mask."""


@dataclass(frozen=True)
class Part:
    name: str
    bytes: int
    note: str
    """Its composition in a few words."""


@dataclass(frozen=True)
class Memory:
    """The memory of one process, part by part."""

    device: str
    """torch's name of the learner's device: cpu, cuda:0."""
    sampler_device: str
    """The same, but in split mode."""
    budget: Budget
    choices: MachineChoices
    shards: int

    @property
    def machine(self) -> Machine:
        return self.budget.machine

    @property
    def size(self) -> Footprint:
        return self.budget.size

    @property
    def config(self) -> "TrainConfig":
        return self.budget.config

    @property
    def parts(self) -> tuple[Part, ...]:
        all_parts = (
            self.context, self.weights, self.adapter, self.optimizer, self.copies,
            self.merged_copy, self.prompt_pass, self.kv_cache, self.activations, self.logits,
        )  # fmt: skip
        return tuple(part for part in all_parts if part.bytes)

    @property
    def fixed(self) -> int:
        """Bytes that the learner's device holds throughout."""
        held = (self.context, self.weights, self.adapter, self.optimizer, self.copies)
        return sum(part.bytes for part in held)

    @property
    def sampling(self) -> int:
        """Bytes that are held while completions are drawn, beside the model."""
        return self.merged_copy.bytes + self.prompt_pass.bytes + self.kv_cache.bytes

    @property
    def peaks(self) -> dict[str, int]:
        """Bytes by device. On one device sampling and learning take turns, so the larger of the two
        counts.
        """
        if self.sampler_device != self.device:
            return {
                self.sampler_device: (
                    self.fixed - self.optimizer.bytes + self.sampling + self.logits.bytes
                ),
                self.device: self.fixed + self.activations.bytes + self.logits.bytes,
            }
        return {
            self.device: self.fixed + max(self.sampling, self.activations.bytes) + self.logits.bytes
        }

    @property
    def peak(self) -> int:
        return max(self.peaks.values())

    def line(self) -> str:
        """Return one line for the start of a run."""
        parts = ", ".join(f"{part.name} {byte_words(part.bytes)}" for part in self.parts)
        return (
            f"Predicted memory of tensors: {parts}; peak {self.peak_words}; Python and the"
            " allocator take more."
        )

    @property
    def peak_words(self) -> str:
        """The peak of each device, and what the device holds."""
        return " and ".join(
            f"{byte_words(peak)} of {byte_words(self.machine.memory)} on {device}"
            for device, peak in self.peaks.items()
        )

    def to_json(self) -> dict[str, Any]:
        """Return sizes in GiB."""
        return {
            "device": self.device,
            "device_gib": self.machine.memory / GIB,
            "parts_gib": {
                part.name.lower().replace(" ", "_"): part.bytes / GIB for part in self.parts
            },
            "peak_gib": {device: peak / GIB for device, peak in self.peaks.items()},
            "num_parameters": self.size.num_frozen,
            "num_trainable": self.size.num_trainable,
            "decode_rows": self.choices.decode_rows,
            "micro_batch_tokens": self.choices.micro_batch_tokens,
            "gradient_checkpointing": self.choices.gradient_checkpointing,
        }

    # -- the parts ---------------------------------------------------------------------------------

    @property
    def completions(self) -> int:
        """Completions per step."""
        return self.config.training.batch_size * self.config.training.group_size

    @cached_property
    def rows(self) -> int:
        """Completions that decode at a time, by all workers, in a training step or in an
        evaluation.
        """
        evaluation = self.config.evaluation
        limits = DecodeLimits(
            self.choices.decode_rows * self.choices.workers, self.choices.decode_tokens
        )
        asked = max(part.max_examples * part.samples or limits.rows for part in evaluation.parts)
        most = self.completions
        if evaluation.asked_for:
            most = max(most, asked)
        return limits.rows_together(self.budget.longest_sampled, most)

    @cached_property
    def weights(self) -> Part:
        """Size the weights, with the second copy where the sampler computes in another dtype."""
        size, total = self.size, self.size.weights
        precision = {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(size.dtype, str(size.dtype))
        note = (
            f"{size.num_frozen:,} parameters in"
            f" {'4 bits' if self.config.model.load_in_4bit else precision}"
        )
        if self.shards > 1:
            note += f", 1/{self.shards} of every layer and two layers whole"
        if self.config.inference.dtype == "bf16" and size.dtype != torch.bfloat16:
            total += 2 * size.num_frozen
            note += ", and in bf16 for the sampler"
        return Part("weights", total, note)

    @cached_property
    def adapter(self) -> Part:
        count, rank = self.size.num_trainable, self.config.model.lora_rank
        if self.size.full_bytes:
            return Part("trained weights", count * _FLOAT, f"{count:,} parameters in fp32")
        return Part(
            "adapter",
            count * _FLOAT + self.size.adapter_copies,
            f"{count:,} parameters of rank {rank} in fp32",
        )

    @cached_property
    def optimizer(self) -> Part:
        size = self.size.trained_bytes - self.size.num_trainable * _FLOAT
        return Part("optimizer", size, "gradient and two moments in fp32")

    @cached_property
    def copies(self) -> Part:
        """Size the copies of weights that are all trained."""
        size = max(0, self.size.full_bytes - self.size.trained_bytes)
        return Part(
            "copies", size, "the sampler's, and the base's where a loss or a teacher reads it"
        )

    @cached_property
    def merged_copy(self) -> Part:
        """Size the sampler's copy of the weights on a CPU, made anew for every step."""
        size = self.size
        cast = self.config.inference.dtype == "bf16" and size.dtype == torch.float32
        makes = self.choices.merge_adapter and (not cast or computes_bf16())
        copy = 0
        if makes and size.layer_weights and not size.full_bytes:
            copy = size.layer_weights + size.head_weights
            # In half precision the adapter is beside the weights.
            if cast or size.dtype != torch.float32:
                copy += size.adapter_copies
            if cast:
                copy //= 2
        workers, each = self.choices.workers, ""
        if workers > 1:
            each = f", in each of {workers} processes"
        note = f"the layers with the adapter in them, and the head, laid out for few rows{each}"
        return Part("merged copy", copy * workers, note)

    @property
    def context(self) -> Part:
        size = self.machine.context
        return Part("CUDA", size, "context, kernels and workspaces, an estimate")

    @cached_property
    def prompt_pass(self) -> Part:
        """Size the pass over prompts on a GPU; on a CPU it is less than what a learning pass takes,
        and the two take turns.
        """
        if self.machine.device_type != "cuda":
            return Part("prompt pass", 0, "")
        plain = kv_bytes_per_token(self.budget.model_config, self.size.dtype.itemsize)
        tokens, total = self.budget.prefill_tokens, self.budget.prompt_pass
        if not self.budget.paged:
            total += tokens * plain
        return Part("prompt pass", total, f"{tokens:,} tokens of prompts at a time")

    @cached_property
    def kv_cache(self) -> Part:
        """Size the rows that decode together, each at its longest, and the prompts of the step."""
        plain, inference = self.size.dtype.itemsize, self.config.inference
        longest = self.budget.longest_sampled
        per_token = kv_bytes_per_token(self.budget.model_config, plain, inference.kv_cache_dtype)
        prompts = min(
            self.config.training.batch_size * min(self.budget.prompt_tokens, longest),
            self.choices.decode_tokens // STORE_SHARE,
        )
        # Rows in pages take what they fill; others reserve their longest.
        if self.budget.paged:
            wanted = prompts + self.completions * (longest + PAGE_TOKENS)
            tokens = min(self.choices.decode_tokens, wanted)
            rows = min(self.completions, tokens // longest)
            note = (
                f"{tokens:,} tokens in pages at {byte_words(per_token)}: {rows:,} of"
                f" {self.completions:,} completions"
            )
            if rows < self.completions:
                note += " at their longest, more while they are shorter"
            return Part("KV cache", tokens * per_token, note)
        kept = 0
        if inference.prefix_caching:
            kept = prompts * kv_bytes_per_token(self.budget.model_config, plain)
        note = f"{self.rows:,} x {longest:,} tokens at {byte_words(per_token)}"
        if self.rows < self.completions:
            note += f"; {self.completions:,} completions take turns"
        return Part("KV cache", self.rows * longest * per_token + kept, note)

    @cached_property
    def activations(self) -> Part:
        """Size the activations of one micro-batch, or of the longest row if that is more, with the
        gradients of one layer.
        """
        tokens = min(
            max(self.choices.micro_batch_tokens, self.budget.longest) * self.choices.workers,
            self.budget.longest * self.completions,
        )
        per_token = self.budget.activations_per_token(self.choices)
        note = f"{tokens:,} tokens at a time at {byte_words(per_token)}"
        if self.choices.gradient_checkpointing:
            note += ", checkpointed"
        return Part("activations", tokens * per_token, note)

    @cached_property
    def logits(self) -> Part:
        """Size the chunks of rows over the whole vocabulary: the sampler's with the logits of a
        token of every row, or the learner's.
        """
        vocabulary = self.budget.model_config.get_text_config().vocab_size
        workers = self.choices.workers
        chunk = min(
            workers * sampling_chunk_bytes(self.machine.device_type),
            self.rows * vocabulary * _FLOAT,
        )
        truncating = _TRUNCATING_TENSORS if self.config.training.truncated else 0
        sampling = (
            self.rows * vocabulary * self.size.dtype.itemsize
            + (_SAMPLING_TENSORS + truncating) * chunk
        )
        actions = self.completions * self.config.training.max_tokens
        tensors = _LEARNING_TENSORS
        if self.config.may_be_positive("loss.entropy_coef"):
            tensors = _LEARNING_ENTROPY_TENSORS
        learning = (tensors + truncating) * min(
            workers * chunk_bytes_on(self.machine.device_type), actions * vocabulary * _FLOAT
        )
        return Part(
            "logits", max(sampling, learning), f"chunks of {vocabulary:,} tokens of vocabulary"
        )


def predict_memory(
    config: "TrainConfig",
    *,
    prompt_tokens: int = PROMPT_ALLOWANCE,
    memory_gib: float | None = None,
    choices: MachineChoices | None = None,
    shards: World = ALONE,
) -> Memory:
    """Predict the memory of one process on the local backend, at its longest completions after the
    longest prompt of `prompt_tokens`.

    `memory_gib` stands for a device that need not be here; `choices` are the stored ones of a
    resumed run; `shards` are the processes that hold the base in parts (`load.shards_of`). Raises
    EnvironmentFailure where the device or the model's configuration is not there, or where one
    completion does not fit.
    """
    sampler: torch.device | None
    if memory_gib is None:
        device, _, sampler = choose_device(config.backend)
        machine = Machine.of(device)
    else:
        # In split mode the sampler's, then the learner's.
        *others, device = map(torch.device, config.backend.device_list)
        sampler = next(iter(others), None)
        machine = Machine(device.type, int(memory_gib * GIB), torch.get_num_threads())
    model = config.model
    model_config = load_model_config(model.model, model.revision, model.trust_remote_code)
    size = _size_without_weights(config, model_config, device, shards)
    budget = Budget(config, model_config, size, machine)
    # With the allowance for prompts, as the run itself plans before it knows them.
    choices = choices or plan(budget)
    budget = replace(budget, prompt_tokens=prompt_tokens)
    return Memory(str(device), str(sampler or device), budget, choices, shards.size)


_sizes: dict[tuple[Any, ...], Footprint] = {}
"""By all that they depend on: a campaign's runs have few different ones."""


def _size_without_weights(
    config: "TrainConfig", model_config: Any, device: torch.device, shards: World
) -> Footprint:
    dtype = choose_dtype(config.model.dtype, device)
    key = (
        model_config.to_json_string(use_diff=False),
        config.model.model_dump_json(),
        config.lora.model_dump_json(),
        config.inference.attention_kernel,
        config.reads_base,
        config.reads_start,
        device.type,
        dtype,
        shards.size,
    )
    if key not in _sizes:
        base = weightless_model(config.model, config.lora, model_config, dtype, shards)
        _sizes[key] = footprint(base, config, device.type)
    return _sizes[key]


# -- words -----------------------------------------------------------------------------------------


def byte_words(count: int) -> str:
    """Write bytes as a person reads them: 7.49 GiB, 96.1 MiB, 144 KiB."""
    if count >= GIB:
        return f"{count / GIB:,.2f} GiB"
    if count >= 2**20:
        return f"{count / 2**20:,.1f} MiB"
    return f"{count / 1024:,.0f} KiB"

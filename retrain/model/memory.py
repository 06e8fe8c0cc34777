"""Predict a run's memory before it loads the weights, in four terms: weights, trained state, keys
and values, one micro-batch.

The module counts sizes on the model without weights, and makes the same choices for the machine as
the run.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from shutil import disk_usage
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
from retrain.model.footprint import (
    TRAINED_BYTES,
    Footprint,
    PredictionError,
    size_without_weights,
)
from retrain.model.head import chunk_bytes_on
from retrain.model.machine import Budget, Machine, plan
from retrain.model.packed import computes_bf16
from retrain.model.text import load_model_config
from retrain.types import MachineChoices

if TYPE_CHECKING:
    from retrain.config import TrainConfig

__all__ = ["GIB", "Memory", "Part", "PredictionError", "byte_words", "predict_memory"]

GIB = 2**30
CHECKPOINT_BYTES = 12
"""Bytes on disk of a trained parameter: a float32 weight and two AdamW moments."""
_FLOAT = 4
_SAMPLING_TENSORS = 4
"""Float32 tensors of [chunk, vocabulary] that live together in the sampler: logits, shifted ones,
their exponentials, products."""
_ENTROPY_TENSORS = 4
"""More of them in the learner for an entropy and its gradient."""
_TRUNCATING_TENSORS = 3
"""More of them, in either, where kept sets reach far into the vocabulary: its largest logits in
order with their ids, and a mask."""
_HOLES = 0.1
"""Unused memory that the allocator of a CPU holds between tensors, as a share of the tensors."""


@dataclass(frozen=True)
class Part:
    name: str
    bytes: int
    note: str
    """Its composition in a few words."""
    when: str = ""
    """"sampling" or "learning", which take turns; "" for permanent memory."""


def weights(budget: Budget, choices: MachineChoices) -> Iterator[Part]:
    """Size the weights: n b bytes of n weights of b bytes, and 2 n more for a sampler in bf16.

    While a CPU samples, each of w processes copies layers and head into another layout: w n b
    bytes. The copy includes the adapter, except in half precision.
    """
    size, dtype = budget.size, str(budget.size.dtype).removeprefix("torch.")
    if budget.config.model.load_in_4bit:
        dtype = "4 bits"
    casts = budget.config.inference.dtype == "bf16" and size.dtype != torch.bfloat16
    note = f"{size.num_frozen:,} parameters in {dtype}{', and in bf16 for the sampler' * casts}"
    yield Part("weights", size.weights + 2 * size.num_frozen * casts, note)
    copy, itemsize = 0, size.dtype.itemsize
    makes = choices.merge_adapter and (not casts or computes_bf16())
    if makes and size.layer_weights and not size.full_bytes:
        rounds = casts or size.dtype != torch.float32
        copy = size.layer_weights + size.head_weights + size.adapter_copies * rounds
        copy = choices.workers * copy * (2 if casts else itemsize) // itemsize
    yield Part(
        "sampler copy",
        copy,
        "weights of the layers and the head, in the sampler's layout",
        "sampling",
    )


def trained_state(size: Footprint) -> Part:
    """Size the trained state: c p + k bytes of c parameters of p bytes each, gradient and moments
    included, and k bytes of copies.
    """
    total = size.full_bytes or size.trained_bytes + size.adapter_copies
    note = f"{size.num_trainable:,} parameters at {TRAINED_BYTES} bytes, and copies"
    return Part("trained", total, note)


def keys_and_values(budget: Budget, choices: MachineChoices) -> Iterator[Part]:
    """Size the KV cache, r l k + q bytes: r rows of l tokens of k bytes each, and q bytes of stored
    prompts. Pages take t k bytes for t tokens, prompts included.

    One pass adds to it: on a GPU the prompts of one layer, the logits of r rows, and the chunks of
    the sampling.
    """
    config, plain = budget.config, budget.size.dtype.itemsize
    training, longest = config.training, budget.longest_sampled
    completions = training.batch_size * training.group_size
    each, stored = (
        kv_bytes_per_token(budget.model_config, plain, storage)
        for storage in (config.inference.kv_cache_dtype, "auto")
    )
    prompts = training.batch_size * min(budget.prompt_tokens, longest)
    prompts = min(prompts, choices.decode_tokens // STORE_SHARE)
    rows = _rows(budget, choices, completions)
    tokens, kept = rows * longest, prompts * stored * config.inference.prefix_caching
    if budget.paged:
        wanted = prompts + completions * (longest + PAGE_TOKENS)
        tokens, kept = min(choices.decode_tokens, wanted), 0
    note = (
        f"{min(completions, tokens // longest):,} of {completions:,} completions of {longest:,}"
        f" tokens at {byte_words(each)}"
    )
    yield Part("KV cache", tokens * each + kept, note, "sampling")
    prefill = budget.prompt_pass + budget.prefill_tokens * stored * (not budget.paged)
    total = _logit_bytes(budget, choices, rows) + prefill * (budget.machine.device_type == "cuda")
    yield Part("sampling pass", total, "prompts and logits at a time", "sampling")


def _logit_bytes(budget: Budget, choices: MachineChoices, rows: int) -> int:
    """Return the bytes of the logits of so many rows, and of the chunks of the sampling."""
    logits = rows * _vocabulary(budget)
    tensors = _SAMPLING_TENSORS + _TRUNCATING_TENSORS * budget.config.training.truncated
    chunk = choices.workers * sampling_chunk_bytes(budget.machine.device_type)
    return logits * budget.size.dtype.itemsize + tensors * min(chunk, logits * _FLOAT)


def _rows(budget: Budget, choices: MachineChoices, completions: int) -> int:
    """Count the completions that decode at a time, by all workers, in a step or an evaluation."""
    evaluation = budget.config.evaluation
    limits = DecodeLimits(choices.decode_rows * choices.workers, choices.decode_tokens)
    if evaluation.asked_for:
        asked = (part.max_examples * part.samples or limits.rows for part in evaluation.parts)
        completions = max(completions, *asked)
    return limits.rows_together(budget.longest_sampled, completions)


def micro_batch(budget: Budget, choices: MachineChoices) -> Part:
    """Size a pass over one micro-batch: t a + max(t g, m c) bytes for t tokens. Each token keeps a
    bytes for the backward pass.

    The gradients of a layer, g bytes a token, come after the head's m tensors of a chunk of c
    bytes. Every worker counts in t a micro-batch, or the longest row if that is more.
    """
    size, training, workers = budget.size, budget.config.training, choices.workers
    completions = training.batch_size * training.group_size
    most = max(choices.micro_batch_tokens, budget.longest) * workers
    tokens = min(most, budget.longest * completions)
    kept = size.activations_per_token(checkpointing=choices.gradient_checkpointing)
    # Half precision adds the product and the gradient's cast to the float32 chunk.
    tensors = 1 + (size.dtype != torch.float32) + _TRUNCATING_TENSORS * training.truncated
    if budget.config.may_be_positive("loss.entropy_coef"):
        tensors += _ENTROPY_TENSORS
    actions = min(tokens, completions * training.max_tokens)
    head = tensors * min(
        workers * chunk_bytes_on(budget.machine.device_type), actions * _vocabulary(budget) * _FLOAT
    )
    note = f"{tokens:,} tokens at a time at {byte_words(kept)}"
    if choices.gradient_checkpointing:
        note += ", checkpointed"
    total = tokens * kept + max(tokens * size.gradients_per_token, head)
    return Part("learning pass", total, note, "learning")


def _vocabulary(budget: Budget) -> int:
    return int(budget.model_config.get_text_config().vocab_size)


@dataclass(frozen=True)
class Memory:
    """The memory of one process, part by part, without Python and the modules that it imports."""

    device: str
    """torch's name of the learner's device: cpu, cuda:0."""
    sampler_device: str
    """The same, but in split mode."""
    budget: Budget
    choices: MachineChoices

    @property
    def machine(self) -> Machine:
        return self.budget.machine

    @property
    def size(self) -> Footprint:
        return self.budget.size

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        size, machine = self.size, self.budget.machine
        name = "CUDA" if machine.device_type == "cuda" else "libraries"
        parts = [
            Part(name, machine.context, "kernels and workspaces, an estimate"),
            *weights(self.budget, self.choices),
            trained_state(size),
            *keys_and_values(self.budget, self.choices),
            micro_batch(self.budget, self.choices),
        ]
        if machine.device_type == "cpu":
            holes = int(_HOLES * max(_peaks(parts)))
            parts.append(Part("allocator", holes, "holes between tensors, an estimate"))
        return tuple(part for part in parts if part.bytes)

    @property
    def turns(self) -> tuple[int, int]:
        """Bytes on one device while it samples, and while it learns."""
        return _peaks(self.parts)

    @property
    def peaks(self) -> dict[str, int]:
        """Bytes by device. On one device sampling and learning take turns, so the larger of the two
        counts.
        """
        sampling, learning = self.turns
        if self.sampler_device == self.device:
            return {self.device: max(sampling, learning)}
        optimizer = (TRAINED_BYTES - _FLOAT) * self.size.num_trainable
        return {self.sampler_device: sampling - optimizer, self.device: learning}

    @property
    def peak(self) -> int:
        return max(self.peaks.values())

    def line(self) -> str:
        """Return one line for the start of a run."""
        parts = ", ".join(f"{part.name} {byte_words(part.bytes)}" for part in self.parts)
        return f"Predicted peak memory without Python: {self.peak_words}. Parts: {parts}."

    @property
    def peak_words(self) -> str:
        """The peak of each device, and what the device holds."""
        return " and ".join(
            f"{byte_words(peak)} of {byte_words(self.machine.memory)} on {device}"
            for device, peak in self.peaks.items()
        )

    def disk_line(self) -> str:
        """Return a line on the disk that the checkpoints of all weights take, and its free bytes;
        "" for an adapter. A save needs room for one more checkpoint.
        """
        config, training = self.budget.config, self.budget.config.training
        if config.model.train != "full":
            return ""
        folder = Path(config.backend.adapter_path or config.logging.log_dir).absolute()
        there = next(place for place in (folder, *folder.parents) if place.exists())
        steps = training.max_steps + config.sft.steps
        saves = steps // (training.save_every or steps or 1) + 1 + config.sft.is_on
        most = min(saves, (training.keep_checkpoints or saves) + 1)
        each, free = CHECKPOINT_BYTES * self.size.num_trainable, disk_usage(there).free
        advice = ": lower [training] keep_checkpoints, or set [backend] adapter_path"
        return (
            f"Each checkpoint takes {byte_words(each)}, up to {most} at a time, on the disk of"
            f" {folder}, which has {byte_words(free)} free{advice * (most * each > free)}."
        )

    def to_json(self) -> dict[str, Any]:
        """Return sizes in GiB."""
        choices = self.choices
        return {
            "device": self.device,
            "device_gib": self.machine.memory / GIB,
            "parts_gib": {
                part.name.lower().replace(" ", "_"): part.bytes / GIB for part in self.parts
            },
            "peak_gib": {device: peak / GIB for device, peak in self.peaks.items()},
            "num_parameters": self.size.num_frozen,
            "num_trainable": self.size.num_trainable,
            "decode_rows": choices.decode_rows,
            "micro_batch_tokens": choices.micro_batch_tokens,
            "gradient_checkpointing": choices.gradient_checkpointing,
        }


def _peaks(parts: Iterable[Part]) -> tuple[int, int]:
    """Return the bytes while sampling and while learning."""
    sampling, learning = (
        sum(part.bytes for part in parts if part.when in ("", turn))
        for turn in ("sampling", "learning")
    )
    return sampling, learning


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

    `memory_gib` describes a device that need not exist here. `choices` are the stored choices of a
    resumed run. `shards` are the processes that hold the base in parts (`load.shards_of`). Raises
    EnvironmentFailure if the device or the model's configuration is missing, or if one completion
    does not fit.
    """
    sampler: torch.device | None
    if memory_gib is None:
        device, _, sampler = choose_device(config.backend)
        machine = Machine.of(device)
    else:
        # Split mode names the sampler's device, then the learner's.
        *others, device = map(torch.device, config.backend.device_list)
        sampler = next(iter(others), None)
        machine = Machine(device.type, int(memory_gib * GIB), torch.get_num_threads())
    model = config.model
    model_config = load_model_config(model.model, model.revision, model.trust_remote_code)
    dtype = choose_dtype(model.dtype, device)
    size = size_without_weights(config, model_config, device.type, dtype, shards)
    budget = Budget(config, model_config, size, machine)
    # Plan with the allowance for prompts, as the run itself does before it knows them.
    choices = choices or plan(budget)
    budget = replace(budget, prompt_tokens=prompt_tokens)
    return Memory(str(device), str(sampler or device), budget, choices)


def byte_words(count: int) -> str:
    """Write bytes as a person reads them: 7.49 GiB, 96.1 MiB, 144 KiB."""
    if count >= GIB:
        return f"{count / GIB:,.2f} GiB"
    if count >= 2**20:
        return f"{count / 2**20:,.1f} MiB"
    return f"{count / 1024:,.0f} KiB"

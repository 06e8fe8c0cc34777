"""How much memory a run takes, by part, before its weights are loaded: the line at its start, and what `explain` prints.

Sizes are counted on the model without weights, and the budgets are those that the run itself chooses from the machine.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from retrain.backends.local.devices import choose_device, choose_dtype
from retrain.backends.local.footprint import Footprint, NotPredictable, footprint, weightless_model
from retrain.backends.local.logprobs import CHUNK_BYTES
from retrain.backends.local.machine import PROMPT_ALLOWANCE, Machine, longest_row, plan
from retrain.inference_engine.budget import kv_bytes_per_token
from retrain.inference_engine.sampling import CHUNK_BYTES as SAMPLING_CHUNK_BYTES
from retrain.inference_engine.scheduler import DecodeLimits
from retrain.inference_engine.torch_engine import STORE_SHARE
from retrain.types import MachineChoices

if TYPE_CHECKING:
    from retrain.config import TrainConfig

__all__ = ["GIB", "Memory", "NotPredictable", "Part", "predict_memory", "size_words"]

GIB = 2**30
_FLOAT = 4
_MOMENTS = 2
_CHUNK_TENSORS = 4
"""Float32 tensors of [chunk, vocabulary] that live together: logits, log-probs, probabilities and their gradient or product."""


@dataclass(frozen=True)
class Part:
    name: str
    bytes: int
    note: str
    """What it is made of, in a few words."""


@dataclass(frozen=True)
class Memory:
    device: str
    """torch's name of the learner's device: cpu, cuda:0."""
    sampler_device: str
    """The same, but in split mode."""
    machine: Machine
    size: Footprint
    choices: MachineChoices
    weights: Part
    adapter: Part
    optimizer: Part
    kv_cache: Part
    activations: Part
    logits: Part

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.weights, self.adapter, self.optimizer, self.kv_cache, self.activations, self.logits

    @property
    def fixed(self) -> int:
        """Bytes that the learner's device holds throughout."""
        return self.weights.bytes + self.adapter.bytes + self.optimizer.bytes

    @property
    def peaks(self) -> dict[str, int]:
        """Bytes by device. On one device sampling and learning take turns, so the larger of the two counts."""
        if self.sampler_device != self.device:
            sampling = self.weights.bytes + self.adapter.bytes + self.kv_cache.bytes
            return {
                self.sampler_device: sampling + self.logits.bytes,
                self.device: self.fixed + self.activations.bytes + self.logits.bytes,
            }
        return {self.device: self.fixed + max(self.kv_cache.bytes, self.activations.bytes) + self.logits.bytes}

    @property
    def peak(self) -> int:
        return max(self.peaks.values())

    def line(self) -> str:
        """One line for the start of a run."""
        parts = ", ".join(f"{part.name} {size_words(part.bytes)}" for part in self.parts)
        peaks = " and ".join(f"{size_words(peak)} of {size_words(self.machine.memory)} on {device}" for device, peak in self.peaks.items())
        return f"Memory, at most: {parts}; peak {peaks}."

    def to_json(self) -> dict[str, Any]:
        """Sizes in GiB."""
        return {
            "device": self.device,
            "device_gib": self.machine.memory / GIB,
            "parts_gib": {part.name.lower().replace(" ", "_"): part.bytes / GIB for part in self.parts},
            "peak_gib": {device: peak / GIB for device, peak in self.peaks.items()},
            "num_parameters": self.size.num_frozen,
            "num_trainable": self.size.num_trainable,
            "decode_rows": self.choices.decode_rows,
            "micro_batch_tokens": self.choices.micro_batch_tokens,
            "gradient_checkpointing": self.choices.gradient_checkpointing,
        }


def predict_memory(config: "TrainConfig", *, memory_gib: float | None = None, choices: MachineChoices | None = None) -> Memory:
    """Of one run on the local backend, at its longest completions.

    `memory_gib` stands for a device that need not be here; `choices` are the stored ones of a run that goes on.
    Raises EnvironmentFailure where the device or the model's configuration is not there, or where one completion does not fit.
    """
    device, sampler, machine = _machine(config, memory_gib)
    base = weightless_model(config, choose_dtype(config, device))
    size = footprint(base, config)
    model_config: Any = base.model.config
    choices = choices or plan(config, model_config, size, machine)
    return Memory(
        device=str(device),
        sampler_device=str(sampler or device),
        machine=machine,
        size=size,
        choices=choices,
        weights=_weights(config, size, choices),
        adapter=_adapter(config, size),
        optimizer=_optimizer(size),
        kv_cache=_kv_cache(config, model_config, size, choices),
        activations=_activations(config, model_config, size, choices),
        logits=_logits(config, model_config, size, choices, machine.device_type),
    )


def _machine(config: "TrainConfig", memory_gib: float | None) -> tuple[torch.device, torch.device | None, Machine]:
    """The learner's device, that of a sampler with one of its own, and what the learner's has."""
    if memory_gib is None:
        device, _, sampler = choose_device(config)
        return device, sampler, Machine.of(device)
    first, *rest = map(torch.device, config.backend.device_list)
    device = rest[0] if rest else first
    return device, first if rest else None, Machine(device.type, int(memory_gib * GIB), torch.get_num_threads())


# -- the parts -----------------------------------------------------------------------------------------------------------


def _weights(config: "TrainConfig", size: Footprint, choices: MachineChoices) -> Part:
    """With the second copy where the sampler computes in another dtype, and the one that holds the adapter on a CPU."""
    total, dtype = size.weights, "4 bits" if config.model.load_in_4bit else _dtype_name(size.dtype)
    note = f"{size.num_frozen:,} parameters in {dtype}"
    if config.inference.dtype == "bf16" and size.dtype != torch.bfloat16:
        total += 2 * size.num_frozen
        note += ", and in bf16 for the sampler"
    if choices.merge_adapter and size.layer_weights:
        total += size.layer_weights
        note += ", the layers twice: once with the adapter merged in"
    return Part("weights", total, note)


def _adapter(config: "TrainConfig", size: Footprint) -> Part:
    parameters = size.num_trainable * _FLOAT
    return Part("adapter", parameters + size.adapter_copies, f"{size.num_trainable:,} parameters of rank {config.model.lora_rank} in fp32")


def _optimizer(size: Footprint) -> Part:
    return Part("optimizer", size.num_trainable * _FLOAT * (1 + _MOMENTS), "gradient and two moments in fp32")


def _kv_cache(config: "TrainConfig", model_config: Any, size: Footprint, choices: MachineChoices) -> Part:
    """The rows that decode together, each at its longest, and the prompts of the step."""
    longest, training = longest_row(config, model_config), config.training
    rows, per_token = (
        _rows(config, longest, choices),
        kv_bytes_per_token(model_config, size.dtype.itemsize, config.inference.kv_cache_dtype),
    )
    prompts = min(training.batch_size * min(PROMPT_ALLOWANCE, longest), choices.decode_tokens // STORE_SHARE)
    kept = prompts * kv_bytes_per_token(model_config, size.dtype.itemsize) if config.inference.prefix_caching else 0
    step = training.batch_size * training.group_size
    turns = f"; {step:,} completions take turns" if rows < step else ""
    return Part("KV cache", rows * longest * per_token + kept, f"{rows:,} x {longest:,} tokens at {size_words(per_token)}{turns}")


def _rows(config: "TrainConfig", longest: int, choices: MachineChoices) -> int:
    """Completions that decode together, in a training step or in an evaluation."""
    training, evaluation = config.training, config.evaluation
    limits = DecodeLimits(choices.decode_rows, choices.decode_tokens)
    most = training.batch_size * training.group_size
    if evaluation.asked_for:
        most = max(most, evaluation.max_examples * evaluation.samples or limits.rows)
    return limits.rows_together(longest, most)


def _activations(config: "TrainConfig", model_config: Any, size: Footprint, choices: MachineChoices) -> Part:
    """Of one micro-batch, or of the longest row where that alone is more."""
    longest, training = longest_row(config, model_config), config.training
    tokens = min(max(choices.micro_batch_tokens, longest), longest * training.batch_size * training.group_size)
    per_token = size.checkpointed_per_token if choices.gradient_checkpointing else size.kept_per_token
    checkpointed = ", checkpointed" if choices.gradient_checkpointing else ""
    return Part("activations", tokens * per_token, f"{tokens:,} tokens a pass at {size_words(per_token)}{checkpointed}")


def _logits(config: "TrainConfig", model_config: Any, size: Footprint, choices: MachineChoices, device_type: str) -> Part:
    """Chunks of rows over the whole vocabulary: the sampler's with the logits of a token of every row, or the learner's."""
    vocabulary, rows = model_config.get_text_config().vocab_size, _rows(config, longest_row(config, model_config), choices)
    chunk = min(SAMPLING_CHUNK_BYTES.get(device_type, CHUNK_BYTES), rows * vocabulary * _FLOAT)
    sampling = rows * vocabulary * size.dtype.itemsize + _CHUNK_TENSORS * chunk
    actions = config.training.batch_size * config.training.group_size * config.training.max_tokens
    learning = _CHUNK_TENSORS * min(CHUNK_BYTES, actions * vocabulary * _FLOAT)
    return Part("logits", max(sampling, learning), f"chunks of {vocabulary:,} tokens of vocabulary")


# -- words ---------------------------------------------------------------------------------------------------------------


def size_words(count: int) -> str:
    """Bytes as a person reads them: 7.49 GiB, 96.1 MiB, 144 KiB."""
    if count >= GIB:
        return f"{count / GIB:,.2f} GiB"
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count / 1024:,.0f} KiB"


def _dtype_name(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(dtype, str(dtype))

"""The bytes of a model with its adapter: a count on the model itself, or on a model without memory.

On torch's meta device a model has shapes and no values. The same count runs on it, so the
prediction before loading the weights equals the measurement afterwards.
"""

import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from retrain.distributed import World
from retrain.errors import ConfigurationError, EnvironmentFailure
from retrain.model.adapter import lora_config
from retrain.model.attention import FusedAttention, missing, plugged_in
from retrain.model.devices import attention_of
from retrain.model.full import full_bytes
from retrain.model.fused import FusedDecoder
from retrain.model.head import Head
from retrain.model.load import BaseModel, decoder_of, held_bytes
from retrain.model.packing import PackedAttention, Segment

if TYPE_CHECKING:
    from retrain.config import TrainConfig

TRAINED_BYTES = 16
"""Bytes of a trained parameter: float32, its gradient and two moments."""
_PROBE_TOKENS = 64
_META = torch.device("meta")
_NF4_BYTES = 4.127 / 8
"""A weight in 4 bits with doubly quantized scales, one for 64 weights (arXiv 2305.14314, section
3).
"""


class PredictionError(EnvironmentFailure):
    """retrain cannot predict the memory of a model whose code needs its weights."""


@dataclass(frozen=True)
class Footprint:
    dtype: torch.dtype
    """Dtype of the products."""
    weights: int
    """Bytes of the frozen weights that a process holds."""
    num_frozen: int
    layer_weights: int
    """Bytes of the blocks' linear layers, which the fused forward may copy; 0 without a fused
    forward."""
    head_weights: int
    num_trainable: int
    """Parameters of the adapter."""
    adapter_copies: int
    """Bytes of the adapter as the fused forward's products read it, in addition to its float32
    parameters.
    """
    kept_per_token: int
    """Bytes that a forward pass keeps for its backward."""
    checkpointed_per_token: int
    """The same with gradient checkpointing: the input of every layer, and one layer's activations
    while it runs again."""
    full_bytes: int
    """Permanent bytes of training all weights, by `full.full_bytes`; 0 with an adapter."""
    gradients_per_token: int
    """Additional bytes in the backward pass, and all bytes of a forward pass that keeps nothing.
    The value is about what one layer keeps (measured on the lab model: 1.05 to 1.13 times as much).
    """

    @property
    def trained_bytes(self) -> int:
        return TRAINED_BYTES * self.num_trainable

    def activations_per_token(self, *, checkpointing: bool) -> int:
        """Count the bytes that a forward pass keeps for its backward."""
        return self.checkpointed_per_token if checkpointing else self.kept_per_token


def footprint(base: BaseModel, config: "TrainConfig", device_type: str | None = None) -> Footprint:
    """Measure a model that carries its adapter. Its state does not change, except that fused layers
    share one weight tensor.

    `device_type` is the device on which a model without weights would run. The count then includes
    its attention kernel.
    """
    device_type = device_type or base.device.type
    kernel = attention_of(config.inference.attention_kernel, device_type, base.dtype)
    fused, saved = None, 0
    # 4-bit weights and sharded weights have no fused forward.
    if config.model.load_in_4bit:
        saved = _four_bits_save(base)
    elif base.shards.size == 1:
        fused = FusedDecoder.of(base.model, merge=False)
    if fused is not None:
        fused.refresh()
    parameters = list(base.model.parameters())
    frozen = sum(each.numel() for each in parameters if not each.requires_grad)
    # Dropout, and weights that are all trained, have the model's own forward pass.
    drops, full = config.dropout > 0, config.model.train == "full"
    learning = None if drops or full else fused
    kept = max(1, _kept_bytes(base, learning, kernel, drops=drops) // _PROBE_TOKENS)
    text: Any = base.model.config.get_text_config()
    layer, stream = kept // text.num_hidden_layers, text.hidden_size * base.dtype.itemsize
    trained = sum(each.numel() for each in parameters) - frozen
    return Footprint(
        dtype=base.dtype,
        weights=held_bytes(base) - saved,
        num_frozen=frozen,
        layer_weights=fused.layer_weight_bytes if fused else 0,
        head_weights=base.head.weight.nbytes,
        num_trainable=trained,
        adapter_copies=fused.adapter_copy_bytes if fused else 0,
        kept_per_token=kept,
        full_bytes=full * full_bytes(trained, device_type, config.reads_base + config.reads_start),
        gradients_per_token=layer,
        # The division above rounds down, hence + 1.
        checkpointed_per_token=text.num_hidden_layers * stream + layer + 1,
    )


def _four_bits_save(base: BaseModel) -> int:
    """Return the bytes that 4 bits save in the linear layers; the head keeps its precision."""
    linears = [module.weight for module in base.decoder.modules() if isinstance(module, nn.Linear)]
    return sum(
        weight.nbytes - int(weight.numel() * _NF4_BYTES)
        for weight in linears
        if not weight.requires_grad
        and weight is not base.head.weight
        and weight.is_floating_point()
    )


_sizes: dict[tuple[Any, ...], Footprint] = {}
"""The footprints by everything on which they depend: a campaign's runs have few different sizes."""


def size_without_weights(
    config: "TrainConfig", settings: Any, device_type: str, dtype: torch.dtype, shards: World
) -> Footprint:
    """Return the footprint of a model from its configuration `settings` alone, as one process of
    `shards` holds it. Raises PredictionError if the model's code needs the weights.
    """
    key = (
        settings.to_json_string(use_diff=False),
        config.model.model_dump_json(),
        config.lora.model_dump_json(),
        config.inference.attention_kernel,
        config.reads_base,
        config.reads_start,
        device_type,
        dtype,
        shards.size,
    )
    if key in _sizes:
        return _sizes[key]
    try:
        base = _weightless_model(config, settings, dtype, shards)
        _sizes[key] = footprint(base, config, device_type)
    except ConfigurationError:
        raise
    # There torch's grouped product, for experts, knows only bfloat16.
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise PredictionError(
            f'[model] model = "{config.model.model}" does not run without its weights'
            f" ({type(error).__name__}), so retrain does not predict its memory."
        ) from error
    return _sizes[key]


def _weightless_model(
    config: "TrainConfig", settings: Any, dtype: torch.dtype, shards: World
) -> BaseModel:
    """Return the configured model with its adapter on the meta device."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    model = config.model
    with _META, warnings.catch_warnings():
        # peft reads an attribute that transformers deprecates.
        warnings.simplefilter("ignore", FutureWarning)
        built = AutoModelForCausalLM.from_config(
            settings, dtype=dtype, trust_remote_code=model.trust_remote_code
        )
        built.requires_grad_(False).eval()
        head = Head(built.get_output_embeddings().weight)
        base = BaseModel(built, decoder_of(built, model.model), head, _META, dtype, shards)
        if model.train == "full":
            built.requires_grad_()
        else:
            lora = lora_config(base, config.lora, model.lora_rank)
            get_peft_model(base.model, lora, low_cpu_mem_usage=True)
    return base


def _kept_bytes(
    base: BaseModel, fused: FusedDecoder | None, kernel: FusedAttention, *, drops: bool
) -> int:
    """Count the bytes of the storages that autograd keeps for the probe's tokens; each counts once,
    and parameters do not count.
    """
    storages = [parameter.untyped_storage() for parameter in base.model.parameters()]
    own = {id(storage): storage for storage in storages}
    kept: dict[int, torch.UntypedStorage] = {}

    def count(tensor: Tensor) -> Any:
        # Keep no tensor: Python never frees a graph that holds its own outputs.
        storage = tensor.untyped_storage()
        if id(storage) not in own:
            kept[id(storage)] = storage  # held, so that no other takes its place

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, count):
        hidden = _forward(base, fused, kernel, drops=drops)
    del hidden
    return sum(storage.nbytes() for storage in kept.values())


class _Factor(nn.Module):
    """Dropout as memory sees it: a factor for every element, and the product."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.ones_like(x)


def _forward(
    base: BaseModel, fused: FusedDecoder | None, kernel: FusedAttention, *, drops: bool
) -> Tensor:
    """Return the probe's hidden states, computed as the learner does; its adapter `drops`."""
    from peft.helpers import disable_input_dtype_casting
    from peft.tuners.lora import LoraLayer

    ids = torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64, device=base.device)
    positions = torch.arange(_PROBE_TOKENS, device=base.device).unsqueeze(0)
    attention = PackedAttention([Segment(0, _PROBE_TOKENS)], _PROBE_TOKENS, kernel, base.device)
    if fused is not None:
        return fused.hidden_states(ids, positions, attention)
    packs = not missing(base.model)
    adapted = [each for each in base.model.modules() if isinstance(each, LoraLayer) and drops]
    with ExitStack() as stack:
        for place in (layer.lora_dropout for layer in adapted):
            stack.callback(place.update, dict(place))
            place.update({name: _Factor() for name in place})
        if base.dtype != torch.float32 and base.device == _META:
            # Without autocast, which that device lacks, the adapter is in half precision too.
            for parameter in base.model.parameters():
                parameter.data = parameter.data.to(base.dtype)
        elif base.dtype != torch.float32 and hasattr(base.model, "peft_config"):
            # Products in half precision over a float32 adapter.
            stack.enter_context(torch.autocast(base.device.type, base.dtype))
            stack.enter_context(disable_input_dtype_casting(base.model))
        if not packs:
            return base.hidden_states(ids)
        stack.enter_context(plugged_in(base.model))
        return base.hidden_states(ids, positions, attention)

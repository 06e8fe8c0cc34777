"""The bytes of a model with its adapter, counted on the model itself or on one that was never
allocated.

On torch's meta device a model has shapes and no values. The same count runs on it, so what is
predicted before the weights are loaded is what is measured afterwards.
"""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from retrain.distributed import ALONE, World
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
    from retrain.config.schema import Lora, Model

_PROBE_TOKENS = 64
_META = torch.device("meta")
_NF4_BYTES = 4.127 / 8
"""A weight in 4 bits with doubly quantised scales, one for 64 weights (arXiv 2305.14314, section
3)."""


class PredictionError(EnvironmentFailure):
    """The memory of a model cannot be predicted: its code needs its weights."""


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
    """Bytes of the adapter as the fused forward's products read it, beside its float32
    parameters."""
    kept_per_token: int
    """Bytes that a forward pass keeps for its backward."""
    checkpointed_per_token: int
    """The same with gradient checkpointing: the input of every layer, and one layer's activations
    while it runs again."""
    full_bytes: int
    """Bytes that stay where all weights are trained, of `full.full_bytes`; 0 with an adapter."""
    gradients_per_token: int
    """Bytes beside these in the backward pass, and all of a forward pass that keeps nothing: about
    what one layer keeps (measured on the lab model: 1.05 to 1.13 times as much)."""

    @property
    def trained_bytes(self) -> int:
        """Bytes of the adapter with its gradient and two moments, in float32."""
        return 4 * 4 * self.num_trainable

    def activations_per_token(self, *, checkpointing: bool) -> int:
        """Count the bytes that a forward pass keeps for its backward."""
        return self.checkpointed_per_token if checkpointing else self.kept_per_token


def footprint(base: BaseModel, config: "TrainConfig", device_type: str | None = None) -> Footprint:
    """Measure a model that carries its adapter. Its state does not change, except that fused layers
    share one weight tensor.

    `device_type`: the device on which a model without weights would run; its attention kernel is
    then counted. Raises PredictionError where such a model cannot run.
    """
    kernel = attention_of(
        config.inference.attention_kernel, device_type or base.device.type, base.dtype
    )
    four_bits, drops = config.model.load_in_4bit, config.lora.dropout > 0
    fused = None
    # Neither weights in 4 bits nor parts of weights have a fused forward.
    if not four_bits and base.shards.size == 1:
        fused = FusedDecoder.of(base.model, merge=False)
    if fused is not None:
        fused.refresh()
    full = config.model.train == "full"
    # Dropout, and weights that are all trained, have the model's own forward pass.
    learning = None if drops or full else fused
    kept = _kept_per_token(base, learning, kernel, config.model.model, drops=drops)
    frozen = [parameter for parameter in base.model.parameters() if not parameter.requires_grad]
    saved = 0
    if four_bits:
        saved = _four_bits_save(base)
    text: Any = base.model.config.get_text_config()
    layer, stream = kept // text.num_hidden_layers, text.hidden_size * base.dtype.itemsize
    return Footprint(
        dtype=base.dtype,
        weights=held_bytes(base) - saved,
        num_frozen=sum(parameter.numel() for parameter in frozen),
        layer_weights=fused.layer_weight_bytes if fused else 0,
        head_weights=base.head.weight.nbytes,
        num_trainable=sum(
            parameter.numel() for parameter in base.model.parameters() if parameter.requires_grad
        ),
        adapter_copies=fused.adapter_copy_bytes if fused else 0,
        kept_per_token=kept,
        full_bytes=_full_bytes(base, config, device_type or base.device.type),
        gradients_per_token=layer,
        # The division above rounds down, hence + 1.
        checkpointed_per_token=text.num_hidden_layers * stream + layer + 1,
    )


def _full_bytes(base: BaseModel, config: "TrainConfig", device_type: str) -> int:
    if config.model.train != "full":
        return 0
    count = sum(weight.numel() for weight in base.model.parameters() if weight.requires_grad)
    return sum(full_bytes(count, device_type, keeps_base=config.reads_base).values())


def _four_bits_save(base: BaseModel) -> int:
    """Return the bytes that 4 bits save in the linear layers; the head is not quantised."""
    linears = [module.weight for module in base.decoder.modules() if isinstance(module, nn.Linear)]
    return sum(
        weight.nbytes - int(weight.numel() * _NF4_BYTES)
        for weight in linears
        if not weight.requires_grad
        and weight is not base.head.weight
        and weight.is_floating_point()
    )


def weightless_model(
    model: "Model", lora: "Lora", settings: Any, dtype: torch.dtype, shards: World = ALONE
) -> BaseModel:
    """Return the configured model with its adapter on the meta device, as one of `shards` holds it;
    `settings` is the model's own configuration. Raises PredictionError where that fails.
    """
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    try:
        with _META, warnings.catch_warnings():
            # peft reads an attribute that transformers deprecates.
            warnings.simplefilter("ignore", FutureWarning)
            built = AutoModelForCausalLM.from_config(
                settings, dtype=dtype, trust_remote_code=model.trust_remote_code
            )
            built.requires_grad_(False).eval()
            base = BaseModel(
                built,
                decoder_of(built, model.model),
                Head(built.get_output_embeddings().weight),
                _META,
                dtype,
                shards,
            )
            if model.train == "full":
                built.requires_grad_()
            else:
                settings = lora_config(base, lora, model.lora_rank)
                get_peft_model(base.model, settings, low_cpu_mem_usage=True)
    except ConfigurationError:
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise PredictionError(
            f'[model] model = "{model.model}" cannot be built without its weights'
            f" ({type(error).__name__}), so its memory is not predicted."
        ) from error
    return base


def _kept_per_token(
    base: BaseModel, fused: FusedDecoder | None, kernel: FusedAttention, name: str, *, drops: bool
) -> int:
    """Count the bytes that a forward pass keeps of a token, under dropout if the adapter `drops`.
    Raises PredictionError where a model without weights cannot run.
    """
    try:
        with _dropping(base.model) if drops else nullcontext():
            return max(1, _kept_bytes(base, fused, kernel) // _PROBE_TOKENS)
    except RuntimeError as error:
        if base.device != _META:
            raise
        # torch's grouped product, as of experts, knows no other dtype than bfloat16 there
        raise PredictionError(
            f'[model] model = "{name}" cannot be run without its weights'
            f" ({type(error).__name__}), so its memory is not predicted."
        ) from error


def _kept_bytes(base: BaseModel, fused: FusedDecoder | None, kernel: FusedAttention) -> int:
    """Count the bytes of the storages that autograd keeps for the probe's tokens; each counts once,
    and parameters do not count.
    """
    storages = [parameter.untyped_storage() for parameter in base.model.parameters()]
    own = {id(storage): storage for storage in storages}
    kept: dict[int, torch.UntypedStorage] = {}

    def count(tensor: Tensor) -> Any:
        # The tensor itself is not kept: a graph that holds its own outputs is never freed.
        storage = tensor.untyped_storage()
        if id(storage) not in own:
            kept[id(storage)] = storage  # held, so that no other takes its place

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, count):
        hidden = _forward(base, fused, kernel)
    del hidden
    return sum(storage.nbytes() for storage in kept.values())


class _Factor(nn.Module):
    """Dropout as memory sees it: a factor for every element, and the product."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.ones_like(x)


@contextmanager
def _dropping(model: nn.Module) -> Iterator[None]:
    """Let the adapter keep the tensors that its dropout makes in training."""
    from peft.tuners.lora import LoraLayer

    places = [module.lora_dropout for module in model.modules() if isinstance(module, LoraLayer)]
    before = [dict(place) for place in places]
    try:
        for place in places:
            place.update({name: _Factor() for name in place})
        yield
    finally:
        for place, modules in zip(places, before, strict=True):
            place.update(modules)


def _forward(base: BaseModel, fused: FusedDecoder | None, kernel: FusedAttention) -> Tensor:
    """Return the probe's hidden states, computed as the learner does."""
    from peft.helpers import disable_input_dtype_casting

    ids = torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64, device=base.device)
    positions = torch.arange(_PROBE_TOKENS, device=base.device).unsqueeze(0)
    attention = PackedAttention([Segment(0, _PROBE_TOKENS)], _PROBE_TOKENS, kernel, base.device)
    if fused is not None:
        return fused.hidden_states(ids, positions, attention)
    packs = not missing(base.model)
    with ExitStack() as stack:
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

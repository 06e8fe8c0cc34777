"""Loading a causal language model: frozen weights from safetensors, whole or one part per rank, its
head, and no generation settings.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from retrain.distributed import ALONE, World
from retrain.errors import ConfigurationError, EnvironmentFailure, first_line
from retrain.model.attention import AttentionBatch
from retrain.model.devices import usable_dtype
from retrain.model.head import Head
from retrain.model.text import model_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from retrain.config import TrainConfig
    from retrain.config.schema import Backend, Model

_PROBE_TOKENS = 8
_PROBE_TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Tolerance of one logit, relative to the largest logit: about three roundings, which a scale and a
cap add up.
"""
_FACTOR_TOLERANCE = 1e-3
"""Tolerance of the factor between all logits, in which roundings average out."""
_GATHERED = 2
"""Number of layers that are whole at once: the running layer and the next layer, whose gathering
overlaps.
"""


@dataclass(frozen=True)
class BaseModel:
    """A frozen model as the learner uses it: hidden states from `decoder`, logits from `head`."""

    model: "PreTrainedModel"
    decoder: nn.Module
    """Token ids to last hidden states: the model without its head."""
    head: Head
    device: torch.device
    dtype: torch.dtype
    shards: World = ALONE
    """The ranks that hold the layers in parts, so that every pass is collective. ALONE: this
    process holds all of them."""

    def hidden_states(
        self,
        token_ids: Tensor,
        positions: Tensor | None = None,
        attention_batch: AttentionBatch | None = None,
    ) -> Tensor:
        """Return [batch, tokens, H] of [batch, tokens] ids: rows padded on the right, or packed,
        with our attention plugged in.

        The model masks no token: attention is causal and padding is on the right, where no token
        sees it. Packed rows get an explicit mask of ones. Otherwise transformers would read the
        positions back to the host to find the rows.
        """
        packed: dict[str, Any] = {}
        if attention_batch is not None:
            packed = {
                "position_ids": positions,
                "attention_batch": attention_batch,
                "attention_mask": torch.ones_like(token_ids, dtype=torch.bool),
            }
        hidden: Tensor = self.decoder(
            input_ids=token_ids, use_cache=False, **packed
        ).last_hidden_state
        return hidden


_model_cache: "dict[tuple[object, ...], BaseModel] | None" = None
"""Inside `shared_models`: the loaded models, by their source."""


@contextmanager
def shared_models() -> Iterator[None]:
    """Keep a model loaded inside for the next backend that asks for it: consecutive runs load it
    once.

    One backend uses it at a time; the next backend removes the adapter of the previous backend.
    """
    global _model_cache  # noqa: PLW0603 - one cache per process, which a campaign turns on and off
    before, _model_cache = _model_cache, {}
    try:
        yield
    finally:
        _model_cache = before


def load_base_model(
    config: "TrainConfig", folder_or_id: str, device: torch.device, world: World = ALONE
) -> BaseModel:
    """Load the base model; `folder_or_id` is what `[model] model` resolves to. Raises
    EnvironmentFailure if it does not load.
    """
    dtype = usable_dtype(config, device)  # refuses an impossible option before loading gigabytes
    shards = shards_of(config.backend, world)
    full = config.model.train == "full"  # the next run needs the base
    if _model_cache is None or full or shards.size > 1:  # parts end with their ranks
        return _load(config.model, folder_or_id, device, dtype, shards)
    model = config.model
    source = (
        folder_or_id,
        model.revision,
        dtype,
        model.trust_remote_code,
        model.load_in_4bit,
        config.inference.attention_kernel,
        *model_files(folder_or_id),
    )
    # Free others before loading the next model: there may not be memory for both.
    for other in [key for key in _model_cache if key[:-1] != source]:
        del _model_cache[other]
    key = (*source, device)
    if key in _model_cache:
        _remove_adapter(_model_cache[key].model)
    else:
        _model_cache[key] = _load(config.model, folder_or_id, device, dtype, shards)
    return _model_cache[key]


def _load(
    settings: "Model", folder_or_id: str, device: torch.device, dtype: torch.dtype, shards: World
) -> BaseModel:
    # The optimizer's weights are float32, as exact as the file has them.
    stored = torch.float32 if settings.train == "full" else dtype
    model = load_weights(settings, folder_or_id, device, stored)
    model.requires_grad_(False)
    model.eval()
    decoder = decoder_of(model, settings.model)
    if shards.size > 1:
        shard(model, decoder, device, shards, settings.model)
    elif not settings.load_in_4bit:
        if device.type == "cpu":
            # A weight in the file's dtype maps the file, and a single one keeps all of it resident.
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
        model.to(device)
    if device.type == "cuda":
        choose_deterministic_experts(model)
    return BaseModel(
        model, decoder, find_head(model, decoder, settings.model), device, dtype, shards
    )


def decoder_of(model: "PreTrainedModel", name: str) -> nn.Module:
    """Return the model without its head; a few families (Llama 4) name another module as their base
    than they have.

    Raises ConfigurationError where there is none.
    """
    decoder: nn.Module | None = model.base_model
    if decoder is model:
        decoder = getattr(model, "model", None)
    if decoder is None:
        raise ConfigurationError(
            f'[model] model = "{name}": {type(model).__name__} has no decoder apart from its'
            " head, so retrain cannot train it. Use another model."
        )
    return decoder


def _remove_adapter(model: "PreTrainedModel") -> None:
    """Put back the frozen layers that peft wrapped; no adapter is ever merged into them."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    wrapped = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, BaseTunerLayer)
    ]
    for name, module in wrapped:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, module.get_base_layer())
    if hasattr(model, "peft_config"):
        del model.peft_config  # peft would take the next adapter for a second one


def load_weights(
    settings: "Model", folder_or_id: str, device: torch.device, dtype: torch.dtype | Literal["auto"]
) -> "PreTrainedModel":
    """Load on the CPU, where weights in the file's dtype map the file; in 4 bits, on `device`.
    "auto" is the file's dtype.
    """
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    options: dict[str, Any] = {
        "dtype": dtype,
        "use_safetensors": True,
        "trust_remote_code": settings.trust_remote_code,
    }
    if settings.revision:
        options["revision"] = settings.revision
    if settings.load_in_4bit:
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
        # bitsandbytes quantizes a weight as it arrives on its device.
        options |= {"quantization_config": quantization, "device_map": {"": device}}
    try:
        with no_progress_bar():
            model = AutoModelForCausalLM.from_pretrained(folder_or_id, **options)
    except (OSError, ValueError, ImportError) as error:
        raise EnvironmentFailure(
            f'[model] model = "{settings.model}" does not load ({first_line(error)}). Name a'
            " folder with config.json and safetensors weights of a causal language model, an"
            ' id of the hub or its cache, or "lab".'
        ) from error
    return model


def choose_deterministic_experts(model: "PreTrainedModel") -> None:
    """Compute a mixture of experts by plain products: the grouped ones count tokens by `histc`,
    which has no deterministic form on CUDA.
    """
    if getattr(model.config, "_experts_implementation", None) == "grouped_mm":
        model.set_experts_implementation("eager")


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Silence the progress bar that transformers shows over a file's tensors, which load at
    once.
    """
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def find_head(model: "PreTrainedModel", decoder: nn.Module, name: str) -> Head:
    """Return the head whose logits equal the model's logits. It tries the forms that the
    configuration mentions on a few tokens.

    Families scale or cap their logits under various names. The function refuses a form that no
    candidate reproduces, since it would silently train another distribution.
    """
    output = model.get_output_embeddings()
    if output is None or not isinstance(getattr(output, "weight", None), Tensor):
        raise ConfigurationError(
            f'[model] model = "{name}" has no linear language-model head, so retrain cannot'
            " train it."
        )
    weight, bias = output.weight, getattr(output, "bias", None)
    probe = torch.arange(min(_PROBE_TOKENS, weight.shape[0]), device=weight.device).unsqueeze(0)
    softcaps = _numbers(model.config, ("final_logit_softcapping", "logits_soft_cap", "softcap"))
    names = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
    mentioned = _numbers(model.config, names)
    tolerance = _PROBE_TOLERANCE.get(weight.dtype, _PROBE_TOLERANCE[torch.bfloat16])
    with torch.no_grad():
        expected = model(input_ids=probe, use_cache=False).logits[0].float()
        hidden = decoder(input_ids=probe, use_cache=False).last_hidden_state[0]
        # Granite divides by its scale, HyperCLOVA multiplies.
        scales = (1.0, *mentioned, *(1 / scale for scale in mentioned))
        for scale, softcap in product(scales, (*softcaps, None)):
            head = Head(weight, bias, scale, softcap)
            # Electra has a layer before its head, which reads fewer numbers than a hidden state.
            if hidden.shape[1] == weight.shape[1] and _matches(
                head.logits(hidden), expected, tolerance
            ):
                return head
    raise ConfigurationError(
        f'[model] model = "{name}" changes its logits in a way that the learner does not know,'
        " so log-probs would be wrong. The learner knows scaled and soft-capped heads. Use"
        " another model, or report it."
    )


def _numbers(settings: Any, names: Sequence[str]) -> list[float]:
    """Return the named attributes that exist and are not 0."""
    values = [getattr(settings, name, None) for name in names]
    return [float(value) for value in values if value]


def _matches(logits: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Return True if two [rows, V] differ by rounding alone.

    A single logit may be off by a rounding. In the least-squares factor between all of them
    roundings average out, and an unknown scale or cap does not.
    """
    if logits.shape != expected.shape:
        return False
    difference = logits - expected
    moved, size = (difference * expected).sum().abs(), expected.square().sum()
    return bool(
        difference.abs().max() <= tolerance * expected.abs().max()
        and moved <= _FACTOR_TOLERANCE * size  # a head of zeros has no size
    )


# -- a base in parts -------------------------------------------------------------------------------
#
# Each rank holds 1/N of every layer, and all of a layer while it runs (FSDP2, ZeRO stage 3).
# Embeddings, head and last norm stay whole on every rank: the learner reads the head's weight
# outside of any layer, tied weights are both at once, and in a model that needs several GPUs they
# are a few percent. A frozen base gives the backward pass nothing to reduce. Every pass is
# collective, so all ranks make equally many (`World.any_rank`).


def shards_of(backend: "Backend", world: World) -> World:
    """Return the ranks that hold the base in parts; ALONE if each holds all of it."""
    return world if backend.splits_base(world.size) else ALONE


def shard(
    model: nn.Module, decoder: nn.Module, device: torch.device, world: World, name: str
) -> None:
    """Move a frozen `model` to `device`: 1/N of every layer, and all of the rest. One layer at a
    time is whole there.

    Collective. Call it before attaching the adapter, so that FSDP leaves the adapter's parameters
    alone.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (world.size,))
    blocks = layers(decoder)
    if not blocks:
        raise ConfigurationError(
            f'[backend] shard_base = true finds no layers in [model] model = "{name}"; set'
            " shard_base = false, or use a model of transformers."
        )
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    whole = [parameter for parameter in model.parameters() if not is_sharded(parameter)]
    # The root, which orders the layers' gathers.
    fully_shard(decoder, mesh=mesh, ignored_params=set(decoder.parameters()) & set(whole))
    # A copy on a CPU too, so that nothing maps the file.
    for tensor in (*whole, *model.buffers()):
        tensor.data = tensor.data.to(device, copy=True)


def layers(decoder: nn.Module) -> list[nn.Module]:
    """Return the blocks of a transformers model that FSDP can gather and checkpointing can
    recompute one by one.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [
        module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)
    ]


def is_sharded(tensor: Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def held_bytes(base: "BaseModel") -> int:
    """Count the bytes of the frozen weights on one rank, gathered layers included; also for a model
    on the meta device.
    """
    total = _frozen_bytes(base.model)
    if base.shards.size == 1:
        return total
    each = [_frozen_bytes(layer) for layer in layers(base.decoder)]
    parts = sum(-(-layer // base.shards.size) for layer in each)
    return total - sum(each) + parts + sum(sorted(each)[-_GATHERED:])


def _frozen_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters() if not parameter.requires_grad)

"""The devices and dtypes of a run, and the options of its engine. The module refuses or replaces
what this machine lacks.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import torch

from retrain.config.names import part_class
from retrain.distributed import ALONE, World
from retrain.errors import ConfigurationError, EnvironmentFailure
from retrain.model.attention import FusedAttention
from retrain.model.budget import PAGE_TOKENS
from retrain.model.packed import computes_bf16
from retrain.model.varlen import flash, flash_paged, has_flash, reads_pages
from retrain.types import LogLine

if TYPE_CHECKING:
    from retrain.config import TrainConfig
    from retrain.config.schema import Backend, Inference, Model

_KV_STORAGE = {"bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class EngineOptions:
    """The keys of `[inference]` resolved for a device and a model."""

    weights: torch.dtype | None = None
    """dtype of a second copy of the weights for decoding, whose adapter follows the learner's
    adapter. With None, decoding uses the learner's own weights.
    """
    kv_storage: torch.dtype | None = None
    """None: the dtype that the weights compute in."""
    flash: bool = False
    """True for attention by torch's flash kernel where it can. It computes the same function as
    torch's fused attention.
    """
    prefix_caching: bool = True
    paged: bool = False
    """True for keys and values in pages and steps in fixed buffers, for models that have a fused
    forward; else rows of one capacity.
    """
    page_tokens: int = PAGE_TOKENS


def engine_options(
    inference: "Inference", device_type: str, model_dtype: torch.dtype
) -> EngineOptions:
    """Resolve the options. Raises ConfigurationError or EnvironmentFailure for a value that this
    device or installation cannot serve.
    """
    dtype = torch.bfloat16 if inference.dtype == "bf16" else model_dtype
    _check_attention(inference.attention_kernel, device_type, dtype)
    if inference.dtype in ("fp8", "fp4"):
        raise ConfigurationError(
            f'[inference] dtype = "{inference.dtype}" needs {inference.dtype[-1]}-bit matrix'
            ' products, which the pytorch engine lacks. Use "auto" (the model\'s own), "bf16",'
            f' or engine = "vllm" with a {inference.dtype} model on a GPU that has them.'
        )
    if inference.kv_cache_dtype == "fp8" and device_type == "mps":
        raise ConfigurationError(
            '[inference] kv_cache_dtype = "fp8" needs 8-bit floats, which mps lacks; use "auto",'
            ' "bf16" or "int8", or another device.'
        )
    kv_storage = _KV_STORAGE.get(inference.kv_cache_dtype)
    flash = inference.attention_kernel != "cutlass" and has_flash(device_type, dtype)
    return EngineOptions(
        weights=None if dtype == model_dtype else dtype,
        kv_storage=None if kv_storage == dtype else kv_storage,
        flash=flash,
        prefix_caching=inference.prefix_caching,
        paged=flash and reads_pages(),
    )


def attention_of(kernel: str, device_type: str, dtype: torch.dtype) -> FusedAttention:
    """Return the learner's attention under `[inference] attention_kernel`, which holds for both."""
    if kernel != "cutlass" and has_flash(device_type, dtype):
        return FusedAttention(flash_paged, flash)
    return FusedAttention()


_ABSENT_KERNELS = {
    "triton": (
        'attention kernels written in Triton, which PyTorch lacks; engine = "vllm" has them'
        " (attention backend TRITON_ATTN)"
    ),
    "tk": (
        "ThunderKittens' kernels, which no package contains; build them from"
        " github.com/HazyResearch/ThunderKittens"
    ),
}


def _check_attention(kernel: str, device_type: str, dtype: torch.dtype) -> None:
    if kernel in _ABSENT_KERNELS:
        raise ConfigurationError(
            f'[inference] attention_kernel = "{kernel}" asks for {_ABSENT_KERNELS[kernel]}; use'
            ' "default" (PyTorch\'s best), "flash" or "cutlass" (both in PyTorch, on a CUDA'
            " device)."
        )
    if kernel in ("flash", "cutlass") and device_type != "cuda":
        raise ConfigurationError(
            f'[inference] attention_kernel = "{kernel}" needs a CUDA device, and this run is on'
            f' {device_type}; use "default", or [backend] devices = "gpu:0".'
        )
    if kernel == "flash" and dtype not in (torch.bfloat16, torch.float16):
        raise ConfigurationError(
            '[inference] attention_kernel = "flash" computes in bf16, and the model is in fp32; use'
            ' "default", or [model] dtype = "bf16".'
        )
    if kernel == "flash" and not has_flash(device_type, dtype):
        raise EnvironmentFailure(
            '[inference] attention_kernel = "flash" needs torch 2.11 and an NVIDIA GPU of compute'
            f' capability 8.0 (Ampere) or later; here is torch {torch.__version__}. Use "default",'
            " which takes what there is."
        )


class DeviceChoice(NamedTuple):
    device: torch.device
    """The learner's device, and the sampler's unless it has its own."""
    note: str
    """One line to print where the default device is absent; else ""."""
    sampler: torch.device | None = None
    """Split mode: a device of the sampler's own."""


def choose_device(backend: "Backend", world: World = ALONE) -> DeviceChoice:
    """Return the devices of `[backend] devices`: one device, or in split mode first the sampler's
    and then the learner's device.

    The unset default falls back to cpu; retrain refuses a named device that is absent. In a
    parallel run each process takes the GPU of its local rank.
    """
    names = backend.device_list
    if len(names) > 1 and world.size > 1:
        raise ConfigurationError(
            f'[backend] devices = "{backend.devices}" under torchrun: each process takes one GPU,'
            " so leave the key out."
        )
    device = torch.device(names[-1])
    if world.size > 1 and device.type == "cuda":
        device = torch.device("cuda", world.local_rank)
    sampler = torch.device(names[0]) if len(names) > 1 else None
    if is_present(device) and (sampler is None or is_present(sampler)):
        return DeviceChoice(device, "", sampler)
    if backend.is_set("devices"):
        raise EnvironmentFailure(
            f'[backend] devices = "{backend.devices}": this machine has no such device'
            f" ({present_devices()}). Name a device of this list, or leave the key out to use the"
            " cpu."
        )
    return DeviceChoice(
        torch.device("cpu"),
        LogLine("No GPU found: using cpu.", "no GPU here"),
    )


def is_present(device: torch.device) -> bool:
    if device.type == "cuda":
        return (device.index or 0) < torch.cuda.device_count()
    if device.type == "mps":
        return torch.backends.mps.is_available()
    return True


def present_devices() -> str:
    """Return the devices of this machine in the configuration's words."""
    names = ["cpu"]
    if torch.backends.mps.is_available():
        names.append("mps")
    names.extend(f"gpu:{index}" for index in range(torch.cuda.device_count()))
    return "it has " + ", ".join(names)


def choose_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """Return the dtype of the frozen weights: auto is bf16 on CUDA and fp32 elsewhere.

    Adapter weights are fp32 always.
    """
    narrow = wanted == "bf16" or (wanted == "auto" and device.type == "cuda")
    return torch.bfloat16 if narrow else torch.float32


def usable_dtype(config: "TrainConfig", device: torch.device) -> torch.dtype:
    """Return the dtype of the frozen weights. Raises ConfigurationError or EnvironmentFailure for
    an option that this device or installation cannot serve.
    """
    missing = "" if find_spec("bitsandbytes") else "bitsandbytes (pip install bitsandbytes)"
    if device.type != "cuda":
        missing = "a CUDA device"
    if config.model.load_in_4bit and missing:
        raise EnvironmentFailure(
            f"[model] load_in_4bit = true needs {missing}: provide it, or set load_in_4bit = false."
        )
    dtype = choose_dtype(config.model.dtype, device)
    if part_class("engine", config.inference.engine).decodes_here:
        engine_options(config.inference, device.type, dtype)
    return dtype


def half_precision_note(model: "Model", inference: "Inference", device: torch.device) -> str:
    """Return a line on bf16 where the device has no units for it; "" otherwise."""
    narrow = choose_dtype(model.dtype, device) == torch.bfloat16 or inference.dtype == "bf16"
    has_units = torch.cuda.is_bf16_supported(False) if device.type == "cuda" else computes_bf16()
    if not narrow or has_units:
        return ""
    return "[model] or [inference] dtype is bf16, which this device computes more slowly than fp32."

"""`[inference]` of the PyTorch engine: each value works, or is refused in one sentence that says what would make it work."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from retrain.errors import ConfigurationError, EnvironmentFailure

if TYPE_CHECKING:
    import torch

_KV_DTYPES = {"bf16": "bfloat16", "int8": "int8", "fp8": "float8_e4m3fn"}


@dataclass(frozen=True)
class EngineOptions:
    """The keys of `[inference]` resolved for a device and a model."""

    weights: "torch.dtype | None"
    """None: the learner's own weights. A dtype: a second copy of them for decoding, whose adapter follows the learner's."""
    kv_storage: "torch.dtype | None"
    """None: the dtype that the weights compute in."""
    flash: bool
    prefix_caching: bool


def resolve(
    *, attention_kernel: str, dtype: str, kv_cache_dtype: str, prefix_caching: bool, device_type: str, model_dtype: "torch.dtype"
) -> EngineOptions:
    """Raises ConfigurationError or EnvironmentFailure for a value that this device or install cannot serve.

    Every attention kernel gives the same function; `flash` is the flash-attn package, `default` is PyTorch's fused attention.
    """
    import torch

    _check_attention(attention_kernel, device_type, torch.bfloat16 if dtype == "bf16" else model_dtype)
    _check_dtype(dtype)
    if kv_cache_dtype == "fp8" and device_type == "mps":
        raise ConfigurationError(
            '[inference] kv_cache_dtype = "fp8" needs 8-bit floats, which mps has not; use "auto", "bf16" or "int8", or another device.'
        )
    weights = torch.bfloat16 if dtype == "bf16" and model_dtype != torch.bfloat16 else None
    computes_in = weights or model_dtype
    kv_storage: torch.dtype | None = getattr(torch, _KV_DTYPES[kv_cache_dtype]) if kv_cache_dtype != "auto" else None
    return EngineOptions(
        weights=weights,
        kv_storage=None if kv_storage == computes_in else kv_storage,
        flash=attention_kernel == "flash",
        prefix_caching=prefix_caching,
    )


def _check_attention(kernel: str, device_type: str, dtype: "torch.dtype") -> None:
    import torch

    if kernel in ("triton", "tk", "cutlass"):
        raise ConfigurationError(
            f'[inference] attention_kernel = "{kernel}" is not in the pytorch engine; use "default" (PyTorch\'s fused attention), "flash" '
            "on a CUDA device with the flash-attn package, or a server engine that brings its own kernels."
        )
    if kernel == "flash" and device_type != "cuda":
        raise ConfigurationError(
            f'[inference] attention_kernel = "flash" needs a CUDA device and the flash-attn package, and this run is on {device_type}; '
            'use "default", or [backend] devices = "gpu:0".'
        )
    if kernel == "flash" and dtype not in (torch.bfloat16, torch.float16):
        raise ConfigurationError(
            '[inference] attention_kernel = "flash" computes in bf16, and the model is in fp32; use "default", or [model] dtype = "bf16".'
        )
    if kernel == "flash" and find_spec("flash_attn") is None:
        raise EnvironmentFailure(
            '[inference] attention_kernel = "flash" needs the flash-attn package, which is not installed; '
            'pip install flash-attn --no-build-isolation, or use "default".'
        )


def _check_dtype(dtype: str) -> None:
    if dtype in ("fp8", "fp4"):
        bits = dtype.removeprefix("fp")
        raise ConfigurationError(
            f'[inference] dtype = "{dtype}" needs {bits}-bit matrix products, which the pytorch engine has on no device; use "auto" (the '
            f'model\'s own) or "bf16", or engine = "vllm" with a {dtype} model on a GPU that has them.'
        )

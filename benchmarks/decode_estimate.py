"""Kernels of one decoding step, counted without a GPU, and an estimate of its time from them and
from the bytes that it moves.

    python benchmarks/decode_estimate.py

The step of Qwen3-4B's shapes (bf16, LoRA of rank 16) runs on tensors without memory. An operator
that computes counts as one kernel, and so do torch's RMS norm and flash attention, which are one on
CUDA. The times are estimates: no kernel has been timed, and the rates below are assumptions, not
measurements, but for the H200's bandwidth of copies, which others measured.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from gpu_first import LAYERS, PLAIN, SHAPES
from peft import LoraConfig, get_peft_model
from report import table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen3Config

from retrain.inference_engine.fixed_step import FixedStep, StepBuffers
from retrain.inference_engine.kv_cache import PagePool
from retrain.model import budget, functions, fused
from retrain.model.attention import VarlenAttention
from retrain.model.fused import FusedDecoder
from retrain.model.step_kernels import StepKernels
from retrain.model.varlen import fits_flash

BANDWIDTH = {"H100": 2.85e12, "H200": 4.3e12}
"""Bytes per second of a large copy."""
SHARE_OF_PRODUCTS, SHARE_OF_ATTENTION = 0.8, 0.7
"""Of the bandwidth, reading the weights and the pages."""
SMALL_KERNEL = 2e-6
"""Seconds of every other kernel, within a graph."""
FREE = {
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "detach",
    "alias",
    "view",
    "_unsafe_view",
    "slice",
    "select",
    "transpose",
    "t",
}
FREE |= {
    "expand",
    "unsqueeze",
    "squeeze",
    "permute",
    "as_strided",
    "split",
    "split_with_sizes",
    "chunk",
    "unbind",
    "lift_fresh",
}


class Counting(TorchDispatchMode):
    """Operators that compute, by name; `kernels` are those that a stand-in below names."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if name not in FREE:
            self.kernels[name] += 1
        return func(*args, **(kwargs or {}))


class OneEach:
    """The Triton kernels of a step as names and empty results."""

    def __init__(self, counting: Counting) -> None:
        self._counted = counting.kernels

    def add_norm(self, residual: Tensor, update: Tensor | None, norm: Any) -> Tensor:
        self._counted["add_norm"] += 1
        return torch.empty_like(residual)

    def apply_rope_and_store_kv(
        self,
        qkv: Tensor,
        pending: Any,
        heads: Sequence[int],
        rotary: Any,
        norm: Any,
        pages: Any,
        places: Tensor,
    ) -> Tensor:
        self._counted["apply_rope_and_store_kv"] += 1
        return qkv.new_empty(len(qkv), heads[0], pages[0].shape[-1])

    def gate(self, gates: Tensor, pending: Any) -> Tensor:
        self._counted["gate"] += 1
        return gates.new_empty(len(gates), gates.shape[1] // 2)

    def draw(self, logits: Tensor, temperatures: Tensor, uniforms: Tensor, cuts: Any) -> Tensor:
        self._counted["draw"] += 2
        return logits.new_empty(len(logits), 4, dtype=torch.float64)


@contextmanager
def one_kernel_each(counting: Counting) -> Iterator[None]:
    """RMS norm and the sampler's chunks as on CUDA."""

    def rms_norm(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        counting.kernels["rms_norm"] += 1
        return torch.empty_like(x)

    with (
        patch.object(functions, "_FUSED_NORM", {"meta"}),
        patch.object(functions.F, "rms_norm", rms_norm),
        patch.dict(budget._SAMPLING_CHUNK_BYTES, {"meta": budget._SAMPLING_CHUNK_BYTES["cuda"]}),
    ):
        yield


def count(rows: int, length: int, *, joined: bool) -> tuple[Counter[str], dict[str, int]]:
    """Kernels of a step, and bytes: of the weights, and of keys and values.

    `joined`: with the Triton kernels, and the adapter under the weights.
    """
    with torch.device("meta"):
        config = Qwen3Config(
            **SHAPES["qwen3-4b"], tie_word_embeddings=True, max_position_embeddings=40_960
        )
        base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).requires_grad_(False)
        model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=16, target_modules=LAYERS))
    counting = Counting()

    def attend(query: Tensor, *rest: Any) -> Tensor:
        counting.kernels["attention"] += 1
        if joined:  # rows of up to 2,048 tokens are attended in parts
            counting.kernels["join"] += 1
        return torch.empty_like(query)

    with patch.object(fused, "TRITON_DEVICES", {"meta"} if joined else set()):
        decoder = FusedDecoder.of(model.get_base_model(), merge=False)
    assert decoder is not None
    decoder.kernels = OneEach(counting) if joined else StepKernels()
    decoder.refresh(sampling=True)
    device = torch.device("meta")
    pool = PagePool(rows * -(-length // 256), decoder.kv_heads, torch.bfloat16, device)
    kernel = VarlenAttention(fits=fits_flash, paged=attend)
    step = FixedStep(decoder, pool, StepBuffers(rows, 8, device), kernel, np.array([2]), 2048)
    with torch.no_grad(), one_kernel_each(counting), counting:
        step.step(rows, PLAIN)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    per_token = sum(2 * heads * size * 2 for heads, size in decoder.kv_heads)
    return counting.kernels, {"weights": weights, "pages": per_token * rows * length}


def seconds(
    kernels: Counter[str], moved: dict[str, int], rows: int, card: str, *, joined: bool
) -> float:
    """The products with weights and the attention by their bytes, the sampler by its passes over
    the logits, all else by its number.
    """
    bandwidth = BANDWIDTH[card]
    large = 4 * SHAPES["qwen3-4b"]["num_hidden_layers"] + 1 + kernels["attention"]
    passes = (
        4 if joined else 40
    )  # bytes per logit: written and read once in bf16; or about ten tensors of float32
    logits = passes * rows * SHAPES["qwen3-4b"]["vocab_size"]
    streamed = (
        moved["weights"] / SHARE_OF_PRODUCTS
        + moved["pages"] / SHARE_OF_ATTENTION
        + logits / SHARE_OF_ATTENTION
    )
    return streamed / bandwidth + SMALL_KERNEL * (sum(kernels.values()) - large)


def main() -> None:
    lines = []
    for rows in (8, 32, 128):
        for joined in (False, True):
            kernels, moved = count(rows, 512, joined=joined)
            if rows == 128:
                name, most = (
                    "Triton kernels" if joined else "torch operators",
                    dict(kernels.most_common(12)),
                )
                print(f"{name}: {sum(kernels.values()):,} kernels, {most}\n")
            row = [rows, "Triton" if joined else "torch", f"{sum(kernels.values()):,}"]
            for card, bandwidth in BANDWIDTH.items():
                estimate = seconds(kernels, moved, rows, card, joined=joined)
                row += [
                    f"{1e3 * sum(moved.values()) / bandwidth:.1f}",
                    f"{1e3 * estimate:.1f}",
                    f"{rows / estimate:,.0f}",
                ]
            lines.append(row)
    columns = [
        f"{card}: {what}"
        for card in BANDWIDTH
        for what in ("ms by bandwidth", "ms (estimate)", "tok/s (estimate)")
    ]
    print(table(["rows of 512 tokens", "step", "kernels", *columns], lines))


if __name__ == "__main__":
    main()

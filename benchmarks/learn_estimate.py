"""What lies between the products of a learning pass, in bytes counted without a GPU, and an
estimate of the pass's time.

    python benchmarks/learn_estimate.py

The layers of Qwen3-4B's shapes (bf16, LoRA of rank 16) run forward and backward over one row of
16,384 tokens on tensors without memory. Every operator but products and attention counts as the
bytes that it reads and writes. The times are estimates from the rates below, which are assumptions;
embedding, head, loss and optimizer are left out.
"""

from collections import Counter
from typing import Any

import torch
from decode_estimate import FREE
from gpu_first import LAYERS, SHAPES
from peft import LoraConfig, get_peft_model
from report import table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Qwen3Config

from retrain.model.fused import FusedDecoder

TOKENS = 16_384
PRODUCTS = {"mm", "addmm"}
TERA_FLOPS, ATTENTION_TERA_FLOPS, BANDWIDTH = (
    600e12,
    {"forward": 400e12, "backward": 250e12},
    2.85e12,
)
"""Of an H100."""


class Counting(TorchDispatchMode):
    """Bytes and floating-point operations of each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.kind, self.moved, self.flops, self.kernels = (
            "forward",
            Counter[str](),
            Counter[str](),
            Counter[str](),
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found, name = func(*args, **(kwargs or {})), func.__name__.partition(".")[0]
        if name in PRODUCTS:
            left, right = args[-2:]
            self.flops[self.kind] += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        elif name not in FREE:
            self.count(args, found)
        return found

    def count(self, *tensors: Any) -> None:
        self.kernels[self.kind] += 1
        self.moved[self.kind] += sum(
            tensor.nbytes for tensor in tree_leaves(tensors) if isinstance(tensor, Tensor)
        )


class OneEach:
    """The Triton kernels of a layer as empty results, whose bytes are counted."""

    def __init__(self, counting: Counting) -> None:
        self._counting = counting

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._made(torch.empty_like(x), x), x.new_empty(len(x), 1, dtype=torch.float32)

    def norm_gradient(self, grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return self._made(torch.empty_like(x), grad, x)

    def apply_rope(
        self, x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return self._made(x.new_empty(x.shape), x), x.new_empty(
            *x.shape[:2], 1, dtype=torch.float32
        )

    def apply_rope_gradient(
        self, grad: Tensor, x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor, scale: Tensor
    ) -> Tensor:
        return self._made(x.new_empty(x.shape), grad, x)

    def gate(self, gates: Tensor) -> Tensor:
        return self._made(gates.new_empty(len(gates), gates.shape[1] // 2), gates)

    def gate_gradient(self, grad: Tensor, gates: Tensor) -> Tensor:
        return self._made(torch.empty_like(gates), grad, gates)

    def _made(self, out: Tensor, *read: Tensor) -> Tensor:
        self._counting.count(out, read)
        return out


class Free:
    """Attention that costs nothing here: it is estimated by its operations."""

    def attention(self, query: Tensor, *rest: Any) -> Tensor:
        return query.view_as(query)


def count(*, kernels: bool) -> Counting:
    """Count one layer in the middle of the model."""
    counting, device = Counting(), torch.device("meta")
    with device:
        config = Qwen3Config(
            **SHAPES["qwen3-4b"] | {"num_hidden_layers": 1},
            tie_word_embeddings=True,
            max_position_embeddings=40_960,
        )
        base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).requires_grad_(False)
        model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=16, target_modules=LAYERS))
    fused = FusedDecoder.of(model.get_base_model(), merge=False)
    assert fused is not None
    fused.refresh()
    (layer,) = fused._layers
    for norm in layer.norms if kernels else ():
        norm.kernels = OneEach(counting)
    hidden = torch.empty(
        TOKENS, config.hidden_size, dtype=torch.bfloat16, device=device, requires_grad=True
    )
    angles = torch.empty(TOKENS, 1, config.head_dim, dtype=torch.bfloat16, device=device)
    with counting:
        after = layer.forward(hidden, (angles, angles), 1, Free(), None, 0)
        counting.kind = "backward"
        after.backward(torch.empty_like(after))
    return counting


def main() -> None:
    shape, lines = SHAPES["qwen3-4b"], []
    causal = 2 * TOKENS**2 * shape["num_attention_heads"] * shape["head_dim"]
    for kernels in (False, True):
        found = count(kernels=kernels)
        seconds = {}
        for kind, share in (("forward", 1.0), ("backward", 2.5)):
            streamed = found.moved[kind] / BANDWIDTH
            seconds[kind] = (
                shape["num_hidden_layers"] * (found.flops[kind] / TERA_FLOPS + share * causal / ATTENTION_TERA_FLOPS[kind] + streamed)
            )  # fmt: skip
        total, checkpointed = sum(seconds.values()), sum(seconds.values()) + seconds["forward"]
        lines.append(
            ["Triton" if kernels else "torch"]
            + [found.kernels[kind] for kind in seconds]
            + [f"{found.moved[kind] / 1e9:.1f}" for kind in seconds]
            + [f"{time:.2f} s, {TOKENS / time:,.0f} tok/s" for time in (total, checkpointed)]
        )
    columns = [
        "operators forward",
        "backward",
        "GB forward",
        "backward",
        "36 layers (estimate, H100)",
        "checkpointed (estimate)",
    ]
    print(table(["between products, one layer", *columns], lines))


if __name__ == "__main__":
    main()

"""Triton's kernels for prompts and for learning against torch's operators: on a GPU, or in Triton's
interpreter.
"""

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from retrain.model import fused as fused_decoder
from retrain.model import layer_kernels as layers
from retrain.model import step_kernels as steps
from retrain.model.functions import Norm, apply_rope, gate_gradient, gated, normed
from retrain.model.fused import FusedDecoder
from retrain.model.layer_kernels import TritonLayers, differences, layer_kernels
from tests.decoding import tiny, with_adapter

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs the package triton"
)
DEVICE = (
    "cuda" if torch.cuda.is_available() else "cpu"
)  # where conftest.py turns the interpreter on
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.bfloat16: {"rtol": 2**-7, "atol": 2**-8},
}


@pytest.fixture(autouse=True)
def _on_device() -> Iterator[None]:
    with torch.device(DEVICE):
        yield


def make(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(
        *shape, generator=torch.Generator("cpu").manual_seed(seed + sum(shape)), device="cpu"
    ).to(DEVICE, dtype)


def assert_near(found: Tensor, expected: Tensor, same: float) -> None:
    """`same`: the share of numbers in bfloat16 that are equal; a sum in float32 may come out on the
    other side of a rounding.
    """
    torch.testing.assert_close(found, expected, **TOLERANCE[expected.dtype])
    assert (found == expected).float().mean() > (same if expected.dtype == torch.bfloat16 else 0), (
        "rounded at other places"
    )


def with_kernels(norm: Norm) -> Norm:
    norm.kernels = TritonLayers()
    return norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [32, 77])
def test_a_norm_and_its_gradient(dtype: torch.dtype, size: int) -> None:
    weight, gradient = make(size, dtype=dtype), make(5, size + 1, dtype=dtype)[:, :size]
    results = []
    for norm in (with_kernels(Norm(weight, 1e-6)), Norm(weight, 1e-6)):
        x = make(5, size, dtype=dtype, seed=1).requires_grad_()
        y = normed(x, norm)
        results.append((y, torch.autograd.grad(y, x, gradient)[0]))
    for found, expected, same in zip(*results, (0.98, 0.9), strict=True):
        assert_near(found, expected, same)
    norm = with_kernels(Norm(weight, 1e-6))
    assert torch.equal(norm(x, norm.scale(x)), results[0][0]), (
        "computed again, it has the same bits"
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "heads", "size"), [(3, 2, 8), (20, 5, 20)])
def test_normed_heads_that_turn_and_their_gradient(
    dtype: torch.dtype, rows: int, heads: int, size: int
) -> None:
    """Heads of a wider tensor, and gradients that lie head by head."""
    weight, angles = (
        make(heads, size, dtype=dtype),
        make(rows, 1, size // 2, dtype=torch.float32).repeat(1, 1, 2),
    )
    gradient = make(heads, rows, size, dtype=dtype).transpose(0, 1)
    results = []
    for norm in (with_kernels(Norm(weight, 1e-6)), Norm(weight, 1e-6)):
        qkv = make(rows, heads + 3, size, dtype=dtype, seed=1).requires_grad_()
        turned = apply_rope(qkv[:, :heads], angles.cos().to(dtype), angles.sin().to(dtype), norm)
        results.append((turned, torch.autograd.grad(turned, qkv, gradient)[0]))
    for found, expected, same in zip(*results, (0.98, 0.85), strict=True):
        assert_near(found, expected, same)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [48, 1030])
def test_the_gradient_of_a_gated_activation(dtype: torch.dtype, size: int) -> None:
    gates, grad, kernels = (
        make(3, 2 * size, dtype=dtype) * 3,
        make(3, size, dtype=dtype),
        TritonLayers(),
    )
    found = kernels.gate_gradient(grad, gates)
    assert_near(kernels.gate(gates), gated(gates, None), 0.98)
    assert_near(
        found, gate_gradient(grad.clone(), gates, torch.nn.functional.silu(gates[:, :size])), 0.95
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "kernel",
    ["norm", "norm_gradient", "apply_rope", "apply_rope_gradient", "gate", "gate_gradient"],
)
def test_a_kernel_that_is_wrong_is_not_used(
    dtype: torch.dtype, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    assert layer_kernels(torch.device(DEVICE), dtype, said.append) is not None and not said

    def wrong(*given: Any) -> Any:
        found = right(*given)
        return (found[0] * 1.1, found[1]) if isinstance(found, tuple) else found * 1.1

    kernels = TritonLayers()
    right = getattr(kernels, kernel)
    setattr(kernels, kernel, wrong)
    assert kernel in differences(kernels, torch.device(DEVICE), dtype)
    monkeypatch.setattr(layers, "TritonLayers", lambda: kernels)
    assert layer_kernels(torch.device(DEVICE), dtype, said.append) is None
    assert "differ" in said[0] and kernel in said[0]


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_a_model_has_the_same_gradients_with_kernels(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With norms of heads and without."""
    found = []
    for triton_devices in (set(), {DEVICE}):
        for module in (steps, fused_decoder):
            monkeypatch.setattr(module, "TRITON_DEVICES", triton_devices)
        model = with_adapter(tiny(family)).to(DEVICE)
        fused = FusedDecoder.of(model.get_base_model(), merge=False)
        assert fused is not None and (fused._norm.kernels is not None) == bool(triton_devices)
        fused.refresh()
        hidden = fused.hidden_states(
            torch.arange(20).view(2, 10),
            torch.arange(10).repeat(2, 1),
            fused_decoder.CausalAttention(),
        )
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        found.append(
            [
                hidden,
                *torch.autograd.grad(
                    (hidden * make(*hidden.shape, dtype=hidden.dtype)).sum(), trained
                ),
            ]
        )
    assert len(found[0]) > 10 and all(gradient.any() for gradient in found[0])
    for plain, own in zip(*found, strict=True):
        assert (own - plain).norm() < 1e-5 * plain.norm()

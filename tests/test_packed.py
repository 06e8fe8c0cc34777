"""The sampler's layouts of a frozen weight: which one it gets, and what their products are."""

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear

from retrain.model import packed
from retrain.model.packed import PackedWeight, dense_product
from retrain.model.projection import Projection


def _weight() -> torch.Tensor:
    return torch.randn(520, 320, generator=torch.Generator().manual_seed(0)) * 0.02


@pytest.mark.parametrize("outputs", [4, 520])
def test_a_large_weight_is_packed_and_the_product_is_the_same(outputs: int) -> None:
    weight, bias, x = _weight()[:outputs], torch.randn(outputs), torch.randn(3, 7, 320)
    held = PackedWeight(weight, bias)
    assert held._packed is (outputs == 520)
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(held.product(x).double(), exact, rtol=0, atol=5e-6)


def adapted(base):
    layer = Linear(base, "default", LoraConfig(), r=4, lora_alpha=8)
    layer.lora_B["default"].weight.data.normal_(std=0.3)  # peft begins with zeros
    return layer


def test_a_float32_copy_contains_the_adapter_and_follows_it():
    layer = adapted(torch.nn.Linear(320, 520, bias=False))
    projection, x = Projection([layer]), torch.randn(5, 320)
    with torch.no_grad():
        for factor in (1.0, 3.0):
            layer.lora_B["default"].weight.mul_(factor)
            projection.refresh(copy=True)
            assert projection.copy._packed
            torch.testing.assert_close(projection.copy.product(x), layer(x), rtol=0, atol=2e-5)
            torch.testing.assert_close(projection.product(x)[0], layer(x), rtol=0, atol=2e-5)
        projection.refresh(copy=False)
        assert projection.copy is None


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this processor packs no bf16 weights"
)
def test_a_bf16_weight_and_its_adapter_are_one_product_that_rounds_once(monkeypatch):
    monkeypatch.setattr(packed, "computes_bf16", lambda: True)
    base = torch.nn.Linear(320, 520, bias=False)
    layer = adapted(base)
    layer.bfloat16()
    projection, x = Projection([layer]), torch.randn(5, 320).bfloat16()

    def is_rounded_once() -> bool:
        down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        exact = x.double() @ base.weight.double().T
        if projection.adapted:
            exact += 2 * torch.nn.functional.linear(x, down).double() @ up.double().T
        difference = (projection.product(x)[0].double() - exact).abs()
        return bool((difference <= 2.0**-8 * exact.abs() + 1e-5 * exact.abs().max()).all())

    with torch.no_grad():
        for factor in (1.0, 3.0):
            layer.lora_B["default"].weight.mul_(factor)
            projection.refresh(copy=True)
            assert projection.copy._packed and is_rounded_once()
            layer.enable_adapters(enabled=False)
            assert is_rounded_once()
            layer.enable_adapters(enabled=True)
        projection.refresh(copy=False)
        assert projection.copy is None


def test_a_weight_without_an_adapter_is_laid_out_once():
    layer = torch.nn.Linear(320, 520).requires_grad_(False)
    projection = Projection([layer])
    projection.refresh(copy=True)
    held = projection.copy
    projection.refresh(copy=True)
    assert projection.copy is held is not None


@pytest.mark.parametrize("rows", [1, 37])
def test_products_on_an_amd_processor_are_those_of_others(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    x, gradient, bias = torch.randn(rows, 320), torch.randn(rows, 520), torch.randn(520)
    weight = _weight()
    wide = weight.double()
    for amd in (True, False):
        monkeypatch.setattr(packed, "_is_amd", lambda amd=amd: amd)
        # oneDNN's operator has no use for `out`.
        memory = torch.empty(rows, 520)
        product = dense_product(x, weight, bias, memory)
        assert (product is memory) is not amd
        torch.testing.assert_close(product.double(), x.double() @ wide.T + bias, rtol=0, atol=5e-6)
        product = dense_product(gradient, weight.T).double()
        torch.testing.assert_close(product, gradient.double() @ wide, rtol=0, atol=5e-6)

"""The sampler's layouts of a frozen weight: which one it gets, and what their products are."""

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear

from retrain.model import packed
from retrain.model.packed import HalfWeight, PackedWeight, dense_product, fits_half, prepack
from retrain.model.projection import Projection

pytestmark = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="this torch has no FBGEMM"
)


def _weight(*, trained_in: torch.dtype, outputs: int = 520, inputs: int = 320) -> torch.Tensor:
    values = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)) * 0.02
    return values.to(trained_in).float()


def test_a_weight_is_held_in_16_bits_where_these_hold_every_value():
    weight = _weight(trained_in=torch.bfloat16)
    assert isinstance(prepack(weight, None), HalfWeight)
    assert isinstance(prepack(_weight(trained_in=torch.float32), None), PackedWeight)
    assert not fits_half(weight.bfloat16()) and not fits_half(weight[:4])
    for outside in (
        1 + 2.0**-12,
        float("inf"),
        float("nan"),
    ):  # beyond float16's precision, and no numbers
        weight[519, 319] = outside
        assert not fits_half(weight)


def test_the_product_in_16_bits_is_that_of_float32():
    weight, bias = _weight(trained_in=torch.bfloat16), torch.randn(520)
    x = torch.randn(3, 7, 320)
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(
        HalfWeight(weight, bias).product(x).double(), exact, rtol=0, atol=5e-6
    )


@pytest.mark.parametrize("size", [1e-20, 1e-8, 1e-5, 1.0, 1e3, 1e20])
def test_small_and_large_weights_are_as_exact_as_others(size: float) -> None:
    """Whole weights, and one output among others: float16 alone would lose or overflow them."""
    weight, x = _weight(trained_in=torch.bfloat16), torch.randn(8, 320)
    single = weight.clone()
    single[7], weight = (single[7] * size).bfloat16().float(), (weight * size).bfloat16().float()
    for values in (weight, single):
        held = prepack(values, None)
        assert isinstance(held, HalfWeight)
        exact = x.double() @ values.double().T
        error = (held.product(x).double() - exact).norm(dim=0) / exact.norm(dim=0)
        assert error.max() < 5e-6


@pytest.mark.parametrize("size", [1e-8, 1e-5, 1.0, 1e3])
def test_weights_trained_in_float32_are_never_halved(size: float) -> None:
    assert not fits_half(_weight(trained_in=torch.float32) * size)
    one = _weight(trained_in=torch.bfloat16)
    one[7] = torch.randn(320, generator=torch.Generator().manual_seed(1)) * size
    assert not fits_half(one)
    assert isinstance(prepack(torch.zeros(520, 320), None), HalfWeight)


@pytest.mark.parametrize("size", [1e2, 1e3, 1e4, 1e5])
def test_an_output_keeps_its_precision_where_the_input_of_its_largest_weight_is_0(
    size: float,
) -> None:
    x = torch.randn(8, 320, generator=torch.Generator().manual_seed(1))
    x[:, 7] = 0
    for trained_in in (torch.float32, torch.bfloat16):
        weight = _weight(trained_in=trained_in)
        weight[:, 7] = torch.tensor(size).bfloat16().float()
        held = prepack(weight, None)
        assert isinstance(held, HalfWeight) == (trained_in == torch.bfloat16)
        exact = x.double() @ weight.double().T
        assert (held.product(x).double() - exact).norm() < 1e-6 * exact.norm()


def test_a_row_has_the_same_bits_whatever_the_rows_beside_it():
    held, x = HalfWeight(_weight(trained_in=torch.bfloat16), None), torch.randn(65, 320)
    whole = held.product(x)
    assert all(
        torch.equal(held.product(x[start : start + rows]), whole[start : start + rows])
        for rows in range(1, 34)
        for start in (0, 31)
    )


def adapted(base):
    layer = Linear(base, "default", LoraConfig(), r=4, lora_alpha=8)
    layer.lora_B["default"].weight.data.normal_(std=0.3)  # peft begins with zeros
    return layer


def test_a_weight_in_16_bits_takes_the_adapter_beside_it_and_is_laid_out_once():
    base = torch.nn.Linear(320, 520, bias=False)
    base.weight.data = _weight(trained_in=torch.bfloat16)
    layer = adapted(base)
    projection, x = Projection([layer]), torch.randn(5, 320)
    with torch.no_grad():
        projection.refresh("merged")
        held = projection.copy
        assert isinstance(held, HalfWeight)
        torch.testing.assert_close(projection.product(x)[0], layer(x), rtol=0, atol=5e-6)
        layer.lora_B["default"].weight.mul_(3.0)
        projection.refresh("merged")
        assert projection.copy is held
        torch.testing.assert_close(projection.product(x)[0], layer(x), rtol=0, atol=5e-6)
        projection.refresh("none")
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
            projection.refresh("merged")
            assert projection.copy._packed and is_rounded_once()
            layer.enable_adapters(enabled=False)
            assert is_rounded_once()
            layer.enable_adapters(enabled=True)
        projection.refresh("none")
        assert projection.copy is None


def test_a_weight_without_an_adapter_is_laid_out_once():
    layer = torch.nn.Linear(320, 520)
    projection = Projection([layer])
    projection.refresh("merged")
    held = projection.copy
    projection.refresh("merged")
    assert projection.copy is held is not None


@pytest.mark.parametrize("rows", [1, 37])
def test_products_on_an_amd_processor_are_those_of_others(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    x, gradient, bias = torch.randn(rows, 320), torch.randn(rows, 520), torch.randn(520)
    weight = _weight(trained_in=torch.float32)
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

"""Triton's kernels of a decoding step against the torch forms that they stand in for: on a GPU, or
in Triton's interpreter.
"""

import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from retrain.inference_engine.base import BASE_MODEL, NoiseKey, SampleRequest, Truncation
from retrain.inference_engine.sampling import draw_scaled
from retrain.inference_engine.torch_engine import TorchEngine
from retrain.model import fused as fused_decoder
from retrain.model import layer_kernels as layers
from retrain.model import step_kernels as steps
from retrain.model.devices import EngineOptions
from retrain.model.functions import Norm
from retrain.model.fused import FusedDecoder
from retrain.model.packed import hold_layers_in_float8, quantised
from retrain.model.projection import LoraTerm
from retrain.model.step_kernels import (
    Heads,
    StepKernels,
    TritonKernels,
    differences,
    step_kernels,
)
from retrain.model.truncation import FixedKeptSets
from retrain.model.varlen import PagedRows, plain_paged
from tests.decoding import assert_same, requests, run, tiny, with_adapter

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs the package triton"
)
DEVICE = (
    "cuda" if torch.cuda.is_available() else "cpu"
)  # where conftest.py turns the interpreter on
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.bfloat16: {"rtol": 2**-7, "atol": 2**-9},
}
"""A last bit of bfloat16, where a sum in float32 came out on the other side of a rounding."""


@pytest.fixture(autouse=True)
def _on_device() -> Iterator[None]:
    with torch.device(DEVICE):
        yield


@pytest.fixture
def kernels() -> StepKernels:
    return TritonKernels()


def make(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(
        *shape, generator=torch.Generator("cpu").manual_seed(seed + sum(shape)), device="cpu"
    ).to(DEVICE, dtype)


def low_rank(rows: int, rank: int, size: int, dtype: torch.dtype) -> LoraTerm | None:
    """A product that is about 1/4 and still to be added, whose left factors lie beside other
    numbers.
    """
    return (
        LoraTerm(
            make(rows, rank + 3, dtype=dtype)[:, :rank],
            make(rank, size, dtype=dtype) / (4 * rank**0.5),
        )
        if rank
        else None
    )


def assert_near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, **TOLERANCE[expected.dtype])
    assert (found == expected).float().mean() > (0.98 if expected.dtype == torch.bfloat16 else 0), (
        "rounded at other places"
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [32, 77])
def test_a_sum_and_its_norm(kernels: StepKernels, dtype: torch.dtype, size: int) -> None:
    norm, apart = Norm(make(size, dtype=dtype), 1e-6), make(3, size + 5, dtype=dtype)[:, :size]
    for update in (None, apart):
        found, expected = make(3, size, dtype=dtype, seed=2), make(3, size, dtype=dtype, seed=2)
        assert_near(
            kernels.add_norm(found, update, norm), StepKernels().add_norm(expected, update, norm)
        )
        assert torch.equal(found, expected), "the residual stream is the rounded sum"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("queries", "keys", "size", "has_norm"), [(4, 2, 8, True), (14, 2, 20, True), (3, 1, 6, False)]
)
@pytest.mark.parametrize("rank", [0, 5, 70])
def test_heads_are_normed_turned_and_stored(
    kernels: StepKernels,
    dtype: torch.dtype,
    queries: int,
    keys: int,
    size: int,
    has_norm: bool,
    rank: int,
) -> None:
    """Of fewer rows than a program has and of more, with the adapter's part, of more ranks than are
    added at once, and without.
    """
    heads, width = (queries, keys, keys), (queries + 2 * keys) * size
    count = 20 if rank == 5 else 3
    qkv, pending = (
        make(count, width + 3, dtype=dtype)[:, :width],
        low_rank(count, rank, width, dtype),
    )
    half = make(count, 1, size // 2, dtype=torch.float32)
    rotary = (
        torch.cat([half.cos(), half.cos()], -1).to(dtype),
        torch.cat([half.sin(), half.sin()], -1).to(dtype),
    )
    norm = Norm(make(queries + keys, size, dtype=dtype), 1e-6) if has_norm else None
    places = torch.arange(count).flip(0) * 4 + 5
    found, expected = (
        [torch.full((count + 1, 4, keys, size), 7.0, dtype=dtype) for _ in range(2)]
        for _ in range(2)
    )
    turned = kernels.apply_rope_and_store_kv(
        qkv.clone(), pending, heads, rotary, norm, tuple(found), places
    )
    assert_near(
        turned,
        StepKernels().apply_rope_and_store_kv(
            qkv, pending, heads, rotary, norm, tuple(expected), places
        ),
    )
    assert_near(found[0], expected[0])
    assert_near(found[1], expected[1])
    untouched = torch.ones(count * 4 + 4, dtype=torch.bool).index_fill_(0, places, False)
    assert (found[1].flatten(0, 1)[untouched] == 7).all() and (
        rank or torch.equal(found[1], expected[1])
    ), "values are copied"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(2, 48), (17, 70), (2, 1030)])
@pytest.mark.parametrize("rank", [0, 5, 70])
def test_the_gated_activation(
    kernels: StepKernels, dtype: torch.dtype, rows: int, size: int, rank: int
) -> None:
    gates, pending = (
        make(rows, 2 * size + 1, dtype=dtype)[:, : 2 * size] * 3,
        low_rank(rows, rank, 2 * size, dtype),
    )
    assert_near(kernels.gate(gates.clone(), pending), StepKernels().gate(gates, pending))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 128, 16), (3, 40, 21), (20, 200, 70), (257, 8, 5)]
)
def test_a_product_with_weights_in_eight_bits(
    kernels: StepKernels, dtype: torch.dtype, rows: int, inputs: int, outputs: int
) -> None:
    """Fewer rows, inputs and outputs than a block has and more, with a bias and without, up to the
    rows for which the weight is widened.
    """
    x = make(rows, inputs + 3, dtype=dtype)[:, :inputs]
    weight, scale = quantised(make(outputs, inputs, dtype=dtype) / inputs**0.5)
    for bias in (None, make(outputs, dtype=dtype)):
        assert_near(
            kernels.scaled_product(x, weight, scale, bias),
            StepKernels().scaled_product(x, weight, scale, bias),
        )


def test_every_number_of_eight_bits_is_widened_exactly(kernels: StepKernels) -> None:
    """Zeros of both signs, the smallest, which have no leading one, and the largest; not the two
    that are no number.
    """
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes % 128 != 127].view(torch.float8_e4m3fn)
    found = kernels.scaled_product(
        torch.eye(len(codes)), codes.expand(16, -1).contiguous(), torch.ones(16, 1), None
    )
    assert torch.equal(found, codes.float()[:, None].expand(-1, 16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "key_heads", "size"), [(4, 2, 8), (6, 1, 24)])
@pytest.mark.parametrize("window", [None, 3, 100])
def test_attention_over_pages(
    kernels: StepKernels,
    dtype: torch.dtype,
    heads: int,
    key_heads: int,
    size: int,
    window: int | None,
) -> None:
    """Rows of one token, of a page and of several blocks, whose pages lie anywhere; a row alone has
    the same bits.
    """
    query = make(4, heads + 2, size, dtype=dtype)[:, :heads]
    pages = (
        make(60, 4, key_heads, size, dtype=dtype),
        make(60, 4, key_heads, size, dtype=dtype, seed=1),
    )
    table = (
        torch.randperm(60, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
        .to(DEVICE, torch.int32)[:44]
        .view(2, 22)
    )
    table, lengths = table.repeat(2, 1), torch.tensor([1, 86, 4, 65], dtype=torch.int32)
    found = kernels.attend(query, *pages, PagedRows.of(table, lengths, 4), 0.3, window)
    expected = plain_paged(
        query.float(),
        *(page.float() for page in pages),
        PagedRows.of(table, lengths, 4),
        0.3,
        window,
    )
    bound = {"rtol": 2**-6, "atol": 2**-8} if dtype == torch.bfloat16 else TOLERANCE[dtype]
    torch.testing.assert_close(found.float(), expected, **bound)
    for row in range(4):
        alone = kernels.attend(
            query[row : row + 1],
            *pages,
            PagedRows.of(table[row : row + 1], lengths[row : row + 1], 4),
            0.3,
            window,
        )
        assert torch.equal(alone[0], found[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 3, 70, 1100])
@pytest.mark.parametrize(("page_tokens", "part"), [(4, 64), (64, 128)])
def test_long_rows_are_attended_in_parts(
    kernels: StepKernels,
    dtype: torch.dtype,
    window: int | None,
    page_tokens: int,
    part: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No token, and up to two parts of 64 and twenty, which are more than are added at once; a row
    of one part has the bits of a row that is not cut.
    """
    from retrain.model.kernels import attention

    query, lengths = (
        make(5, 6, 8, dtype=dtype),
        torch.tensor([0, 1, 64, 65, 1250], dtype=torch.int32),
    )
    pages = (
        make(1280 // page_tokens, page_tokens, 2, 8, dtype=dtype),
        make(1280 // page_tokens, page_tokens, 2, 8, dtype=dtype, seed=1),
    )
    table = torch.arange(1280 // page_tokens, dtype=torch.int32).flip(0).repeat(5, 1)
    rows = PagedRows.of(table, lengths, page_tokens)
    monkeypatch.setattr(attention, "PART", 2048)
    uncut = kernels.attend(query, *pages, rows, 0.3, window)
    monkeypatch.setattr(attention, "PART", part)
    found = kernels.attend(query, *pages, rows, 0.3, window)
    expected = plain_paged(query.float(), *(page.float() for page in pages), rows, 0.3, window)
    bound = {"rtol": 2**-6, "atol": 2**-8} if dtype == torch.bfloat16 else TOLERANCE[dtype]
    torch.testing.assert_close(found[1:].float(), expected[1:], **bound)
    assert torch.equal(found[:3], uncut[:3]) and not found[0].any()


# -- the sampler -----------------------------------------------------------------------------------


def by_torch(
    logits: Tensor, temperatures: Tensor, uniforms: Tensor, cuts: tuple[Tensor, ...] | None
) -> Tensor:
    """What FixedStep.draw computes where no kernel draws."""

    def keep(z: Tensor, weights: Tensor) -> FixedKeptSets:
        assert cuts is not None
        return FixedKeptSets.of_device_cuts(z, weights.sum(-1, dtype=torch.float64), *cuts)

    greedy = temperatures == 0
    z = logits.float() / torch.where(greedy, 1.0, temperatures)[:, None]
    return torch.cat(
        [
            column.double()
            for column in draw_scaled(z, uniforms, greedy, None if cuts is None else keep)
        ],
        dim=1,
    )


def sharp(rows: int, vocabulary: int, dtype: torch.dtype) -> Tensor:
    """Logits of which a few tokens have most of the probability, in a tensor whose rows lie
    apart.
    """
    return make(rows, vocabulary + 3, dtype=torch.float32)[:, :vocabulary].mul(3).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [5, 2048, 5003])
def test_a_draw_is_that_of_the_torch_form(
    kernels: StepKernels, dtype: torch.dtype, vocabulary: int
) -> None:
    """Vocabularies of less than a block, of one, and of several that they do not fill; greedy rows
    and others.
    """
    logits, uniforms = (
        sharp(6, vocabulary, dtype) / torch.tensor([1, 4]).repeat(3)[:, None].to(dtype),
        torch.linspace(0.05, 0.97, 6, dtype=torch.float64),
    )
    temperatures = torch.tensor([1.0, 0.7, 0.0, 1.3, 0.2, 0.0])
    found, expected = (
        kernels.draw(logits, temperatures, uniforms, None),
        by_torch(logits, temperatures, uniforms, None),
    )
    torch.testing.assert_close(found[:, :3], expected, rtol=0, atol=2e-6)
    assert not found[:, 3].any()


def test_a_greedy_row_takes_the_lowest_id_of_the_largest(kernels: StepKernels) -> None:
    logits = torch.zeros(2, 5003)
    logits[0, [4500, 2300, 2301]] = 9.0
    found = kernels.draw(logits, torch.zeros(2), torch.full((2,), 0.9, dtype=torch.float64), None)
    assert found[:, 0].tolist() == [2300, 0] and not found[:, 1:3].any()


def test_a_token_of_probability_zero_is_never_drawn(kernels: StepKernels) -> None:
    """Tokens at -inf, tokens far below the largest, whole blocks of them, and uniforms at both
    ends.
    """
    logits = torch.full((4, 5003), -torch.inf)
    logits[:, [7, 4999]] = torch.tensor([1.0, 1.5])
    logits[:, 2048:4000] = -200.0
    uniforms = torch.tensor([1e-300, 0.3, 0.999999, 1 - 1e-16], dtype=torch.float64)
    found, expected = (of(logits, torch.ones(4), uniforms, None) for of in (kernels.draw, by_torch))
    assert found[:, 0].tolist() == [7, 7, 4999, 4999]
    torch.testing.assert_close(found[:, :3], expected, rtol=0, atol=2e-6)
    at_zero = kernels.draw(logits, torch.ones(4), torch.zeros(4, dtype=torch.float64), None)
    assert at_zero[:, 0].tolist() == [7] * 4


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_numbers_that_are_not_finite_show_in_the_log_prob(
    kernels: StepKernels, bad: float, temperature: float
) -> None:
    """One NaN or +inf among others, or -inf everywhere; the next row is as it was, and the token is
    one of the vocabulary.
    """
    logits = sharp(2, 3000, torch.float32).clone()
    expected = by_torch(logits, torch.ones(2), torch.full((2,), 0.5, dtype=torch.float64), None)
    logits[0, 2048:] = -300.0  # tokens without weight, among which it stands
    logits[0, 2500 if bad != -torch.inf else slice(None)] = bad
    for cuts in (None, (torch.tensor([5, 0]), torch.ones(2).double(), torch.zeros(2).double())):
        found = kernels.draw(
            logits,
            torch.tensor([temperature, 1.0]),
            torch.full((2,), 0.5, dtype=torch.float64),
            cuts,
        )
        assert not found[0, 1:3].isfinite().all() and 0 <= found[0, 0] < 3000
        torch.testing.assert_close(found[1, :3], expected[1], rtol=0, atol=2e-6)


CUTS: list[dict[str, Any]] = [
    {},
    {"top_k": 9999},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"top_k": 40, "top_p": 0.9},
]
CUTS += [{"top_k": 30, "min_p": 0.01, "top_p": 0.95}, {"top_p": 1e-9}]


@pytest.mark.parametrize("dtype", DTYPES)
def test_kept_sets_are_those_of_a_sorted_vocabulary(
    kernels: StepKernels, dtype: torch.dtype
) -> None:
    """In bfloat16 many tokens are equal, and the lower ids come first."""
    logits, count = sharp(len(CUTS), 1500, dtype), len(CUTS)
    top_k = torch.tensor([cut.get("top_k", 0) for cut in CUTS])
    top_p = torch.tensor([cut.get("top_p", 1.0) for cut in CUTS], dtype=torch.float64)
    min_p = torch.tensor([cut.get("min_p", 0.0) for cut in CUTS], dtype=torch.float64)
    temperatures, uniforms = (
        torch.tensor([1.0, 0.7, 0.0])[torch.arange(count) % 3],
        torch.linspace(0.999, 0.03, count).double(),
    )
    found, expected = (
        of(logits, temperatures, uniforms, (top_k, top_p, min_p)) for of in (kernels.draw, by_torch)
    )
    assert found[:, 3].tolist() == expected[:, 3].tolist()
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


def test_equal_tokens_are_cut_by_their_id(kernels: StepKernels) -> None:
    """Five equal tokens in two blocks, of which three are kept: the last of these is drawn by a
    uniform near 1.
    """
    logits = torch.full((1, 4000), -3.0)
    logits[0, [10, 900, 2047, 2048, 3999]] = 5.0
    cuts = torch.tensor([3]), torch.ones(1).double(), torch.zeros(1).double()
    found = kernels.draw(logits, torch.ones(1), torch.tensor([0.9999], dtype=torch.float64), cuts)[
        0
    ]
    assert found[0] == 2047 and found[3] == 3
    np.testing.assert_allclose(found[1], -np.log(3), atol=1e-6)


# -- where they are used ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "heads", [Heads(4, 2, 8), Heads(32, 8, 128), Heads(14, 2, 64), Heads(5, 1, 96)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_probe_passes_kernels_that_are_right(
    kernels: StepKernels, dtype: torch.dtype, heads: Heads
) -> None:
    assert differences(kernels, torch.device(DEVICE), dtype, heads, narrow=True) == []


def test_a_kernel_that_does_not_fit_the_models_heads_is_not_used(
    on_triton: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of 256 take more shared memory than a consumer's GPU has, with Triton 3.4."""
    from retrain.model.kernels import attention

    model, said, attend = tiny(head_dim=16), list[str](), attention.attend
    too_large = model.config.head_dim

    def overflowing(query: Tensor, *others: Any) -> Tensor:
        if query.shape[-1] >= too_large:
            raise RuntimeError("out of resource: shared memory")
        return attend(query, *others)

    monkeypatch.setattr(attention, "attend", overflowing)
    fused = FusedDecoder.of(model, merge=False, log=said.append)
    assert fused is not None and type(fused.kernels) is StepKernels and "shared memory" in said[0]


def test_a_kernel_that_is_wrong_is_not_used(
    kernels: StepKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "TRITON_DEVICES", {DEVICE})
    said: list[str] = []
    assert (
        isinstance(step_kernels(torch.device(DEVICE), torch.float32, said.append), TritonKernels)
        and not said
    )
    right = TritonKernels()
    right.gate = lambda *gates: StepKernels().gate(*gates) * 1.01  # type: ignore[method-assign]
    monkeypatch.setattr(steps, "TritonKernels", lambda: right)
    assert type(step_kernels(torch.device(DEVICE), torch.float32, said.append)) is StepKernels
    assert "differ" in said[0] and "gate" in said[0]


def test_kernels_that_do_not_compile_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> TritonKernels:
        raise RuntimeError("no compiler")

    said: list[str] = []
    monkeypatch.setattr(steps, "TRITON_DEVICES", {DEVICE})
    monkeypatch.setattr(steps, "TritonKernels", failing)
    monkeypatch.setattr(layers, "TritonLayers", failing)
    assert type(step_kernels(torch.device(DEVICE), torch.float32, said.append)) is StepKernels
    assert layers.layer_kernels(torch.device(DEVICE), torch.float32, said.append) is None
    assert ["do not compile here (RuntimeError: no compiler)" in line for line in said] == [
        True,
        True,
    ]


def test_the_probe_sees_a_truncated_draw_that_forgets_a_cut(kernels: StepKernels) -> None:
    right = kernels.draw
    assert right is not None
    for forgotten in range(3):
        off = (0, 1.0, 0.0)[forgotten]
        wrong = TritonKernels()
        wrong.draw = lambda logits, temperatures, uniforms, cuts, place=forgotten, value=off: right(
            logits,
            temperatures,
            uniforms,
            cuts
            and tuple(
                torch.full_like(cut, value) if n == place else cut for n, cut in enumerate(cuts)
            ),
        )
        assert differences(wrong, torch.device(DEVICE), torch.float32) == ["draw"]


def drawn(model: Any, asked: list[SampleRequest], *, merge: bool = False) -> Any:
    fused = FusedDecoder.of(
        getattr(model, "base_model", model).model if hasattr(model, "peft_config") else model,
        merge=merge,
    )
    assert fused is not None
    engine = TorchEngine(
        model, [], DEVICE, options=EngineOptions(paged=True, page_tokens=8), fused=fused
    )
    return fused, run(engine, asked)


def drawn_by_torch(model: Any, asked: list[SampleRequest]) -> Any:
    """What an engine of torch's operators draws, with the adapter where peft holds it."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (steps, fused_decoder):
            patch.setattr(module, "TRITON_DEVICES", set())
        return run(TorchEngine(model, [], DEVICE), asked)


@pytest.fixture
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (steps, fused_decoder):
        monkeypatch.setattr(module, "TRITON_DEVICES", {DEVICE})


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "mistral"])
def test_a_whole_decode_with_kernels_draws_the_same(family: str, on_triton: None) -> None:
    """With norms of heads and without, with a bias, in a window; an adapter under the weights; the
    prompts fill a page and a part.
    """
    model, asked = (
        with_adapter(tiny(family)).to(DEVICE),
        requests(count=1, many=2, max_tokens=4, temperature=0.7),
    )
    fused, found = drawn(model, asked)
    assert isinstance(fused.kernels, TritonKernels) and fused._projections[0]._joined is not None
    assert_same(found, drawn_by_torch(with_adapter(tiny(family)).to(DEVICE), asked), atol=1e-4)


def test_a_decode_with_weights_in_eight_bits_draws_the_same(
    on_triton: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def narrow() -> Any:
        model = tiny("qwen2")
        hold_layers_in_float8(model.base_model, "tiny")
        return with_adapter(model).to(DEVICE)

    asked, model = requests(count=1, many=1, max_tokens=3, temperature=0.7), narrow()
    called: list[int] = []
    product = TritonKernels().scaled_product
    counting = TritonKernels()
    counting.scaled_product = lambda *given: (called.append(len(given[0])), product(*given))[1]
    monkeypatch.setattr(steps, "TritonKernels", lambda: counting)
    fused, found = drawn(model, asked)
    assert fused._projections[0]._joined is None and len(called) > 2 * 12, (
        "three layers of four projections, in each step"
    )
    assert_same(found, drawn_by_torch(narrow(), asked), atol=1e-4)


def test_truncated_and_greedy_rows_and_those_of_the_base_model_draw_the_same(
    on_triton: None,
) -> None:
    model, prompt = with_adapter(tiny()).to(DEVICE), np.arange(3, 9, dtype=np.int32)
    cuts = Truncation(), Truncation(top_k=9), Truncation(top_p=0.7)
    asked = [
        SampleRequest(prompt, 1, 2, temperature, NoiseKey(1, 0, 0, number), 0, slot, truncation=cut)
        for number, (slot, temperature, cut) in enumerate(
            zip((BASE_MODEL, 0, 0), (0.8, 0.0, 1.0), cuts, strict=True)
        )
    ]
    _, found = drawn(model, asked)
    assert_same(found, drawn_by_torch(model, asked), atol=1e-4)


def test_the_adapter_under_the_weights_follows_the_learner(on_triton: None) -> None:
    """The model's own weights stay what they were, the step sees a change of the adapter, and a
    second look finds the same layout.
    """
    model = with_adapter(tiny()).to(DEVICE)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    fused, first = drawn(model, requests(count=1, many=1, max_tokens=4))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
    again, _ = drawn(model, requests(count=1, many=1, max_tokens=1))
    assert again._projections[0].weight.data_ptr() == fused._projections[0].weight.data_ptr()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                parameter.neg_()
    asked, pages = requests(count=1, many=1, max_tokens=4), EngineOptions(paged=True, page_tokens=8)
    changed = run(TorchEngine(model, [], DEVICE, options=pages, fused=fused), asked)
    assert_same(changed, drawn_by_torch(model, asked), atol=1e-4)
    assert not np.allclose(changed[0, 0].logprobs, first[0, 0].logprobs)

"""The PyTorch engine against the plain full-sequence forward of the same model, over families,
budgets and adapters.
"""

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from retrain.errors import ConfigurationError, RunFailed
from retrain.inference_engine.base import BASE_MODEL, NoiseKey, SampleRequest
from retrain.inference_engine.torch_engine import TorchEngine
from retrain.model import attention
from retrain.model.devices import EngineOptions
from retrain.types import FinishReason
from tests.decoding import (
    EOS,
    FAMILIES,
    assert_agrees,
    assert_near,
    assert_same,
    prompts,
    requests,
    run,
    tiny,
    with_adapter,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_entropies_equal_the_full_forward(family):
    """Ragged prompts, rows that finish at different times, fewer rows than completions."""
    model, asked = tiny(family), requests(temperature=0.7, max_tokens=20)
    got = run(TorchEngine(model, range(2, 12), "cpu", decode_rows=5), asked)
    assert len({len(one.token_ids) for one in got.values()}) > 2
    assert_agrees(model, asked, got, atol=1e-4)
    assert model.config._attn_implementation == "eager"


def test_sampled_eos_is_kept_and_nothing_follows_it():
    got = run(TorchEngine(tiny(), EOS, "cpu"), requests(count=16, max_tokens=40))
    reasons = {one.finish_reason for one in got.values()}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH} or reasons == {FinishReason.STOP}
    for one in got.values():
        assert not np.isin(one.token_ids[:-1], EOS).any()
        assert (one.finish_reason is FinishReason.STOP) == bool(np.isin(one.token_ids[-1], EOS))
        assert len(one.token_ids) == len(one.logprobs) == len(one.entropies)
        assert len(one.token_ids) == 40 or one.finish_reason is FinishReason.STOP


def test_every_eos_id_stops():
    got = run(TorchEngine(tiny(), EOS, "cpu"), requests(count=32, max_tokens=60))
    assert {
        int(one.token_ids[-1]) for one in got.values() if one.finish_reason is FinishReason.STOP
    } == set(EOS)


def test_max_tokens_is_per_request_and_the_context_ends_a_row_by_length():
    model = tiny(max_position_embeddings=20)
    asked = [
        SampleRequest(p, 2, limit, 1.0, NoiseKey(1, 0, 0, i))
        for i, (p, limit) in enumerate(zip(prompts(), (1, 5, 50), strict=True))
    ]
    got = run(TorchEngine(model, [], "cpu"), asked)
    assert [len(got[i, 0].token_ids) for i in range(3)] == [1, 5, 20 - 13]
    assert all(one.finish_reason is FinishReason.LENGTH for one in got.values())
    assert_agrees(model, asked, got, atol=1e-4)


@pytest.mark.parametrize(
    "limits",
    [
        {"decode_rows": 1},
        {"decode_rows": 4},
        {"decode_rows": 64, "decode_tokens": 80},
        {"options": EngineOptions(prefix_caching=False)},
    ],
)
def test_a_completion_does_not_depend_on_the_batch_it_was_in(limits):
    model, asked = tiny(), requests(count=5, max_tokens=30)
    assert_same(
        run(TorchEngine(model, EOS, "cpu"), asked),
        run(TorchEngine(model, EOS, "cpu", **limits), asked),
    )


def test_a_completion_alone_draws_the_same_tokens():
    model, asked = tiny(), requests(count=6, max_tokens=30)
    together = run(TorchEngine(model, EOS, "cpu"), asked)
    for index, sample in ((0, 5), (2, 3)):
        r = asked[index]
        alone = SampleRequest(
            r.prompt_ids, 1, r.max_tokens, r.temperature, r.noise, first_sample=sample
        )
        (one,) = TorchEngine(model, EOS, "cpu").sample([alone])
        assert one.sample == sample
        np.testing.assert_array_equal(one.token_ids, together[index, sample].token_ids)


def test_completions_come_as_they_finish():
    """The first one arrives while others still decode: the shortest is first, whatever its place in
    the call.
    """
    limits = (30, 3, 12)
    asked = [
        SampleRequest(p, 1, limit, 1.0, NoiseKey(1, 0, 0, i))
        for i, (p, limit) in enumerate(zip(prompts(), limits, strict=True))
    ]
    assert [one.request for one in TorchEngine(tiny(), [], "cpu").sample(asked)] == [1, 2, 0]


def test_the_model_is_as_its_owner_left_it_between_completions():
    model = with_adapter(tiny(), dropout=0.5).train()
    engine, asked = TorchEngine(model, EOS, "cpu"), requests(max_tokens=10)
    stream = engine.sample(asked)
    first = next(stream)
    assert model.training and torch.is_grad_enabled()
    assert all(module.training for module in model.modules())
    loss = model(input_ids=torch.tensor([[5, 6, 7]])).logits.sum()
    loss.backward()  # nothing that sampling made may be in the way of autograd
    rest = list(stream)
    model.eval()
    assert_agrees(
        model, asked, {(one.request, one.sample): one for one in [first, *rest]}, atol=1e-4
    )  # dropout was off


def test_slots_choose_the_adapter_or_the_base_model():
    model = with_adapter(tiny())
    asked = [*requests(many=1), *requests(many=1, slot=BASE_MODEL)]
    got = run(TorchEngine(model, EOS, "cpu"), asked)
    adapter, base = ({key: one for key, one in got.items() if key[0] == index} for index in (0, 1))
    assert_agrees(model, asked, adapter, atol=1e-4)
    with model.disable_adapter():
        assert_agrees(model, asked, base, atol=1e-4)
    assert any(not np.array_equal(got[0, i].token_ids, got[1, i].token_ids) for i in range(4))
    assert all(
        parameter.requires_grad for name, parameter in model.named_parameters() if "lora" in name
    )


def test_a_redraw_uses_the_kept_prompt_until_the_weights_change():
    model = with_adapter(tiny())
    engine = TorchEngine(model, EOS, "cpu")
    first = requests(many=1)
    redraw = [
        SampleRequest(r.prompt_ids, 4, r.max_tokens, r.temperature, r.noise, first_sample=4)
        for r in first
    ]
    run(engine, first)
    prefill, calls = engine._decoder.prefill, []
    engine._decoder.prefill = lambda prompts: (calls.append(len(prompts)), prefill(prompts))[1]  # type: ignore[method-assign]
    assert_agrees(model, redraw, run(engine, redraw), atol=1e-4)
    assert calls == []
    with torch.no_grad():
        next(parameter for parameter in model.parameters() if parameter.requires_grad).add_(0.5)
    assert_agrees(model, redraw, run(engine, redraw), atol=1e-4)
    assert calls == [1]
    engine.sync(lambda folder: None, 1)
    run(engine, redraw)
    assert calls == [1], "shared weights that did not change keep their prompts over a sync"


def test_greedy_follows_the_largest_logit_with_certainty():
    model, asked = tiny(), requests(count=2, temperature=0.0, max_tokens=8)
    got = run(TorchEngine(model, EOS, "cpu"), asked)
    for (index, _), one in got.items():
        prompt = asked[index].prompt_ids
        ids = torch.from_numpy(np.concatenate([prompt, one.token_ids]).astype(np.int64))
        best = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].argmax(-1)
        np.testing.assert_array_equal(one.token_ids, best.numpy())
        assert not one.logprobs.any() and not one.entropies.any()


def test_the_generation_config_does_not_leak_in():
    model, asked = tiny(), requests(max_tokens=12)
    plain = run(TorchEngine(model, EOS, "cpu"), asked)
    model.generation_config.update(
        temperature=0.1,
        top_k=1,
        repetition_penalty=5.0,
        max_new_tokens=1,
        eos_token_id=[5, 6, 7, 8],
    )
    assert_same(plain, run(TorchEngine(model, EOS, "cpu"), asked), atol=0)


def test_logits_that_are_not_finite_stop_the_run_and_name_the_completion():
    model = tiny()
    with torch.no_grad():
        model.lm_head.weight[7] = float("nan")
    with pytest.raises(RunFailed, match=r"step 5, prompt slot 0, sample 0, completion token 0"):
        list(TorchEngine(model, EOS, "cpu").sample(requests()))


def test_a_prompt_that_fills_the_context_and_an_unknown_slot_are_refused():
    engine = TorchEngine(tiny(max_position_embeddings=8), EOS, "cpu")
    with pytest.raises(ConfigurationError, match="context is 8 tokens"):
        list(engine.sample(requests()))
    with pytest.raises(ConfigurationError, match="slot 0, and got 3"):
        list(engine.sample(requests(many=1, slot=3)))


def test_a_model_whose_layers_are_not_attention_is_refused():
    config = CONFIG_MAPPING["mamba"](vocab_size=50, hidden_size=16, num_hidden_layers=1)
    with pytest.raises(ConfigurationError, match=r"cannot decode MambaForCausalLM"):
        TorchEngine(AutoModelForCausalLM.from_config(config), EOS, "cpu")


def test_a_row_ends_at_the_original_length_of_longrope():
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 16,
    }
    model = tiny(
        "phi3", sliding_window=None, rope_parameters=rope, original_max_position_embeddings=16
    )
    (asked,) = requests(many=1, max_tokens=14)
    for found in TorchEngine(model, [], "cpu").sample([asked]):
        assert len(found.token_ids) == 16 - len(asked.prompt_ids) < 14


@pytest.mark.parametrize(
    ("storage", "mean"), [(torch.bfloat16, 0.02), (torch.int8, 0.02), (torch.float8_e4m3fn, 0.1)]
)
def test_a_narrow_kv_cache_stays_near_the_full_forward(storage, mean):
    model, asked = tiny(initializer_range=0.1), requests(max_tokens=30)
    engine = TorchEngine(
        model, EOS, "cpu", options=EngineOptions(kv_storage=storage), decode_rows=5
    )
    assert_near(model, asked, run(engine, asked), mean)


def test_bf16_on_an_fp32_model_decodes_a_copy_that_follows_the_adapter():
    model = with_adapter(tiny(initializer_range=0.1))
    engine, asked = (
        TorchEngine(model, EOS, "cpu", options=EngineOptions(weights=torch.bfloat16)),
        requests(max_tokens=12),
    )
    before = run(engine, asked)
    assert_near(model, asked, before, 0.03)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(-1)
    after = run(engine, asked)
    assert_near(model, asked, after, 0.03)
    assert any(
        not np.array_equal(one.token_ids, after[key].token_ids) for key, one in before.items()
    )
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def digest() -> str:
    """Of everything that one thread samples from a tiny model."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    hashed, engine = hashlib.sha256(), TorchEngine(tiny(), EOS, "cpu", decode_rows=7)
    for _, one in sorted(run(engine, requests(count=6, max_tokens=40)).items()):
        hashed.update(one.token_ids.tobytes() + one.logprobs.tobytes() + one.entropies.tobytes())
    torch.set_num_threads(threads)
    return hashed.hexdigest()


@pytest.mark.slow
def test_a_fresh_process_gives_the_same_bytes():
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import"
        " test_engine_decoding as t; print(t.digest())"
    )
    fresh = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert fresh.stdout.strip() == digest()


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("lengths", [[70, 70, 70], [3, 70, 41]])
def test_decoding_in_bf16_sums_in_float32(lengths, window):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(3, *shape, 16, generator=generator).bfloat16()
        for shape in ((6, 1), (2, 80), (2, 80))
    )
    key, value = key[:, :, :70], value[:, :, :70]  # as of a cache with room left
    rows = attention.RowLengths(torch.tensor(lengths), 70, ragged=len(set(lengths)) > 1)
    found = attention.FusedAttention().decode(query, key, value, rows, 0.25, window, None)
    for row, length in enumerate(lengths):
        seen = slice(max(0, length - (window or length)), length)
        keys, values = (
            part[row, :, seen].double().repeat_interleave(3, dim=0) for part in (key, value)
        )
        scores = 0.25 * query[row].double() @ keys.transpose(1, 2)
        weights = torch.softmax(scores, dim=-1)
        exact = weights @ values
        # The fused kernel rounds weights too, and sums and scores where the processor has no
        # products of bfloat16: by the derivative of softmax, w s |v - exact| for each score.
        spread = (values[:, None] - exact[:, :, None]).abs()[:, 0]
        rounded = 2 * exact.abs() + weights @ values.abs() + (weights * scores.abs()) @ spread
        assert ((found[row] - exact).abs() <= 1.01 * 2.0**-8 * rounded + 1e-6).all()

"""Decoding from fixed buffers over pages draws what the other engine draws, token for token,
however short memory is.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from retrain.errors import RunFailed
from retrain.inference_engine.base import BASE_MODEL, NoiseKey, SampleRequest, Truncation
from retrain.inference_engine.torch_engine import TorchEngine
from retrain.model.devices import EngineOptions
from tests.decoding import (
    EOS,
    PAGES,
    assert_agrees,
    assert_same,
    paged,
    prompts,
    requests,
    run,
    tiny,
    with_adapter,
)
from tests.marks import first_of

CASES: dict[str, dict[str, Any]] = {
    "ragged prompts, rows that finish and are taken over": {
        "count": 5,
        "max_tokens": 30,
        "temperature": 0.7,
    },
    "greedy": {"count": 2, "max_tokens": 12, "temperature": 0.0},
    "one token": {"count": 3, "max_tokens": 1},
    "past a block of noise": {"count": 2, "max_tokens": 150},
    "the base model": {"count": 3, "slot": BASE_MODEL},
}


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2", "mistral"])
@pytest.mark.parametrize("rows", first_of([5, 64]))
def test_families_draw_the_same(family: str, rows: int) -> None:
    model, asked = tiny(family), requests(count=4, max_tokens=20, temperature=0.7)
    eos = range(2, 12)
    assert_same(
        run(paged(model, eos, decode_rows=rows), asked), run(TorchEngine(model, eos, "cpu"), asked)
    )


@pytest.mark.parametrize("case", CASES)
def test_requests_of_every_kind_draw_the_same(case: str) -> None:
    model, asked = with_adapter(tiny()), requests(**CASES[case])
    found = run(paged(model, decode_rows=6), asked)
    assert_same(found, run(TorchEngine(model, EOS, "cpu"), asked), atol=1e-4)
    for one in found.values():
        assert one.kept is None and len(one.entropies) == len(one.token_ids)


def test_truncated_rows_beside_whole_and_greedy_ones_draw_the_same() -> None:
    cuts = [Truncation(), Truncation(top_p=0.7)]
    cuts += [Truncation(top_k=5, min_p=0.02), Truncation(top_k=3)]
    asked = [
        SampleRequest(prompt, 2, 15, temperature, NoiseKey(1, 0, 0, number), truncation=cut)
        for number, (prompt, cut, temperature) in enumerate(
            zip(prompts(4), cuts, (1.0, 0.7, 1.0, 0.0), strict=True)
        )
    ]
    model = tiny()
    found, expected = run(paged(model, []), asked), run(TorchEngine(model, [], "cpu"), asked)
    assert_same(found, expected)
    for key, one in expected.items():
        assert (one.kept is None) == (found[key].kept is None)
        if one.kept is not None:
            np.testing.assert_array_equal(found[key].kept, one.kept)


def test_a_later_turn_draws_its_own_noise() -> None:
    """Positions go on across turns: `first_position` is part of the noise, on both paths."""
    model, first = tiny(), requests(count=2)
    # Past a block of 64 uniforms.
    later = [replace(request, first_position=70) for request in first]
    found = run(paged(model, []), later)
    assert_same(found, run(TorchEngine(model, EOS, "cpu"), later), atol=1e-4)
    before = run(paged(model, []), first)
    assert any(not np.array_equal(found[key].token_ids, before[key].token_ids) for key in found)


def test_room_for_a_later_turn_changes_no_angle() -> None:
    """A table of angles past longrope's original length would hold other angles for every
    position.
    """
    short, long = [1.0, 1.1, 1.2, 1.3], [4.0, 6.0, 8.0, 9.0]
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": short}
    rope |= {"long_factor": long, "original_max_position_embeddings": 40}
    asked = [replace(request, extendable=True) for request in requests(count=2, max_tokens=20)]
    model = tiny("llama", rope_parameters=rope)
    assert_same(run(paged(model, []), asked), run(TorchEngine(model, [], "cpu"), asked), atol=1e-4)


@pytest.mark.parametrize("tokens", [50, 90, 200])
@pytest.mark.parametrize("shares", first_of([True, False]))
def test_short_memory_changes_no_completion(
    tokens: int, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages for one row and a little, for two, for five: rows wait, and go back."""
    from retrain.inference_engine.paged_run import PagedRun

    model, asked = tiny(), requests(count=5, max_tokens=35)
    plenty = run(paged(model, []), asked)
    back: list[int] = []
    preempt = PagedRun.preempt

    def counted(run: PagedRun, row: Any) -> None:
        back.append(row.number)
        preempt(run, row)

    monkeypatch.setattr(PagedRun, "preempt", counted)
    options = EngineOptions(paged=True, page_tokens=8, prefix_caching=shares)
    engine = paged(model, [], options, decode_tokens=tokens)
    assert_same(run(engine, asked), plenty, atol=1e-4)
    assert back, "some rows went back"
    engine.release()
    pool = engine._paged.pool  # type: ignore[union-attr]
    assert pool.free == pool.pages, "every page came back"


def test_the_youngest_row_goes_back_and_the_same_bytes_come_twice() -> None:
    model, asked = tiny(), requests(count=6, max_tokens=30)
    one, other = (run(paged(model, [], decode_tokens=120), asked) for _ in range(2))
    assert_same(one, other, atol=0)


def test_a_group_shares_the_full_pages_of_its_prompt() -> None:
    prompt = np.arange(3, 3 + 20).astype(np.int32)  # two and a half pages of 8
    engine = paged(tiny(), [])
    group = SampleRequest(prompt, 4, 30, 1.0, NoiseKey(1, 0, 0, 0))
    stream = engine.sample([group, SampleRequest(prompt, 1, 2, 1.0, NoiseKey(1, 0, 0, 1))])
    assert next(stream).request == 1
    pool = engine._paged.pool  # type: ignore[union-attr]
    used = pool.pages - pool.free
    assert pool._holders.max() == 5, "four rows, and the prompt that is kept for a redraw"
    assert used == 3 + 4 + 3, "the prompt, one page for each row of its group, and the other prompt"
    stream.close()
    engine.release()
    assert pool.free == pool.pages, "a consumer that stops listening leaves no page behind"


def test_a_redraw_uses_the_kept_prompt_until_the_weights_change() -> None:
    model = with_adapter(tiny())
    engine = paged(model)
    first = requests(many=1)
    redraw = [
        SampleRequest(r.prompt_ids, 4, r.max_tokens, r.temperature, r.noise, first_sample=4)
        for r in first
    ]
    run(engine, first)
    compute, calls = engine._decoder.run_prompts, []
    engine._decoder.run_prompts = lambda prompts, *rest: (
        calls.append(len(prompts)),
        compute(prompts, *rest),
    )[1]  # type: ignore[method-assign]
    assert_agrees(model, redraw, run(engine, redraw), atol=1e-4)
    assert calls == []
    with torch.no_grad():
        next(parameter for parameter in model.parameters() if parameter.requires_grad).add_(0.5)
    assert_agrees(model, redraw, run(engine, redraw), atol=1e-4)
    assert calls == [1]


def test_logits_that_are_not_finite_stop_the_run_and_name_the_completion() -> None:
    model = tiny()
    with torch.no_grad():
        model.lm_head.weight[7] = float("nan")
    with pytest.raises(RunFailed, match=r"step 5, prompt slot 0, sample 0, completion token 0"):
        list(paged(model).sample(requests()))


def test_families_without_a_fused_forward_decode_as_before() -> None:
    model, asked = tiny("gemma2"), requests()
    assert_same(run(paged(model), asked), run(TorchEngine(model, EOS, "cpu"), asked), atol=0)


def test_two_calls_at_once_do_not_meet() -> None:
    model, asked = tiny(), requests(count=3, max_tokens=20)
    expected = run(paged(model), asked)
    engine = paged(model)
    one, other = engine.sample(asked), engine.sample(asked)
    found: list[dict[tuple[int, int], Any]] = [{}, {}]
    for pair in zip(one, other, strict=True):
        for into, completion in zip(found, pair, strict=True):
            into[completion.request, completion.sample] = completion
    for each in found:
        assert_same(each, expected)


def test_pages_are_given_back_before_a_learning_pass_that_does_not_fit_beside_them() -> None:
    from retrain.backends.local import backend as local
    from tests.learner_models import config_for, make_rows

    backend = local.LocalBackend(config_for(), eos_ids=[3])
    backend.engine = TorchEngine(
        backend._weights.peft_model, [3], "cpu", options=PAGES, fused=backend._fused
    )
    asked = [SampleRequest(np.arange(4, 15, dtype=np.int32), 4, 12, 0.7, NoiseKey(1, 0, 0, 0))]
    before = run(backend.engine, asked)
    held = backend.engine.held_bytes
    assert held == 2 * 4 * 2 * 2 * 8 * 8 * (backend.engine._paged.pool.pages + 1)  # type: ignore[union-attr]
    for leaves, kept in ((held, held), (held - 1, 0)):
        backend._bytes_left_for_kv_pages = leaves
        backend.train(make_rows(), 0)  # lr = 0
        assert backend.engine.held_bytes == kept
    assert_same(run(backend.engine, asked), before, atol=0)

"""The fused forward is the model's own function, on the model's own parameters."""

import copy

import pytest
import torch

from retrain.backends.local.learner import Learner
from retrain.backends.local.micro_batches import LearnerRow
from retrain.model import packed
from retrain.model.attention import FusedAttention
from retrain.model.fused import FusedDecoder
from retrain.model.packing import PackedAttention, Segment
from tests.learner_models import (
    config_for,
    distance,
    gradients,
    make_learner,
    make_rows,
    with_logprobs,
)

FUSED, OTHERS = ("qwen3", "llama"), ("gemma2", "cohere", "granite")


def scores(learner: Learner, *, reference: bool = False) -> torch.Tensor:
    rows = [
        LearnerRow(number, row, row.logprobs, row.logprobs)
        for number, row in enumerate(make_rows())
    ]
    return torch.cat([torch.from_numpy(row) for row in learner.score(rows, reference=reference)])


def logits(fused: FusedDecoder, *, sampling: bool) -> torch.Tensor:
    """[1, T, V] as the sampler or the learner reads the weights."""
    ids = torch.arange(8).unsqueeze(0)
    fused.refresh(sampling=sampling)
    batch = PackedAttention([Segment(0, 8)], 8, FusedAttention(), ids.device)
    with torch.no_grad():
        return fused.logits(fused.hidden_states(ids, torch.arange(8).unsqueeze(0), batch))


@pytest.mark.parametrize("family", FUSED)
def test_fused_and_own_forward_give_the_same_log_probs_and_gradients(family: str) -> None:
    own, fused = make_learner(config_for(family), fused=False), make_learner(config_for(family))
    torch.testing.assert_close(scores(own), scores(fused), atol=2e-5, rtol=0)
    torch.testing.assert_close(
        scores(own, reference=True), scores(fused, reference=True), atol=2e-5, rtol=0
    )
    rows = with_logprobs(make_rows(), own.logprobs(make_rows()), 0.3)
    own.train(rows, 0)
    fused.train(rows, 0)
    assert distance(gradients(fused), gradients(own)) < 1e-5


@pytest.mark.parametrize("family", FUSED)
def test_the_samplers_copy_computes_the_same_and_is_gone_while_the_learner_learns(
    family: str,
) -> None:
    model = make_learner(config_for(family), fused=False).base.model
    fused = FusedDecoder.of(model, merge=True)
    assert fused is not None
    before = logits(fused, sampling=False)
    torch.testing.assert_close(logits(fused, sampling=True), before, atol=2e-5, rtol=0)
    assert fused._packed_head is not None
    assert all(projection.copy for projection in fused._projections)
    with torch.no_grad():
        for parameter in fused._parameters:
            parameter.mul_(2.0)
    after = logits(fused, sampling=True)
    assert (after - before).abs().max() > 1e-2  # the copy has followed the adapter
    torch.testing.assert_close(logits(fused, sampling=False), after, atol=5e-5, rtol=0)
    assert fused._packed_head is None
    assert not any(projection.copy for projection in fused._projections)


def test_the_adapter_is_never_merged_into_the_weights() -> None:
    learner = make_learner(config_for(), merge=True)
    frozen = {
        name: p.clone() for name, p in learner.base.model.named_parameters() if not p.requires_grad
    }
    before = scores(learner)
    learner.train(make_rows(), 0)
    with torch.no_grad():
        for parameter in learner.weights.parameters.values():
            parameter.mul_(3.0)
    assert (scores(learner) - before).abs().max() > 1e-2  # the change is followed
    assert learner._fused is not None
    learner._fused.refresh(sampling=True)
    assert all(
        torch.equal(frozen[name], p)
        for name, p in learner.base.model.named_parameters()
        if name in frozen
    )


def test_an_optimizer_step_reaches_the_fused_forward() -> None:
    learner = make_learner(config_for(training={"lr": 0.05}))
    before = scores(learner)
    assert learner.train(with_logprobs(make_rows(), learner.logprobs(make_rows())), 0).updates == 1
    after = scores(learner)
    own = make_learner(config_for(), fused=False)
    with torch.no_grad():
        for name, parameter in own.weights.parameters.items():
            parameter.copy_(learner.weights.parameters[name])
    assert (after - before).abs().max() > 1e-2
    torch.testing.assert_close(after, scores(own), atol=5e-5, rtol=0)


def test_the_frozen_weights_are_held_once() -> None:
    learner = make_learner(config_for())
    attention = learner.base.model.model.layers[0].self_attn
    weights = [getattr(attention, f"{name}_proj").base_layer.weight for name in "qkv"]
    assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    again = FusedDecoder.of(learner.base.model, merge=False)
    assert again is not None
    assert [getattr(attention, f"{name}_proj").base_layer.weight.data_ptr() for name in "qkv"] == [
        weight.data_ptr() for weight in weights
    ]


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_keep_their_own_forward(family: str) -> None:
    assert (
        FusedDecoder.of(make_learner(config_for(family), fused=False).base.model, merge=False)
        is None
    )


def test_a_model_that_computes_something_else_is_found_out() -> None:
    model = copy.deepcopy(make_learner(config_for("llama"), fused=False).base.model)
    assert FusedDecoder.of(model, merge=False) is not None
    model.model.layers[1].mlp.act_fn = torch.nn.Tanh()
    assert FusedDecoder.of(model, merge=False) is None


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this processor packs no bf16 weights"
)
def test_a_bf16_sampler_reads_packed_weights_and_an_adapter_that_is_not_rounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packed, "_MIN_ELEMENTS", 1)
    monkeypatch.setattr(packed, "computes_bf16", lambda: True)
    model = make_learner(config_for("llama", model={"dtype": "bf16"}), fused=False).base.model
    fused = FusedDecoder.of(model, merge=True)
    assert fused is not None
    before = logits(fused, sampling=False)
    torch.testing.assert_close(
        logits(fused, sampling=True), before, atol=0.02 * float(before.abs().max()), rtol=0
    )
    assert all(
        projection.copy is not None and projection.copy._packed and projection._merges
        for projection in fused._projections
    )
    with torch.no_grad():
        for parameter in fused._parameters:
            parameter.mul_(2.0)
    sampled = logits(fused, sampling=True)  # first: to come from the learner's would refresh too
    after = logits(fused, sampling=False)
    assert (after - before).abs().max() > 0.05 * before.abs().max()
    torch.testing.assert_close(  # the adapter is followed
        sampled, after, atol=0.02 * float(before.abs().max()), rtol=0
    )

"""The fused forward is the model's own function, on the model's own parameters."""

import copy

import pytest
import torch
from learner_models import config_for, distance, gradients, make_learner, make_rows, with_logprobs

from retrain.backends.local.learner import Learner
from retrain.backends.local.micro_batches import LearnerRow
from retrain.fused.decoder import FusedDecoder

FUSED, OTHERS = ("qwen3", "llama"), ("gemma2", "cohere", "granite")


def scores(learner: Learner, *, reference: bool = False) -> torch.Tensor:
    rows = [LearnerRow(number, row, row.logprobs, row.logprobs) for number, row in enumerate(make_rows())]
    return torch.cat([torch.from_numpy(row) for row in learner.score(rows, reference=reference)])


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("family", FUSED)
def test_fused_and_own_forward_give_the_same_log_probs_and_gradients(family: str, merge: bool) -> None:
    own, fused = make_learner(config_for(family), fused=False), make_learner(config_for(family), merge=merge)
    torch.testing.assert_close(scores(own), scores(fused), atol=2e-5, rtol=0)
    torch.testing.assert_close(scores(own, reference=True), scores(fused, reference=True), atol=2e-5, rtol=0)
    rows = with_logprobs(make_rows(), own.logprobs(make_rows()), 0.3)
    own.train(rows, 0)
    fused.train(rows, 0)
    assert distance(gradients(fused), gradients(own)) < 1e-5


@pytest.mark.parametrize("merge", [False, True])
def test_the_adapter_is_never_merged_into_the_weights(merge: bool) -> None:
    learner = make_learner(config_for(), merge=merge)
    frozen = {name: p.clone() for name, p in learner.base.model.named_parameters() if not p.requires_grad}
    before = scores(learner)
    learner.train(make_rows(), 0)
    with torch.no_grad():
        for parameter in learner.adapter.parameters.values():
            parameter.mul_(3.0)
    assert (scores(learner) - before).abs().max() > 1e-2  # the change is followed
    assert all(torch.equal(frozen[name], p) for name, p in learner.base.model.named_parameters() if name in frozen)


@pytest.mark.parametrize("merge", [False, True])
def test_an_optimizer_step_reaches_the_fused_forward(merge: bool) -> None:
    learner = make_learner(config_for(training={"lr": 0.05}), merge=merge)
    before = scores(learner)
    assert learner.train(with_logprobs(make_rows(), learner.logprobs(make_rows())), 0).updates == 1
    after = scores(learner)
    own = make_learner(config_for(), fused=False)
    with torch.no_grad():
        for name, parameter in own.adapter.parameters.items():
            parameter.copy_(learner.adapter.parameters[name])
    assert (after - before).abs().max() > 1e-2
    torch.testing.assert_close(after, scores(own), atol=5e-5, rtol=0)


def test_the_frozen_weights_are_held_once() -> None:
    learner = make_learner(config_for())
    attention = learner.base.model.model.layers[0].self_attn
    weights = [getattr(attention, f"{name}_proj").base_layer.weight for name in "qkv"]
    assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    again = FusedDecoder.of(learner.base.model, merge=False)
    assert again is not None
    assert [getattr(attention, f"{name}_proj").base_layer.weight.data_ptr() for name in "qkv"] == [weight.data_ptr() for weight in weights]


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_keep_their_own_forward(family: str) -> None:
    assert FusedDecoder.of(make_learner(config_for(family), fused=False).base.model, merge=False) is None


def test_a_model_that_computes_something_else_is_found_out() -> None:
    model = copy.deepcopy(make_learner(config_for("llama"), fused=False).base.model)
    assert FusedDecoder.of(model, merge=False) is not None
    model.model.layers[1].mlp.act_fn = torch.nn.Tanh()
    assert FusedDecoder.of(model, merge=False) is None


def test_gradient_checkpointing_of_the_fused_forward_changes_no_gradient() -> None:
    plain, checkpointed = make_learner(config_for()), make_learner(config_for(), checkpointing=True)
    rows = with_logprobs(make_rows(), plain.logprobs(make_rows()), 0.3)
    plain.train(rows, 0)
    checkpointed.train(rows, 0)
    assert distance(gradients(checkpointed), gradients(plain)) < 1e-6

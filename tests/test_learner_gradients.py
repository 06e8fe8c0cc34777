"""The learner's gradient is the one of the formulas, whatever the micro-batches."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from learner_reference import reference_loss, row_scores

from retrain.backends.local.learner import Learner
from retrain.backends.local.micro_batches import LearnerRow, pack
from retrain.model.attention import FusedAttention
from retrain.model.load import layers
from retrain.types import Row
from tests.learner_models import (
    EOS,
    config_for,
    distance,
    gradients,
    make_learner,
    make_rows,
    with_logprobs,
)
from tests.marks import first_of

MODES: dict[str, dict[str, Any]] = {
    "importance_sampling": {},
    "ppo": {"low": 0.2, "high": 0.2},
    "gspo": {"low": 3e-4, "high": 4e-4},
    "cispo": {"low": 0.0, "high": 4.0},
}
NOISE = 0.5  # of the recorded log-probs, so that every clip acts on some tokens


def reference_gradients(
    learner: Learner, rows: list[Row], **settings: Any
) -> tuple[float, dict[str, torch.Tensor]]:
    model, temperature = learner.weights.peft_model, learner.temperature
    recorded = [row.logprobs.tolist() for row in rows]
    with torch.no_grad():
        with model.disable_adapter():
            frozen = [[float(lp) for lp in row_scores(model, row, temperature)[0]] for row in rows]
        if settings.pop("recomputed", False):
            recorded = [
                [float(lp) for lp in row_scores(model, row, temperature)[0]] for row in rows
            ]
    learner.optimizer.zero_gradients()
    loss = reference_loss(model, rows, recorded, frozen, temperature=temperature, **settings)
    loss.backward()
    return loss.item(), gradients(learner)


def with_shared_prompts(rows: list[Row]) -> list[Row]:
    """Every row behind the prompt of its group's first row, and one row of a single action."""
    changed = []
    for row in rows:
        prompt = next(first for first in rows if first.group == row.group)
        before, cut = prompt.token_ids[: prompt.spans[0][0]], row.spans[0][0]
        shift = len(before) - cut
        spans = tuple((start + shift, stop + shift) for start, stop in row.spans)
        changed.append(
            replace(row, token_ids=np.concatenate([before, row.token_ids[cut:]]), spans=spans)
        )
    last = changed[-1]
    start = last.spans[0][0]
    one = replace(
        last,
        token_ids=last.token_ids[: start + 1],
        spans=((start, start + 1),),
        logprobs=last.logprobs[:1],
        advantages=last.advantages[:1],
    )
    return [*changed, one]


def rows_near(learner: Learner, noise: float = NOISE) -> list[Row]:
    rows = make_rows()
    return with_logprobs(rows, learner.logprobs(rows), noise)


def trained(learner: Learner, rows: list[Row]) -> dict[str, torch.Tensor]:
    learner.train(rows, 0)
    return gradients(learner)


@pytest.mark.parametrize("budget", first_of([40, 1, 4096]), ids=["a few", "one row", "all"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant", "sum"])
def test_gradient_equals_the_written_out_loss_for_any_micro_batch(
    mode: str, aggregation: str, budget: int
) -> None:
    learner = make_learner(config_for(loss={"mode": mode, "aggregation": aggregation}), budget)
    rows = rows_near(learner)
    result = learner.train(rows, 0)
    ours = gradients(learner)
    loss, theirs = reference_gradients(
        learner, rows, mode=mode, aggregation=aggregation, **MODES[mode]
    )
    assert result.loss == pytest.approx(loss, rel=5e-5, abs=1e-5)
    assert distance(ours, theirs) < 1e-5


@pytest.mark.parametrize(
    "loss",
    [
        {"mode": "ppo", "dual_clip": 1.1},
        {"correction": "tis", "old_logprobs": "recomputed"},
        {"correction": "icepop", "old_logprobs": "recomputed"},
        {"kl_coef": 0.3, "kl_estimator": "k2"},
        {"kl_coef": 0.3, "kl_estimator": "k3"},
        {"entropy_coef": 0.2},
    ],
    ids=lambda loss: "-".join(map(str, loss.values())),
)
def test_every_addition_to_the_loss_has_its_gradient(loss: dict[str, Any]) -> None:
    learner = make_learner(config_for(loss=loss), 40)
    rows = rows_near(learner)
    ours = trained(learner, rows)
    settings = {key: value for key, value in loss.items() if key != "old_logprobs"}
    settings |= MODES[loss.get("mode", "importance_sampling")]
    _, theirs = reference_gradients(learner, rows, recomputed="old_logprobs" in loss, **settings)
    assert distance(ours, theirs) < 1e-5


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere", "granite"])
def test_families_that_scale_or_cap_their_logits_have_the_right_gradient(family: str) -> None:
    learner = make_learner(config_for(family), 40)
    rows = rows_near(learner)
    ours = trained(learner, rows)
    assert distance(ours, reference_gradients(learner, rows)[1]) < 1e-5


@pytest.mark.parametrize("budget", first_of([40, 1, 4096]), ids=["a few", "one row", "all"])
@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2"])
def test_a_prompt_computed_once_for_its_group_changes_no_gradient(family: str, budget: int) -> None:
    learner = make_learner(config_for(family), budget)
    rows = with_shared_prompts(rows_near(learner))
    ours = trained(learner, rows)
    assert distance(ours, reference_gradients(learner, rows)[1]) < 1e-5


def test_a_shared_prompt_is_packed_once() -> None:
    rows = [
        LearnerRow(number, row, row.logprobs, row.logprobs)
        for number, row in enumerate(with_shared_prompts(make_rows()))
    ]
    kernel, device = FusedAttention(), torch.device("cpu")
    packed = {
        share: pack(rows, device, kernel, 4096, share=share).token_ids.numel()
        for share in (True, False)
    }
    prompts = {row.prompt: row.prompt_tokens for row in rows}
    assert len(prompts) < len(rows)
    assert packed[False] == sum(row.tokens for row in rows)
    assert packed[True] == packed[False] - sum(row.prompt_tokens for row in rows) + sum(
        prompts.values()
    )


def test_ratio_is_one_on_policy_at_temperature_0_7() -> None:
    learner = make_learner(config_for())
    rows = make_rows()
    with torch.no_grad():
        recorded = [
            np.array(
                [float(lp) for lp in row_scores(learner.weights.peft_model, row, 0.7)[0]],
                np.float32,
            )
            for row in rows
        ]
    result = learner.train(with_logprobs(rows, recorded), 0)
    assert result.ratio_max == pytest.approx(1, abs=1e-5)
    assert result.ratio_mean == pytest.approx(1, abs=1e-5)
    assert result.ess == pytest.approx(1, abs=1e-5)
    assert result.mismatch_kl == pytest.approx(0, abs=1e-6)


def test_ratio_statistics_are_those_of_the_first_pass() -> None:
    learner = make_learner(config_for(training={"lr": 0.05, "updates_per_batch": 3}))
    rows = rows_near(learner, noise=0.0)
    result = learner.train(rows, 0)
    assert result.updates == 3
    assert result.ratio_max == pytest.approx(1, abs=1e-5)


def test_ratio_statistics_cover_the_tokens_of_all_minibatches() -> None:
    whole, parts = (make_learner(config_for(training={"minibatches": count})) for count in (1, 4))
    rows = rows_near(whole)
    one, several = whole.train(rows, 0), parts.train(rows, 0)
    assert (one.updates, several.updates) == (1, 4)
    differences = np.concatenate(
        [own - row.logprobs for own, row in zip(whole.logprobs(rows), rows, strict=True)]
    )
    for result in (one, several):
        assert result.ratio_mean == pytest.approx(np.exp(differences).mean(), rel=1e-4)
        assert result.ratio_max == pytest.approx(np.exp(differences.max()), rel=1e-4)
        assert result.ratio_min == pytest.approx(np.exp(differences.min()), rel=1e-4)


def test_sampled_eos_is_an_action() -> None:
    learner = make_learner(config_for())
    ends = [row for row in rows_near(learner) if row.token_ids[-1] == EOS]
    assert ends
    last = [np.arange(row.num_actions) == row.num_actions - 1 for row in ends]
    only_eos = [
        Row(row.token_ids, row.spans, row.logprobs, mark.astype(np.float32), 0)
        for row, mark in zip(ends, last, strict=True)
    ]
    assert sum(float(own.abs().sum()) for own in trained(learner, only_eos).values()) > 0


def test_nothing_after_the_last_action_reaches_the_gradient() -> None:
    learner = make_learner(config_for())
    rows = rows_near(learner)
    ours = trained(learner, rows)
    more = np.int32([EOS, 9, 9])
    longer = [replace(row, token_ids=np.append(row.token_ids, more)) for row in rows]
    theirs = trained(learner, longer)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_prompt_length_does_not_change_the_gradients_scale() -> None:
    """Two copies of the actions, one behind a prompt five times as long: the loss weighs both
    alike.
    """
    learner = make_learner(config_for())
    rng = np.random.default_rng(3)
    actions = rng.integers(4, 60, 6).astype(np.int32)
    losses = []
    for length in (4, 20):
        ids = np.concatenate([rng.integers(4, 60, length).astype(np.int32), actions])
        row = Row(ids, ((length, length + 6),), np.zeros(6, np.float32), np.ones(6, np.float32), 0)
        (own,) = learner.logprobs([row])
        (near,) = with_logprobs([row], [own])
        result = learner.train([near], 0)
        losses.append(result.loss)
    assert losses == pytest.approx([-1, -1], rel=1e-5)


def test_rows_of_one_micro_batch_do_not_see_each_other() -> None:
    learner = make_learner(config_for())
    rows = make_rows()
    together = learner.logprobs(rows)
    for row, ours in zip(rows, together, strict=True):
        (alone,) = learner.logprobs([row])
        np.testing.assert_allclose(ours, alone, atol=2e-5)


def test_a_row_that_is_not_trained_is_out_of_the_loss_and_its_denominator() -> None:
    learner = make_learner(config_for())
    rows = rows_near(learner)
    third = [replace(row, trained=number != 3) for number, row in enumerate(rows)]
    ours = trained(learner, third)
    assert distance(ours, reference_gradients(learner, [*rows[:3], *rows[4:]])[1]) < 1e-5


def test_kl_of_an_untouched_adapter_is_zero() -> None:
    learner = make_learner(config_for(loss={"kl_coef": 1.0}), untouched=True)
    rows = [replace(row, advantages=np.zeros_like(row.advantages)) for row in rows_near(learner)]
    result = learner.train(rows, 0)
    assert result.loss == 0
    assert result.grad_norm == 0


def test_gradient_checkpointing_changes_no_gradient() -> None:
    config = config_for(lora={"dropout": 0.3})
    plain, saving = make_learner(config), make_learner(config, checkpointing=True)
    rows = rows_near(plain)
    plain.train(rows, 4)
    saving.train(rows, 4)
    ours, theirs = gradients(saving), gradients(plain)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("family", ["opt", "qwen3"])
@pytest.mark.parametrize("own_forward", [True, False])
def test_no_module_is_in_training_mode_while_a_checkpointed_base_learns(
    family: str, own_forward: bool
) -> None:
    """OPT's layers drop out by themselves where they are, at the rate of the model's
    configuration.
    """
    plain, saving = (
        make_learner(config_for(family), checkpointing=on, fused=not own_forward)
        for on in (False, True)
    )
    rows, modes = rows_near(plain), list[bool]()
    layer = layers(saving.base.model)[0]
    layer.register_forward_pre_hook(
        lambda *unused: modes.append(any(module.training for module in saving.base.model.modules()))
    )
    before = layer.forward
    plain.train(rows, 4)
    result = saving.train(rows, 4)
    assert not any(modes) and (modes or family == "qwen3") and layer.forward == before
    assert result.ratio_mean == pytest.approx(plain.train(rows, 4).ratio_mean, abs=1e-6)
    assert distance(gradients(saving), gradients(plain)) < 1e-6


def test_a_norm_that_autocast_leaves_in_float32_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As CUDA's autocast leaves layer_norm and rms_norm; a processor's does not."""
    learner = make_learner(config_for("opt", model={"dtype": "bf16"}))
    rows, narrow = rows_near(learner), torch.nn.functional.layer_norm
    expected = learner.logprobs(rows)

    def wide(*arguments: Any) -> torch.Tensor:
        found = narrow(*arguments)
        return found.float() if torch.is_autocast_enabled("cpu") else found

    monkeypatch.setattr(torch.nn.functional, "layer_norm", wide)
    assert all(map(np.array_equal, learner.logprobs(rows), expected))
    assert learner.train(rows, 4).updates == 1


def test_bf16_base_gives_nearly_the_fp32_gradient_and_fp32_adapters() -> None:
    exact, rounded = make_learner(config_for()), make_learner(config_for(model={"dtype": "bf16"}))
    rows = rows_near(exact, noise=0.0)
    exact.train(rows, 0)
    rounded.train(rows, 0)
    assert {parameter.dtype for parameter in rounded.weights.parameters.values()} == {torch.float32}
    assert distance(gradients(rounded), gradients(exact)) < 0.1

"""What a loss is divided by: the same number whatever the rewards, the minibatches, the
micro-batches and the processes.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_reference import reference_loss, row_scores

from retrain.backends.local.learner import Learner
from retrain.backends.local.micro_batches import LearnerRow
from retrain.backends.rows import minibatch_split
from retrain.run.parts import build_backend
from retrain.types import Row, StepResult
from tests.learner_models import (
    OneOfTwo,
    config_for,
    distance,
    gradients,
    make_learner,
    make_rows,
    mixed,
    on_policy,
    silent,
    with_logprobs,
)
from tests.runs import lines, small, small_run

AGGREGATIONS = ("token_mean", "sequence_mean", "constant", "sum")
MAX_TOKENS = 12
"""Of `config_for`."""


# --- rows without an advantage --------------------------------------------------------------------


@pytest.mark.parametrize("minibatches", [1, 2, 4])
def test_constant_divides_by_all_completions_of_the_step(minibatches: int) -> None:
    learner = make_learner(
        config_for(loss={"aggregation": "constant"}, training={"minibatches": minibatches})
    )
    rows = on_policy(learner)
    for trained in (7, 4, 1):
        result = learner.train([*rows[:trained], *silent(rows[trained:])], 0)
        whole = (
            result.loss * result.updates / minibatches
        )  # fewer rows than minibatches leave some of these empty
        assert whole == pytest.approx(
            -sum(row.num_actions for row in rows[:trained]) / (7 * MAX_TOKENS), rel=1e-4
        )


@pytest.mark.parametrize("aggregation", ["sequence_mean", "constant"])
def test_a_completion_whose_history_was_rewritten_counts_once(aggregation: str) -> None:
    """Rows 3 and 4 are one completion: rows of one completion weigh as if each of its tokens stood
    in one row.
    """
    learner = make_learner(config_for(loss={"aggregation": aggregation}))
    rows = on_policy(learner)
    rows[4] = replace(rows[4], group=rows[3].group, sample=rows[3].sample, part=1)
    completions = [rows[:1], rows[1:2], rows[2:3], rows[3:5], rows[5:6], rows[6:]]
    tokens = [sum(row.num_actions for row in parts) for parts in completions]
    divisors = [MAX_TOKENS if aggregation == "constant" else count for count in tokens]
    expected = -sum(count / divisor for count, divisor in zip(tokens, divisors, strict=True)) / len(
        completions
    )
    assert learner.train(rows, 0).loss == pytest.approx(expected, rel=1e-4)
    found = gradients(learner)
    summing = make_learner(config_for(loss={"aggregation": "sum"}))
    weighed = [
        replace(row, advantages=row.advantages / np.float32(len(completions) * divisor))
        for parts, divisor in zip(completions, divisors, strict=True)
        for row in parts
    ]
    summing.train(weighed, 0)
    assert distance(found, gradients(summing)) < 1e-5


def test_prompt_mean_is_the_mean_over_prompts_of_the_mean_over_their_tokens() -> None:
    """On policy, where a token's loss is minus its advantage."""
    learner = make_learner(config_for(loss={"aggregation": "prompt_mean"}), 40)
    rows = on_policy(learner, advantage=None)
    of_prompt: dict[int, list[float]] = {}
    for row in rows:
        of_prompt.setdefault(row.group, []).extend(row.advantages.tolist())
    assert len({len(values) for values in of_prompt.values()}) > 1
    expected = -np.mean([np.mean(values) for values in of_prompt.values()])
    assert learner.train(
        [*rows, *silent([replace(row, group=9) for row in rows[:2]])], 0
    ).loss == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sum"])
def test_the_other_aggregations_are_over_the_completions_with_an_advantage(
    aggregation: str,
) -> None:
    learner = make_learner(config_for(loss={"aggregation": aggregation}))
    loud, quiet = mixed(learner, trained=False)
    assert learner.train([*loud, *quiet], 0).loss == learner.train(loud, 0).loss


def _by_hand(
    learner: Learner,
    loud: list[Row],
    quiet: list[Row],
    aggregation: str,
    settings: dict[str, float],
) -> dict[str, torch.Tensor]:
    """The policy term over the rows with an advantage and the other terms over all rows, each
    divided as the keys say.
    """
    model, every = learner.weights.peft_model, [*loud, *quiet]
    old = {id(row.token_ids): row.logprobs.tolist() for row in every}
    with torch.no_grad(), model.disable_adapter():
        frozen = {
            id(row.token_ids): [float(lp) for lp in row_scores(model, row, learner.temperature)[0]]
            for row in every
        }

    def loss(rows: list[Row], **terms: Any) -> torch.Tensor:
        inputs = [[of_row[id(row.token_ids)] for row in rows] for of_row in (old, frozen)]
        return reference_loss(
            model, rows, *inputs, temperature=learner.temperature, aggregation=aggregation, **terms
        )

    learner.optimizer.zero_gradients()
    policy = loss(loud) * (len(loud) / len(every) if aggregation == "constant" else 1)
    bare = [replace(row, advantages=np.zeros(row.num_actions, np.float32)) for row in every]
    (policy + loss(bare, **settings)).backward()
    return gradients(learner)


@pytest.mark.parametrize(
    "settings",
    [{"kl_coef": 0.3, "kl_estimator": "k2"}, {"kl_coef": 0.3}, {"entropy_coef": 0.2}],
    ids=str,
)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_kl_and_entropy_are_over_all_completions_and_the_policy_term_over_its_own(
    aggregation: str, settings: dict[str, float]
) -> None:
    learner = make_learner(config_for(loss={"aggregation": aggregation, **settings}), 40)
    loud, quiet = mixed(learner)
    learner.train([*loud, *quiet], 0)
    ours = gradients(learner)
    assert distance(ours, _by_hand(learner, loud, quiet, aggregation, settings)) < 1e-5


def test_groups_with_equal_rewards_alone_are_pulled_to_the_base() -> None:
    learner = make_learner(config_for(loss={"kl_coef": 0.5}))
    result = learner.train(silent(on_policy(learner), trained=True), 0)
    assert result.updates == 1 and result.loss > 0 and result.grad_norm > 0


def test_a_run_of_nothing_but_equal_rewards_still_follows_its_entropy_bonus(tmp_path: Path) -> None:
    wrong, training = {"type": "random", "random_p": 0.0}, {"max_steps": 1}
    small_run(
        small(tmp_path / "run", reward=wrong, loss={"entropy_coef": 0.01}, training=training),
        quiet=True,
    )
    (record,) = lines(tmp_path / "run" / "metrics.jsonl")
    assert record["groups_skipped_all_wrong"] == 2 and record["informative_fraction"] == 0
    assert record["num_datums"] == 8 and record["grad_norm"] > 0


@pytest.mark.parametrize("minibatches", [1, 2])
def test_the_entropy_of_the_first_minibatch_is_a_by_product(minibatches: int) -> None:
    """It is over all tokens of several micro-batches, before the first update, and moves nothing."""
    config = config_for(training={"minibatches": minibatches, "lr": 0.02})
    rows, results, weights = make_rows(), [], []
    for entropy in (True, False):
        learner = make_learner(config, 40)
        numbered = [
            LearnerRow(number, row, row.logprobs, row.logprobs) for number, row in enumerate(rows)
        ]
        first = minibatch_split(numbered, minibatches, config.training.seed, step=0, turn=0)[0]
        model = learner.weights.peft_model
        with torch.no_grad():
            scores = [row_scores(model, one.row, learner.temperature) for one in first]
        results.append(learner.train(rows, 0, entropy=entropy))
        weights.append([parameter.tolist() for parameter in learner.weights.parameters.values()])
    expected = np.mean([float(entropy) for _, of_row in scores for entropy in of_row])
    assert results[0].entropy_mean == pytest.approx(expected, rel=1e-5)
    assert replace(results[0], entropy_mean=None) == results[1] and weights[0] == weights[1]


# --- tokens and completions that are left out -----------------------------------------------------


@pytest.mark.parametrize(
    ("aggregation", "per_token"), [("token_mean", None), ("constant", 1 / (7 * MAX_TOKENS))]
)
def test_untrained_completions_are_out_of_a_mean_and_count_in_the_constant(
    aggregation: str, per_token: float | None
) -> None:
    learner = make_learner(config_for(loss={"aggregation": aggregation}))
    rows = [replace(row, trained=number != 3) for number, row in enumerate(on_policy(learner))]
    tokens = sum(row.num_actions for row in rows if row.trained)
    assert learner.train(rows, 0).loss == pytest.approx(
        -1 if per_token is None else -tokens * per_token, rel=1e-4
    )


@pytest.mark.parametrize("minibatches", [1, 2, 3])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_a_mean_over_the_kept_tokens_is_that_of_each_minibatch(
    aggregation: str, minibatches: int
) -> None:
    """Advantage 1 on the kept tokens: whatever was dropped and however the rows are cut, each
    update's loss is -1.
    """
    learner = make_learner(
        config_for(loss={"aggregation": aggregation}, training={"minibatches": minibatches}), 40
    )
    rng = np.random.default_rng(1)
    rows = []
    for row in on_policy(learner):
        keep = rng.random(row.num_actions) < 0.6
        keep[0] = True
        rows.append(replace(row, advantages=keep.astype(np.float32), counted=int(keep.sum())))
    assert learner.train(rows, 0).loss == pytest.approx(-1, rel=1e-4)


# --- micro-batches and processes ------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_two_processes_have_the_gradient_the_loss_and_the_clip_of_one(aggregation: str) -> None:
    loss = {"mode": "ppo", "aggregation": aggregation, "entropy_coef": 0.2}
    learner = make_learner(config_for(loss=loss), 40)
    rows = make_rows()
    loud, quiet = mixed(learner)
    loud[3] = replace(loud[3], trained=False)
    rows = [*with_logprobs(loud, [row.logprobs for row in loud], 0.5), *quiet]
    alone = OneOfTwo(size=1)
    learner.world = alone
    learner.train(rows, 0)
    shares = []
    for rank in (0, 1):
        learner.world = OneOfTwo(rank=rank)
        learner.train(rows, 0)
        shares.append(learner.world.sent[0])
    for whole, one, other in zip(alone.sent[0], *shares, strict=True):
        torch.testing.assert_close(one + other, whole, rtol=1e-3, atol=1e-5)
    clipped, clippable = alone.sent[0][-3].tolist()
    assert 0 < clipped < clippable == sum(row.num_actions for row in loud if row.trained)


# --- dropout --------------------------------------------------------------------------------------


@pytest.mark.parametrize("minibatches", [1, 3])
def test_recomputed_log_probs_are_under_the_masks_of_the_step(minibatches: int) -> None:
    """Before any update the loss is then minus the mean advantage, and importance sampling, PPO and
    REINFORCE have one gradient.
    """
    shape = {"lora": {"dropout": 0.4}, "training": {"minibatches": minibatches}}
    found = {}
    for mode in ("importance_sampling", "ppo"):
        learner = make_learner(
            config_for(
                loss={"mode": mode, "old_logprobs": "recomputed", "aggregation": "sum"}, **shape
            ),
            40,
        )
        rows = on_policy(learner, advantage=None)
        result = learner.train(rows, 5)
        wanted = -sum(float(row.advantages.sum()) for row in rows) / minibatches
        assert result.loss == pytest.approx(wanted, abs=1e-4)
        assert result.clip_fraction == 0
        assert abs(result.ratio_mean - 1) > 1e-3 and result.ess < 1, (
            "what is recorded is learner against sampler"
        )
        found[mode] = gradients(learner)
    assert distance(found["ppo"], found["importance_sampling"]) < 1e-6


def test_the_masks_of_a_row_do_not_depend_on_the_rewards_of_others() -> None:
    learner = make_learner(config_for(lora={"dropout": 0.4}))
    rows = on_policy(learner)
    last = [replace(row, advantages=np.zeros_like(row.advantages)) for row in rows[:-1]]
    learner.train([*last, rows[-1]], 2)
    dense = gradients(learner)
    learner.train([*silent(rows[:-1]), rows[-1]], 2)
    sparse = gradients(learner)
    tokens, own = sum(row.num_actions for row in rows), rows[-1].num_actions
    assert distance({name: value * tokens / own for name, value in dense.items()}, sparse) < 1e-5


# --- half precision -------------------------------------------------------------------------------


def _trained_in_bf16(**loss: Any) -> tuple[StepResult, dict[str, torch.Tensor]]:
    """One update of a bf16 learner against the log-probs of a sampler that rounds otherwise: the
    same policy in float32.
    """
    exact, rounded = (
        make_learner(config_for(model={"dtype": dtype}, loss=loss)) for dtype in ("fp32", "bf16")
    )
    return rounded.train(on_policy(exact, advantage=None), 0), gradients(rounded)


def test_gspo_in_half_precision_recomputes_old_log_probs_unless_told_otherwise() -> None:
    whole = {"aggregation": "sequence_mean"}
    told, clipped_gradient = _trained_in_bf16(mode="gspo", old_logprobs="sampler", **whole)
    unset, gradient = _trained_in_bf16(mode="gspo", **whole)
    _, reinforce = _trained_in_bf16(old_logprobs="recomputed", **whole)
    assert told.clip_fraction > 0.2 and unset.clip_fraction == 0
    assert distance(gradient, reinforce) < 1e-6 < 0.1 < distance(clipped_gradient, reinforce)


def test_what_gspo_does_about_rounding_is_said_at_the_start() -> None:
    found: dict[str, str] = {}
    for name in ("", "sampler", "recomputed"):
        for dtype in ("bf16", "fp32"):
            loss, told = {"mode": "gspo"} | ({"old_logprobs": name} if name else {}), list[str]()
            config = config_for(model={"dtype": dtype}, loss=loss)
            build_backend(config, [3], None, told.append).close()
            found[f"{name} {dtype}"] = next((line for line in told if "gspo" in line), "")
    assert "as old_logprobs is unset, the learner recomputes" in found[" bf16"]
    assert "takes gradient away on policy (clip_fraction)" in found["sampler bf16"]
    told_so = found["recomputed bf16"]
    assert "the learner recomputes" in told_so and "unset" not in told_so
    assert not any(found[name] for name in found if name.endswith("fp32"))


def test_gspo_in_float32_keeps_the_samplers_log_probs() -> None:
    learner = make_learner(config_for(loss={"mode": "gspo", "aggregation": "sequence_mean"}))
    rows = on_policy(learner, advantage=None)
    assert learner.train(rows, 0).clip_fraction == 0
    off = with_logprobs(rows, [row.logprobs for row in rows], 0.1)
    assert learner.train(off, 0).clip_fraction > 0


def test_log_probs_are_recomputed_in_the_micro_batches_of_the_first_pass() -> None:
    """In half precision another packing rounds otherwise: with the same one the ratio is exactly 1
    in every minibatch.
    """
    config = config_for(
        model={"dtype": "bf16"},
        loss={"mode": "gspo", "aggregation": "sequence_mean"},
        training={"minibatches": 3},
    )
    learner = make_learner(config, 60)
    assert learner.train(make_rows(12), 0).clip_fraction == 0

"""A loss of one's own: what is proved before a run, the sentence that each mistake gets, and that
it learns as a built-in one does.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from retrain.backends.declared import incapable, loss_notes
from retrain.backends.local.loss import policy_terms
from retrain.backends.losses import LOSSES, ActionTokens
from retrain.backends.own_loss import OwnFunction
from retrain.backends.proof import prove, prove_aggregation, prove_correction
from retrain.config import TrainConfig, config_from_mapping
from retrain.config.schema import Loss
from retrain.errors import ConfigurationError, RunFailed
from retrain.explain import explain
from retrain.plugins import Fault
from tests.learner_models import (
    OneOfTwo,
    config_for,
    distance,
    gradients,
    make_learner,
    make_rows,
    mixed,
    silent,
    with_logprobs,
)
from tests.marks import first_of
from tests.runs import quiet_run, timeless

SOUND = """
import torch
from retrain.backends import ActionTokens
def ppo(tokens: ActionTokens, params):
    rho = (tokens.new - tokens.old).clamp(-20, 20).exp()
    low, high = 1 - params["clip"], 1 + params["clip"]
    gain = torch.minimum(rho * tokens.advantages, rho.clamp(low, high) * tokens.advantages)
    beyond = (tokens.new - tokens.old).abs() > 20
    up, down = tokens.advantages > 0, tokens.advantages < 0
    clipped = (up & (rho > high)) | (down & (rho < low)) | beyond
    return -gain, {"rho": rho, "clipped": clipped}
def dro(tokens):
    '''Direct reward optimization: a quadratic in place of the clip, which pulls also where the advantage is 0.'''
    return -tokens.new * tokens.advantages + 0.5 * (tokens.new - tokens.old) ** 2
dro.own_term = True
def mean_ratio(tokens):
    parts = torch.split(tokens.new - tokens.old, list(tokens.lengths))
    ratios = torch.cat([part.mean().exp().expand(len(part)) for part in parts])
    return -ratios * tokens.advantages, {"mean": torch.stack([part.mean() for part in parts])}
mean_ratio.sequence_level = True
def surprised(tokens):
    return -(tokens.new + 0.1 * tokens.entropy - 0.1 * tokens.reference) * tokens.advantages
surprised.needs_entropy = surprised.needs_reference = True
def cautious(tokens):
    return ((tokens.old - tokens.sampler).abs() < 0.1).to(tokens.old.dtype)
def by_root(counts, group):
    weights = counts ** -0.5
    return weights / (weights * counts).sum()
def by_power(counts, group, params):
    return counts ** -params["power"]
"""

WRONG = {
    "return -tokens.advantages * tokens.new / (tokens.old - tokens.sampler)": "gives -inf for a token with new = -0.0562, old = 0, advantages = -0.805; its terms must be finite",
    "return -tokens.advantages * torch.log1p(-tokens.new.exp())": "gives -inf for a token with new = 0, old = 0, advantages = -0.527; its terms must be finite",
    "terms = -tokens.advantages * tokens.new\nreturn terms - terms.mean()": "gives a sequence other terms when it stands alone",
    "a = tokens.advantages\nreturn -(a / (a.std() + 1e-6)) * tokens.new": "gives a sequence other terms when it stands alone, so the result would depend on the micro-batches",
    "return -tokens.advantages * tokens.new.detach()": "has no gradient through tokens.new at any token",
    "return -tokens.advantages * (tokens.new - tokens.new).exp()": "has no gradient through tokens.new at any token",
    "return -tokens.advantages * SCALE * tokens.new": "carries gradient into a tensor other than tokens.new and tokens.entropy; detach that",
    "return -(tokens.advantages + 0.01) * tokens.new": "multiply its terms by tokens.advantages, or declare wrong.own_term = True",
    "r = torch.split(tokens.new - tokens.old, list(tokens.lengths))\nreturn -tokens.advantages * torch.cat([p - p.mean() for p in r])": "gives a token other terms when it is a sequence of its own, so it reads its sequence; declare wrong.sequence_level = True",
    "return -tokens.advantages * tokens.new * (torch.rand(len(tokens.new)) < 0.5)": "gives a sequence other terms when it stands alone",
    "CALLS.append(1)\nreturn -tokens.advantages * tokens.new * len(CALLS)": "gives a sequence other terms when it stands alone",
    "return tokens.logits": "fails on a small example (AttributeError: 'ActionTokens' object has no attribute 'logits')",
    'return -tokens.advantages * tokens.new * params["beta"]': "fails on a small example (KeyError: 'beta', [loss] params does not give it)",
    "return -tokens.advantages * tokens.new * tokens.weights": "gives a sequence other terms when it stands alone",
    "return -tokens.advantages * (tokens.new + tokens.entropy)": "reads tokens.entropy, which is None unless it declares wrong.needs_entropy = True",
    "return -tokens.advantages * (tokens.new - tokens.reference)": "reads tokens.reference, which is None unless it declares wrong.needs_reference = True",
    "assert max(tokens.lengths) > 1\nreturn -tokens.advantages * tokens.new": "fails on a small example (AssertionError)",
    "assert len(tokens.new) < 14 or (tokens.new != tokens.old).any()\nreturn -tokens.advantages * tokens.new": "fails on a small example (AssertionError)",
    "if len(tokens.new) < 14: return -tokens.advantages * tokens.new\nreturn -tokens.advantages * (tokens.new - (tokens.new - tokens.old).square().sum().sqrt() * 0.0)": "has a gradient that is not finite where tokens.new equals tokens.old",
    'return -tokens.advantages * tokens.new, {"kl": 0.1}': "reports a metric kl that must be a tensor of shape [14] (tokens) or [5]",
    'return -tokens.advantages * tokens.new, {"clipped": tokens.new}': "which must be a mask of torch.bool",
}
"""The body of a loss, and a part of its sentence. More of them stand in data/wrong_plugins.md."""


@pytest.fixture
def module(here: Path) -> Any:
    """Writes my_losses.py into the current folder."""
    return (here / "my_losses.py").write_text


def own(mode: str, **more: Any) -> TrainConfig:
    return config_for(loss={"mode": f"my_losses.{mode}", **more})


# --- what is proved -------------------------------------------------------------------------------


@pytest.mark.parametrize(("body", "sentence"), WRONG.items(), ids=WRONG)
def test_a_wrong_loss_is_refused_before_the_run_in_a_sentence_that_says_what_to_do(
    body: str, sentence: str, module: Any
) -> None:
    lines = "".join(f"    {line}\n" for line in body.split("\n"))
    module(
        "import torch\nCALLS, SCALE = [], torch.nn.Parameter(torch.ones(()))\ndef wrong(tokens,"
        f" params):\n{lines}"
    )
    before = torch.random.get_rng_state()
    (problem,) = incapable(own("wrong"))
    assert problem.startswith('[loss] mode = "my_losses.wrong" ') and sentence in problem
    assert problem.endswith("; fix it, or set [plugins] strict = false to get only a warning.")
    assert problem.count("\n") == 0
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("mode", LOSSES)
def test_every_built_in_loss_has_the_properties_that_are_asked_of_others(mode: str) -> None:
    def terms(tokens: ActionTokens) -> torch.Tensor:
        return policy_terms(tokens, Loss(mode=mode))

    terms.sequence_level = mode in ("gspo", "gmpo")  # type: ignore[attr-defined]  # as plugins declare it
    prove(OwnFunction("loss", f"built_in.{mode}", terms, {}))


def test_with_strict_false_a_wrong_loss_is_warned_of(module: Any) -> None:
    module("def wrong(tokens):\n    return -(tokens.advantages + 0.01) * tokens.new")
    config = config_for(loss={"mode": "my_losses.wrong"}, plugins={"strict": False})
    assert incapable(config) == []
    assert any(
        "has a gradient where every advantage is 0" in note and "continues" in note
        for note in loss_notes(config)
    )


def test_a_loss_with_the_sign_of_a_gain_is_asked_about(module: Any) -> None:
    module(SOUND + "\ndef gain(tokens):\n    return tokens.new * tokens.advantages\n")
    assert any(
        "is its sign meant?" in note
        for note in loss_notes(config_for(loss={"mode": "my_losses.gain"}))
    )
    for sound in ("dro", "mean_ratio", "surprised"):
        assert not any("sign" in note for note in loss_notes(own(sound))), sound


def test_explain_says_what_a_loss_declares(module: Any) -> None:
    module(SOUND)
    text = " ".join(explain(own("dro")).losses)
    assert "proved on a small batch" in text
    assert "a term of its own where the advantage is 0" in text
    assert "reads whole sequences" in " ".join(explain(own("mean_ratio")).losses)
    assert explain(config_for()).losses == ()


def test_a_correction_and_an_aggregation_are_tried_too(module: Any) -> None:
    module(SOUND)
    sound = {"correction": "my_losses.cautious", "aggregation": "my_losses.by_root"}
    sound["old_logprobs"] = "recomputed"
    assert incapable(config_for(loss=sound)) == []
    (problem,) = incapable(config_for(loss=sound | {"aggregation": "my_losses.by_power"}))
    assert 'aggregation = "my_losses.by_power"' in problem and "f(counts, group)" in problem


CORRECTIONS = {
    "gave weights that carry gradient; detach them": lambda t: (t.new - t.sampler).exp(),
    "gives a sequence other weights when it stands alone": lambda t: t.old / t.old.sum(),
    "gives weights that are not finite": lambda t: 1 / t.old,
}
AGGREGATIONS = {
    "gave an array of shape [], and must give one weight for each of 5": lambda n, _: 1 / n.sum(),
    "gave the weight -1.5; a weight is finite and at least 0": lambda n, _: n - 2.5,
    "when the completions come in another order": lambda *_: np.arange(5.0),
    "or the groups have other numbers": lambda _, group: 1 / (1 + group),
    "gives every token the weight 0": lambda n, _: 0.0 * n,
}


@pytest.mark.parametrize("sentence", [*CORRECTIONS, *AGGREGATIONS])
def test_a_wrong_correction_or_aggregation_is_refused(sentence: str) -> None:
    function: Any = CORRECTIONS.get(sentence) or AGGREGATIONS[sentence]
    kind = "correction" if sentence in CORRECTIONS else "aggregation"
    prover: Any = prove_correction if sentence in CORRECTIONS else prove_aggregation
    with pytest.raises(Fault) as caught:
        prover(OwnFunction(kind, f"my_losses.{kind}", function, {}))
    assert sentence in str(caught.value)


def test_a_parameter_that_a_built_in_loss_does_not_know_or_take_is_refused() -> None:
    for params, sentence in (
        ({"tau": 1.0}, 'tau is not a parameter of the built-in "sapo"; it knows tau_neg, tau_pos.'),
        ({"tau_pos": 0}, "[loss] params tau_pos = 0 must be a number above 0."),
    ):
        assert sentence in incapable(config_for(loss={"mode": "sapo", "params": params}))[0]


def test_a_backend_without_losses_of_ones_own_says_so(module: Any) -> None:
    module(
        "from retrain.backends import BackendCapabilities\nfrom retrain.backends.local.backend"
        " import LocalBackend\nclass Other(LocalBackend):\n    capabilities ="
        f" BackendCapabilities(True, True, True)\n{SOUND}"
    )
    config = config_from_mapping(
        {"backend": {"backend": "my_losses.Other"}, "loss": {"mode": "my_losses.dro"}}
    )
    assert (
        '[loss] mode = "my_losses.dro" with backend = "my_losses.Other": it takes no plugin here;'
        " use a built-in name." in incapable(config)
    )
    prime = {"backend": {"backend": "prime_rl"}, "algorithm": {"transform_mode": "none"}}
    with pytest.raises(ConfigurationError, match="PRIME-RL's trainer has its own loss"):
        config_from_mapping({**prime, "loss": {"mode": "my_losses.dro"}})


# --- what is learned ------------------------------------------------------------------------------


def rows_near(learner: Any) -> list[Any]:
    rows = make_rows()
    return with_logprobs(rows, learner.logprobs(rows), 0.5)


@pytest.mark.parametrize("budget", first_of([40, 1, 4096]), ids=["a few", "one row", "all"])
def test_a_copy_of_a_built_in_loss_has_its_gradient_to_the_bit_and_its_clip_fraction(
    module: Any, budget: int
) -> None:
    module(SOUND)
    found = {}
    for name, loss in {
        "built in": {"mode": "ppo"},
        "own": {"mode": "my_losses.ppo", "params": {"clip": 0.2}},
    }.items():
        learner = make_learner(config_for(loss=loss), budget)
        result = learner.train(rows_near(learner), 0)
        found[name] = (gradients(learner), result)
    for name, gradient in found["own"][0].items():
        assert torch.equal(gradient, found["built in"][0][name]), name
    assert found["own"][1].clip_fraction == found["built in"][1].clip_fraction > 0
    metrics = found["own"][1].loss_metrics
    assert set(metrics) == {"rho"}
    assert metrics["rho"] == pytest.approx(found["own"][1].ratio_mean, rel=1e-5)
    assert found["built in"][1].loss_metrics is None


@pytest.mark.parametrize("mode", ["dro", "mean_ratio", "surprised"])
def test_a_loss_gets_what_it_declares_and_micro_batches_do_not_move_its_gradient(
    module: Any, mode: str
) -> None:
    module(SOUND)
    one, other = (make_learner(own(mode), budget) for budget in (1, 4096))
    rows = rows_near(one)
    results = [learner.train(rows, 0) for learner in (one, other)]
    assert distance(gradients(one), gradients(other)) < 1e-5
    assert results[0].clip_fraction is None and results[0].grad_norm > 0
    if mode == "mean_ratio":
        assert results[0].loss_metrics["mean"] == pytest.approx(
            results[1].loss_metrics["mean"], rel=1e-5
        )


def test_two_processes_have_the_gradient_and_the_metrics_of_one(module: Any) -> None:
    module(SOUND)
    learner = make_learner(own("ppo", params={"clip": 0.2}), 40)
    rows = rows_near(learner)
    alone, *shares = OneOfTwo(size=1), OneOfTwo(rank=0), OneOfTwo(rank=1)
    for learner.world in (alone, *shares):
        learner.train(rows, 0)
    for whole, one, two in zip(alone.sent[0], *(share.sent[0] for share in shares), strict=True):
        torch.testing.assert_close(one + two, whole, rtol=1e-3, atol=1e-5)
    assert alone.sent[0][-1].tolist()[0][1] == sum(row.num_actions for row in rows)


def test_a_term_of_its_own_acts_on_groups_with_an_advantage_with_or_without_kl(module: Any) -> None:
    """With a KL term the rows of groups with equal rewards are in the batch too; they have no
    policy term there either.
    """
    module(SOUND)
    losses = []
    for kl in (0.0, 1e-9):
        learner = make_learner(own("dro", kl_coef=kl))
        loud, quiet = mixed(learner, trained=kl > 0)
        loud = with_logprobs(loud, [row.logprobs for row in loud], 0.5)
        quiet = with_logprobs(quiet, [row.logprobs for row in quiet], 0.5)
        losses.append(learner.train([*loud, *quiet], 0).loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_an_aggregation_sees_the_whole_optimizer_batch_once_and_gives_the_weights(
    module: Any,
) -> None:
    module(
        "SEEN = []\ndef sequence_mean(counts, group):\n    SEEN.append((counts.tolist(),"
        " group.tolist()))\n    return 1 / (len(counts) * counts)\n"
    )
    found = {}
    for aggregation in ("sequence_mean", "my_losses.sequence_mean"):
        learner = make_learner(config_for(loss={"aggregation": aggregation}), 1)
        seen = sys.modules["my_losses"].SEEN if "my_losses" in sys.modules else []
        seen.clear()
        rows = rows_near(learner)
        learner.train([*rows[:4], *silent(rows[4:], trained=True)], 0)
        found[aggregation] = gradients(learner)
    assert distance(*found.values()) < 1e-6
    assert seen[0] == ([row.num_actions for row in rows[:4]], [row.group for row in rows[:4]]), (
        "those that count"
    )


def test_a_correction_of_ones_own_weighs_the_terms(module: Any) -> None:
    module(
        "def tis(tokens):\n    return (tokens.old - tokens.sampler).clamp(-20, 20).exp().clamp(max=2)"
    )
    loss = {"old_logprobs": "recomputed"}
    found = []
    for more in ({"correction": "tis"}, {"correction": "my_losses.tis"}):
        learner = make_learner(config_for(loss=loss | more), 40)
        learner.train(rows_near(learner), 0)
        found.append(gradients(learner))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_what_a_loss_raises_in_a_run_ends_it_in_a_sentence(module: Any) -> None:
    module(
        "def late(tokens):\n    assert len(tokens.new) < 20, 'too many'\n    return"
        " -tokens.advantages * tokens.new"
    )
    learner = make_learner(own("late"))
    told = r'^\[loss\] mode = "my_losses.late" failed with AssertionError: too many\.$'
    with pytest.raises(RunFailed, match=told):
        learner.train(rows_near(learner), 0)


@pytest.mark.slow
def test_a_run_with_a_copy_of_a_built_in_loss_has_its_bytes(module: Any, tmp_path: Path) -> None:
    module(SOUND)
    training = {"max_steps": 2, "max_tokens": 12, "save_every": 1}
    training |= {"micro_batch_tokens": 200, "updates_per_batch": 2}
    quiet_run(tmp_path / "built_in", training=training, loss={"mode": "ppo"})
    before = torch.get_num_threads()
    torch.set_num_threads(2)  # and so two workers
    try:
        loss: dict[str, Any] = {"mode": "my_losses.ppo", "params": {"clip": 0.2}}
        quiet_run(tmp_path / "own", training=training | {"max_steps": 1}, loss=loss)
        quiet_run(
            tmp_path / "own", training=training, loss=loss, resume={"from": str(tmp_path / "own")}
        )
    finally:
        torch.set_num_threads(before)
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        left, right = (
            (tmp_path / run / "checkpoints" / "step_000002" / name).read_bytes()
            for run in ("built_in", "own")
        )
        assert left == right, name
    records = [timeless(tmp_path / run / "metrics.jsonl") for run in ("built_in", "own")]
    assert all(record.pop("loss_metrics")["rho"] > 0 for record in records[1])
    assert [record.pop("loss_metrics") for record in records[0]] == [None, None]
    assert records[0] == records[1]
    (stored,) = json.loads((tmp_path / "own" / "environment.json").read_text())["loss"]
    assert '[loss] mode = "my_losses.ppo" is a plugin, proved on a small batch' in stored

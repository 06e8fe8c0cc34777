"""The Tinker backend's own logic: shifted datums, one normalization, real losses, what is asked for
before what, and no torch anywhere.
"""

import gzip
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import tinker_double
import torch
from runs import small
from tinker_double import APIConnectionError, APIStatusError, Double

from retrain import train
from retrain.backends.declared import incapable
from retrain.backends.local.loss import clipped_tokens, policy_terms
from retrain.backends.losses import ActionTokens
from retrain.backends.tinker import datums, service
from retrain.backends.tinker.backend import STATE_FILE, TinkerBackend
from retrain.backends.tinker.datums import ShiftedRow
from retrain.campaign.runner import run_campaign
from retrain.cli.main import main
from retrain.config import config_from_mapping, config_from_toml, dump_toml, unused_keys
from retrain.config.overrides import deep_merge
from retrain.config.schema import Loss
from retrain.data.traces import TraceSet
from retrain.errors import (
    ConfigurationError,
    EnvironmentFailure,
    Interrupted,
    RunFailed,
    ServerFailure,
)
from retrain.inference_engine.base import NoiseKey, SampleRequest
from retrain.model.text import load_text_model
from retrain.run.notes import notes
from retrain.run.supervised import SupervisedStage
from retrain.types import FinishReason, Row, StepResult
from tests.marks import first_of
from tests.runs import small_run

KEY = "tml-a-key-that-stays-here"
TINKER: dict[str, Any] = {
    "backend": {"backend": "tinker", "devices": "gpu:0"},
    "model": {"model": "lab", "lora_rank": 4},
}


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[Double]:
    before = {name: sys.modules.get(name) for name in ("tinker", "tinker.types")}
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    yield tinker_double.install()
    for name, module in before.items():
        sys.modules.pop(name)
        if module is not None:
            sys.modules[name] = module


def tinker_config(folder: Path, **sections: dict[str, Any]) -> Any:
    return small(folder, **deep_merge(TINKER, sections))


def backend_for(
    folder: Path, said: list[str] | None = None, **sections: dict[str, Any]
) -> TinkerBackend:
    config, log = tinker_config(folder, **sections), (said if said is not None else []).append
    return TinkerBackend(config, eos_ids=[258], log=log)


def make_rows(count: int = 3) -> list[Row]:
    noise, rows = np.random.default_rng(0), []
    for group in range(count):
        prompt, action = 3 + group, 2 + 2 * group
        ids = noise.integers(0, 256, prompt + action).astype(np.int32)
        logprobs = noise.normal(-5, 0.1, action).astype(np.float32)
        advantages = noise.normal(size=action).astype(np.float32)
        rows.append(Row(ids, ((prompt, prompt + action),), logprobs, advantages, group))
    return rows


def differentiable(logits: Any, row: Row) -> torch.Tensor:
    """The row's log-probs [T] under the bigram model."""
    (start, stop), ids = row.spans[0], torch.tensor(row.token_ids.astype(np.int64))
    new = torch.log_softmax(logits[ids[start - 1 : stop - 1]], -1)
    return new.gather(1, ids[start:stop, None])[:, 0]


def assert_gradient(gradient: Any, logits: torch.Tensor, loss: torch.Tensor, result: Any) -> None:
    loss.backward()  # type: ignore[no-untyped-call]
    np.testing.assert_allclose(gradient, logits.grad, rtol=1e-4, atol=1e-8)
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)


# -- datums ----------------------------------------------------------------------------------------


def test_targets_are_the_next_tokens_and_only_actions_have_advantages(double: Double) -> None:
    logprobs, advantages = np.float32([-1, -2]), np.float32([0.5, -0.25])
    row = Row(np.arange(5, 10, dtype=np.int32), ((3, 5),), logprobs, advantages, 0)
    datum: Any = ShiftedRow(row).datum(logprobs=row.logprobs, advantages=row.advantages)
    assert datum.model_input.ids == [5, 6, 7, 8]
    assert datum["target_tokens"].tolist() == [6, 7, 8, 9]
    assert datum["target_tokens"].dtype == np.int64
    assert datum["advantages"].tolist() == [0, 0, 0.5, -0.25]
    assert datum["logprobs"].tolist() == [0, 0, -1, -2]


def test_environment_tokens_have_no_advantage_and_the_rest_is_not_sent(double: Double) -> None:
    values = np.array([1, 2, 3], np.float32)
    row = Row(np.arange(10, 19, dtype=np.int32), ((2, 4), (6, 7)), -values, values, 0)
    datum: Any = ShiftedRow(row).datum(logprobs=row.logprobs, advantages=row.advantages)
    assert datum.model_input.ids == [10, 11, 12, 13, 14, 15]
    assert datum["target_tokens"].tolist() == [11, 12, 13, 14, 15, 16]
    assert datum["advantages"].tolist() == [0, 1, 2, 0, 0, 3]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant", "sum"])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_gradient_is_normalized_once_however_the_service_adds_up(
    double: Double, tmp_path: Path, aggregation: str, reduction: str
) -> None:
    """The reference divides by what docs/losses.md names; the service by nothing, or by positions
    and rows.
    """
    double.reduction = reduction
    options = {"options": {"loss_reduction": reduction}}
    gradient, result, before = one_update(tmp_path, {"aggregation": aggregation}, backend=options)
    tokens = [row.num_actions for row in make_rows()]
    weights = {
        "token_mean": [1 / sum(tokens)] * 3,
        "sequence_mean": [1 / (3 * count) for count in tokens],
        "constant": [1 / (3 * 24)] * 3,
        "sum": [1.0] * 3,
    }
    logits = torch.tensor(before, requires_grad=True)
    expected = torch.zeros((), dtype=torch.float64)
    for row, weight in zip(make_rows(), weights[aggregation], strict=True):
        rho = torch.exp(differentiable(logits, row) - torch.tensor(row.logprobs))
        expected = expected - (rho * torch.tensor(row.advantages)).sum() * weight
    assert_gradient(gradient, logits, expected, result)
    assert result.grad_norm == pytest.approx(float(np.linalg.norm(gradient)), rel=1e-6)


@pytest.mark.parametrize("loads_into_adapters", [False, True])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_supervised_step_is_the_services_cross_entropy(
    double: Double, tmp_path: Path, reduction: str, loads_into_adapters: bool
) -> None:
    """Its mean over the learned tokens; reinforcement then begins with a new optimizer."""
    double.reduction, double.loads_into_adapters = reduction, loads_into_adapters
    backend = backend_for(
        tmp_path, backend={"options": {"loss_reduction": reduction}}, loss={"mode": "ppo"}
    )
    config = backend.config.with_(sft_steps=2, sft_lr=1e-3)
    stage = SupervisedStage(config, TraceSet((), ()), None, load_text_model(config.model))
    backend.supervise(stage.learner_config)
    rows = [replace(row, advantages=np.ones_like(row.advantages)) for row in make_rows()]
    before = backend.trainer.weights.logits.copy()
    result = backend.train(rows, 0)
    gradient = (before - backend.trainer.weights.logits) / 100 / 1e-3
    logits = torch.tensor(before, requires_grad=True)
    expected = -torch.cat([differentiable(logits, row) for row in rows]).mean()
    assert_gradient(gradient, logits, expected, result)
    learned = backend.trainer.weights
    backend.supervise(None)
    np.testing.assert_array_equal(backend.trainer.weights.logits, learned.logits)
    assert (learned.steps, backend.trainer.weights.steps) == (1, 0)
    backend.train(make_rows(), 0)
    assert [loss for loss, _ in double.losses] == ["cross_entropy", "ppo"]


def one_update(folder: Path, loss: dict[str, Any], **sections: Any) -> tuple[Any, StepResult, Any]:
    """Return (gradient, result, logits before the update)."""
    training = {"lr": 1e-3, "max_tokens": 24}
    backend = backend_for(folder, loss=loss, training=training, **sections)
    before = backend.trainer.weights.logits.copy()
    result = backend.train(make_rows(), 0)
    return (before - backend.trainer.weights.logits) / 100 / 1e-3, result, before


OWN = """
def importance(tokens, params):
    rho = (tokens.new - tokens.old).exp()
    return -rho * tokens.advantages * params["scale"], {"rho": rho, "clipped": rho > 1.1}
def breaks(tokens):
    return -tokens.new * tokens.advantages * (tokens.new + 1e3 if len(tokens.new) == 14 else float("inf"))
def halves(counts, group):
    return 0.5 ** group / counts
"""


@pytest.fixture
def own_module(here: Path) -> None:
    (here / "tinker_losses.py").write_text(OWN)


def test_a_loss_of_ones_own_has_the_gradient_of_the_services_when_it_is_the_same(
    double: Double, tmp_path: Path, own_module: None
) -> None:
    gradient, result, _ = one_update(tmp_path / "a", {"aggregation": "sequence_mean"})
    mode = {"mode": "tinker_losses.importance", "params": {"scale": 1.0}}
    own, own_result, _ = one_update(tmp_path / "b", mode | {"aggregation": "sequence_mean"})
    np.testing.assert_allclose(own, gradient, rtol=1e-5, atol=1e-8)
    assert own_result.loss == pytest.approx(result.loss, rel=1e-5)
    assert own_result.grad_norm == pytest.approx(result.grad_norm, rel=1e-5)
    assert own_result.ratio_mean == pytest.approx(result.ratio_mean)
    assert own_result.loss_metrics == {"rho": pytest.approx(result.ratio_mean)}
    assert 0 < own_result.clip_fraction < 1 and own_result.updates == 1
    assert [name for name, _ in double.losses] == ["importance_sampling", "custom"]


def test_sapo_and_an_aggregation_of_ones_own_have_their_gradient(
    double: Double, tmp_path: Path, own_module: None
) -> None:
    loss = {"mode": "sapo", "aggregation": "tinker_losses.halves"}
    gradient, result, before = one_update(tmp_path, loss)
    logits = torch.tensor(before, requires_grad=True)
    expected = torch.zeros((), dtype=torch.float64)
    for row in make_rows():
        rho = torch.exp(differentiable(logits, row) - torch.tensor(row.logprobs))
        advantages, weight = torch.tensor(row.advantages), 0.5**row.group / row.num_actions
        tau = torch.where(advantages > 0, torch.tensor(1.0), torch.tensor(1.05))
        terms = 4 / tau * torch.sigmoid(tau * (rho - 1)) * advantages
        expected = expected - terms.sum() * weight
    assert_gradient(gradient, logits, expected, result)


def test_a_loss_of_ones_own_that_is_not_finite_is_skipped_and_nothing_is_sent(
    double: Double, tmp_path: Path, own_module: None
) -> None:
    gradient, result, _ = one_update(tmp_path, {"mode": "tinker_losses.breaks"})
    assert result.updates == 0
    assert result.nonfinite_updates == 1
    assert result.nonfinite_tensor == "loss"
    assert not gradient.any() and "ask optim_step" not in double.events


def test_a_forward_pass_that_never_ends_inside_the_sdk_is_given_up(
    double: Double, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = backend_for(tmp_path, loss={"mode": "sapo"}, backend={"options": {"timeout_s": 0.1}})
    forever = threading.Event()
    monkeypatch.setattr(backend.trainer, "forward_backward_custom", lambda *_: forever.wait())
    told = r"no answer within 0.1 s \(\[backend.options\] timeout_s\) \(asked for an update\)"
    with pytest.raises(EnvironmentFailure, match=f"gave {told}"):
        backend.train(make_rows(), 0)
    forever.set()


@pytest.mark.parametrize(
    "loss", [{"mode": "sapo"}, {"aggregation": "tinker_losses.halves"}], ids=str
)
def test_a_loss_that_is_computed_here_needs_torch(
    loss: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    (problem,) = incapable(tinker_config(tmp_path, loss=loss))
    assert "needs torch, which this environment lacks; pip install torch" in problem


def test_what_a_service_of_means_or_one_without_entropies_cannot_do_is_refused(
    tmp_path: Path, own_module: None
) -> None:
    means = {"options": {"loss_reduction": "mean"}}
    with pytest.raises(ConfigurationError, match="use importance_sampling, ppo or cispo"):
        tinker_config(tmp_path, backend=means, loss={"mode": "sapo"})
    (tmp_path / "tinker_losses.py").write_text(OWN + "importance.needs_entropy = True\n")
    own = {"mode": "tinker_losses.importance", "params": {"scale": 1.0}}
    (problem,) = incapable(tinker_config(tmp_path, loss=own))
    said = 'reads tokens.entropy, which backend "tinker" does not have; use backend = "local".'
    assert said in problem


@pytest.mark.parametrize(
    "settings",
    [{}, {"mode": "ppo"}, {"mode": "ppo", "clip_high": 0.05}, {"mode": "cispo", "clip_high": 1.1}],
)
def test_the_reported_loss_and_clip_are_those_of_the_local_learner(
    settings: dict[str, Any],
) -> None:
    noise, chosen = np.random.default_rng(1), Loss(**settings)
    old, advantages = noise.normal(-2, 1, 200), noise.normal(size=200)
    new = old + noise.normal(0, 0.2, 200)
    values = map(torch.tensor, (new, old, old, advantages, np.ones(200)))
    tokens = ActionTokens(*values, lengths=[200])
    terms, clipped = datums.policy_terms(new, old, advantages, chosen)
    np.testing.assert_allclose(terms, policy_terms(tokens, chosen).numpy())
    np.testing.assert_array_equal(clipped, clipped_tokens(tokens, chosen).numpy())


def test_clip_bounds_and_adam_reach_the_service(double: Double, tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "training": {"lr": 0.5, "weight_decay": 0.1, "lr_warmup_steps": 4},
        "loss": {"mode": "ppo", "clip_high": 0.3, "max_grad_norm": 2.0},
        "optimizer": {"beta1": 0.8, "beta2": 0.9, "eps": 1e-6},
    }
    backend = backend_for(tmp_path, **sections)
    backend.train(make_rows(), 0)
    assert double.losses == [("ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.3})]
    (adam,) = double.adam
    assert (adam.learning_rate, adam.weight_decay, adam.grad_clip_norm) == (0.125, 0.1, 2.0)
    assert (adam.beta1, adam.beta2, adam.eps) == (0.8, 0.9, 1e-6)
    (created,) = double.created
    assert created.pop("base_model") == backend.base_model
    assert created == {"rank": 4, "seed": 3, "train_unembed": False}


# -- the order of requests -------------------------------------------------------------------------


def test_a_steps_updates_and_sampler_are_asked_for_before_anything_is_awaited(
    double: Double, tmp_path: Path
) -> None:
    backend = backend_for(tmp_path, training={"updates_per_batch": 2, "minibatches": 2})
    assert backend.trainer is not None
    double.events.clear()
    result = backend.train(make_rows(4), 0)
    asked = [event for event in double.events if event.startswith("ask")]
    assert asked == ["ask forward_backward", "ask optim_step"] * 4 + ["ask sampler"]
    assert double.events[: len(asked)] == asked
    assert result.updates == 4 and result.ratio_mean is not None
    backend.engine.sync(lambda folder: None, 1)
    assert double.events.count("ask sampler") == 1 and double.events[-1] == "wait sampler"


def test_a_row_that_is_not_trained_is_not_sent_but_counts_in_a_constant_divisor(
    double: Double, tmp_path: Path
) -> None:
    backend = backend_for(tmp_path, loss={"aggregation": "constant"}, training={"max_tokens": 24})
    first, *rest = make_rows(4)
    backend.train([first, *(replace(row, trained=False) for row in rest)], 0)
    ((datum,),) = double.sent
    np.testing.assert_allclose(datum["advantages"][2:], first.advantages / (4 * 24), rtol=1e-6)


# -- sampling --------------------------------------------------------------------------------------


def request(count: int = 3, sample: int = 0) -> SampleRequest:
    return SampleRequest(
        np.array([65, 66], np.int32), count, 12, 1.0, NoiseKey(1, 0, 5, 2), first_sample=sample
    )


def test_completions_are_numbered_end_with_eos_and_repeat_with_their_coordinates(
    double: Double, tmp_path: Path
) -> None:
    engine = backend_for(tmp_path).engine
    engine.sync(lambda folder: None, 0)

    def sampled(*requests: SampleRequest) -> dict[tuple[int, int], list[int]]:
        found = {(one.request, one.sample): one for one in engine.sample(requests)}
        for one in found.values():
            assert len(one.token_ids) == len(one.logprobs) and (one.logprobs < 0).all()
            ended = one.token_ids[-1] == 258
            assert one.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
        return {place: one.token_ids.tolist() for place, one in found.items()}

    first, again = sampled(request(40), request(2, sample=40)), sampled(request(40))
    assert (
        {*first} == {*again, (1, 40), (1, 41)} == {*((0, n) for n in range(40)), (1, 40), (1, 41)}
    )
    assert again.items() <= first.items()
    assert sampled(replace(request(40), first_position=7)) != again


@pytest.mark.parametrize(
    ("fault", "words"),
    [("drops_eos", "never learn to stop"), ("drops_logprobs", "needs one for each")],
)
def test_a_service_that_withholds_eos_or_log_probs_stops_the_run(
    double: Double, tmp_path: Path, fault: str, words: str
) -> None:
    setattr(double, fault, True)
    engine = backend_for(tmp_path).engine
    engine.sync(lambda folder: None, 0)
    with pytest.raises(RunFailed, match=words):
        list(engine.sample([request(200)]))


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "problem", "words"),
    [
        ("session", APIStatusError(401), "refused the key in TINKER_API_KEY (401)"),
        ("create", APIStatusError(400, "none"), "refused the request (400: none)"),
        ("optim_step", APIStatusError(503), "failed (503) and failed again whenever the SDK tried"),
        ("forward_backward", APIConnectionError("lost"), "does not answer"),
        ("forward_backward", ValueError("Error: 3 retries"), "failed: Error: 3 retries"),
        ("forward_backward", TimeoutError(), "no answer within 7 s ([backend.options] timeout_s)"),
    ],
)
def test_an_error_of_the_service_is_one_sentence_and_no_further_call_is_made(
    double: Double, tmp_path: Path, name: str, problem: Exception, words: str
) -> None:
    double.problems[name] = problem
    (tmp_path / "config.toml").touch()
    with pytest.raises(EnvironmentFailure) as raised:
        backend_for(tmp_path, backend={"options": {"timeout_s": 7.0}}).train(make_rows(), 0)
    assert words in str(raised.value)
    assert f"--resume {tmp_path}`" in str(raised.value)
    assert KEY not in str(raised.value)


def test_an_address_where_another_program_answers_is_told(
    double: Double, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forever = threading.Event()
    monkeypatch.setattr("retrain.backends.tinker.service._SESSION_S", 0.1)
    monkeypatch.setattr("tinker.ServiceClient", lambda **_: forever.wait())
    with pytest.raises(EnvironmentFailure, match=r"opened no session within 0.1 s.*\(tml-") as told:
        backend_for(tmp_path)
    assert "continue with" not in str(told.value)
    forever.set()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait_for_a_session(
    double: Double, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    asked, forever = threading.Event(), threading.Event()

    def opens(**_: Any) -> None:
        asked.set()
        forever.wait(30)

    def stop() -> None:
        asked.wait()
        # This thread gets it, so it interrupts no wait of the main one.
        signal.pthread_kill(threading.get_ident(), number)

    monkeypatch.setattr("tinker.ServiceClient", opens)
    threading.Thread(target=stop, daemon=True).start()
    began = time.monotonic()
    with pytest.raises(Interrupted, match=signal.Signals(number).name):
        train(tinker_config(tmp_path / "run"), quiet=True)
    forever.set()
    assert time.monotonic() - began < 20
    assert not (tmp_path / "run").exists()


def test_after_a_failure_nothing_more_is_asked_of_the_service(
    double: Double, tmp_path: Path
) -> None:
    backend = backend_for(tmp_path)
    double.problems["forward_backward"] = APIStatusError(400)
    with pytest.raises(EnvironmentFailure):
        backend.train(make_rows(), 0)
    double.events.clear()
    with pytest.raises(EnvironmentFailure, match="400"):
        backend.save(tmp_path)
    assert double.events == []


def test_a_refusal_by_the_sampler_saves_the_run(double: Double, tmp_path: Path) -> None:
    config = tinker_config(tmp_path / "run", training={"save_every": 100, "max_steps": 50})
    sampled = 0

    class Later(dict[str, Exception]):
        def get(self, name: str, default: Any = None) -> Any:  # type: ignore[override]
            nonlocal sampled
            sampled += name == "sample"
            return APIStatusError(429, "quota") if name == "sample" and sampled > 12 else default

    double.problems = Later()
    told = r"saved after \d steps: continue with `retrain .* --resume .*--base-url"
    with pytest.raises(ServerFailure, match=told):
        small_run(config, quiet=True)
    (checkpoint,) = (tmp_path / "run/checkpoints").glob("step_*")
    assert json.loads((checkpoint / STATE_FILE).read_text())["state"].startswith(
        "tinker://run-1/weights/"
    )


def test_log_probs_that_are_not_finite_end_the_run_and_such_advantages_stay_here(
    double: Double, tmp_path: Path
) -> None:
    backend = backend_for(tmp_path)
    rows = make_rows()
    result = backend.train([replace(rows[0], advantages=rows[0].advantages * np.nan), *rows[1:]], 0)
    assert (result.updates, result.nonfinite_updates) == (0, 1) and not double.sent
    assert result.nonfinite_tensor == "advantages"
    double.broken = True
    with pytest.raises(RunFailed, match="not finite"):
        backend.train(rows, 0)


def test_without_a_key_or_the_sdk_the_sentence_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tinker", None)
    with pytest.raises(EnvironmentFailure, match=r"pip install"):
        small_run(tinker_config(tmp_path / "run"), quiet=True)
    tinker_double.install()
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    with pytest.raises(EnvironmentFailure, match="TINKER_API_KEY is not set"):
        backend_for(tmp_path)


# -- whole runs ------------------------------------------------------------------------------------


def test_a_run_saves_places_at_the_service_and_resumes_from_them(
    double: Double, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tinker_config(tmp_path / "run"))
    shown = capsys.readouterr().out
    client = "Creating LoRA training client (model=lab, rank=4)..."
    order = ["Pre-encoded", "Connecting to Tinker...", client, "Training client ready.", "Step 0"]
    assert [shown.index(line) for line in order] == sorted(shown.index(line) for line in order)
    assert "Parity gate passed" in shown
    assert "stays with the service as tinker://run-1/sampler_weights/" in shown
    for record in run.records():
        assert not record.loss_is_placeholder and record.loss is not None
        assert record.grad_norm is not None and abs(record.ratio_mean - 1) < 1e-5
    more = {"resume": {"from": str(tmp_path / "run")}, "training": {"max_steps": 6}}
    resumed = train(tinker_config(tmp_path / "run", **more))
    assert "Creating training client from tinker://run-1/weights/" in capsys.readouterr().out
    assert [record.step for record in resumed.records()] == list(range(6))
    assert double.keys == [KEY, KEY]
    for name in ("config.toml", "environment.json"):
        assert KEY not in (tmp_path / "run" / name).read_text()


@pytest.mark.parametrize("loads_into_adapters", [False, True])
def test_a_state_is_restored_with_its_optimizer_by_services_of_both_kinds(
    double: Double, tmp_path: Path, loads_into_adapters: bool
) -> None:
    double.loads_into_adapters = loads_into_adapters
    first, second = backend_for(tmp_path), backend_for(tmp_path)
    first.train(make_rows(), 0)
    first.save(tmp_path)
    second.load(tmp_path)
    np.testing.assert_array_equal(second.trainer.weights.logits, first.trainer.weights.logits)
    assert second.trainer.weights.steps == 1


@pytest.mark.slow
def test_a_campaign_makes_its_workers_share_a_throttle(double: Double, tmp_path: Path) -> None:
    conditions = [{"advantage_mode": "grpo", "transform_mode": "none"}]
    campaign = {"seeds": [1, 2], "conditions": conditions}
    folder, training = tmp_path / "campaign", {"max_steps": 1}
    config = tinker_config(folder, campaign=campaign, training=training)
    manifest = run_campaign(config, quiet=True)
    assert len(manifest.runs) == 2 and (tmp_path / "campaign/tinker_throttle").is_dir()


def test_calls_hold_a_place_of_the_throttle(double: Double, tmp_path: Path) -> None:
    backend = backend_for(tmp_path)
    held: list[str] = []

    @contextmanager
    def slot() -> Iterator[None]:
        held.append("in")
        yield
        held.append("out")

    backend._service.slot = slot
    backend.train(make_rows(), 0)
    backend.engine.sync(lambda folder: None, 1)
    list(backend.engine.sample([request()]))
    backend.logprobs(make_rows())
    backend.save(tmp_path)
    assert held == ["in", "out"] * 4


def test_a_first_save_makes_its_client_within_its_place(double: Double, tmp_path: Path) -> None:
    backend = backend_for(tmp_path)
    made: list[bool] = []

    @contextmanager
    def slot() -> Iterator[None]:
        made.append(backend._trainer is not None)
        yield
        made.append(backend._trainer is not None)

    backend._service.slot = slot
    backend.save(tmp_path)
    assert made == [False, True]


BLOCKED = """
import sys

sys.modules |= {"torch": None, "peft": None}
import tinker_double
tinker_double.install()
from retrain.cli.main import main
code = main(sys.argv[1:])
assert sys.modules["torch"] is None and sys.modules["peft"] is None
sys.exit(code)
"""


@pytest.mark.parametrize("campaign", first_of([True, False]))
def test_neither_a_run_nor_a_campaign_imports_torch(tmp_path: Path, campaign: bool) -> None:
    toml = (
        '[backend]\nbackend = "tinker"\n[model]\nmodel = "lab"\n[data]\nsource = "lab"\n'
        '[reward]\ntype = "random"\n[training]\nmax_steps = 2\nbatch_size = 2\ngroup_size = 4\n'
        "max_tokens = 8\n[evaluation]\nat_end = true\nmax_examples = 4\n"
    )
    toml += (
        '[campaign]\nseeds = [1]\nmax_steps = 1\nconditions = [{advantage_mode = "grpo",'
        ' transform_mode = "none"}]\n[squeeze]\n' * campaign
    )
    (tmp_path / "run.toml").write_text(toml)
    environment = os.environ | {"TINKER_API_KEY": KEY, "PYTHONPATH": str(Path(__file__).parent)}
    words = [str(tmp_path / "run.toml"), "--log-dir", str(tmp_path / "logs")]
    command = [sys.executable, "-c", BLOCKED, *words]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "Traceback" not in found.stderr and "PyTorch was not found" not in found.stderr
    said = "LoRA-Squeeze failed, and the campaign continues: LoRA-Squeeze and `retrain export` need"
    assert not campaign or f"{said} torch" in found.stdout


COMMANDS_WITHOUT_TORCH = """
import json, sys

sys.modules |= {"torch": None, "peft": None}
from retrain.cli.main import main
print(json.dumps([main(command.split()) for command in sys.argv[1:]]))
"""


def test_a_command_that_needs_torch_says_where_it_is_to_be_had(tmp_path: Path) -> None:
    (tmp_path / "lab.toml").write_text(
        '[model]\nmodel = "lab"\n[data]\nsource = "lab"\n[training]\nmax_examples = 64\n'
    )
    commands = "lab.toml,explain lab.toml,eval lab.toml,serve vllm lab.toml,inspect .,backends"
    command = [sys.executable, "-c", COMMANDS_WITHOUT_TORCH, *commands.split(",")]
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert json.loads(found.stdout.splitlines()[-1]) == [3, 3, 3, 3, 3, 0], found.stderr
    assert found.stderr.count("this needs torch, which retrain-core leaves out") == 5
    assert "Install retrain itself with `pip install " in found.stderr
    assert "Traceback" not in found.stderr and "bug" not in found.stderr


# -- configurations --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["minimal_tinker", "campaign"])
def test_the_blocks_of_the_guide_start_as_they_are(name: str) -> None:
    block = Path(__file__).parent / f"data/config_blocks/{name}.toml"
    config = config_from_toml(block.read_text())
    assert config.backend.backend == "tinker" and config.training.temperature == 1.0
    assert incapable(config) == []


def test_options_belong_to_their_backend() -> None:
    unused = unused_keys(config_from_mapping({"backend": {"options": {"loss_reduction": "mean"}}}))
    said = (
        'loss_reduction = "mean" has no effect: it is an option of tinker, and backend is "local".'
    )
    assert unused == [f"[backend.options] {said}"]


@pytest.mark.parametrize("command", [[], ["explain"]])
def test_a_file_of_every_default_is_refused_for_its_temperature(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], double: Double
) -> None:
    lab = {"model": {"model": "lab"}, "data": {"source": "lab"}}
    every_key = config_from_mapping(lab | {"logging": {"log_dir": str(tmp_path / "run")}})
    (tmp_path / "all.toml").write_text(dump_toml(every_key))
    assert main([*command, str(tmp_path / "all.toml"), "--backend", "tinker"]) == 2
    said = "".join(capsys.readouterr())
    assert '[training] temperature = 0.7 with backend = "tinker"' in said
    assert "remove [training] temperature" in said and "or write 1.0" in said
    assert "retrain samples and trains at temperature 1" not in said
    assert said.count('with backend = "tinker"') == 1


def test_the_temperature_is_said_and_is_one() -> None:
    said = " ".join(notes(config_from_mapping(TINKER)))
    assert "retrain samples and trains at temperature 1" in said
    assert config_from_mapping({}).training.temperature == 0.7


# -- adapters --------------------------------------------------------------------------------------


ADAPTER = {"adapter_config.json", "adapter_model.safetensors"}


def tar(**files: bytes) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as packed:
        for name, data in files.items():
            member = tarfile.TarInfo(name.replace("__", "."))
            member.size = len(data)
            packed.addfile(member, io.BytesIO(data))
    return content.getvalue()


@contextmanager
def archive_server(
    status: int, body: bytes, redirect: str = ""
) -> Iterator[tuple[str, list[str | None]]]:
    keys: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            keys.append(self.headers.get("x-api-key"))
            self.send_response(302 if redirect else status)
            if redirect:
                self.send_header("location", redirect)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", keys
    server.shutdown()
    server.server_close()


def test_an_archive_becomes_a_peft_folder_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    names = ("mlp.up.lora_A", "mlp.up.lora_B", "q.lora_A", "q.lora_B")
    layer = "base_model.model.model.layers.0"
    factors = {f"{layer}.{name}.weight": np.zeros((2, 2)) for name in names}
    weights = safetensors.numpy.save(factors)
    packed = tar(
        adapter_config__json=b'{"target_modules": null}',
        adapter_model__safetensors=weights,
        **{"../../escaped": b"no"},
    )
    with archive_server(200, packed) as (store, store_keys):
        elsewhere = store.replace("127.0.0.1", "localhost")
        with archive_server(302, b"", redirect=elsewhere) as (url, keys):
            service.download_adapter(url, "tinker://run/sampler_weights/name", tmp_path / ".", 10)
    assert {path.name for path in tmp_path.iterdir()} == ADAPTER
    assert keys == [KEY] and store_keys == [None]
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert settings == {"target_modules": ["q", "up"]}


def odd_tar(kind: bytes, name: str = "adapter_config.json", size: int = 0) -> bytes:
    """One member of a kind of its own, which says that it has `size` bytes."""
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.size = kind, "/etc/passwd", size
    return gzip.compress(member.tobuf(tarfile.GNU_FORMAT) + bytes(20 * 512))


TERABYTE = 1 << 40
ARCHIVES = {
    "no archive": (b"no tar", "holds no adapter"),
    "an archive of something else": (tar(a=b""), "no adapter_config.json"),
    "link": (odd_tar(tarfile.SYMTYPE), "no adapter_config.json"),
    "hard link": (odd_tar(tarfile.LNKTYPE), "no adapter_config.json"),
    "pipe": (odd_tar(tarfile.FIFOTYPE), "no adapter_config.json"),
    "terabyte": (odd_tar(tarfile.REGTYPE, size=TERABYTE), f"has {TERABYTE} bytes"),
    "long name": (odd_tar(tarfile.GNUTYPE_LONGNAME, size=TERABYTE), f"header of {TERABYTE} bytes"),
    "long header": (odd_tar(tarfile.XHDTYPE, size=TERABYTE), f"a header of {TERABYTE} bytes"),
    "many files": (tar(**{f"{number}": b"" for number in range(1001)}), "more than 1000 files"),
    "broken": (tar(adapter_config__json=b"{}")[:-40] + bytes(32), "holds no adapter"),
    "a large other": (odd_tar(tarfile.REGTYPE, "other", TERABYTE), f"other has {TERABYTE} bytes"),
    "deep": (
        tar(adapter_config__json=b"[" * 100_000, adapter_model__safetensors=b""),
        "RecursionError",
    ),
    "list": (tar(adapter_config__json=b"[]", adapter_model__safetensors=b""), "holds no object"),
}


@pytest.mark.parametrize(("body", "words"), ARCHIVES.values(), ids=ARCHIVES)
def test_an_archive_that_is_hostile_writes_nothing_outside_and_is_one_sentence(
    tmp_path: Path, body: bytes, words: str
) -> None:
    (tmp_path / "folder").mkdir()
    with (
        archive_server(200, body) as (url, _),
        pytest.raises(EnvironmentFailure, match=words) as caught,
    ):
        service.download_adapter(url, "tinker://run/name", tmp_path / "folder", 10)
    assert "holds no adapter" in str(caught.value) and "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert {path.name for path in (tmp_path / "folder").iterdir()} <= ADAPTER


def test_an_archive_without_end_or_none_and_a_path_upwards_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_MAX_BYTES", 1000)
    for status, words in (
        (200, "more than any adapter"),
        (404, "offers no archive of the adapter"),
    ):
        refused = pytest.raises(EnvironmentFailure, match=words)
        with archive_server(status, bytes(5000)) as (url, _), refused:
            service.download_adapter(url, "tinker://run/name", tmp_path, 10)
    with pytest.raises(EnvironmentFailure, match="is not a path of a Tinker service"):
        service.download_adapter("http://127.0.0.1:1", "tinker://../name", tmp_path, 10)


@pytest.mark.slow
def test_a_path_of_the_service_is_squeezed_after_a_download(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    local = small_run(small(tmp_path / "local"), quiet=True).adapter
    packed = tar(**{name.replace(".", "__"): (local / name).read_bytes() for name in ADAPTER})
    (tmp_path / "squeeze.toml").write_text(
        '[squeeze]\nadapter_path = "tinker://run/sampler_weights/name"\n'
    )
    for status, code, words in (
        (200, 0, "Recommended rank: "),
        (404, 3, "this service offers no archive of the adapter"),
    ):
        with archive_server(status, packed) as (url, _):
            line = f"{tmp_path}/squeeze.toml --base-url {url} --log-dir {tmp_path}/logs/train"
            assert main(line.split()) == code
        shown = capsys.readouterr()
        assert words in shown.out + shown.err
        assert "base_url" not in shown.out.replace("model.base_url = ", "")

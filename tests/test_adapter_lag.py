"""An engine that serves an old or a foreign adapter is found at a rate so small that no limit of nats
sees it.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import lines, small, small_run

from retrain import train
from retrain.backends.base import LAST_UPDATE, WHOLE_ADAPTER
from retrain.backends.local.changes import AdapterChange
from retrain.backends.local.optimizer import AdapterOptimizer
from retrain.run.adapter_lag import AdapterLag, _effect, adapter_lag, is_due
from retrain.run.dialogues import Watcher
from retrain.run.gate_fits import Fit, GateSample
from retrain.run.parts import Parts, gate_inputs, load_parts, training_plan
from retrain.run.rollout import chosen_rows
from tests.marks import first_of

LR = 4e-5
STEPS = 4
QUIET = Watcher(lambda: None, lambda _: None)
CONFIG = small(Path("nowhere"), training={"lr": LR, "max_tokens": 48, "max_examples": 8})


def test_it_is_made_again_ever_less_often() -> None:
    assert [step for step in range(600) if is_due(step)] == [2, 8, 32, 128, 512]


@pytest.fixture(scope="module")
def states() -> Iterator[tuple[Parts, list[dict[str, torch.Tensor]]]]:
    """A backend after STEPS updates, and the adapter before each of them and after the last."""
    with closing(load_parts(CONFIG, None, lambda _: None)) as parts:
        backend: Any = parts.backend
        parameters, kept = backend._adapter.parameters, []
        for step in range(STEPS + 1):
            kept.append({name: own.detach().clone() for name, own in parameters.items()})
            if step < STEPS:
                rows = sampled(parts, step)
                advantages = [
                    np.full_like(row.advantages, (-1.0) ** i) for i, row in enumerate(rows)
                ]
                backend.train([replace(r, advantages=a) for r, a in zip(rows, advantages)], step)
        yield parts, kept


def sampled(parts: Parts, step: int) -> Any:
    prompts = parts.prompts.batch(0, 4, 0)
    rollout = parts.sampler.draw(prompts, step, training_plan(CONFIG.training), QUIET)
    return chosen_rows(rollout.first_draws, 0, step, 8)


@pytest.mark.parametrize(
    ("served", "last", "whole", "cause"),
    [
        ("this", 0, 0, ""),
        ("before", 1, None, "the adapter of an earlier step"),
        ("base", None, 1, "the base model"),
        ("foreign", None, None, "the differences do not say which"),
    ],
)
def test_the_share_that_is_missing_is_measured(
    states: Any, served: str, last: float | None, whole: float | None, cause: str
) -> None:
    parts, kept = states
    backend: Any = parts.backend
    weights = {
        "this": kept[-1],
        "before": kept[-2],
        "base": kept[0],
        "foreign": {n: w.flip(0) if "lora_B" in n else w for n, w in kept[-1].items()},
    }[served]
    with backend._adapter.holding(weights):
        rows = sampled(parts, STEPS)
    inputs = gate_inputs(CONFIG, parts, STEPS, trained=True)
    found = adapter_lag(inputs, backend.learned(), rows)
    assert found and found.last and found.whole
    assert found.off is bool(cause)
    assert last is None or found.last.share == pytest.approx(last, abs=0.01)
    assert whole is None or found.whole.share == pytest.approx(whole, abs=0.01)
    assert cause in found.sentence(STEPS) if cause else True
    # a lag of one step is far below the limit of 1e-3 nats
    off = [np.abs(own - row.logprobs).mean() for own, row in zip(backend.logprobs(rows), rows)]
    assert served in ("base", "foreign") or np.mean(off) < 5e-4
    for name, own in backend._adapter.parameters.items():
        assert torch.equal(own, kept[-1][name])


def fit(share: float, explained: float) -> Fit:
    return Fit("", share, error=0.001, nats=1e-4, explained=explained)


@pytest.mark.parametrize(
    ("last", "whole", "cause"),
    [
        (fit(1.0, 0.995), fit(0.1, 0.2), "the adapter of an earlier step"),
        (fit(1.0, 0.98), fit(0.1, 0.2), "the differences do not say which"),
        (fit(0.1, 0.2), fit(1.0, 0.995), "served the base model"),
        (fit(0.1, 0.2), fit(1.0, 0.98), "the differences do not say which"),
        (fit(0.1, 0.2), fit(0.5, 0.995), "the differences do not say which"),
        (fit(0.1, 0.2), fit(2.0, 0.995), "the differences do not say which"),
        (fit(0.4, 0.995), None, "the differences do not say which"),
        (fit(3.0, 0.995), None, "the adapter of an earlier step"),
        (None, None, "the differences do not say which"),
    ],
)
def test_a_cause_is_named_only_where_it_explains_nearly_all(
    last: Fit | None, whole: Fit | None, cause: str
) -> None:
    assert cause in AdapterLag(last, whole, off=True).cause


@pytest.mark.parametrize("factor", [1e-2, 1e3])
def test_a_change_too_small_or_too_large_is_measured_at_another_size(
    states: Any, factor: float
) -> None:
    parts, _ = states
    backend: Any = parts.backend
    parameters = backend._adapter.parameters
    moved = backend._learner.optimizer.last_update()
    rows = sampled(parts, STEPS)
    inputs = gate_inputs(CONFIG, parts, STEPS, trained=True)
    compared = GateSample(inputs, rows, inputs.learner_logprobs(rows))
    found = []
    for size in (1.0, factor):
        changes = [(parameters[name], -size * own) for name, own in moved.items()]
        with AdapterChange(changes) as one:
            effect = _effect(compared, one)
        assert effect is not None
        found.append(effect / size)
    assert np.linalg.norm(found[1] - found[0]) < 0.1 * np.linalg.norm(found[0])


def test_the_last_update_follows_from_the_moments(states: Any) -> None:
    parts, kept = states
    backend: Any = parts.backend
    assert {*backend.learned()} == {LAST_UPDATE, WHOLE_ADAPTER}
    with backend.learned()[LAST_UPDATE] as change:
        change.set(1.0)
        for name, own in backend._adapter.parameters.items():
            assert torch.allclose(own, kept[-2][name], rtol=1e-5, atol=1e-3 * LR), name


def test_a_sampler_in_bf16_is_compared_along_an_update_that_is_not_enlarged(states: Any) -> None:
    """Far beyond its size the effect is another direction, and no lag showed along it."""
    parts, kept = states
    backend: Any = parts.backend
    with backend._adapter.holding(kept[-2]):
        rows = sampled(parts, STEPS)
    inputs = replace(gate_inputs(CONFIG, parts, STEPS, trained=True), half_precision=True)
    found = adapter_lag(inputs, backend.learned(), rows)
    assert found and found.last and found.last.share == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("engine", first_of(["faulty_engines.StopsReloadingLater", "pytorch"]))
def test_a_run_records_it_and_warns_and_stops_nothing(
    tmp_path: Path, engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    training = {"lr": LR, "max_steps": 3, "max_tokens": 48, "batch_size": 4}
    train(small(tmp_path, inference={"engine": engine}, training=training))
    found = [record.get("adapter_lag") for record in lines(tmp_path / "metrics.jsonl")]
    sound = engine == "pytorch"
    assert found == [None, None, pytest.approx(0 if sound else 1, abs=0.02)]
    said = capsys.readouterr().out
    assert ("served the adapter of an earlier step" in said) is not sound


@pytest.mark.parametrize("resumed", [False, True])
def test_the_last_update_has_its_own_rate_under_a_schedule(tmp_path: Path, resumed: bool) -> None:
    """Also after steps that trained nothing, and in a run that was resumed."""
    training = CONFIG.training.model_copy(update={"lr_schedule": "linear", "max_steps": 8})
    parameters = {"a.lora_B.weight": torch.nn.Parameter(torch.ones(4))}
    optimizer = AdapterOptimizer(parameters, CONFIG.optimizer, training, 0.0)
    for step in (0, 4):
        before = parameters["a.lora_B.weight"].detach().clone()
        parameters["a.lora_B.weight"].grad = torch.full((4,), 1.0 + step)
        optimizer.step(step, torch.tensor(1.0))
    if resumed:
        optimizer.save(tmp_path)
        optimizer = AdapterOptimizer(parameters, CONFIG.optimizer, training, 0.0)
        optimizer.load(tmp_path)
    moved = parameters["a.lora_B.weight"].detach() - before
    assert torch.allclose(optimizer.last_update()["a.lora_B.weight"], moved, rtol=0.01)


def test_a_step_that_trains_nothing_is_compared_on_four_completions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing stops, however many steps are off."""
    hopeless = {"reward": {"type": "match"}, "training": {"max_steps": 5, "max_tokens": 4}}
    inference = {"engine": "faulty_engines.Drifts"}
    small_run(small(tmp_path, inference=inference, **hopeless))
    records = lines(tmp_path / "metrics.jsonl")
    assert [record["num_datums"] for record in records] == [0] * 5
    assert {record["log_ratio_tokens"] for record in records} == {16}
    assert records[0]["log_ratio_mean"] < 1e-5 < records[1]["log_ratio_mean"]
    said = capsys.readouterr().out
    assert "Step 1 trained nothing; sampler and learner differed by 0.01 nats" in said


def test_an_update_that_the_engine_has_too_much_of_is_no_older_adapter() -> None:
    for share, older in ((1.0, True), (-1.0, False)):
        lag = AdapterLag(Fit(LAST_UPDATE, share, 0.001, 1e-3, 0.999), None, True)
        assert ("of an earlier step" in lag.cause) is older

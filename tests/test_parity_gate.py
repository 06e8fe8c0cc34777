"""The parity gate stops an engine that samples from another policy than the one that is trained,
adapter included.
"""

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import faulty_engines
import numpy as np
import pytest
from faulty_engines import Served
from runs import lines, quiet_run, small, small_run

from retrain import train
from retrain.config import TrainConfig
from retrain.errors import ConfigurationError, RunFailed
from retrain.run import gate, gate_faults, gate_samples
from retrain.run.gate_samples import Asked, GateSample
from retrain.run.identical import chance_of_identical
from retrain.run.observer import default_logprob_diff_limit
from retrain.run.parts import RunParts, gate_inputs, load_parts, run_parity_gate
from tests.marks import first_of

CONFIG = small(Path("nowhere"), training={"temperature": 0.8, "max_examples": 0})
TRIAL = (
    r"with a trial adapter that changes log-probs by 0\.\d+ nats, engine and learner disagree by"
)


@pytest.fixture(scope="module")
def parts() -> Iterator[RunParts]:
    with closing(load_parts(CONFIG, None, lambda line: None)) as loaded:
        yield loaded


def built(name: str, config: TrainConfig, parts: RunParts) -> Any:
    """An engine plugin, made as the backend makes its own engine."""
    backend: Any = parts.backend
    model, eos_ids = backend._weights.peft_model, parts.text.eos_ids
    return getattr(faulty_engines, name)(config, model=model, eos_ids=eos_ids, device="cpu")


@pytest.fixture
def engine(parts: RunParts) -> Iterator[Any]:
    """Puts an engine plugin in the place of the backend's own."""
    own = parts.backend.engine
    yield lambda name: setattr(parts.backend, "engine", built(name, CONFIG, parts))
    parts.backend.engine = own


def adapter_bytes(parts: RunParts) -> dict[str, bytes]:
    backend: Any = parts.backend
    return {
        name: parameter.detach().numpy().tobytes()
        for name, parameter in backend._weights.parameters.items()
    }


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        pytest.param("IgnoresTheAdapter", TRIAL, marks=pytest.mark.slow),
        ("HalvesTheScale", TRIAL),
        pytest.param("RaisesTheScale", TRIAL, marks=pytest.mark.slow),
        ("DropsAProjection", TRIAL),
        pytest.param("SwapsQAndK", TRIAL, marks=pytest.mark.slow),
        ("DropsTheLastLayer", TRIAL),
        ("KeepsTheFirstAdapter", TRIAL),
        ("KeepsTheTrialAdapter", "at temperature 2, engine and learner disagree by"),
        ("KeepsOldKeysAndValues", TRIAL),
        ("StripsEOS", "(0 tokens with 0 log-probs|without an end-of-sequence token)"),
        ("StripsEOSSilently", "(0 tokens with 0 log-probs|that did not stop)"),
        ("NeverEnds", "engine and learner disagree"),
        ("NoNumbers", "a log-prob of nan, which no sampled token has"),
        ("OffByALittle", "engine and learner disagree"),
        pytest.param("RawLogprobs", "engine and learner disagree", marks=pytest.mark.slow),
        pytest.param("ShiftsByAToken", "engine and learner disagree", marks=pytest.mark.slow),
        ("CertainEOS", "at temperature 2, engine and learner disagree"),
        ("OneSeed", "completions of one prompt are identical"),
        ("TopPOfItsOwn", "engine and learner disagree"),
        ("PenaltyOfItsOwn", "engine and learner disagree"),
    ],
)
def test_the_gate_stops_an_engine_that_serves_another_adapter_or_draws_otherwise(
    fault: str, told: str, parts: RunParts, engine: Any
) -> None:
    before = adapter_bytes(parts)
    engine(fault)
    with pytest.raises(RunFailed, match=f"Parity gate: .*{told}"):
        run_parity_gate(CONFIG, parts, 0)
    assert adapter_bytes(parts) == before


def in_bf16(**training: Any) -> Any:
    return small(
        Path("nowhere"), inference={"dtype": "bf16"}, training={"temperature": 0.8} | training
    )


def test_the_gate_passes_a_sound_engine_and_restores_every_byte(
    parts: RunParts, engine: Any
) -> None:
    before = adapter_bytes(parts)
    for place in ("in this process", "served"):
        if place == "served":
            engine("Served")
        result = run_parity_gate(CONFIG, parts, 0)
        assert adapter_bytes(parts) == before and not result.half_precision
        allowed = 1e-4 if place == "in this process" else 1e-3
        assert result.max_difference < result.tolerance == pytest.approx(allowed / 0.8)
        assert result.adapter_effect is not None
        assert result.adapter_effect > 10 * result.max_difference
        effect = f"{result.adapter_effect:.2g} nats on average"
        assert f"a trial update changes the log-probs by {effect}" in result.line()
        assert result.longest_prompt > 256 and result.endings > 0, "a page of 256 is filled"
        depths = [depth or 0 for depth in result.logprob_diff_by_depth or ()]
        assert len(depths) == 4 and 0 < max(depths) <= result.max_difference


def test_a_server_that_came_back_is_compared(parts: RunParts, engine: Any) -> None:
    engine("Noisy")
    inputs, prompts = gate_inputs(CONFIG, parts, 1, True), parts.prompts.batch(0, 2, 3)
    told = "came back, engine and learner disagree .*, so the run stops; check the engine's model"
    with pytest.raises(RunFailed, match=told):
        gate.adapter_check(inputs, prompts)


@pytest.mark.parametrize(
    ("fault", "told"),
    first_of(
        [
            ("SecondHasOtherWeights", "engine and learner disagree by .* check the engine's model"),
            ("SecondIgnoresTheAdapter", TRIAL),
        ]
    ),
)
def test_of_two_servers_the_wrong_one_is_named(
    parts: RunParts, engine: Any, fault: str, told: str
) -> None:
    """And what is found is about it alone: half of the adapter is missing in all completions."""
    engine("TwoServers")
    assert run_parity_gate(CONFIG, parts, 0).max_difference < 1e-3
    engine(fault)
    with pytest.raises(RunFailed, match=f"^Parity gate, at http://two alone of 2 servers: {told}"):
        run_parity_gate(CONFIG, parts, 0)


LOOKS = [
    ([{"one", "two"}, {"one", "two"}], [{"one"}, {"two"}], ""),
    ([{"one", "two"}, {"one", "two"}], [{"one"}, {"one", "two"}], "at one alone of 2 servers: "),
    ([{"one"}, {"one", "two"}], [{"one"}, {"one"}], "at one alone of 2 servers: "),
    ([{"one", "two"}, {"one"}], [{"one"}, {"one"}], " wrong"),
    ([{"two"}, {"one"}], [{"two"}, {"one"}], " wrong"),
]


@pytest.mark.parametrize(("answered", "faulty", "told"), LOOKS)
def test_a_server_is_at_fault_that_fails_every_look_that_it_answered(
    answered: list[set[str]],
    faulty: list[set[str]],
    told: str,
    parts: RunParts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of many sound servers, noise may accuse another one in each look."""
    inputs = gate_inputs(CONFIG, parts, 0, False)

    def sampled(_: Any, __: Any, look: int) -> Any:
        parts = {one: GateSample(inputs, [], np.zeros(0)) for one in sorted(answered[look])}
        bad.extend(id(part) for one, part in parts.items() if one in faulty[look])
        seen.append(parts)
        return parts

    bad, seen = list[int](), list[Any]()
    monkeypatch.setattr(gate, "sampled", sampled)

    def judge(part: GateSample) -> str:
        return "wrong" if id(part) in bad else ""

    if not told:
        monkeypatch.setattr(gate, "joined", lambda parts: parts)
        assert gate._compare(inputs, [], "", judge) is cast("Any", seen[1])
        return
    with pytest.raises(RunFailed, match=f"^Parity gate.*{told}"):
        gate._compare(inputs, [], "", judge)


def test_a_prompt_near_the_end_of_the_context_is_asked_for_what_is_left(
    parts: RunParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no answer, after which completions may end, is longer than that."""
    inputs, (prompt,) = gate_inputs(CONFIG, parts, 0, False), parts.prompts.batch(0, 1, 3)
    answer = np.full(9, 48, np.int32)
    inputs = replace(inputs, answers=lambda _: [answer, answer[:7]])
    monkeypatch.setattr(type(parts.backend), "reach", (len(prompt.token_ids) + 8, 0))
    (completion, _) = gate_samples.completed(inputs, [Asked(prompt, 0, 2, 32)], 0)
    assert len(completion.token_ids) <= 8
    _, end = gate_samples.endings(inputs, [prompt])
    assert len(end.prompt.token_ids) == len(prompt.token_ids) + 7


@pytest.mark.parametrize(("context", "tokens"), [(4096, 550), (560, 250)])
def test_whole_prompts_fill_a_page_and_leave_room_for_the_completion(
    parts: RunParts, monkeypatch: pytest.MonkeyPatch, context: int, tokens: int
) -> None:
    """Where text is sent, to a server that takes the model's whole context."""
    monkeypatch.setattr(type(parts.backend), "reach", (context, 0))
    able = replace(parts.backend.engine.capabilities, in_process=False, token_ids_in=False)
    monkeypatch.setattr(parts.backend.engine, "capabilities", able)
    inputs = replace(gate_inputs(CONFIG, parts, 0, False), longest_row=364)
    (prompt,) = parts.prompts.batch(0, 1, 3)
    prompts = [replace(prompt, token_ids=np.full(size, 48, np.int32)) for size in (250, 300)]
    length = len(gate_samples.long_prompt(inputs, prompts).token_ids)
    assert length == tokens <= context - gate_samples.FEW_TOKENS


def test_at_a_temperature_near_0_kept_counts_are_compared_without_overflow(parts: RunParts) -> None:
    training = {"temperature": 1e-8, "top_p": 0.9, "max_tokens": 2}
    inputs = gate_inputs(small(Path("nowhere"), training=training), parts, 0, False)
    prompts = parts.prompts.batch(0, 2, 3)
    assert "kept" not in gate_faults.fault(sample(inputs, prompts, 2))


def sample(inputs: Any, prompts: Any, max_tokens: int) -> GateSample:
    asked = [Asked(prompt, slot, 2, max_tokens) for slot, prompt in enumerate(prompts)]
    return gate_samples.joined(gate_samples.sampled(inputs, asked, 0))


@pytest.mark.filterwarnings("error")
def test_log_probs_that_are_the_learners_own_fit_no_temperature(parts: RunParts) -> None:
    inputs = replace(gate_inputs(CONFIG, parts, 0, False), half_precision=True)
    sampled = sample(inputs, parts.prompts.batch(0, 2, 3), 24)
    rows = [replace(row, logprobs=inputs.learner_logprobs([row])) for row in sampled.rows]
    assert (
        gate_faults.fault(replace(sampled, rows=rows, learner=inputs.learner_logprobs(rows))) == ""
    )


class Overflows:
    """A learner and its trial adapter: above a strength of 0.05 no log-prob is finite, as where a
    float16 would be above 65,504.
    """

    def __init__(self, sampled: GateSample) -> None:
        self.own, self.engine = sampled.learner, sampled.inputs.backend.engine

    def set(self, strength: float) -> None:
        self.strength = strength

    def logprobs(self, rows: Any, temperature: float) -> list[Any]:
        change = np.float32(4 * self.strength if self.strength <= 0.05 else np.nan)
        return [self.own + change]


def test_a_trial_adapter_whose_effect_is_not_finite_is_too_strong(parts: RunParts) -> None:
    inputs = gate_inputs(CONFIG, parts, 0, False)
    sampled = sample(inputs, parts.prompts.batch(0, 2, 3), 4)
    trial: Any = Overflows(sampled)
    found = replace(sampled, inputs=replace(inputs, backend=trial))
    effect, _ = gate._visible(trial, found)
    assert trial.strength == 0.05 and effect == pytest.approx(0.2, rel=1e-3)


@pytest.mark.slow
def test_in_half_precision_a_missing_projection_is_told_from_rounding(
    parts: RunParts, engine: Any
) -> None:
    for seed in range(4):
        rounded = in_bf16(seed=seed)
        engine("ServedInBf16")
        assert run_parity_gate(rounded, parts, 0).adapter_effect is not None
        engine("DropsAProjectionInBf16")
        with pytest.raises(RunFailed, match="with a trial adapter"):
            run_parity_gate(rounded, parts, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_in_half_precision_a_temperature_off_by_a_tenth_is_told_from_rounding(
    seed: int, parts: RunParts, engine: Any
) -> None:
    engine("HotterInBf16")
    with pytest.raises(RunFailed, match=r"effect of a temperature a tenth higher|disagree by"):
        run_parity_gate(in_bf16(seed=seed), parts, 0)


@pytest.mark.parametrize(
    ("longest_row", "tokens"), [(1000, 257), (1001, 257), (1016, 257), (1017, 1001), (2000, 1001)]
)
def test_the_long_prompt_passes_the_window_where_its_completion_fits_a_server_too(
    parts: RunParts, longest_row: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server is started for the run's longest row."""
    monkeypatch.setattr(type(parts.backend), "reach", (4096, 1000))
    inputs = replace(gate_inputs(CONFIG, parts, 0, False), longest_row=longest_row)
    prompt = gate_samples.long_prompt(inputs, parts.prompts.prompts[:4])
    assert len(prompt.token_ids) == tokens
    assert tokens == 257 or tokens + gate_samples.FEW_TOKENS <= longest_row


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 0.2, 1.0, 1.5])
def test_a_temperature_below_1_multiplies_the_rounding_that_is_allowed(temperature: float) -> None:
    config = small(Path("nowhere"), training={"temperature": temperature})
    # The learner's temperature is that of its parts.
    with closing(load_parts(config, None, lambda line: None)) as own:
        for engine, allowed in (("", 1e-4), ("RoundsItsLogits", 1e-4), ("Served", 1e-3)):
            if engine:
                own.backend.engine = built(engine, config, own)
            tolerance = run_parity_gate(config, own, 0).tolerance
            assert tolerance == pytest.approx(allowed / min(1, temperature))


# a sound engine was refused at both, at 14 since the trial adapter changes the policy by 6 nats
@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 14])
def test_a_run_of_one_token_is_checked_on_as_many_as_any_other(
    seed: int, parts: RunParts, engine: Any
) -> None:
    """Of one token per completion, rounding in half precision looks like a fault of some group of
    layers.
    """
    short = in_bf16(seed=seed, max_tokens=1)
    engine("ServedInBf16")
    assert run_parity_gate(short, parts, 0).tokens > 100
    engine("DropsAProjectionInBf16")
    with pytest.raises(RunFailed, match="with a trial adapter"):
        run_parity_gate(short, parts, 0)


# -- whole runs ------------------------------------------------------------------------------------


def test_an_engine_plugin_runs_and_passes_the_gate_again_at_its_first_new_adapter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrain.tracking.console.REMINDER_S", 0.01)
    Served.syncs.clear()
    inference, training = {"engine": "faulty_engines.Served"}, {"max_steps": 3}
    train(small(tmp_path / "plugin", inference=inference, training=training))
    shown = capsys.readouterr()
    assert shown.out.count("Parity gate passed") == 2 and "Still at: Parity gate" in shown.err
    assert Served.syncs == [0, 0, 0, 0, 1, 1, 1, 2], (
        "three of the gate, then once a step, and two of the second gate"
    )
    quiet_run(tmp_path / "own", training={"max_steps": 3})
    plugin, own = (lines(tmp_path / name / "metrics.jsonl") for name in ("plugin", "own"))
    assert [record["loss"] for record in plugin] == pytest.approx(
        [record["loss"] for record in own], abs=1e-4
    )
    recorded = json.loads((tmp_path / "plugin" / "environment.json").read_text())
    assert recorded["engine"] == asdict(Served.capabilities)
    assert recorded["backend"]["exact_resume"] is True
    assert recorded["parity_gate"]["adapter_effect"] > 0


@pytest.mark.parametrize(
    ("name", "told", "steps"),
    [
        ("IgnoresTheAdapter", TRIAL, 0),
        (
            "StopsReloading",
            "after the sync of the first step's adapter, engine and learner disagree",
            1,
        ),
    ],
)
def test_a_run_on_an_engine_plugin_stops_at_the_gate(
    tmp_path: Path, name: str, told: str, steps: int
) -> None:
    inference = {"engine": f"faulty_engines.{name}"}
    with pytest.raises(RunFailed, match=told):
        train(small(tmp_path / "run", inference=inference, training={"lr": 3e-2}), quiet=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert (len(lines(metrics)) if metrics.exists() else 0) == steps


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ("TextOnly", "cannot load a new adapter,without token ids,no log-probs,without entropies"),
        ("DeclaresNothing", "declares no capabilities,capabilities = EngineCapabilities"),
        ("Nothing", "does not load"),
        ("lines", "does not load"),
    ],
)
def test_what_an_engine_declares_is_checked_before_a_model_is_loaded(
    tmp_path: Path, engine: str, told: str
) -> None:
    sections = {
        "inference": {"engine": f"faulty_engines.{engine}"},
        "algorithm": {"transform_mode": "gtpo", "uncertainty_kind": "shannon_entropy"},
        "model": {"model": "no/such-model"},
    }
    with pytest.raises(ConfigurationError) as caught:
        train(small(tmp_path / "run", **sections), quiet=True)
    assert all(part in str(caught.value) for part in told.split(","))


# -- the mismatch of every step --------------------------------------------------------------------


def test_a_run_whose_sampler_leaves_the_policy_stops_after_three_steps(tmp_path: Path) -> None:
    drifting = {"engine": "faulty_engines.Drifts"}
    told = r"differed by 0\.01 nats per token .* step 3.* limit of 0\.001 for 3 steps in a row"
    sections: dict[str, Any] = {"training": {"max_steps": 6}}
    with pytest.raises(RunFailed, match=told):
        quiet_run(tmp_path / "run", inference=drifting, **sections)
    sections["resume"] = {"from": str(tmp_path / "run")}
    records = lines(tmp_path / "run" / "metrics.jsonl")
    assert len(records) == 4 and records[0]["logprob_diff_mean"] < 1e-5
    quantiles = [
        records[3][name] for name in ("logprob_diff_p50", "logprob_diff_p90", "logprob_diff_p99")
    ]
    assert quantiles == sorted(quantiles) and quantiles == pytest.approx([0.01] * 3, abs=1e-4)
    with pytest.raises(RunFailed, match=r"limit of 0\.001"):
        quiet_run(tmp_path / "run", inference=drifting, **sections)
    allowed = drifting | {"max_logprob_diff": 0.0}
    assert quiet_run(tmp_path / "run", inference=allowed, **sections).summary.steps == 6


@pytest.mark.parametrize(
    "loss", [{}, {"old_logprobs": "recomputed"}], ids=["sampler", "recomputed"]
)
def test_updates_within_a_step_are_no_mismatch(tmp_path: Path, loss: dict[str, Any]) -> None:
    """The ratio of the later minibatches contains the updates before them; the mismatch is that of
    the first minibatch alone.
    """
    training = {"max_steps": 3, "minibatches": 2, "lr": 1e-2}
    config = small(tmp_path / "run", training=training, loss=loss)
    records = small_run(config, quiet=True).records()
    assert max(record.logprob_diff_mean or 0 for record in records) < 1e-5
    assert (max(record.mismatch_kl or 0 for record in records) > 1e-2) is (not loss)
    assert [record.logprob_diff_tokens for record in records] == [
        12 * (record.num_datums or 0) for record in records
    ], "half of 24 each"


def test_the_limit_is_ten_times_the_gates_figure_above_the_noise() -> None:
    assert default_logprob_diff_limit(1e-6, half_precision=False) == 1e-3
    assert default_logprob_diff_limit(5e-4, half_precision=False) == pytest.approx(5e-3)
    assert default_logprob_diff_limit(1e-3, half_precision=True) == 0.02
    assert default_logprob_diff_limit(8e-3, half_precision=True) == pytest.approx(0.08)


def test_dropout_moves_the_ratio_by_itself_and_stops_nothing(tmp_path: Path) -> None:
    run = quiet_run(tmp_path / "run", lora={"dropout": 0.5}, training={"max_steps": 5, "lr": 3e-2})
    assert max(record.logprob_diff_mean or 0 for record in run.records()) > 1e-3


# -- endings, kept counts, noise, rounding ---------------------------------------------------------


@pytest.mark.parametrize("fault", first_of(["HidesTopP", "HidesPenalty"]))
def test_the_gate_passes_right_log_probs_whatever_is_drawn(
    fault: str, parts: RunParts, engine: Any
) -> None:
    """What an engine draws from is not compared: docs/parity.md says so."""
    engine(fault)
    assert run_parity_gate(CONFIG, parts, 0).max_difference < 1e-4


@pytest.mark.slow
def test_a_sound_bf16_sampler_whose_rounding_looks_like_another_temperature_passes(
    tmp_path: Path,
) -> None:
    """Sound run 1056 of benchmarks/sound_runs.py: its trial adapter makes some tokens 30 nats more
    probable by rounding alone, and those are what it samples.
    """
    training = {"max_steps": 1, "seed": 1056, "temperature": 0.3, "top_p": 0.9, "max_tokens": 24}
    training |= {"batch_size": 4, "group_size": 2}
    more = {"inference": {"dtype": "bf16"}, "model": {"lora_rank": 1}, "data": {"difficulty": 1}}
    config = small(tmp_path / "run", training=training, **more)
    assert train(config, quiet=True).summary.steps == 1


def test_log_probs_that_are_not_finite_stop_a_run_whose_learner_has_none(
    parts: RunParts, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is compared where a service trains, and the loss would read them."""
    engine("NoNumbers")
    able = replace(parts.backend.capabilities, scores_rows=False)
    monkeypatch.setattr(parts.backend, "capabilities", able)
    with pytest.raises(RunFailed, match="a log-prob of nan, which no sampled token has"):
        run_parity_gate(CONFIG, parts, 0)


KEPT = r"the engine kept [\d,]+ tokens where \[training\] top_k, top_p and min_p keep"
COUNTS = [("IgnoresTopP", KEPT), ("CountsOneMore", KEPT)]
COUNTS += [("ReportsThePolicy", "engine and learner disagree"), ("AnotherTopP", KEPT)]
COUNTS += [("CountsNothing", "does not report the tokens that")]


@pytest.mark.parametrize(("fault", "told"), first_of(COUNTS, quick=2))
def test_kept_counts_and_log_probs_are_held_against_the_learners_logits(
    fault: str, told: str, parts: RunParts, engine: Any
) -> None:
    truncated = small(
        Path("nowhere"), training={"temperature": 0.8, "top_p": 0.95, "batch_size": 4}
    )
    assert run_parity_gate(truncated, parts, 0).max_difference is not None
    engine(fault)
    with pytest.raises(RunFailed, match=told):
        run_parity_gate(truncated, parts, 0)


def test_an_engine_that_truncates_unasked_is_stopped(parts: RunParts, engine: Any) -> None:
    """It says what it kept, so the learner's log-probs are of the same cut, and agree."""
    engine("AnotherTopP")
    with pytest.raises(RunFailed, match=r"min_p keep 259 to 259 of"):
        run_parity_gate(CONFIG, parts, 0)


@pytest.mark.slow
def test_a_sound_bf16_sampler_passes_though_one_token_is_off_by_half_a_nat(tmp_path: Path) -> None:
    training = {"max_steps": 1, "seed": 5, "max_tokens": 96, "batch_size": 2}
    run = train(small(tmp_path / "run", inference={"dtype": "bf16"}, training=training), quiet=True)
    found = json.loads((run.folder / "environment.json").read_text())["parity_gate"]
    assert found["half_precision"] and found["mean_difference"] < found["tolerance"]
    assert found["rounding"] / 4 < found["mean_difference"] < 4 * found["rounding"]


def test_a_head_in_half_precision_is_no_float32(parts: RunParts, engine: Any) -> None:
    """No token is off by the limit of 1e-3 nats, and their mean is."""
    engine("RoundsItsHead")
    assert run_parity_gate(CONFIG, parts, 0).half_precision
    engine("RoundsItsHead")
    told = r"engine and learner disagree by 0\.0004 nats on average \(allowed: 6\.[23]e-05\)"
    inputs = replace(gate_inputs(CONFIG, parts, 0, False), dtype_set=True)
    with pytest.raises(RunFailed, match=told):
        gate.parity_gate(inputs, parts.prompts.batch(0, 2, 3))


@pytest.mark.slow
def test_a_server_of_unknown_dtype_is_compared_in_its_own(parts: RunParts, engine: Any) -> None:
    """One that serves in float32 is in test_the_gate_passes_a_sound_engine_and_restores_every_byte."""
    engine("ServedInBf16")
    assert run_parity_gate(CONFIG, parts, 0).half_precision


def test_equal_completions_are_possible_where_their_log_probs_allow_them() -> None:
    ids, other = np.arange(16, dtype=np.int32), np.arange(1, 17, dtype=np.int32)
    certain, unlikely = np.full(16, -0.01, np.float32), np.full(16, -1.0, np.float32)
    assert chance_of_identical([[(ids, certain)] * 8] * 8) > 0.01
    assert chance_of_identical([[(ids, unlikely), (other, unlikely)]]) == 1.0
    assert chance_of_identical([[(ids, unlikely), (ids, unlikely)]]) < 1e-5
    assert chance_of_identical([[(ids[:15], unlikely[:15])] * 2]) == 1.0, (
        "too short to conclude anything"
    )
    # The gate's own completions are hot, and it asks about every length.
    assert chance_of_identical([[(ids[:3], certain[:3])] * 4], min_tokens=1) > 0.1
    assert chance_of_identical([[(ids[:15], unlikely[:15])] * 4], min_tokens=1) < 1e-6


def test_one_seed_is_found_in_short_completions_too(parts: RunParts, engine: Any) -> None:
    """With this seed those at temperature 2 end after seven tokens."""
    engine("OneSeed")
    training = {"seed": 23, "temperature": 0.8, "max_examples": 0}
    with pytest.raises(RunFailed, match="completions of one prompt are identical"):
        run_parity_gate(small(Path("nowhere"), training=training), parts, 0)

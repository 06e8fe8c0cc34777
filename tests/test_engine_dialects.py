"""Engines that speak SGLang's, MLX-LM's and MAX's dialects, against stand-ins; raw log-probs."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from dialect_doubles import (
    HastyMAX,
    HastyMLX,
    HastySGLang,
    LlamaCppDouble,
    MAXDouble,
    MLXDouble,
    SGLangDouble,
    double,
)
from runs import lines, small
from vllm_double import eos_ids, lab

from retrain import train
from retrain.backends.local.backend import LocalBackend
from retrain.cli.main import main
from retrain.config import dump_toml, replaced
from retrain.errors import ConfigurationError, RunFailed, ServerFailure
from retrain.inference_engine.base import NoiseKey, SampleRequest
from retrain.inference_engine.mlx import MLXDialect, to_mlx
from retrain.inference_engine.sglang import SGLangDialect
from retrain.types import Completion, Row
from tests.runs import small_run

DOUBLES: dict[str, type] = {
    "HastySGLang": SGLangDouble,
    "HastyMLX": MLXDouble,
    "HastyMAX": MAXDouble,
}


@pytest.fixture
def sglang() -> Iterator[SGLangDouble]:
    with double(SGLangDouble) as one:
        yield one


@pytest.fixture
def mlx() -> Iterator[MLXDouble]:
    with double(MLXDouble) as one:
        yield one


@pytest.fixture
def maximal() -> Iterator[MAXDouble]:
    with double(MAXDouble) as one:
        yield one


def served(folder: Path, url: str, engine: str, **sections: Any) -> Any:
    training = {"max_steps": 2, "temperature": 0.7} | sections.pop("training", {})
    return small(
        folder,
        inference={"engine": f"dialect_doubles.{engine}", "url": url},
        training=training,
        **sections,
    )


def engine_of(make: type, url: str, folder: Path) -> Any:
    config = served(folder, url, make.__name__)
    return make(config, model=lab()._base.model, eos_ids=eos_ids(), device=lab()._base.device)


def request(ids: Any = range(40, 60), count: int = 2, **changes: Any) -> SampleRequest:
    settings = {"max_tokens": 6, "temperature": 0.7} | changes
    return SampleRequest(np.array(ids, np.int32), count, noise=NoiseKey(0, 0, 0, 0), **settings)


# -- all of them -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "steps"), [("HastySGLang", 1), ("HastyMLX", 2), ("HastyMAX", 1)]
)
def test_a_run_at_another_temperature_than_1_passes_the_gate_and_stays_on_policy(
    engine: str, steps: int, tmp_path: Path
) -> None:
    with double(DOUBLES[engine]) as server:
        run = train(
            served(tmp_path / "run", server.url, engine, training={"max_steps": steps}), quiet=True
        )
    assert run.summary.steps == steps
    assert all(
        record.logprob_diff_mean is not None and record.logprob_diff_mean < 1e-4
        for record in run.records()
    )
    gate = json.loads((tmp_path / "run" / "environment.json").read_text())["parity_gate"]
    assert gate["max_difference"] < 1e-3 and gate["adapter_effect"] > 5 * gate["max_difference"]
    assert not list((tmp_path / "run").glob(".served-*"))


WITHOUT_PENALTY = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_new_tokens": 0,
    "logit_bias": None,
}


# -- SGLang ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "stopped"), [([7, 3], True), ([7, 9], False), ([3, 9], False), ([], False)]
)
def test_an_eos_at_the_limit_ends_a_completion_that_sglang_calls_a_length(
    tmp_path: Path, ids: list[int], stopped: bool
) -> None:
    """An empty one is refused by its counts, as any server's is."""
    about = {
        "prompt_tokens": 2,
        "finish_reason": {"type": "length", "length": 2},
        "output_token_logprobs": [[-0.1, token, None] for token in ids],
    }
    dialect = SGLangDialect(served(tmp_path, "http://a", "sglang"), [3])
    (found,) = dialect.read([{"meta_info": about}], replace(request(), prompt_ids=np.arange(2)))
    assert found.token_ids == ids and found.stopped is stopped


def test_every_sample_has_its_own_seed_and_the_adapter_by_name(
    sglang: SGLangDouble, tmp_path: Path
) -> None:
    engine = engine_of(HastySGLang, sglang.url, tmp_path)
    engine.sync(lab().save_adapter, 0)
    first, second = (
        sorted(engine.sample([request(count=4)]), key=lambda one: one.sample) for _ in range(2)
    )
    list(engine.sample([request(count=4, first_position=7)]))  # a later turn
    engine.sync(lab().save_adapter, 1)
    engine.close()
    asked = {
        path: [body for other, body in sglang.asked if other == path] for path, _ in sglang.asked
    }
    generate = asked["/generate"][0]
    seeds, again, later = (
        [settings["sampling_seed"] for settings in body["sampling_params"]]
        for body in asked["/generate"]
    )
    assert seeds == again and not {*seeds} & {*later}
    assert WITHOUT_PENALTY.items() <= generate["sampling_params"][0].items()
    assert len(set(seeds)) == 4 and all(0 <= seed < 2**31 for seed in seeds)
    assert generate["input_ids"] == [list(range(40, 60))] * 4
    assert len(set(map(str, (one.token_ids for one in first)))) > 1
    assert [one.token_ids.tolist() for one in first] == [
        one.token_ids.tolist() for one in second
    ], "the noise is the run's own"
    loads, unloads = (
        [body["lora_name"] for body in asked[path]]
        for path in ("/load_lora_adapter", "/unload_lora_adapter")
    )
    assert loads == unloads and len(set(loads)) == 2 and generate["lora_path"] == [loads[0]] * 4
    assert len(asked["/flush_cache"]) == 2


def test_an_adapter_that_the_server_does_not_list_is_refused(
    sglang: SGLangDouble, tmp_path: Path
) -> None:
    sglang.hides_adapters = True
    engine = engine_of(HastySGLang, sglang.url, tmp_path)
    with pytest.raises(
        ServerFailure,
        match=(
            r"did not load the adapter retrain-.*-1 \(it does not list it\); start it with"
            r" --enable-lora"
        ),
    ):
        engine.sync(lab().save_adapter, 0)
    engine.close()


# -- MLX-LM ----------------------------------------------------------------------------------------


def test_prompts_are_sent_as_text_one_request_per_sample_the_adapter_as_a_folder(
    mlx: MLXDouble, tmp_path: Path
) -> None:
    engine = engine_of(HastyMLX, mlx.url, tmp_path)
    engine.sync(lab().save_adapter, 0)
    found = list(engine.sample([request(count=3)]))
    folders = {body.get("adapters") for _, body in mlx.asked}
    engine.sync(lab().save_adapter, 1)
    engine.close()
    bodies = [body for _, body in mlx.asked if body["max_tokens"] == 6]
    assert sorted(one.sample for one in found) == [0, 1, 2] and len(bodies) == 3
    assert all(
        "seed" not in body
        and body["temperature"] == 0.7
        and mlx.tokenizer.encode(body["prompt"]) == list(range(40, 60))
        for body in bodies
    )
    later = {body.get("adapters") for _, body in mlx.asked} - folders
    assert len(folders - {None}) == len(later) == 1
    assert all(Path(str(folder)).is_absolute() for folder in later)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"rope_parameters": {"rope_theta": 1e6}}, True),
        ({"rope_parameters": {"rope_theta": 1e6}, "rope_theta": 1e6}, False),
        ({"rope_parameters": {"rope_theta": 1e4}}, False),
        ({"rope_parameters": None}, False),
    ],
)
def test_rope_is_named_where_the_server_cannot_have_read_it(
    settings: dict[str, Any], told: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(settings))
    config = SimpleNamespace(model=SimpleNamespace(model=str(tmp_path)))
    dialect, server = cast(Any, SimpleNamespace(config=config)), cast(Any, None)
    found = asyncio.run(MLXDialect.why_it_differs(dialect, server))
    assert ('"rope_theta": 1000000.0 next to it' in found) is told and bool(found) is told


def test_a_prompt_that_does_not_survive_as_text_is_refused(mlx: MLXDouble, tmp_path: Path) -> None:
    engine = engine_of(HastyMLX, mlx.url, tmp_path)
    engine.sync(lab().save_adapter, 0)
    spelled = [
        mlx.tokenizer.encode(letter)[0] for letter in "<|im_end|>"
    ]  # letters, which encode to the special token
    with pytest.raises(
        ConfigurationError, match=r"prompt '<\|im_end\|>' \(10 tokens\) encodes to other token ids"
    ):
        list(engine.sample([request(spelled)]))
    engine.close()


def test_a_server_with_another_tokenizer_is_found_by_the_number_of_prompt_tokens(
    mlx: MLXDouble, tmp_path: Path
) -> None:
    engine = engine_of(HastyMLX, mlx.url, tmp_path)
    engine.sync(lab().save_adapter, 0)
    mlx.extra_tokens = 1
    with pytest.raises(
        ServerFailure, match="got a prompt of 20 tokens, which reached the model as 21"
    ):
        list(engine.sample([request()]))
    engine.close()


@pytest.mark.slow
def test_raw_log_probs_of_the_base_model_are_stopped_by_the_gate(
    mlx: MLXDouble, tmp_path: Path
) -> None:
    mlx.base_only = True
    with pytest.raises(RunFailed, match="with a trial adapter"):
        train(served(tmp_path / "run", mlx.url, "HastyMLX"), quiet=True)


@pytest.mark.parametrize(("rslora", "scale"), [(False, 4.0), (True, 8.0)])
def test_an_adapter_is_converted_with_its_scale(rslora: bool, scale: float, tmp_path: Path) -> None:
    backend = LocalBackend(small(tmp_path, lora={"use_rslora": rslora, "alpha": 16}))
    backend.save_adapter(tmp_path / "peft")
    to_mlx(tmp_path / "peft", tmp_path / "mlx")
    settings = json.loads((tmp_path / "mlx" / "adapter_config.json").read_text())
    assert settings["lora_parameters"]["scale"] == scale
    assert settings["lora_parameters"]["rank"] == 4 and settings["num_layers"] == 4
    assert "self_attn.q_proj" in settings["lora_parameters"]["keys"]
    assert len(settings["lora_parameters"]["keys"]) == 7
    backend.close()


# -- MAX -------------------------------------------------------------------------------------------


def test_max_is_asked_for_one_sample_at_a_time_each_with_its_seed(
    maximal: MAXDouble, tmp_path: Path
) -> None:
    engine = engine_of(HastyMAX, maximal.url, tmp_path)
    engine.sync(lab().save_adapter, 0)
    list(engine.sample([request(count=3), request(count=1, first_position=7)]))  # a later turn
    engine.close()
    bodies = [body for path, body in maximal.asked if path == "/v1/completions"]
    assert len(bodies) == len({body["seed"] for body in bodies}) == 4
    assert all(
        body["logprobs"] == 1 and body["prompt"] == list(range(40, 60)) and "n" not in body
        for body in bodies
    )


def test_max_on_a_cpu_cannot_train(maximal: MAXDouble, tmp_path: Path) -> None:
    maximal.on_a_cpu = True
    with pytest.raises(
        ConfigurationError, match=r"without adapters, which MAX serves on a GPU only"
    ):
        small_run(served(tmp_path / "run", maximal.url, "HastyMAX"), quiet=True)


# -- raw log-probs ---------------------------------------------------------------------------------


def row_of(prompt: Any, one: Completion, advantage: float) -> Row:
    ids = np.concatenate([prompt, one.token_ids]).astype(np.int32)
    advantages = np.full(len(one.token_ids), advantage, np.float32)
    return Row(ids, ((len(prompt), len(ids)),), one.logprobs, advantages, 0, one.sample)


def test_with_raw_log_probs_a_step_is_the_same_as_with_those_of_the_policy(tmp_path: Path) -> None:
    config = small(
        tmp_path, training={"temperature": 0.7, "updates_per_batch": 2}, loss={"mode": "ppo"}
    )
    one, other = LocalBackend(config), LocalBackend(config)
    ids = np.arange(40, 60, dtype=np.int32)
    drawn = list(one.engine.sample([request(ids, count=4, max_tokens=12)]))
    rows = [row_of(ids, each, 0.5 - each.sample % 2) for each in drawn]
    raw = [
        replace(row, logprobs=own) for row, own in zip(rows, one.logprobs(rows, 1.0), strict=True)
    ]
    assert (
        max(np.abs(row.logprobs - own.logprobs).max() for row, own in zip(rows, raw, strict=True))
        > 0.1
    )
    result = one._learner.train(raw, 0, sampler_is_raw=True)
    other.train(
        [replace(row, logprobs=own) for row, own in zip(rows, other.logprobs(rows), strict=True)], 0
    )
    for ours, theirs in zip(
        one._weights.parameters.values(), other._weights.parameters.values(), strict=True
    ):
        assert ours.equal(theirs)
    assert result.logprob_diff_mean == pytest.approx(0, abs=1e-6), (
        "measured at temperature 1, where the raw ones belong"
    )
    stale = one._learner.train(
        [replace(row, logprobs=row.logprobs - 0.3) for row in raw], 1, sampler_is_raw=True
    )
    assert stale.logprob_diff_mean is not None and stale.logprob_diff_mean > 0.2, (
        "a sampler with other weights is still seen"
    )
    one.close()
    other.close()


# -- llama.cpp ---------------------------------------------------------------------------------


def test_llama_cpps_server_is_evaluated_and_not_trained_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = LlamaCppDouble()
    evaluation = {"max_examples": 4, "samples": 1, "temperature": 0.0, "max_tokens": 96}
    config = small(
        tmp_path / "run",
        inference={"engine": "openai", "url": server.url, "patience_s": 5},
        reward={"type": "match"},
        evaluation=evaluation,
    )
    (tmp_path / "llama.toml").write_text(dump_toml(config))
    (tmp_path / "local.toml").write_text(
        dump_toml(replaced(config, {"inference.engine": "pytorch"}))
    )
    assert main([str(tmp_path / "llama.toml")]) == 2
    told = capsys.readouterr().err
    assert "takes and returns token ids with log-probs, but loads no PEFT adapter" in told
    written = []
    for name in ("llama", "local"):
        command = ["eval", str(tmp_path / f"{name}.toml"), "--output", str(tmp_path / name)]
        assert main(command) == 0
        keys = ("completion", "reward", "finish_reason", "num_tokens")
        samples = lines(tmp_path / name / "samples.jsonl")
        written.append([{key: line[key] for key in keys} for line in samples])
    server.kill()
    assert written[0] == written[1] and len(written[0]) == 4
    assert "stop" in {line["finish_reason"] for line in written[0]}

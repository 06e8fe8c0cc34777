"""`[model] train = "full"`: every weight has its gradient and its step, and is saved, sampled from
and exported as the learner has it.
"""

import json
import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import assert_same_run, lines, small, small_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from retrain.backends.local.backend import LocalBackend
from retrain.backends.local.learner import Learner
from retrain.cli.main import main
from retrain.config import TrainConfig
from retrain.inference_engine.base import NoiseKey, SampleRequest
from retrain.types import Row
from tests.learner_models import EOS, config_for, gradients, make_learner, make_rows, with_logprobs
from tests.learner_reference import reference_loss, row_scores

FULL = {"train": "full"}
FAMILIES = ("qwen3", "biased", "gemma2", "opt")
PROMPT = np.arange(5, 12, dtype=np.int32)


def full(family: str = "qwen3", **sections: dict[str, Any]) -> TrainConfig:
    return config_for(family, **{**sections, "model": FULL | sections.get("model", {})})


def rows_near(learner: Learner) -> list[Row]:
    """Rows of which some share a prompt, and one is alone."""
    rows = make_rows()
    rows[1] = replace(
        rows[1], token_ids=np.concatenate([rows[0].token_ids[:2], rows[1].token_ids[2:]])
    )
    return with_logprobs(rows, learner.logprobs(rows), 0.3)


@pytest.mark.parametrize("budget", [4096, 30], ids=["one batch", "small batches"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_has_the_gradient_of_float64_autograd(family: str, budget: int) -> None:
    loss = {"mode": "ppo", "entropy_coef": 0.02, "kl_coef": 0.1}
    learner = make_learner(full(family, loss=loss), budget)
    rows = rows_near(learner)
    model: Any = deepcopy(learner.weights.model).double()
    learner.train(rows, 0)
    ours = gradients(learner)
    temperature = learner.temperature
    with torch.no_grad():
        frozen = [[float(lp) for lp in row_scores(model, row, temperature)[0]] for row in rows]
    recorded = [row.logprobs.tolist() for row in rows]
    terms: dict[str, Any] = {**loss, "low": 0.2, "high": 0.2, "temperature": temperature}
    reference_loss(model, rows, recorded, frozen, **terms).backward()
    theirs = {name: own.grad for name, own in model.named_parameters()}
    trained = {name for name, own in learner.base.model.named_parameters() if own.requires_grad}
    assert ours.keys() == theirs.keys() == trained
    for name, expected in theirs.items():
        distance = float((ours[name].double() - expected).norm() / expected.norm())
        # a key's bias moves all scores of a query alike: its gradient is 0
        assert distance < 1e-5 or expected.norm() < 1e-7, (name, distance)


def test_ten_steps_are_those_of_torchs_adamw_in_float64() -> None:
    training = {"lr": 1e-3, "weight_decay": 0.1}
    learner = make_learner(full("biased", training=training, loss={"max_grad_norm": 0.0}))
    names = list(learner.weights.parameters)
    matrices = {name for name in names if "proj.weight" in name or "lm_head" in name}
    theirs = {
        name: own.detach().double().requires_grad_()
        for name, own in learner.weights.parameters.items()
    }
    groups = [
        {"params": [theirs[name] for name in names if name in matrices], "weight_decay": 0.1},
        {"params": [theirs[name] for name in names if name not in matrices], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
    for group in adamw.param_groups:
        settings = learner.optimizer._adamw.param_groups[0]
        group["betas"], group["eps"] = settings["betas"], settings["eps"]
    for step in range(10):
        learner.train(rows_near(learner), step)
        for name, gradient in gradients(learner).items():
            theirs[name].grad = gradient.double()
        adamw.step()
    for name, own in learner.weights.parameters.items():
        torch.testing.assert_close(own.double(), theirs[name].data, rtol=1e-5, atol=1e-6)


# -- the sampler -----------------------------------------------------------------------------------


def sampled(backend: LocalBackend) -> Row:
    request = SampleRequest(PROMPT, 1, 20, 1.0, NoiseKey(11, 0, 0, 0))
    (found,) = backend.engine.sample([request])
    ids = np.concatenate([PROMPT, found.token_ids])
    advantages = np.ones(len(found.token_ids), np.float32)
    span = (len(PROMPT), len(ids))
    return Row(ids, (span,), found.logprobs, advantages, group=0, sample=0)


@pytest.mark.parametrize("family", ["qwen3", "biased", "gemma2"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_sampler_follows_every_step(
    family: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrain.model.packed._MIN_ELEMENTS", 1)
    training = {"lr": 3e-2, "temperature": 1.0}
    backend = LocalBackend(full(family, model={"dtype": dtype}, training=training), eos_ids=[EOS])
    tolerance = 1e-4 if dtype == "fp32" else 0.2
    seen = []
    for step in range(3):
        row = sampled(backend)
        seen.append(row.logprobs[:1])
        (own,) = backend.logprobs([row])
        assert np.abs(own - row.logprobs).max() < tolerance
        backend.train([row], step)
    assert len({float(first[0]) for first in seen}) == 3, "the weights moved"
    assert backend.engine.layout_seconds >= 0


def test_half_precision_steps_float32_weights() -> None:
    learner = make_learner(full(model={"dtype": "bf16"}, training={"lr": 1e-5}))
    before = {name: own.detach().clone() for name, own in learner.weights.parameters.items()}
    cast = [own.detach().clone() for own in learner.base.model.parameters()]
    for step in range(2):
        learner.train(rows_near(learner), step)
    moved = [(own - before[name]).norm() > 0 for name, own in learner.weights.parameters.items()]
    assert all(moved)
    assert {own.dtype for own in learner.weights.parameters.values()} == {torch.float32}
    same = [
        torch.equal(own, old)
        for own, old in zip(learner.base.model.parameters(), cast, strict=True)
    ]
    assert any(same), "a rate that bf16 alone would lose"
    for name, own in learner.base.model.named_parameters():
        assert torch.equal(own, learner.weights.parameters[name].to(own.dtype))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_gates_change_shows_and_is_taken_back_byte_for_byte(dtype: str) -> None:
    backend = LocalBackend(full(model={"dtype": dtype}), eos_ids=[EOS])
    row = sampled(backend)
    (before,), digest = backend.logprobs([row]), backend.digest()
    bits = [own.detach().clone() for own in backend._base.model.parameters()]
    trial = backend.trial_adapter(3)
    with trial:
        trial.set(0.3)
        assert np.abs(backend.logprobs([row])[0] - before).max() > 1e-2
    changes = trial._changes  # type: ignore[attr-defined]
    assert len({change.parameter.shape for change in changes}) == len(changes) == 2
    assert backend.digest() == digest
    for own, old in zip(backend._base.model.parameters(), bits, strict=True):
        assert torch.equal(own, old)
    assert np.array_equal(backend.logprobs([row])[0], before)


def test_the_reference_is_the_base_as_it_was_loaded(tmp_path: Path) -> None:
    config = full(training={"lr": 1e-2}, algorithm={"reference": "base"})
    backend = LocalBackend(config, eos_ids=[EOS])
    rows = make_rows()
    before, digest = backend.logprobs(rows), backend.digest()
    backend.train(rows, 0)
    trained = backend.digest()
    assert trained != digest
    for was, now in zip(before, backend.reference_logprobs(rows), strict=True):
        assert np.array_equal(was, now)
    assert backend.digest() == trained


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_saving_and_loading_between_steps_changes_no_byte(tmp_path: Path, dtype: str) -> None:
    training = {"lr": 1e-3, "weight_decay": 0.1}
    config = full("biased", model={"dtype": dtype}, training=training)
    straight = LocalBackend(config, eos_ids=[EOS])
    straight.train(make_rows(seed=0), 0)
    straight.save(tmp_path / "half")
    resumed = LocalBackend(config, straight.choices, eos_ids=[EOS])
    resumed.load(tmp_path / "half")
    for backend, name in ((straight, "straight"), (resumed, "resumed")):
        backend.train(make_rows(seed=1), 1)
        backend.save(tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "straight").iterdir())
    assert files == [
        "README.md", "config.json", "model.safetensors", "optimizer.json", "optimizer.safetensors"
    ]  # fmt: skip
    for name in files:
        one, other = (tmp_path / folder / name for folder in ("straight", "resumed"))
        assert one.read_bytes() == other.read_bytes(), name


RUN: dict[str, Any] = {
    "model": FULL,
    "evaluation": {"at_start": True, "every": 2, "max_examples": 4},
    "training": {"lr": 1e-3, "max_steps": 4, "save_every": 1},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("full") / "run"
    small_run(small(folder, **RUN), quiet=True)
    return folder


def test_a_run_resumes_to_the_same_bytes(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    training = RUN["training"] | {"max_steps": 2}
    small_run(small(other, **{**RUN, "training": training}), quiet=True)
    small_run(small(other, **{**RUN, "resume": {"from": str(other)}}), quiet=True)
    assert_same_run(run, other, 4)


def test_a_run_keeps_two_checkpoints_and_its_last_weights_once(run: Path) -> None:
    folder = run / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["final", "step_000003", "step_000004"]
    last, final = (folder / name / "model.safetensors" for name in ("step_000004", "final"))
    assert last.samefile(final)
    steps = lines(run / "metrics.jsonl")
    assert all(0 <= line["time_layout_s"] < line["time_sample_s"] for line in steps)
    assert all(line["logprob_diff_mean"] < 1e-4 for line in steps)
    model = AutoModelForCausalLM.from_pretrained(folder / "final")
    assert model.dtype == torch.float32


@torch.no_grad()
def test_an_export_is_the_model_with_its_tokenizer_and_card(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run)]) == 0
    folder = run.parent / "run-model"
    assert f"Model: {folder}" in capsys.readouterr().out
    ids = AutoTokenizer.from_pretrained(folder)("1 + 1 = ?", return_tensors="pt").input_ids
    exported = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    final = AutoModelForCausalLM.from_pretrained(run / "checkpoints/final")
    assert torch.equal(exported(input_ids=ids).logits, final(input_ids=ids).logits)
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "library_name: transformers" in card and "lora]" not in card and "all weights" in card


@pytest.mark.slow
def test_a_finished_run_of_a_campaign_keeps_its_weights_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from retrain.config import dump_toml

    conditions = [{"advantage_mode": "grpo", "transform_mode": "none"}]
    campaign = {"seeds": [1], "max_steps": 2, "conditions": conditions}
    sections = {**RUN, "campaign": campaign}
    file = tmp_path / "campaign.toml"
    file.write_text(dump_toml(small(tmp_path / "c", **sections)), "utf-8")
    assert main([str(file), "--quiet"]) == 0
    (folder,) = (tmp_path / "c/runs").iterdir()
    checkpoints = folder / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["final", "step_000002"]
    assert not [*checkpoints.rglob("optimizer*")]
    assert (checkpoints / "step_000002/model.safetensors").samefile(
        checkpoints / "final/model.safetensors"
    )
    assert main(["eval", str(folder)]) == 0
    more = [str(file), "--campaign-max-steps", "3", "--resume", str(tmp_path / "c")]
    assert main(more) == 2 and "its finished runs keep only weights" in capsys.readouterr().err
    assert main([*more[:1], "--quiet", *more[3:]]) == 0
    capsys.readouterr()
    assert main(["--resume", str(folder), "--max-steps", "3"]) == 2
    assert "holds only weights" in capsys.readouterr().err
    assert json.loads((folder / "summary.json").read_text())["status"] == "done"
    manifest = json.loads((checkpoints / "step_000002/manifest.json").read_text())
    assert "optimizer.safetensors" not in {file["name"] for file in manifest["files"]}


# -- what is said and refused ----------------------------------------------------------------------


def test_the_rate_and_the_checkpoints_that_nobody_wrote_are_said() -> None:
    from retrain.config import unused_keys
    from retrain.run.notes import notes

    config = TrainConfig.model_validate(
        {"model": FULL | {"lora_rank": 8}, "lora": {"alpha": 4, "dropout": 0.1}}
    )
    assert (config.training.lr, config.training.keep_checkpoints) == (1e-6, 2)
    said = [note for note in notes(config) if 'train = "full"' in note]
    assert len(said) == 1 and "lr = 1e-06 and keep_checkpoints = 2" in said[0]
    assert not any("dropout" in note for note in notes(config))
    (unused,) = [note for note in unused_keys(config) if "trains no adapter" in note]
    assert "lora_rank = 8" in unused and "[lora] alpha = 4" in unused and "dropout" in unused
    written = TrainConfig.model_validate({"model": FULL, "training": {"lr": 2e-6}})
    assert written.training.lr == 2e-6
    assert TrainConfig().training.lr == 4e-5


REFUSED: dict[str, dict[str, Any]] = {
    "load_in_4bit = true": {"model": {"load_in_4bit": True}},
    "init_from = ": {"lora": {"init_from": "somewhere"}},
    "devices = ": {"backend": {"devices": "gpu:0,gpu:1"}},
    "shard_base = true": {"backend": {"shard_base": True}},
    'engine = "vllm"': {"inference": {"engine": "vllm", "url": "http://127.0.0.1:1"}},
    "PRIME-RL trains full weights itself": {"backend": {"backend": "prime_rl"}},
    'backend = "tinker"': {"backend": {"backend": "tinker"}},
    "teacher = ": {"algorithm": {"teacher": "logs/a/checkpoints/final"}},
    "no adapter to squeeze": {"squeeze": {"target_ranks": [2]}, "campaign": {"seeds": [1]}},
}


@pytest.mark.parametrize("says", REFUSED)
def test_what_full_weights_do_not_know_is_refused_by_name(says: str) -> None:
    from retrain.backends.declared import incapable

    sections = REFUSED[says]
    config = TrainConfig.model_validate({**sections, "model": FULL | sections.get("model", {})})
    refused = [problem for problem in incapable(config) if says in problem]
    assert len(refused) == 1
    assert not [one for one in incapable(TrainConfig.model_validate(sections)) if one in refused]


RARE = {"save_every": 20}


@pytest.mark.parametrize(
    ("keep", "sft", "most"),
    [({}, 0, 3), ({"keep_checkpoints": 0}, 0, 5), (RARE, 0, 1), (RARE, 9, 2)],
)
def test_explain_tells_the_disk_of_the_checkpoints_and_where_it_lacks_room(
    keep: dict[str, int], sft: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from retrain.explain.explanation import explain
    from retrain.model.memory import predict_memory

    training = {"save_every": 2, "max_steps": 9, **keep}
    config = small(tmp_path / "not/yet", model=FULL, training=training, sft={"steps": sft})
    memory = predict_memory(config)
    told = f"Each checkpoint takes 9.4 MiB, up to {most} at a time, on"
    assert memory.disk_line().startswith(told)
    assert "lower" not in memory.disk_line()
    assert any(line.startswith(told) for line in explain(config).warnings)
    full = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr("retrain.model.memory.disk_usage", lambda path: full)
    assert "0 KiB free: lower [training] keep" in memory.disk_line()
    assert not predict_memory(small(tmp_path)).disk_line()


def test_weights_that_do_not_fit_are_refused_before_they_are_loaded(tmp_path: Path) -> None:
    from retrain.errors import EnvironmentFailure
    from retrain.model.memory import predict_memory

    config = small(tmp_path, model=FULL)
    count = predict_memory(config).size.num_trainable
    assert predict_memory(config).size.full_bytes == 20 * count
    with_base = small(tmp_path, model=FULL, loss={"kl_coef": 0.1})
    assert predict_memory(with_base).size.full_bytes == 24 * count
    with pytest.raises(
        EnvironmentFailure, match=r'train = "full" takes .* GiB for 820,992 weights'
    ):
        predict_memory(config, memory_gib=20 * count / 2**30)

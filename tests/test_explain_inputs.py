"""`retrain explain` refuses what the run would refuse, and a run's record names the code that
ran.
"""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from retrain.cli.main import main
from retrain.config import dump_toml, load_config, replaced
from retrain.errors import ConfigurationError
from retrain.explain import explain
from retrain.model.text import LAB_MODEL, LAB_MODELS, placed
from tests.runs import quiet_run, small, small_run

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"reward": {"type": "absent_reward.score"}}, "absent_reward.score"),
    ({"algorithm": {"advantage_mode": "absent_advantage.f"}}, "absent_advantage.f"),
    ({"algorithm": {"transform_mode": "absent_transform.f"}}, "absent_transform.f"),
]


def explain_exit(folder: Path, sections: dict[str, Any], *flags: str) -> int:
    (folder / "this.toml").write_text(dump_toml(small(folder / "run", **sections)))
    return main(["explain", str(folder / "this.toml"), *flags])


def refusal(
    folder: Path, capsys: pytest.CaptureFixture[str], code: int, sections: dict[str, Any]
) -> str:
    """What explain says would be refused; it ends with the code."""
    assert explain_exit(folder, sections) == code
    return capsys.readouterr().out.partition("Would be refused")[2]


@pytest.mark.parametrize(
    ("sections", "code", "said"),
    [
        *((sections, 2, named) for sections, named in WRONG),
        ({"data": {"source": "nowhere.jsonl"}}, 2, "nowhere.jsonl"),
        ({"data": {"source": "absent_source.load"}}, 2, "absent_source.load"),
        ({"backend": {"devices": "gpu:63"}}, 3, "gpu:63"),
        ({"model": {"model": "./no-model-here"}}, 3, '"./no-model-here" is not a folder'),
        ({"inference": {"attention_kernel": "triton"}}, 2, 'attention_kernel = "triton"'),
        ({"inference": {"dtype": "fp8"}}, 2, '[inference] dtype = "fp8"'),
        ({"model": {"load_in_4bit": True}}, 3, "load_in_4bit = true needs a CUDA device"),
        ({"lora": {"target_modules": ["nope"]}}, 2, "blocks have no such linear layer"),
        ({"resume": {"from": "nowhere"}}, 2, "'nowhere' does not exist; name a run's folder"),
        ({"lora": {"init_from": "nowhere"}}, 2, "holds no adapter_config.json"),
        ({"reward": {"type": "random.gauss"}}, 2, "could judge none of 3 reference answers"),
        ({"data": {"source": "math"}}, 3, "is not in the hub's cache"),
        ({"data": {"source": "aime24"}}, 2, "is an evaluation set, not for training"),
        ({"evaluation": {"source": "aime24", "every": 1}}, 3, "is not in the hub's cache"),
        (
            {"algorithm": {"transform_mode": "hicra"}, "planning": {"detector": "semantic"}},
            3,
            'needs the extra "semantic"',
        ),
    ],
)
def test_what_a_run_would_stop_at_later_is_refused_by_explain(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    sections: dict[str, Any],
    code: int,
    said: str,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    monkeypatch.setattr("retrain.data.readers.hub.why_unreachable", lambda: "nobody is asked")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    assert said in refusal(tmp_path, capsys, code, sections)


@pytest.mark.parametrize(
    ("sections", "extra"),
    [
        ({"environment": {"provider": "reasoning_gym", "id": "task"}}, "reasoning-gym"),
        ({"logging": {"trackers": ["trackio"]}}, "trackio"),
        ({"backend": {"backend": "tinker"}}, "tinker"),
    ],
)
def test_packages_of_environments_trackers_and_backends_that_are_not_here_are_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    sections: dict[str, Any],
    extra: str,
) -> None:
    for module in ("retrain.environments.loading", "retrain.tracking.external"):
        monkeypatch.setattr(f"{module}.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "tinker", None)
    assert f"[{extra}]" in refusal(tmp_path, capsys, 3, sections)


def test_explain_repeats_what_a_run_says_of_its_prompts_and_held_out_problems(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("sums", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text('{"question": "1+1=?", "answer": "2"}\n')
    sections = {
        "model": {"model": "./no-model-here"},
        "data": {
            "source": str(tmp_path / "sums.jsonl"),
            "prompt_column": "question",
            "answer_column": "answer",
        },
        "reward": {"type": "match"},
        "evaluation": {"source": str(tmp_path / "held_out.jsonl"), "every": 1},
    }
    explain_exit(tmp_path, sections)
    said = " ".join(capsys.readouterr().out.split())
    assert "none of 1 prompt asks for one, so" in said
    assert "Held-out problems that are in training too: 1, the first is" in said


def test_a_resume_from_another_folder_finds_its_own_folders_and_explain_agrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(LAB_MODEL, tmp_path / "models" / "mine")
    monkeypatch.chdir(tmp_path)
    sections: dict[str, Any] = {"model": {"model": "models/mine"}, "training": {"max_steps": 1}}
    adapter = str(quiet_run(Path("first"), **sections).adapter)
    start = {"lora": {"init_from": adapter}, "backend": {"adapter_path": "adapters"}}
    teacher = {"transform_mode": "distill", "teacher": adapter}
    quiet_run(Path("second"), algorithm=teacher, **start, **sections)
    shutil.copytree(LAB_MODELS["lab2"], tmp_path / "elsewhere" / "models" / "mine")
    monkeypatch.chdir(tmp_path / "elsewhere")
    flags = ["--resume", str(tmp_path / "second"), "--max-steps", "2"]
    config = load_config(tmp_path / "second" / "config.toml", flags, environ={})
    seen = explain(config)
    assert (seen.refused, seen.unavailable, seen.memory_unknown) == ((), (), "")
    assert "pilot ran" not in str(explain(config, pilot=tmp_path / "second").warnings)
    assert small_run(config, quiet=True).summary.steps == 2
    stored = json.loads((tmp_path / "second" / "environment.json").read_text())
    assert stored["resumed"][0]["model_sha256"] == stored["model_sha256"]
    for command in (["inspect"], ["export"]):
        assert main([*command, str(tmp_path / "second")]) == 0
    made = json.loads((tmp_path / "second-adapter" / "adapter_config.json").read_text())
    assert made["base_model_name_or_path"] == str(tmp_path / "models" / "mine")
    refused = explain(replaced(config, {"training.max_steps": 1, "training.lr": 1.0})).refused
    assert "lr = 1.0 differs from" in refused[0] and "models/mine" not in str(refused)
    too_few = explain(replaced(config, {"training.max_steps": 1}))
    assert "too small for a run that has taken 2 steps" in str(too_few.refused)


def test_a_name_is_a_model_only_where_a_folder_holds_one(tmp_path: Path) -> None:
    model = tmp_path / "org" / "name"
    model.mkdir(parents=True)
    (tmp_path / "a.toml").write_text('[model]\nmodel = "org/name"\n')
    config = load_config(tmp_path / "a.toml", environ={})
    assert placed(config).model.model == "org/name"
    (model / "config.json").touch()
    assert placed(config).model.model == str(model)


@pytest.mark.parametrize("command", ["explain", "audit", "eval"])
def test_what_a_plugin_prints_stays_out_of_the_json(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    code = "import retrain.data as d\nprint('!')\ndef load(split='train'):\n"
    code += "    return [d.Example('1=', '1')] * 9\n"
    (tmp_path / f"loud_{command}.py").write_text(code)
    config = small(tmp_path / "run", data={"source": f"loud_{command}.load"})
    (tmp_path / "a.toml").write_text(dump_toml(config))
    assert main([command, "a.toml", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) and "!" in printed.err


@pytest.mark.parametrize(("sections", "named"), WRONG)
def test_plugins_are_loaded_before_the_model_is_looked_for(
    tmp_path: Path, sections: dict[str, Any], named: str
) -> None:
    absent = {**sections, "model": {"model": "./no-model-here"}}
    with pytest.raises(ConfigurationError, match=named):
        small_run(small(tmp_path / "run", **absent), quiet=True)


def test_the_code_of_a_run_is_recorded_and_not_run_by_explaining_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = "open('imported', 'a').write('.')\ndef score(response, reference):\n    return 1.0\n"
    (tmp_path / "token_score.py").write_text(code)
    steps = {"max_steps": 1, "max_tokens": 4, "max_examples": 16}
    small_run(
        small(tmp_path / "run", reward={"type": "token_score.score"}, training=steps), quiet=True
    )
    recorded = json.loads((tmp_path / "run" / "environment.json").read_text())["code"]
    assert recorded["plugins"] == {"token_score.score": hashlib.sha256(code.encode()).hexdigest()}
    package = Path(__file__).parents[1]
    here = subprocess.run(
        ["git", "-C", str(package), "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert recorded["revision"] == (here.stdout.strip() or None)
    (tmp_path / "imported").unlink()
    stored = str(tmp_path / "run" / "config.toml")
    assert main(["explain", stored]) == 2
    assert "--trust" in capsys.readouterr().err and not (tmp_path / "imported").exists()
    assert main(["explain", stored, "--trust"]) == 0 and (tmp_path / "imported").exists()


@pytest.mark.parametrize(
    ("body", "said"), [('raise ValueError("boom")', "boom"), ('return "yes"', "value of type str")]
)
def test_a_reward_that_can_judge_nothing_is_refused_before_and_fails_at_the_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    body: str,
    said: str,
) -> None:
    (tmp_path / "nothing.py").write_text(f"def score(response, reference):\n    {body}\n")
    (tmp_path / "own.jsonl").write_text(
        '{"prompt": "1+1?", "answer": "2"}\n{"prompt": broken\n{"prompt": "1+2?", "answer": "3"}\n'
    )
    monkeypatch.chdir(tmp_path)
    sections: dict[str, Any] = {
        "data": {"source": "own.jsonl"},
        "reward": {"type": "nothing.score", "workers": 1},
        "training": {"batch_size": 2, "group_size": 2, "max_steps": 1, "save_every": 1},
    }
    assert said in refusal(tmp_path, capsys, 2, sections)
    assert main([str(tmp_path / "this.toml")]) == 1
    assert said in capsys.readouterr().err.rpartition("could be judged")[2]
    sections["reward"] = {"type": "match"}
    assert explain_exit(tmp_path, sections) == 0
    assert "Dropped rows: 1" in capsys.readouterr().out

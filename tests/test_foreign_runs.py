"""A run's folder may come from anyone: looking at it runs none of the code that it names, and eval
says what it would run.
"""

import shutil
import tomllib
from pathlib import Path

import pytest
from runs import small

from retrain.cli.main import main
from retrain.model.text import LAB_MODEL
from tests.runs import small_run

EVIL = (
    "import os, pathlib\npathlib.Path(os.environ['RETRAIN_TEST_TRACE']).touch()\ndef f(*a, **k):\n "
    "   return 1.0\n"
)
MODEL_CODE = EVIL + "from transformers import Qwen3Config\nclass C(Qwen3Config):\n    pass\n"


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logs") / "run"
    return small_run(
        small(folder, training={"max_steps": 1}, logging={"tokens_every": 1}), quiet=True
    ).folder


@pytest.fixture
def foreign(honest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same run, with a model whose configuration is code and a plugin beside config.toml."""
    folder, model = tmp_path / "run", tmp_path / "model"
    shutil.copytree(honest, folder)
    shutil.copytree(LAB_MODEL, model)
    settings = (model / "config.json").read_text().rstrip().removesuffix(
        "}"
    ) + ', "auto_map": {"AutoConfig": "evil_model.C"}}'
    (model / "config.json").write_text(
        settings.replace('"model_type": "qwen3"', '"model_type": "evil"')
    )
    (model / "evil_model.py").write_text(MODEL_CODE)
    (folder / "evil_plugin.py").write_text(EVIL)
    config = (folder / "config.toml").read_text()
    config = config.replace('model = "lab"', f'model = "{model}"').replace(
        "trust_remote_code = false", "trust_remote_code = true"
    )
    (folder / "config.toml").write_text(config)
    monkeypatch.setenv("RETRAIN_TEST_TRACE", str(tmp_path / "trace"))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return folder


def with_plugin(folder: Path, old: str, new: str) -> None:
    config = (folder / "config.toml").read_text()
    assert old in config
    (folder / "config.toml").write_text(config.replace(old, new))


LOOKS = ("inspect {}", "report {}", "explain {}/config.toml --memory-gib 8", "status {}")


@pytest.mark.parametrize("command", LOOKS)
def test_looking_at_a_run_runs_no_code_of_its_model_or_beside_it(
    foreign: Path, tmp_path: Path, command: str
) -> None:
    main(command.format(foreign).split())
    with_plugin(foreign, 'advantage_mode = "maxrl"', 'advantage_mode = "evil_plugin.f"')
    with_plugin(foreign, "trust_remote_code = true", "trust_remote_code = false")
    command += " --against gtpo" * command.startswith("inspect")
    main(command.format(foreign).split())
    assert not (tmp_path / "trace").exists()


PLUGINS = {
    "run": """
[algorithm]
advantage_mode = "evil_plugin.f"
[reward]
type = "evil_plugin.f"
""",
    "condition": """
[campaign]
seeds = [1]
[[campaign.conditions]]
advantage_mode = "grpo"
transform_mode = "none"
[[campaign.conditions]]
advantage_mode = "evil_plugin.f"
transform_mode = "none"
reward.type = "evil_plugin.f"
""",
}


@pytest.mark.parametrize("command", ["explain", "xray", "audit"])
def test_a_runs_folder_that_lost_its_marker_is_still_a_runs(
    foreign: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (foreign / ".retrain.json").unlink()
    with_plugin(foreign, 'advantage_mode = "maxrl"', 'advantage_mode = "evil_plugin.f"')
    assert main([command, str(foreign / "config.toml")]) == 2
    assert "--trust" in capsys.readouterr().err
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("where", PLUGINS)
@pytest.mark.parametrize("command", ["explain", "xray", "audit"])
def test_a_file_in_a_runs_folder_names_code_and_wants_to_be_told(
    foreign: Path, tmp_path: Path, command: str, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = foreign / "other.toml"
    file.write_text(f'[model]\nmodel = "lab"\n[data]\nsource = "lab"\n{PLUGINS[where]}')
    assert main([command, str(file)]) == 2
    said = capsys.readouterr().err
    assert '[algorithm] advantage_mode = "evil_plugin.f"' in said and "--trust" in said
    assert not (tmp_path / "trace").exists()
    main([command, str(file), "--trust"])
    assert "--trust" not in capsys.readouterr().err


def test_eval_names_the_code_that_it_would_run_and_wants_to_be_told(
    foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_plugin(foreign, 'type = "random"', 'type = "evil_plugin.f"')
    assert main(["eval", str(foreign)]) == 2
    said = capsys.readouterr().err
    assert "[model] trust_remote_code = true" in said and "--trust" in said
    assert '[reward] type = "evil_plugin.f"' in said and not (tmp_path / "trace").exists()
    main(["eval", str(foreign), "--trust"])
    assert (tmp_path / "trace").exists()


@pytest.mark.parametrize(
    "named", ['provider = "verifiers"\nid = "evil_plugin"', 'provider = "evil_plugin.f"']
)
def test_an_environment_is_code_too(
    honest: Path, tmp_path: Path, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Looking at the run leaves it alone, and eval names it, with `auto_install` before anything is
    fetched.
    """
    folder, marker = tmp_path / "run", tmp_path / "trace"
    shutil.copytree(honest, folder)
    (folder / "evil_plugin.py").write_text(
        f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n"
    )
    settings = tomllib.loads((folder / "config.toml").read_text())["environment"]
    old = "\n".join(
        line
        for line in (folder / "config.toml").read_text().splitlines()
        if line.startswith(("provider", "id = "))
    )
    assert settings["provider"] == "" and old
    with_plugin(folder, old, named)
    for command in ("inspect", "report", "status"):
        main([command, str(folder)])
    capsys.readouterr()
    assert main(["eval", str(folder)]) == 2
    said = capsys.readouterr().err
    assert "[environment] " in said and "evil_plugin" in said and "--trust" in said
    assert not marker.exists()


def test_against_loads_a_runs_plugin_with_trust_alone(
    honest: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without it inspect refuses, and the page is written without the other transform."""
    folder, marker = tmp_path / "run", tmp_path / "trace"
    shutil.copytree(honest, folder)
    (folder / "trusted_plugin.py").write_text(
        f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n"
        "def f(rewards):\n    return [r - sum(rewards) / len(rewards) for r in rewards]\n"
    )
    with_plugin(folder, 'advantage_mode = "maxrl"', 'advantage_mode = "trusted_plugin.f"')
    (folder / "summary.json").unlink()  # it has the condition before this edit
    assert main(["inspect", str(folder), "--against", "gtpo"]) == 2
    assert "trusted_plugin.f" in (said := capsys.readouterr().err) and "add --trust" in said
    assert main(["inspect", str(folder), "--against", "trusted_plugin.t"]) == 2
    assert "--against trusted_plugin.t names code" in capsys.readouterr().err
    assert main(["report", str(folder), "--against", "gtpo"]) == 0
    assert "Without gtpo" in (folder / "report.html").read_text() and not marker.exists()
    assert "Without gtpo" in (said := capsys.readouterr().err) and "add --trust" in said
    assert main(["inspect", str(folder), "--against", "gtpo", "--trust"]) == 0
    assert marker.exists() and "f+gtpo" in capsys.readouterr().out

"""`retrain plugins` and `retrain init-plugin`: what is listed, and what is written."""

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

import pytest

from retrain.cli.init_plugin import Kind
from retrain.cli.main import main
from retrain.config import config_from_mapping, load_config
from retrain.errors import ConfigurationError
from retrain.plugins import KINDS, load_plugin
from retrain.records.environment import package_versions


def install(folder: Path, name: str, value: str, code: str) -> None:
    """Put a package with one entry point and one module into a folder of sys.path."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[retrain.plugins]\n{name} = {value}\n")
    (folder / f"{name}_module.py").write_text(code)


@pytest.mark.parametrize(
    ("name", "attribute", "code", "said"),
    [
        ("fine", "f", "print(1)\ndef f(rewards): return rewards", ""),
        ("absent", "g", "def f(rewards): return rewards", "has no attribute 'g'"),
        ("needy", "f", "import not_there_at_all\ndef f(rewards): ...", "not_there_at_all"),
        ("broken", "f", "def f(rewards:", "SyntaxError"),
        ("grpo", "f", "def f(rewards): return rewards", "its name is a built-in one"),
        ("pools", "f", "def f(rewards): return rewards", "for [data] sampler its name is a"),
    ],
)
def test_an_installed_plugin_is_loaded_and_what_stands_against_it_is_said(
    name: str,
    attribute: str,
    code: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install(tmp_path, name, f"{name}_module:{attribute}", code)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["plugins", "--json"]) == 0
    (row,) = [row for row in json.loads(capsys.readouterr().out) if row["kind"] == ""]
    assert row["name"] == name and said in row["error"] and bool(said) == bool(row["error"])
    assert row["signature"] == ("f(rewards)" if name in ("fine", "grpo", "pools") else "")
    assert main(["plugins"]) == 0
    assert said in capsys.readouterr().out
    sys.modules.pop(f"{name}_module", None)


def test_a_package_installed_after_a_run_of_the_same_process_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "later").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "later")
    monkeypatch.setattr(metadata, "requires", lambda _: ["later"])
    named = {"algorithm": {"advantage_mode": "later"}}
    with pytest.raises(ConfigurationError, match="is not known"):
        config_from_mapping(named)
    assert package_versions() == {}
    install(tmp_path / "later", "later", "later_module:f", "def f(rewards): return rewards")
    loaded = load_plugin("advantage", "later", config_from_mapping(named))
    assert loaded([1.0]) == [1.0]
    assert package_versions() == {"later": "1.0"}


def test_every_kind_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "--json"]) == 0
    assert {row["kind"] for row in json.loads(capsys.readouterr().out)} >= set(KINDS)


def write(kind: str, name: str, *options: str) -> int:
    return main(["init-plugin", "--kind", kind, "--name", name, *options])


@pytest.mark.parametrize("kind", get_args(Kind))
def test_a_written_plugin_is_named_by_its_file(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert write(kind, "my_part", "--output", "parts") == 0
    config = load_config(Path("parts/my_part.toml"), environ={})
    assert config.training.max_steps == 2 and config.model.model == "lab"
    text = Path("parts/my_part.toml").read_text()
    assert '"my_part.my_part"' in text or '"my_part.MyPart"' in text or kind == "reward"
    compile(Path("parts/my_part.py").read_text(), "my_part.py", "exec")


def test_a_written_test_is_green_and_fails_with_the_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert write("advantage", "written_part", "--with-test") == 0
    for folder in ("first", "second"):
        Path(folder).mkdir()
    namespace: dict[str, Any] = {"__file__": str(tmp_path / "test_written_part.py")}
    exec(Path("test_written_part.py").read_text(), namespace)
    try:
        namespace["test_a_run_uses_it"](tmp_path / "first", monkeypatch)
        sys.modules.pop("written_part")
        (tmp_path / "written_part.py").write_text("def other(): ...")
        with pytest.raises(ConfigurationError, match="has no written_part"):
            namespace["test_a_run_uses_it"](tmp_path / "second", monkeypatch)
    finally:
        sys.modules.pop("written_part", None)


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("advantag", "my_part", "is not one of 'transform', 'advantage', 'algorithm'"),
        ("advantage", "json", "the name of an importable module"),
        ("advantage", "class", "not a word of Python"),
        ("advantage", "my-part", "must be a Python name"),
        ("advantage", "there", "there.py exists, and retrain never overwrites it"),
        ("reward", "both", "both.py exists, and retrain never overwrites it; choose another"),
    ],
)
def test_a_plugin_that_cannot_be_written_says_why(
    kind: str,
    name: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {"there.py", "both.py", "both.toml"}
    for file in files:
        Path(file).write_text("mine")
    assert write(kind, name) == 2
    assert said in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == files
    assert {Path(file).read_text() for file in files} == {"mine"}

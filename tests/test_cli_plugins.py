"""`retrain plugins` and `retrain init-plugin`: what is listed, and what is written."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from retrain.cli.main import main
from retrain.plugins import KINDS


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
        ("fine", "f", "import json\ndef f(rewards): return rewards", ""),
        ("absent", "g", "def f(rewards): return rewards", "has no g"),
        ("needy", "f", "import not_there_at_all\ndef f(rewards): ...", "imports not_there_at_all"),
        ("broken", "f", "def f(rewards:", "is not Python"),
        ("grpo", "f", "def f(rewards): return rewards", "found twice"),
    ],
)
def test_an_installed_plugin_is_read_and_not_imported(
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
    assert row["signature"] == ("f(rewards)" if name in ("fine", "needy", "grpo") else "")
    assert f"{name}_module" not in sys.modules
    assert main(["plugins"]) == 0
    assert said in capsys.readouterr().out


def test_every_kind_is_listed_without_a_model_library() -> None:
    code = (
        "import sys; from retrain.cli.main import main; main(['plugins', '--json']);"
        "sys.exit('torch' in sys.modules or 'pandas' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {row["kind"] for row in json.loads(done.stdout)} >= set(KINDS)

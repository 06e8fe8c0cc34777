"""Both distributions install the same package; retrain-core asks for neither torch nor peft. Each
in an environment of its own.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.servers

ROOT = Path(__file__).resolve().parents[2]
LOOK = """
import json, sys
from importlib.metadata import distribution
found = distribution(sys.argv[1])
files = sorted(str(file) for file in found.files if str(file).startswith("retrain/") and "__pycache__" not in str(file))
print(json.dumps({"requires": found.requires, "files": files, "version": found.version}))
"""


def installed(folder: Path, source: Path, name: str) -> dict[str, Any]:
    subprocess.run(
        [
            sys.executable,
            str(ROOT / "scripts" / "install.py"),
            str(folder),
            "--no-deps",
            "--anew",
            str(source),
        ],
        check=True,
    )
    python = str(folder / "bin" / "python")
    found: dict[str, Any] = json.loads(
        subprocess.run(
            [python, "-c", LOOK, name], capture_output=True, text=True, check=True
        ).stdout
    )
    return found


def test_retrain_and_retrain_core_install_the_same_files_and_other_requirements(
    tmp_path: Path,
) -> None:
    whole = installed(tmp_path / "whole", ROOT, "retrain")
    core = installed(tmp_path / "core", ROOT / "core", "retrain-core")
    assert (
        whole["files"] == core["files"] and "retrain/assets/lab/model.safetensors" in core["files"]
    )
    assert whole["version"] == core["version"]
    names = [
        {
            requirement.partition(">")[0]
            for requirement in one["requires"]
            if "extra ==" not in requirement
        }
        for one in (whole, core)
    ]
    assert names[0] - names[1] == {"torch", "peft"} and not names[1] - names[0]
    assert any(requirement.startswith("tinker") for requirement in core["requires"])

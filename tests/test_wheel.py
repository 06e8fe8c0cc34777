"""The wheel: it is built, and what is in it runs without the checkout."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_trains_the_lab_in_an_environment_without_the_checkout(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path)]
    subprocess.run([*build, str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("retrain-*.whl")
    folder = tmp_path / "environment"
    venv.create(folder)
    # pip of this Python installs into it, and what retrain needs is borrowed; a line of a .pth file
    # is not searched for .pth files, so the checkout is not.
    site = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    # Without --ignore-installed pip would remove the checkout from its own environment.
    aside = ["--ignore-installed", "--prefix", str(folder)]
    subprocess.run([*install, *aside, str(wheel)], check=True)
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def python(*arguments: str) -> str:
        command = [str(folder / "bin" / "python"), *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = python("-c", "import retrain; print(retrain.__file__)").strip()
    assert Path(where).is_relative_to(site)
    schema = json.loads(python("-m", "retrain", "help", "config", "--json"))
    assert schema == json.loads((ROOT / "docs" / "retrain.schema.json").read_text("utf-8"))
    python("-m", "retrain", "init", "--template", "lab", "--output", "lab.toml")
    tiny = ["--max-steps", "1", "--batch-size", "2", "--evaluation-max-examples", "4"]
    python("-m", "retrain", "lab.toml", *tiny, "--log-dir", "run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text("utf-8"))["status"] == "done"

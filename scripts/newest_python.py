"""Import the package and run two steps of the lab on the newest Python beside 3.11 that this
machine offers, with the newest packages that pyproject.toml allows; only torch keeps the version of
constraints.txt. `python scripts/newest_python.py` says so where there is no other Python.

RETRAIN_PYTHON names another interpreter. The environment is kept in RETRAIN_CACHE.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from install import CACHE, install

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("python3.14", "python3.13", "python3.12")
WHICH = "import sys; print('.'.join(map(str, sys.version_info[:2])), sys.executable)"


def interpreters() -> Iterator[str]:
    """Candidates, the newest first: on PATH, then those that pyenv keeps off it."""
    if chosen := os.environ.get("RETRAIN_PYTHON"):
        yield chosen
        return
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    for name in NAMES:
        if found := shutil.which(name):
            yield found
        yield from map(str, sorted(pyenv.glob(f"versions/*/bin/{name}"), reverse=True))


def newest() -> tuple[str, str] | None:
    """Version and path of the first candidate that starts; a shim of pyenv may not."""
    for candidate in interpreters():
        done = subprocess.run([candidate, "-c", WHICH], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            version, _, path = done.stdout.strip().partition(" ")
            return version, path
    return None


def pinned_torch() -> str:
    """`torch==VERSION`, as constraints.txt has it."""
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    found = re.search(r"^torch==\S+", constraints, re.MULTILINE)
    assert found, "constraints.txt pins no torch"
    return found[0]


def main() -> None:
    found = newest()
    if found is None:
        print(f"No other Python: none of {', '.join(NAMES)} starts here; RETRAIN_PYTHON names one.")
        return
    version, path = found
    folder = CACHE / f"python-{version}"
    if not (folder / "bin" / "python").exists():
        subprocess.run([path, "-m", "venv", "--without-pip", str(folder)], check=True)
    install(folder, [pinned_torch(), "--editable", str(ROOT)], flags=["--upgrade"])
    python = str(folder / "bin" / "python")
    subprocess.run([python, "-c", "import retrain; retrain.train"], check=True)
    with tempfile.TemporaryDirectory() as name:
        lab = ["-m", "retrain", str(ROOT / "examples" / "lab.toml"), "--max-steps", "2"]
        subprocess.run([python, *lab, "--log-dir", f"{name}/lab"], cwd=name, check=True)
    print(f"Python {version}: the package imports, and two steps of the lab ran.")


if __name__ == "__main__":
    main()

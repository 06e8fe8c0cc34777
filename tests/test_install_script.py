"""scripts/install.py: uv is told what pip is told, and pip is there where uv is not. And the script
of a small model.
"""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts.install import pip_settings, uv_variables

INSTALL = Path(__file__).resolve().parents[1] / "scripts" / "install.py"
LISTED = """\
:env:.default-timeout='180'
:env:.find-links='/wheels /more'
global.cert='/etc/company.pem'
global.extra-index-url='file:///one/simple\\nfile:///two/simple'
global.find-links='/not/these'
global.index-url='https://mirror.example/simple'
install.constraint='/etc/constraints.txt'
freeze.index-url='https://not.example/simple'
"""


def test_what_pip_is_told_is_handed_to_uv_and_never_in_place_of_its_own_variables() -> None:
    found = uv_variables(pip_settings(LISTED), {"UV_DEFAULT_INDEX": "https://own.example/simple"})
    assert found.pop("UV_CACHE_DIR").endswith("/uv")
    assert found == {
        "UV_SYSTEM_CERTS": "1",
        "UV_HTTP_TIMEOUT": "180",
        "UV_FIND_LINKS": "/wheels,/more",
        "SSL_CERT_FILE": "/etc/company.pem",
        "UV_EXTRA_INDEX_URL": "file:///one/simple file:///two/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_CONSTRAINT": "/etc/constraints.txt",
    }


@pytest.mark.parametrize(
    "uv", [pytest.param(True, id="uv"), pytest.param(False, id="pip", marks=pytest.mark.slow)]
)
def test_a_package_that_only_pips_own_settings_lead_to_is_installed(
    tmp_path: Path, uv: bool
) -> None:
    for name, asks in (("wanted", "Requires-Dist: unused-here\n"), ("unused_here", "")):
        with zipfile.ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", "")
            wheel.writestr(
                f"{name}-1.0.dist-info/METADATA",
                f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{asks}",
            )
            wheel.writestr(
                f"{name}-1.0.dist-info/WHEEL",
                "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            )
            wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")
    folder = tmp_path / "environment"
    told = {
        "PIP_FIND_LINKS": str(tmp_path),
        "PIP_NO_INDEX": "1",
        "RETRAIN_CACHE": str(tmp_path / "cache"),
    }
    # A Python in a folder of its own has no uv beside it.
    lone = tmp_path / "bin" / "python"
    lone.parent.mkdir()
    lone.symlink_to(Path(sys.executable).resolve())
    python = sys.executable if uv else str(lone)
    path = os.environ["PATH"] if uv else "/usr/bin:/bin"
    done = subprocess.run(
        [python, str(INSTALL), str(folder), "--without", "unused-here", "wanted"],
        env=os.environ | told | {"PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert ("is installed with pip" in done.stdout) == (not uv or "there is no uv" in done.stdout)
    look = (
        "from importlib.util import find_spec; assert find_spec('wanted') and not"
        " find_spec('unused_here')"
    )
    subprocess.run([folder / "bin" / "python", "-c", look], check=True)


def test_the_model_script_asks_for_gguf_before_it_downloads(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-S", INSTALL.with_name("get_smollm2.py"), tmp_path / "model"],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 2 and "error: gguf is not installed; run" in ran.stderr
    assert not (ran.stdout or list(tmp_path.iterdir()))

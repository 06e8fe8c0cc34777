"""Install packages into a virtual environment of their own: with uv, which takes a third of pip's
time, else with pip.

    python scripts/install.py DIR [--without NAME]... [--no-deps] [--anew] [--any-python]
    REQUIREMENT...

DIR is made where it is missing. uv reads no configuration of pip, so what pip is told (index,
certificate, constraints, links to files) is handed to it, but for what uv's own variables say
already. Downloads stay in RETRAIN_CACHE/uv, from which uv links the files of several environments
to one copy.
"""

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

CACHE = Path(os.environ.get("RETRAIN_CACHE") or Path.home() / ".cache" / "retrain").resolve()
VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_EXTRA_INDEX_URL",
    "find-links": "UV_FIND_LINKS",
    "constraint": "UV_CONSTRAINT",
    "no-index": "UV_NO_INDEX",
    "trusted-host": "UV_INSECURE_HOST",
    "timeout": "UV_HTTP_TIMEOUT",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
}
"""pip's setting -> uv's variable."""


def pip_settings(listing: str) -> dict[str, str]:
    """What `pip config list` printed, as setting -> value; [install] wins over [global], and the
    environment over both, as in pip.
    """
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listing.splitlines():
        name, _, value = line.partition("=")
        section, _, setting = name.partition(".")
        if section in sections:
            sections[section][setting.removeprefix("default-").replace("_", "-")] = str(
                ast.literal_eval(value)
            )
    return sections["global"] | sections["install"] | sections[":env:"]


def uv_variables(settings: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that make uv find what pip finds; a variable of `environment` is never replaced."""
    found = {"UV_CACHE_DIR": str(CACHE / "uv"), "UV_SYSTEM_CERTS": "1"}
    for setting, variable in VARIABLES.items():
        if value := settings.get(setting, "").strip():
            found[variable] = (",".join if setting == "find-links" else " ".join)(value.split())
    if "UV_EXTRA_INDEX_URL" in found:
        found["UV_INDEX_STRATEGY"] = (
            "unsafe-best-match"  # as pip does: the newest version of all indexes
        )
    return {name: value for name, value in found.items() if name not in environment}


def find_uv() -> str | None:
    beside = Path(sys.executable).with_name("uv")
    return str(beside) if beside.exists() else shutil.which("uv")


def install(
    folder: Path,
    requirements: list[str],
    *,
    without: Sequence[str] = (),
    flags: Sequence[str] = (),
    any_python: bool = False,
) -> None:
    """`requirements` and, unless told otherwise, what they ask for, into the environment `folder`,
    but not the packages `without`, which something declares and nothing here uses. `flags` are what
    uv and pip both understand. `any_python`: also packages that declare not to run on this Python.

    Raises:
        subprocess.CalledProcessError: neither uv nor pip could install them; both said why.
    """
    python = str(folder / "bin" / "python")
    if not Path(python).exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    given = [*flags, *requirements]
    if uv := find_uv():
        listed = subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as excluded:
            excluded.write("\n".join(without))
            excluded.flush()
            command = [
                uv,
                "pip",
                "install",
                "--quiet",
                "--python",
                python,
                "--excludes",
                excluded.name,
            ]
            command += ["--python-version", "3.13"] if any_python else []
            if (
                subprocess.run(
                    [*command, *given],
                    env=os.environ | uv_variables(pip_settings(listed), os.environ),
                    check=False,
                ).returncode
                == 0
            ):
                return
    print(
        f"{'uv failed' if uv else 'there is no uv (pip install uv)'}: {folder} is installed with"
        " pip, which takes longer",
        flush=True,
    )
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "--quiet",
        "--disable-pip-version-check",
    ]
    subprocess.run(
        [*pip, "install", *(["--ignore-requires-python"] if any_python else []), *given], check=True
    )
    if without:
        subprocess.run([*pip, "uninstall", "--yes", *without], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the virtual environment")
    parser.add_argument("requirements", nargs="+", help="as pip takes them")
    parser.add_argument(
        "--without", action="append", default=[], metavar="NAME", help="a dependency to leave out"
    )
    parser.add_argument("--no-deps", action="store_true", help="leave out all dependencies")
    parser.add_argument("--anew", action="store_true", help="also what is there already")
    parser.add_argument(
        "--any-python", action="store_true", help="also what declares not to run on this Python"
    )
    given = parser.parse_args()
    flags = [
        *(["--no-deps"] if given.no_deps else []),
        *(["--force-reinstall"] if given.anew else []),
    ]
    try:
        install(
            given.folder.resolve(),
            given.requirements,
            without=given.without,
            flags=flags,
            any_python=given.any_python,
        )
    except subprocess.CalledProcessError as failed:
        print(failed, file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())

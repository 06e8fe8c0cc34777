"""The command that installs an extra, derived from the installation of this retrain.

`pip install "retrain[x]"` would take what the package index has under that name, which is an older,
other program.
"""

import importlib
import json
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

_SOURCE = Path(__file__).resolve().parents[1]
_CORE = "retrain-core"
"""The same package without torch, made by core/. An environment holds this or retrain, never
both."""


def missing_package(*modules: str) -> str:
    """Return the module that importing `modules` lacks; "" if all import."""
    try:
        for module in modules:
            importlib.import_module(module)
    except ImportError as error:
        return error.name or str(error)
    return ""


def install_hint(extra: str = "") -> str:
    """Return the shell command that adds an extra: `pip install -e ".[x]"` in a checkout, and what
    does the same elsewhere.

    Without an extra it is the command that installs retrain itself, with what its core leaves out.
    """
    core = _found(_CORE)
    if core is None:
        return f"{_installer()} {_target('retrain', extra, _found('retrain'))}"
    if extra in (core.metadata.get_all("Provides-Extra") or []):
        return f"{_installer()} {_target(_CORE, extra, core)}"
    return f"pip uninstall --yes {_CORE} && pip install {_target('retrain', extra, core)}"


def _installer() -> str:
    """Return the command that installs here. A tool of uv has no pip, and to install it again would
    exchange its torch.
    """
    if (Path(sys.prefix) / "uv-receipt.toml").is_file():
        return f"uv pip install --python {sys.executable}"
    return "pip install"


def _target(name: str, extra: str, installed: Distribution | None) -> str:
    """Return the argument of `pip install`: a folder, the repository that the package came from, or
    its version in an index.
    """
    extras = f"[{extra}]" if extra else ""
    origin = json.loads((installed and installed.read_text("direct_url.json")) or "{}")
    url = origin.get("url", "")
    if (_SOURCE / "pyproject.toml").is_file():
        return _folder(_SOURCE, name, extras, "-e ")
    if "dir_info" in origin:
        folder = Path(unquote(urlsplit(url).path))
        # The core's folder is inside the checkout, and `_folder` adds it again.
        return _folder(folder.parent if folder.name == "core" else folder, name, extras)
    if "vcs_info" in origin:
        vcs, part = origin["vcs_info"], "#subdirectory=core" if name == _CORE else ""
        return f'"{name}{extras} @ {vcs["vcs"]}+{url}@{vcs["commit_id"]}{part}"'
    if url and installed is not None and installed.name == name:
        return f'"{name}{extras} @ {url}"'
    if installed:
        return f'"{name}{extras}=={installed.version}"'
    return f'"{name}{extras}"'


def _folder(checkout: Path, name: str, extras: str, editable: str = "") -> str:
    """Return a folder as pip takes it: "." where the current folder is the checkout, else its whole
    path.
    """
    base = "." if Path.cwd() == checkout else str(checkout)
    if name == _CORE:
        base += "/core"
    if extras or " " in base:
        return f'{editable}"{base}{extras}"'
    return editable + base


def _found(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None

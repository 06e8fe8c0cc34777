"""`provider = "verifiers"`: the checks before retrain imports the verifiers library."""

import shutil
import subprocess
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from packaging.version import Version

from retrain.environments.base import Environment
from retrain.errors import ConfigurationError, EnvironmentFailure, first_line

if TYPE_CHECKING:
    from retrain.config.schema import Environment as Settings

_FIRST = Version("0.4")
"""The first version with tasksets, agents and harnesses."""
_INSTALL_SECONDS = 900


def load(settings: "Settings") -> Environment:
    """Load an environment of verifiers. Raises EnvironmentFailure without the library or the
    environment's package, ConfigurationError for what it refuses.
    """
    installed = Version(version("verifiers"))
    if installed < _FIRST:
        raise EnvironmentFailure(
            f"retrain 0.10 needs verifiers {_FIRST} or later, and this environment has"
            f" {installed}; run pip install 'verifiers>={_FIRST}'."
        )
    # owner/my-env@1.0 is the module my_env.
    name = settings.id.rpartition("/")[2].partition("@")[0].replace("-", "_")
    if find_spec(name) is None:
        _install(settings, name)
    from retrain.environments import verifiers_v1

    return verifiers_v1.load(settings, name)


def _install(settings: "Settings", name: str) -> None:
    """Get the package of the module `name` from the Prime hub, if the configuration allows it."""
    missing = (
        f'[environment] id = "{settings.id}": this environment lacks its package (no module {name})'
    )
    command = f"prime env install {settings.id}"
    if not settings.auto_install:
        raise EnvironmentFailure(
            f"{missing}; install it (from the Prime hub: `{command}`), or set auto_install = true."
        )
    if "/" not in settings.id:
        raise ConfigurationError(
            f"{missing}, and the Prime hub knows environments as owner/name; give the id in that"
            " form."
        )
    prime = shutil.which("prime")
    if prime is None:
        raise EnvironmentFailure(
            f"{missing}, and auto_install needs the command prime; install it with pip install"
            " prime."
        )
    try:
        done = subprocess.run(
            [prime, "env", "install", settings.id],
            capture_output=True,
            text=True,
            timeout=_INSTALL_SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise EnvironmentFailure(
            f"{missing}, and `{command}` did not end within {_INSTALL_SECONDS} s; run it by hand."
        ) from None
    if done.returncode:
        said = first_line(Exception((done.stderr or done.stdout).strip() or "no message"))
        raise EnvironmentFailure(
            f"{missing}, and `{command}` failed with status {done.returncode}: {said}"
        )
    if find_spec(name) is None:
        raise EnvironmentFailure(
            f"{missing} although `{command}` succeeded; it may have installed into another Python"
            " than this one."
        )

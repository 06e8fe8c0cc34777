"""Write environment.json: everything beyond the configuration that results depend on. It never
holds the value of an environment variable.
"""

import os
import platform
import re
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from retrain import __version__
from retrain.system import Json, total_memory

if TYPE_CHECKING:
    from retrain.config import TrainConfig


def describe_environment(device: str) -> Json:
    """Describe versions, machine, the git revision of the current folder, and the command line, in
    which the caller masks secrets.
    """
    torch, cpu = sys.modules.get("torch"), None  # A run without torch has None.
    with suppress(OSError):
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        cpu = re.search(r"^model name.*?: *(.+?) *$", cpuinfo, re.MULTILINE)
    return {
        "retrain": __version__,
        "python": platform.python_version(),
        "packages": package_versions(),
        "platform": platform.platform(),
        "cpu": cpu[1] if cpu else platform.processor() or platform.machine(),
        "cpu_count": os.cpu_count(),
        # These instructions decide how the CPU rounds sums, as the number of threads does.
        "instructions": torch.backends.cpu.get_cpu_capability() if torch else None,
        "threads": int(torch.get_num_threads()) if torch else None,
        "memory_gib": round(total_memory() / 2**30, 1),
        "device": device,
        "device_name": (
            str(torch.cuda.get_device_name(device)) if torch and device.startswith("cuda") else None
        ),
        "git": git_revision(Path.cwd()),
        "command": sys.argv,
    }


def code_of(config: "TrainConfig") -> Json:
    """Describe the code that runs: the git revision of retrain's own folder (null outside a
    checkout), and the plugins' files by hash.
    """
    from retrain.plugins import plugin_hashes

    folder = Path(__file__).resolve().parents[1]
    revision = None
    with suppress(OSError, subprocess.SubprocessError):
        # The folder may lie inside another project's checkout.
        _git(folder, "ls-files", "--error-unmatch", "__init__.py")
        revision = _git(folder, "rev-parse", "HEAD")
    return {"revision": revision, "plugins": plugin_hashes(config)}


def package_versions() -> dict[str, str]:
    """Return the installed versions of the declared requirements, extras included. If retrain
    itself is not a package here, return the versions of the main requirements.
    """
    requirements = ["torch", "transformers", "peft"]
    for distribution in ("retrain-core", "retrain"):
        with suppress(metadata.PackageNotFoundError):
            requirements = metadata.requires(distribution) or requirements
    versions = {}
    for requirement in requirements:
        name = re.split(r"[^\w.-]", requirement)[0]
        with suppress(metadata.PackageNotFoundError):  # The extra may be absent.
            versions[name] = metadata.version(name)
    return dict(sorted(versions.items()))


def git_revision(folder: Path) -> Json | None:
    """Return {"revision", "changed"} of the repository around `folder`; None outside a repository
    or without git.
    """
    try:
        revision = _git(folder, "rev-parse", "HEAD")
        changed = bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None
    return {"revision": revision, "changed": changed}


def _git(folder: Path, *arguments: str) -> str:
    result = subprocess.run(
        ["git", "-C", str(folder), *arguments],
        capture_output=True,
        text=True,
        timeout=10,
        check=True,
    )
    return result.stdout.strip()

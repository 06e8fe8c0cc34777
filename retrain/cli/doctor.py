"""`retrain doctor`: what this machine has, what it lacks, and what to do about each."""

import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import typer

from retrain.cli.shared import Form, load_dotenv, print_json
from retrain.errors import EnvironmentFailure, RetrainError
from retrain.install import install_hint, missing_package
from retrain.system import total_memory

KEYS = ("HF_TOKEN", "OPENAI_API_KEY", "TINKER_API_KEY", "WANDB_API_KEY")
"""Credentials that a run may need, by their usual names. Their values are never shown."""
_SELF_TEST = {
    "model": {"model": "lab"},
    "data": {"source": "lab"},
    "reward": {"type": "match"},
    "algorithm": {"advantage_mode": "grpo", "transform_mode": "none"},
    "training": {"batch_size": 2, "group_size": 4, "max_tokens": 48, "max_steps": 1, "seed": 0},
    "backend": {"devices": "cpu"},
}
_TRAINER = ("torch", "transformers", "peft")
_MIN_FREE = 10 * 2**30
"""Bytes of a disk below which a 4B model's download may not fit."""


@dataclass(frozen=True)
class Finding:
    """The finding of one check."""

    name: str
    state: Literal["ok", "note", "lacks"]
    """`lacks`: a run of the lab would not work here. `note`: some runs would not."""
    found: str
    advice: str = ""


def command(form: Form = "text") -> None:
    """Check this machine: Python, torch, device, memory, the hub, folders, keys by name,
    and one training step of the embedded model. Exits with 3 if something needed is lacking.
    """
    load_dotenv()
    findings = [check() for check in CHECKS]
    if form == "json":
        print_json([asdict(finding) for finding in findings])
    else:
        print("\n".join(_lines(findings)))
    lacking = [finding.name for finding in findings if finding.state == "lacks"]
    if lacking and form == "json":
        raise typer.Exit(EnvironmentFailure.exit_code)
    if lacking:
        raise EnvironmentFailure(f"this machine lacks what a run needs: {', '.join(lacking)}.")


def _lines(findings: list[Finding]) -> Iterator[str]:
    from retrain.records.terminal import GAP, table_lines

    rows = [(each.state, each.name, each.found) for each in findings]
    for line, finding in zip(table_lines(rows, indent=GAP), findings, strict=True):
        yield line
        if finding.advice:
            yield f"{GAP}{'':<5}{GAP}-> {finding.advice}"


def _python() -> Finding:
    return Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")


def _package() -> Finding:
    from retrain import __version__

    return Finding("retrain", "ok", f"{__version__} at {Path(__file__).parents[1]}")


def _torch() -> Finding:
    missing = missing_package(*_TRAINER)
    if missing:
        return Finding("torch", "lacks", f"{missing} is not installed", f"`{install_hint()}`")
    versions = [f"{name} {importlib.metadata.version(name)}" for name in _TRAINER]
    return Finding("torch", "ok", ", ".join(versions))


def _device() -> Finding:
    if missing_package("torch"):
        return Finding("device", "note", "not known without torch")
    import torch

    from retrain.model.devices import present_devices

    found = f"{present_devices()}, {os.cpu_count()} cores"
    if torch.cuda.is_available():
        return Finding("device", "ok", found)
    return Finding(
        "device",
        "note",
        found,
        "without a CUDA GPU train small models, or use a service: `retrain backends`.",
    )


def _memory() -> Finding:
    import psutil

    memory, total = psutil.virtual_memory(), total_memory()
    found = f"{total / 2**30:.1f} GiB, {min(memory.available, total) / 2**30:.1f} GiB free"
    if total < memory.total:
        found += f" (the control group's limit; the machine has {memory.total / 2**30:.1f} GiB)"
    if not missing_package("torch"):
        import torch

        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            found += f"; gpu:{index} {total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free"
    return Finding("memory", "ok", found)


def _hub() -> Finding:
    if missing_package("huggingface_hub"):
        return Finding("hub", "note", "huggingface_hub is missing", f"`{install_hint()}`")
    from huggingface_hub import constants

    from retrain.model.hub import why_unreachable

    cache = Path(constants.HF_HUB_CACHE)
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    disk = f"cache {cache}, {free / 2**30:.0f} GiB free"
    unreachable = why_unreachable()
    if unreachable:
        return Finding(
            "hub",
            "note",
            f"{unreachable}; {disk}",
            "name models and data by a local folder, or copy them into the cache.",
        )
    if free < _MIN_FREE:
        return Finding("hub", "note", disk, "set HF_HOME to a disk with room for models.")
    return Finding("hub", "ok", f"{constants.ENDPOINT} answers; {disk}")


def _folder() -> Finding:
    try:
        with tempfile.TemporaryFile(dir=Path()):
            pass
    except OSError as error:
        return Finding(
            "folder",
            "lacks",
            f"{Path.cwd()} is not writable: {error.strerror}",
            "runs go to logs/ here; change to a folder of your own, or set --log-dir.",
        )
    free = shutil.disk_usage(Path()).free / 2**30
    return Finding("folder", "ok", f"{Path.cwd()} is writable, {free:.0f} GiB free")


def _keys() -> Finding:
    present = [name for name in KEYS if os.environ.get(name)]
    absent = [name for name in KEYS if name not in present]
    found = f"set: {', '.join(present) or 'none'}; not set: {', '.join(absent) or 'none'}"
    return Finding("keys", "ok", found)


def _extras() -> Finding:
    from retrain.backends.declared import catalog

    here = [
        entry.name for entry in catalog() if not entry.packages or any(entry.installed.values())
    ]
    return Finding("can use", "ok", f"{', '.join(here)}; `retrain backends` says more")


def _self_test() -> Finding:
    if missing_package(*_TRAINER):
        return Finding("self-test", "lacks", "not run without torch", f"`{install_hint()}`")
    from retrain.config import config_from_mapping
    from retrain.run.loop import train
    from retrain.tracking.base import Verbosity

    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        config = config_from_mapping({**_SELF_TEST, "logging": {"log_dir": f"{folder}/run"}})
        try:
            train(config, verbosity=Verbosity.SILENT)
        except RetrainError as error:
            return Finding("self-test", "lacks", f"a step of the lab failed: {error}")
    seconds = time.perf_counter() - started
    return Finding(
        "self-test", "ok", f"a step of the lab passed the parity gate and trained, {seconds:.1f} s"
    )


CHECKS: tuple[Callable[[], Finding], ...] = (
    _python, _package, _torch, _device, _memory,
    _hub, _folder, _keys, _extras, _self_test,
)  # fmt: skip

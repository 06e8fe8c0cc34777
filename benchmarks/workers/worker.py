"""The frame of a measured process: settings in, one line of JSON out for each request, and memory
as the kernel reports it.

It needs only the standard library, so that it runs in a peer's environment too. Memory is read from
Linux's /proc.
"""

import contextlib
import ctypes
import importlib.metadata
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 2**30


@dataclass
class Measure:
    """Filled in when `measured` ends."""

    seconds: float = float("nan")
    cpu_seconds: float = float("nan")
    before_gib: float = float("nan")
    """Resident before the block: model, adapter, libraries."""
    peak_gib: float = float("nan")
    """Peak resident memory inside the block."""
    reserved_gib: float = float("nan")
    """Peak that torch reserved on a GPU, its cache included; not a number on a CPU."""


@contextlib.contextmanager
def measured() -> Iterator[Measure]:
    """Wall seconds, CPU seconds and peak resident memory of the block alone; memory that the
    allocator caches is released first.
    """
    _give_back_free_memory()
    result = Measure(before_gib=resident_gib())
    _forget_peak()
    wall, processor = time.perf_counter(), time.process_time()
    yield result
    result.seconds, result.cpu_seconds = time.perf_counter() - wall, time.process_time() - processor
    result.peak_gib = _status("VmHWM")


def resident_gib() -> float:
    return _status("VmRSS")


def _status(field: str) -> float:
    """In GiB. Not ru_maxrss, which a child inherits from its parent."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024 / GIB
    raise RuntimeError(f"/proc/self/status has no {field}")


def _give_back_free_memory() -> None:
    with contextlib.suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def serve(
    setup: Callable[[dict[str, Any]], Callable[[dict[str, Any]], dict[str, Any]]],
    packages: tuple[str, ...],
) -> None:
    """Run a worker: `setup(settings)` gives the function that answers requests, one JSON line each,
    until standard input ends.

    Everything that libraries print goes to standard error. Every worker has the settings `threads`
    and `memory_limit_gib`, beyond which an allocation fails (None: no limit, for CUDA, which maps
    far more memory than it uses).
    """
    settings: dict[str, Any] = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if settings["memory_limit_gib"] is not None:
        limit = int(settings["memory_limit_gib"] * GIB)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    os.environ["HF_HUB_OFFLINE"] = "1"
    answer = setup(settings)
    versions = {name: version_of(name) for name in packages}
    print(json.dumps({"versions": versions}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


def version_of(package: str) -> str:
    """Version of a package, also of one that is imported from a folder without being installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get(package), "__version__", "of no known version"))

"""The lock of a folder's one writer, and whether the process that holds it is alive, where it runs
on this machine.
"""

import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout

from retrain.errors import ConfigurationError
from retrain.records.run_folder import RunFolder

_OWNER = re.compile(r"pid (\d{1,10}) on (.+)")
_CLOCK_SLACK_S = 5.0
"""Seconds by which the file system's clock and the kernel's may differ."""


class Liveness(Enum):
    ALIVE = "alive"
    GONE = "gone"
    ELSEWHERE = "elsewhere"
    """It runs on another machine, which cannot be asked from here."""


@dataclass(frozen=True)
class Writer:
    """The process that holds, or held until it was killed, a run folder's lock."""

    pid: int
    host: str
    since: float
    """Time when it took the lock, in seconds since 1970."""

    @classmethod
    def of(cls, folder: RunFolder) -> Self | None:
        """Return the process that holds a run's folder; None if no process does: a run that ends by
        itself removes its name.
        """
        try:
            text = folder.lock_owner.read_text(encoding="utf-8")
            since = folder.lock_owner.stat().st_mtime
        except (FileNotFoundError, IsADirectoryError, UnicodeDecodeError):
            return None
        match = _OWNER.fullmatch(text.strip())
        if match:
            return cls(int(match.group(1)), match.group(2), since)
        return None

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"

    def liveness(self) -> Liveness:
        if self.host != socket.gethostname():
            return Liveness.ELSEWHERE
        return Liveness.ALIVE if _runs(self.pid, self.since) else Liveness.GONE


def _runs(pid: int, since: float) -> bool:
    """Return True if `pid` is a process that already ran at `since`; a younger process only reuses
    the number.
    """
    if not Path("/proc/self/stat").exists():
        return _answers(pid)
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    fields = text.rpartition(")")[2].split()  # after the name, which may hold anything
    state, start_ticks = fields[0], int(fields[19])
    uptime = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
    started = time.time() - uptime + start_ticks / os.sysconf("SC_CLK_TCK")
    return state not in "ZX" and started <= since + _CLOCK_SLACK_S


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # there, and another user's
        return True
    return True


@contextmanager
def writer_lock(folder: RunFolder) -> Iterator[None]:
    """Hold the lock that makes this process the run's only writer. Raises ConfigurationError where
    another process holds it.
    """
    owner = folder.lock_owner
    lock = FileLock(folder.lock)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        who = "another process"
        if owner.exists():
            who = owner.read_text(encoding="utf-8").strip()
        raise ConfigurationError(
            f"{folder.path} is being written by {who}; wait for it, or choose another [logging]"
            " log_dir."
        ) from None
    try:
        owner.write_text(f"pid {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
        yield
    finally:
        owner.unlink(missing_ok=True)
        lock.release()

"""At most so many calls to a service at a time, over all the processes of a campaign. The Tinker backend's calls go through it.

A counting semaphore of file locks, one file a slot: the kernel lets go of a lock when its holder dies, however it dies, so a killed worker
never keeps a slot.
"""

import random
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from filelock import BaseFileLock

    from retrain.config.schema import Backend

_POLL_S = 0.05


class Gate(Protocol):
    def slot(self) -> AbstractContextManager[None]:
        """Wait for a slot, hold it inside the context."""


class Unthrottled:
    """Every call may go: no file is touched."""

    def slot(self) -> AbstractContextManager[None]:
        return _OPEN


_OPEN = nullcontext()


class Throttle:
    """`limit` slots, shared by every process and thread that names the same folder. Any thread may call it."""

    def __init__(self, folder: Path, limit: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._files = [folder / f"slot_{number:03d}.lock" for number in range(limit)]

    @contextmanager
    def slot(self) -> Iterator[None]:
        lock = self._acquire()
        try:
            yield
        finally:
            lock.release()

    def _acquire(self) -> "BaseFileLock":
        from filelock import FileLock, Timeout

        # Each holder begins elsewhere, and waits for a while of its own: else all would ask for the same slot at the same moments.
        files = random.sample(self._files, len(self._files))
        while True:
            for file in files:
                lock = FileLock(file, thread_local=False)
                try:
                    lock.acquire(blocking=False)
                except Timeout:
                    continue
                return lock
            time.sleep(_POLL_S * (0.5 + random.random()))


def throttle_of(backend: "Backend") -> Gate:
    """Return the campaign's throttle, where `[backend] throttle_dir` names its folder; a run of its own has none."""
    return Throttle(Path(backend.throttle_dir), backend.max_concurrent) if backend.throttle_dir else Unthrottled()

"""What tests write need not reach the disk: a process that is killed loses nothing of what it wrote,
and what a machine that stops loses, tests/faulty_disk.py plays. A small run waits fifty times.
"""

import os
from typing import Any


def _fsync(file: Any) -> None:
    """Raise what os.fsync raises for a descriptor that is not open."""
    os.fstat(file if isinstance(file, int) else file.fileno())


def wait_for_no_disk() -> None:
    """For the rest of this process, and of those that are forked from it."""
    os.fsync = _fsync

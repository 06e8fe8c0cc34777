"""What a full or broken disk says, as errors that the rest of the code expects."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from retrain.errors import EnvironmentFailure

_FAILURES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO})


def is_reader_gone(error: OSError) -> bool:
    """Whether it comes from writing to a pipe whose reader went away, or to a terminal that was closed."""
    return isinstance(error, BrokenPipeError) or error.errno == errno.EIO


def delete(path: Path) -> None:
    """A file, a folder with all that is in it, or a link but nothing behind it; gone already is fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def safetensors_io() -> Iterator[None]:
    """safetensors wraps what the disk said in an error of its own; outside of this context it is the OSError that it was."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number.group(1)), os.strerror(int(number.group(1)))) from error


@contextmanager
def writing_to(folder: Path, then: str) -> Iterator[None]:
    """Raises EnvironmentFailure in place of an OSError of a disk that is full or broken; other errors pass.

    `then` is what to do when there is room again.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FAILURES:
            raise
        where = error.filename or f"A file in {folder}"
        raise EnvironmentFailure(f"{where} cannot be written: {error.strerror}; free space there, then {then}.") from error

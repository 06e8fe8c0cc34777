"""Errors of disks and paths, turned into retrain's own."""

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from retrain.errors import ConfigurationError, EnvironmentFailure, RetrainError

_FAILURES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO})
_PATH_PROBLEMS = {
    errno.ENAMETOOLONG: "its name is too long (255 bytes at most, 4,095 with its folders); shorten it",
    errno.EISDIR: "it is a folder, and a file is expected there; name the file",
    errno.ENOTDIR: "a file stands where a folder is expected; check the path",
    errno.ELOOP: "its symbolic links form a loop; fix them",
}
_DENIED = frozenset({errno.EACCES, errno.EPERM})


def path_error(error: OSError) -> RetrainError | None:
    """The error to show for an OSError that concerns a path or a disk; None for any other, which may be a fault of this program."""
    where = str(error.filename or "A file")
    if error.errno in _PATH_PROBLEMS:
        return ConfigurationError(f"{where} cannot be used: {_PATH_PROBLEMS[error.errno]}.")
    if error.errno in _DENIED:
        return EnvironmentFailure(f"{where} cannot be used: this user may not read or write it; change its permissions or name another.")
    return EnvironmentFailure(f"{where} cannot be used: {error.strerror}; free space or choose another disk.") if is_disk(error) else None


def is_disk(error: OSError) -> bool:
    """Return True for the error of a full or broken disk."""
    return error.errno in _FAILURES


def expanded(path: str, key: str) -> Path:
    """Expand ~ and ~user in the path given by `key`. Raises ConfigurationError for a user that this machine does not have."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        user = path.partition("/")[0]
        raise ConfigurationError(f"{key} = {path!r}: this machine has no user {user.removeprefix('~')!r}; write the whole path.") from error


def is_reader_gone(error: OSError) -> bool:
    """Return True for a write to a pipe whose reader went away, or to a terminal that was closed."""
    return isinstance(error, BrokenPipeError) or error.errno == errno.EIO


def delete(path: Path) -> None:
    """Delete a file, a folder with its content, or a link without its target; a missing path is fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def safetensors_io() -> Iterator[None]:
    """Raise the OSError that safetensors wraps in an error of its own."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number.group(1)), os.strerror(int(number.group(1)))) from error


@contextmanager
def writing_to(folder: Path, then: str | Callable[[], str]) -> Iterator[None]:
    """Turn the OSError of a full or broken disk into EnvironmentFailure; other errors pass.

    `then` tells the user what to do once there is space; a function is asked when the disk fails.
    """
    try:
        yield
    except OSError as error:
        if not is_disk(error):
            raise
        where = error.filename or f"A file in {folder}"
        raise EnvironmentFailure(
            f"{where} cannot be written: {error.strerror}; free space there, then {then if isinstance(then, str) else then()}."
        ) from error

"""Replace files and folders as a whole, and turn the errors of disks and paths into retrain's own.

A crash at any instant leaves the old content or the new content, never a part. Each file is first a
`.tmp-...` in the same folder; retrain then syncs it, renames it and syncs the parent folder.
"""

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from retrain.errors import ConfigurationError, EnvironmentFailure, RetrainError, RunFailed

_FAILURES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO})
_PATH_PROBLEMS = {
    errno.ENAMETOOLONG: (
        "its name is too long (255 bytes at most, 4,095 with its folders); shorten it"
    ),
    errno.EISDIR: "it is a folder, and a file is expected there; name a file, or move the folder",
    errno.ENOTDIR: "a file stands where a folder is expected; check the path",
    errno.EEXIST: "it is a file, and a folder is expected there; name a folder, or move the file",
    errno.ELOOP: "its symbolic links form a loop; fix them",
}
_DENIED = frozenset({errno.EACCES, errno.EPERM})
TEMPORARY = ".tmp-"
"""Prefix of the name of a file or folder that is not in its place yet."""
_REPLACED = f"{TEMPORARY}replaced-"


def path_error(error: OSError) -> RetrainError | None:
    """Return the error to show for an OSError that concerns a path or a disk. Return None for any
    other, which may be a fault of this program.
    """
    # A write, unlike an open, does not know its name.
    where = str(error.filename or "Standard output, or a file,")
    # A plugin that makes an existing folder meets the same error.
    is_folder = error.errno == errno.EEXIST and Path(where).is_dir()
    if error.errno in _PATH_PROBLEMS and not is_folder:
        return ConfigurationError(f"{where} cannot be used: {_PATH_PROBLEMS[error.errno]}.")
    if error.errno in _DENIED:
        return EnvironmentFailure(
            f"{where} cannot be used: this user may not read or write it; change its permissions or"
            " name another."
        )
    if is_disk(error):
        return EnvironmentFailure(
            f"{where} cannot be used: {error.strerror}; free space or choose another disk."
        )
    return None


def is_disk(error: OSError) -> bool:
    """Return True for the error of a full or broken disk."""
    return error.errno in _FAILURES


def is_reader_gone(error: OSError) -> bool:
    """Return True for a write to a pipe whose reader went away, or to a closed terminal."""
    return isinstance(error, BrokenPipeError) or error.errno == errno.EIO


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Ignore a reader of standard output that goes away (`| head`, a closed terminal). Any other
    error gets the name of the stream.
    """
    try:
        yield
    except OSError as error:
        if not is_reader_gone(error):
            error.filename = "Standard output"  # A disk under `> log.txt` is full.
            raise


def delete(path: Path) -> None:
    """Delete a file, a folder with its content, or a link without its target; a missing path is
    fine.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders, each one before its parent, up to the first that holds something."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return


@contextmanager
def safetensors_io() -> Iterator[None]:
    """Raise the OSError inside an error of safetensors, or inside a bare Exception of
    tokenizers.
    """
    from safetensors import SafetensorError

    try:
        yield
    except Exception as error:
        found = re.search(r"os error (\d+)", str(error))
        if found is None or type(error) not in (SafetensorError, Exception):
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number)) from error


def was_deleted(folder: Path) -> str:
    """Return the sentence about a deleted folder."""
    return f"{folder} was deleted or moved while it was written to."


@contextmanager
def writing_to(folder: Path, then: str | Callable[[], str]) -> Iterator[None]:
    """Raise EnvironmentFailure instead of an OSError of a full or broken disk, and RunFailed if
    `folder` is gone; other errors pass.

    `then` tells the user what to do after making space; this calls a function when the disk fails.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not folder.exists():
            raise RunFailed(was_deleted(folder)) from error
        if not is_disk(error):
            raise
        where = error.filename or f"A file in {folder}"
        raise EnvironmentFailure(
            f"{where} cannot be written: {error.strerror}; free space there, then"
            f" {then if isinstance(then, str) else then()}."
        ) from error


# -- replacing as a whole --------------------------------------------------------------------------


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace a file by `content`; text becomes UTF-8."""
    with replacing_file(path) as aside:
        aside.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing_file(path: Path) -> Iterator[Path]:
    """Yield a path to write to; the file written there replaces `path` at the end of the block."""
    aside = path.with_name(f"{TEMPORARY}{path.name}")
    yield aside
    with aside.open("rb") as file:
        os.fsync(file.fileno())
    aside.replace(path)
    sync_folder(path.parent)


def open_to_readers(path: Path) -> None:
    """Give a new file the mode of its folder, since safetensors lets only the owner read it."""
    # A disk may have no modes, and a hard link may be to a file of another user.
    with suppress(PermissionError):
        path.chmod(path.parent.stat().st_mode & 0o666)


@contextmanager
def replacing_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder to fill. At the end of the block, sync its files and put it at
    `target`.

    After Ctrl-C or an error, including an OSError inside an error of safetensors, the old `target`
    is there unchanged and the new folder is gone.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.parent / f"{TEMPORARY}{target.name}"
    delete(aside)
    aside.mkdir()
    try:
        with safetensors_io():
            yield aside
        for path in filter(Path.is_file, aside.rglob("*")):
            open_to_readers(path)
            with path.open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(aside)
        replaced = target.parent / f"{_REPLACED}{target.name}"
        if target.exists():  # rename(2) cannot replace a folder that holds files.
            target.rename(replaced)
        aside.rename(target)
        sync_folder(target.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        put_back(target.parent)
        raise


def put_back(folder: Path) -> None:
    """Undo an interrupted `replacing_folder`: the old folder returns if its place is free."""
    for moved in folder.glob(f"{_REPLACED}*"):
        place = folder / moved.name.removeprefix(_REPLACED)
        if not place.exists():
            moved.rename(place)


def sync_folder(folder: Path) -> None:
    """Write the names in `folder` to the disk; without this, a crash may undo a rename."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

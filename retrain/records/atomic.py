"""Files and folders that are replaced as a whole: a crash at any instant leaves the old content or the new one, never a part.

Each is written beside its place as `.tmp-...`, synced and renamed, and the parent folder is synced.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from retrain.records.disk import delete, safetensors_io

TEMPORARY = ".tmp-"
"""Prefix of the name of a file or folder that is not in its place yet."""
_REPLACED = f"{TEMPORARY}replaced-"


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace a file by `content`; text is written as UTF-8."""
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


@contextmanager
def replacing_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder to fill, whose files the caller syncs; it replaces `target` at the end of the block.

    After an OSError, also one that safetensors wrapped, the old `target` is there unchanged and nothing else is left.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.parent / f"{TEMPORARY}{target.name}"
    delete(aside)
    aside.mkdir()
    try:
        with safetensors_io():
            yield aside
        sync_folder(aside)
        replaced = target.parent / f"{_REPLACED}{target.name}"
        if target.exists():  # rename(2) cannot replace a folder that holds files
            target.rename(replaced)
        aside.rename(target)
        sync_folder(target.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        put_back(target.parent)
        raise


def put_back(folder: Path) -> None:
    """Undo an interrupted `replacing_folder`: a folder that was moved aside returns if nothing has taken its place."""
    for moved in folder.glob(f"{_REPLACED}*"):
        place = folder / moved.name.removeprefix(_REPLACED)
        if not place.exists():
            moved.rename(place)


def write_synced(path: Path, text: str) -> None:
    """Write a file whose bytes are on the disk when the function returns."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Write the names in `folder` to the disk; without this, a crash may undo a rename."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

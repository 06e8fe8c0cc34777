"""What a process does to the files below a folder, counted, and one of it failed; and what a power
cut leaves there.

Operations are calls of Python: opened for writing, written, synced, renamed, made, removed,
truncated. The libraries that write tensors are one operation for each file.
"""

import builtins
import errno
import io
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

KILLED = 77
"""Exit code of a process that ended as if killed."""
FAULTS = ("before", "after", "EIO", "ENOSPC", "short")
"""Killed before or after an operation; refused; and a write that takes the first half, with the
rest refused."""
_ERRORS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "short": errno.ENOSPC}


class Disk:
    """Watches the files below `folder` in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = os.fspath(folder)
        self.numbers = count(1)
        self.done: list[str] = []
        """Operations so far, as words."""
        self.wanted, self.fault = 0, ""
        self.synced: Durable | None = None

    def install(self) -> None:
        self._by_path(os, "mkdir", lambda path, *_: path)
        self._by_path(os, "unlink", lambda path, *_: path)
        self._by_path(os, "remove", lambda path, *_: path)
        self._by_path(os, "rmdir", lambda path, *_: path)
        self._by_path(os, "rename", lambda _, target, *__: target)
        self._by_path(os, "replace", lambda _, target, *__: target)
        self._by_path(os, "truncate", _place)
        self._by_path(os, "ftruncate", _place)
        self._by_path(os, "fsync", _place)
        self._by_path(os, "open", lambda path, *_: path, when=_opens_to_write)
        self._by_path(os, "write", _place, halved=lambda fd, data: (fd, data[: len(data) // 2]))
        import safetensors.numpy
        import safetensors.torch

        for module in (safetensors.numpy, safetensors.torch):
            self._by_path(module, "save_file", lambda _, path, *__: path)
        real = io.open

        def opened(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if isinstance(file, int) or not set(mode) & set("wxa+") or not self._holds(file):
                return real(file, mode, *args, **options)
            return _open(self, os.fspath(file), mode, *args, **options)

        io.open = builtins.open = opened  # type: ignore[assignment]

    def _by_path(
        self,
        module: Any,
        name: str,
        path_of: Callable[..., Any],
        *,
        when: Callable[..., bool] = lambda *_: True,
        halved: Callable[..., tuple[Any, ...]] | None = None,
    ) -> None:
        real = getattr(module, name)

        def watched(*args: Any, **options: Any) -> Any:
            path = path_of(*args)
            if options.get("dir_fd") is not None:
                path = Path(_place(options["dir_fd"])) / path
            if not when(*args) or not self._holds(path):
                return real(*args, **options)
            half = None
            if halved:
                half = partial(real, *halved(*args))
            return self.operation(name, path, partial(real, *args, **options), half)

        setattr(module, name, watched)

    def _holds(self, path: Any) -> bool:
        return (str(Path(path).absolute()) + os.sep).startswith(self.folder + os.sep)

    def operation(
        self, name: str, path: Any, do: Callable[[], Any], half: Callable[[], Any] | None = None
    ) -> Any:
        number = next(self.numbers)
        fails = number == self.wanted
        self.done.append(f"{name} {os.path.relpath(path, self.folder)}")
        if fails and self.fault == "before":
            self.end()
        if fails and self.fault == "short" and half is not None:
            self.wanted, self.fault = number + 1, "ENOSPC"  # what is left of the write
            return half()
        if fails and self.fault in _ERRORS:
            error = _ERRORS[self.fault]
            raise OSError(error, os.strerror(error), os.fspath(path))
        known = os.path.lexists(path)
        try:
            return do()
        finally:  # an operation may find nothing to do, such as a missing file to remove
            if self.synced is not None:
                self.synced.note(name, os.fspath(path), known=known)
            if fails and self.fault == "after":
                self.end()

    def end(self) -> None:
        """End as if killed; after a power cut, put what the disk holds in place of the folder."""
        if self.synced is not None:
            self.synced.rebuild(Path(f"{self.folder}-after"))
        os._exit(KILLED)


def _place(descriptor: int, *_: Any) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())


def _opens_to_write(_: Any, flags: int, *__: Any) -> bool:
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def _open(
    disk: Disk,
    path: str,
    mode: str,
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
) -> Any:
    """What `open` returns for a file that is written to, with every write an operation."""

    class Raw(io.FileIO):
        def write(self, data: Any) -> int:
            content, write = bytes(data), super().write
            return disk.operation(  # type: ignore[no-any-return]
                "write", path, lambda: write(content), lambda: write(content[: len(content) // 2])
            )

        def truncate(self, size: int | None = None) -> int:
            cut = super().truncate
            return disk.operation("truncate", path, lambda: cut(size))  # type: ignore[no-any-return]

    raw = disk.operation("open", path, lambda: Raw(path, mode.replace("b", "").replace("t", "")))
    if buffering == 0:
        return raw
    made = io.BufferedRandom if "+" in mode else io.BufferedWriter
    buffered = made(raw)
    if "b" in mode:
        return buffered
    return io.TextIOWrapper(
        buffered, encoding or "utf-8", errors, newline, line_buffering=buffering == 1
    )


class Durable:
    """What of a folder is on the disk: of each file the bytes at its last fsync, of each folder the
    names at its last fsync. What was never synced is gone after a power cut, or, with a seed, is
    there by chance.
    """

    def __init__(self, folder: Path, seed: int | None = None) -> None:
        self._folder = folder
        self._rng = random.Random(seed) if seed is not None else None
        self._bytes: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        self._current: dict[int, str] = {}
        """inode -> a path of now."""

    def note(self, name: str, path: str, *, known: bool) -> None:
        if not os.path.lexists(path):
            return
        number = os.lstat(path).st_ino
        if name == "fsync":
            if Path(path).is_dir():
                self._names[number] = {one.name: one.inode() for one in os.scandir(path)}
            else:
                self._bytes[number] = _content(path)
        elif not known and name in ("open", "mkdir", "save_file"):  # the number may be used again
            self._bytes.pop(number, None)
            self._names.pop(number, None)

    def rebuild(self, target: Path) -> None:
        """Write to `target` what a power cut leaves."""
        self._current = {
            os.lstat(path).st_ino: os.fspath(path)
            for path in (self._folder, *self._folder.rglob("*"))
        }
        self._rebuild(os.lstat(self._folder).st_ino, target)

    def _rebuild(self, number: int, target: Path) -> None:
        now = self._current.get(number)
        is_folder = number in self._names or (now is not None and Path(now).is_dir())
        if not is_folder:
            content = self._bytes.get(number, b"")
            if now is not None and self._survives():
                content = _content(now)
            target.write_bytes(content)
            return
        names = self._names.get(number, {})
        if now is not None and self._survives():
            names = {one.name: one.inode() for one in os.scandir(now)}
        target.mkdir()
        for name, inode in names.items():
            self._rebuild(inode, target / name)

    def _survives(self) -> bool:
        return self._rng is not None and self._rng.random() < 0.5


def _content(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def faulty_run(
    file: str,
    folder: str,
    wanted: int,
    fault: str,
    cut: int | None,
    said: str,
    listed: str,
    threads: int,
) -> None:
    """Run a configuration in this process, which should be a forked one, with one fault. `cut` is
    the seed of a power cut, -1 for one that keeps nothing that was not synced. Errors go to the file
    `said`, the operations of a whole run to `listed`.
    """
    import sys
    from contextlib import redirect_stderr

    import torch

    from retrain.cli.main import main

    torch.set_num_threads(threads)
    disk = Disk(Path(folder))
    disk.wanted, disk.fault = wanted, fault
    if cut is not None:
        disk.synced = Durable(Path(folder), None if cut < 0 else cut)
    with Path(said).open("w", encoding="utf-8") as errors, redirect_stderr(errors):
        disk.install()
        code = main([file, "--quiet", "--skip-parity"])
    if listed:
        Path(listed).write_text("\n".join(disk.done), encoding="utf-8")
    sys.exit(code)


def after_a_cut(folder: Path) -> None:
    """Put what a power cut left in place of the folder."""
    shutil.rmtree(folder)
    Path(f"{folder}-after").rename(folder)

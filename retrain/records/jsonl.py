"""JSON lines that survive a crash: one write per line on an append descriptor, and a reader that
accepts a torn last line.

JSON has no NaN and no infinity: they become null, and the line's `nonfinite` names the fields. It
escapes an unpaired surrogate, which a model can write and UTF-8 cannot encode. It also escapes
every character that Python's `splitlines` and other readers take for the end of a line.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import file_digest, sha256
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Self

from retrain.errors import RunFailed
from retrain.records.disk import replace_file
from retrain.system import Json, object_of

CHANGED = (
    ": the file was changed or the disk is damaged; put it back from a copy, or train it again."
)
"""The end of a sentence on a damaged file of a run."""
_LINE_ENDS = "\x85\u2028\u2029"
"""The other characters that end a line in Unicode; JSON itself escapes the controls below a
space.
"""


def encode_line(record: Mapping[str, Any]) -> bytes:
    """Encode one record as a line, newline included."""
    text = json.dumps(finite(record), ensure_ascii=False, allow_nan=False)
    for separator in _LINE_ENDS:
        text = text.replace(separator, f"\\u{ord(separator):04x}")
    # backslashreplace writes a lone surrogate as \udxxx, which is JSON's own escape of it.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def finite(record: Mapping[str, Any]) -> Json:
    """Return the record with plain JSON numbers; numbers that are not finite become null, and
    `nonfinite` lists them.
    """
    nonfinite: list[str] = []
    clean = {key: _finite(value, key, nonfinite) for key, value in record.items()}
    return clean | {"nonfinite": nonfinite} if nonfinite else clean


def _finite(value: Any, name: str, nonfinite: list[str]) -> Any:
    match value:
        case None | bool() | str():
            return value
        case Mapping():
            return {
                str(key): _finite(item, f"{name}.{key}", nonfinite) for key, item in value.items()
            }
        case list() | tuple():
            return [
                _finite(item, f"{name}[{index}]", nonfinite) for index, item in enumerate(value)
            ]
        case Integral():
            return int(value)
        case Real():  # numpy's scalars register as Real.
            if math.isfinite(value):
                return float(value)
            nonfinite.append(name)
            return None
    raise TypeError(f"{name} = {value!r} is not a JSON value")


@dataclass(frozen=True)
class Extent:
    """The size and hash of a file at some moment. If a run only appends to the file, its later
    versions begin with these bytes.
    """

    size: int
    """Size in bytes."""
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Self:
        with path.open("rb") as file:
            return cls(path.stat().st_size, file_digest(file, "sha256").hexdigest())

    def problem(self, path: Path, *, whole: bool = False) -> str:
        """Return why the file `path` no longer begins with these bytes; with `whole`, why it has
        other bytes. Return "" for equal bytes.
        """
        if not (self.size or whole):
            return ""
        if not path.is_file():
            return f"{path.name} is missing"
        size = path.stat().st_size
        if size != self.size and (whole or size < self.size):
            return f"{path.name} has {size} bytes instead of {self.size}"
        with path.open("rb") as file:  # A log fits in memory, and a whole file need not.
            found = file_digest(file, "sha256") if whole else sha256(file.read(self.size))
        return "" if found.hexdigest() == self.sha256 else f"{path.name} differs from its sha256"


class JsonlWriter:
    """Appends lines to one file. It first cuts a torn tail that a crash left, so that no new line
    sticks to it.

    It keeps a line that the disk refuses, and tries it again with the next line or in `sync`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        data = path.read_bytes()
        self._size = data.rfind(b"\n") + 1
        if self._size < len(data):
            os.ftruncate(self._descriptor, self._size)
        self._sha256 = sha256(data[: self._size])
        self._unwritten = b""

    @property
    def is_behind(self) -> bool:
        """True if the writer still holds a line that the disk refused."""
        return bool(self._unwritten)

    def write(self, record: Mapping[str, Any]) -> None:
        self.append(encode_line(record))

    def append(self, line: bytes) -> None:
        self._unwritten += line
        with suppress(OSError):  # `is_behind` says so, and `sync` raises it.
            self._write_out()

    def sync(self) -> Extent:
        """Flush every line written so far to the disk, and return how far the file reaches. Raises
        OSError, which names the file.
        """
        try:
            self._write_out()
            os.fsync(self._descriptor)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        return Extent(self._size, self._sha256.hexdigest())

    def _write_out(self) -> None:
        aside = aside_of(self.path)
        while self._unwritten:
            written = os.write(self._descriptor, self._unwritten)
            self._sha256.update(self._unwritten[:written])
            self._size += written
            self._unwritten = self._unwritten[written:]
            # From this line on the run makes the cut lines again.
            if not self._unwritten and aside.exists():
                os.fsync(self._descriptor)
                aside.unlink()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def read_jsonl(path: Path) -> Iterator[Json]:
    """Yield the lines of a file without a last line that a crash tore, which has no newline; none
    without a file.

    Raises RunFailed, naming file and line, for a damaged line anywhere else.
    """
    for number, line in enumerate(_whole_lines(path), start=1):
        yield _parse(line, path, number)


def read_jsonl_backwards(path: Path) -> Iterator[Json]:
    """Yield the same lines, last one first. It parses a line only when the caller asks for it."""
    for number, line in reversed([*enumerate(_whole_lines(path), start=1)]):
        yield _parse(line, path, number)


def aside_of(path: Path) -> Path:
    """Return the place of lines that a resume cut from `path`; they go when the first new line is
    on the disk.
    """
    return path.with_name(f"{path.name}.aside")


def truncate_to_size(path: Path, size: int) -> None:
    """Keep the first `size` bytes, and set the other lines aside: a resumed run is about to make
    their steps again. The lines that an earlier resume cut follow them.
    """
    if not path.is_file() or path.stat().st_size <= size:
        return
    aside = aside_of(path)
    with path.open("rb") as file:
        file.seek(size)
        cut = file.read()
    lines = cut[: cut.rfind(b"\n") + 1]
    earlier = aside.read_bytes() if aside.exists() else b""
    if not earlier.startswith(lines):  # else a kill came before the truncation
        replace_file(aside, lines + earlier)
    os.truncate(path, size)


def truncate_to_step(path: Path, step: int) -> None:
    """Keep the lines before the first of `step` or a later one, as `truncate_to_size` does."""
    size = 0
    for number, line in enumerate(_whole_lines(path), start=1):
        if _parse(line, path, number)["step"] >= step:
            break
        size += len(line)
    truncate_to_size(path, size)


def _whole_lines(path: Path) -> Iterator[bytes]:
    if path.is_file():
        with path.open("rb") as file:
            yield from (line for line in file if line.endswith(b"\n"))


def _parse(line: bytes, path: Path, number: int) -> Json:
    place = f"{path}, line {number},"
    record = object_of(line, place)
    if type(record.get("step")) is not int or record["step"] < 0:
        raise RunFailed(
            f"{place} has no step, which every line of a run's file counts: the file was changed or"
            " another program wrote it."
        )
    return record

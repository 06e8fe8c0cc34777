"""Facts from outside the package. The module parses texts into data that every later step can hold,
and asks the operating system about a process and its children.

The standard parsers of TOML and JSON raise RecursionError for deep nesting and a bare ValueError
for an integer of more than 4,300 digits. They also let through nesting and integers on which a
later step would fail. Here everything wrong with a text is one ParseError. Every process imports
this module at its start, so functions import the parsers at their call.
"""

import ctypes
import importlib
import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from retrain.errors import RunFailed

Json = dict[str, Any]
"""An object of JSON or a table of TOML, by its names."""
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def grouped(pairs: Iterable[tuple[_Key, _Value]]) -> dict[_Key, list[_Value]]:
    """Return the values of each key, in the order of the pairs."""
    found: dict[_Key, list[_Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


# -- texts -----------------------------------------------------------------------------------------


MAX_DEPTH = 100
MAX_INTEGER = 2**63 - 1
"""The range of integers that TOML promises, and that a tensor or a table's column holds."""
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


class ParseError(ValueError):
    """The reason why a text is not TOML or JSON: the end of a sentence that names the text, without
    its full stop.
    """


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a TOML document into a table. Raises ParseError."""
    import tomllib

    return _parse(tomllib.loads, text, "TOML")  # type: ignore[no-any-return]  # a document is a table


def parse_json(text: str | bytes, **hooks: Any) -> Any:
    """Parse a JSON text into a value of any kind, with the hooks of `json.loads`. Raises
    ParseError.
    """
    import json

    return _parse(partial(json.loads, **hooks), text, "JSON")


def integer_or_digits(digits: str) -> int | str:
    """Read an integer; an integer of more than 64 bits stays text."""
    if len(digits) <= len(str(-MAX_INTEGER)) and abs(int(digits)) <= MAX_INTEGER:
        return int(digits)
    return digits


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object. Anybody may have changed it, so the caller checks its
    fields.

    Raises RunFailed for a file that holds no JSON object; an OSError passes through.
    """
    return object_of(path.read_bytes(), path)


def object_of(text: bytes, path: object) -> dict[str, Any]:
    """Parse the JSON object from `path`, a file or its line, as `read_object` does."""
    try:
        content = parse_json(text)
    except ParseError as error:
        raise RunFailed(f"{path} {error}: the file was changed or the disk is damaged.") from error
    if not isinstance(content, dict):
        raise RunFailed(
            f"{path} holds {_KINDS[type(content)]} where an object is expected: the file was"
            " changed or another program wrote it."
        )
    return content


def is_path_text(value: Any) -> bool:
    """Return True if a value from a file can name a file: a string without NUL, and without a name
    that no file system holds.
    """
    return (
        isinstance(value, str)
        and "\0" not in value
        and all(len(name.encode(errors="replace")) <= 255 for name in value.split("/"))
    )


def expanded(path: str) -> str:
    """Expand ~, ~user, $NAME and ${NAME} in a path. The returned path expands to itself, so a
    stored path stays the same everywhere.

    Raises ParseError for an unknown user or an unset variable, unless a file or folder has that
    name.
    """
    # A Path would turn tinker:// into tinker:/ and an empty text into a dot.
    whole = os.path.expanduser(os.path.expandvars(path))  # noqa: PTH111
    lost = re.search(r"^~[^/]*|\$(\w+|\{[^}]*\})", whole, re.ASCII)
    if lost and not os.path.lexists(whole):  # a folder may have such a name
        kind = "variable" if lost[1] else "user"
        raise ParseError(f"names {lost[0]}, and no {kind} has that name; write the whole path")
    return whole


def search_path() -> tuple[tuple[str, int], ...]:
    """Return the folders in which Python looks for packages, each with the time of its last change,
    such as an installation.
    """
    found = []
    for place in sys.path:
        with suppress(OSError, ValueError):
            found.append((place, Path(place).stat().st_mtime_ns))
    return tuple(found)


_KINDS = {
    type(None): "null",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}
"""Type of a JSON value -> its name, with its article."""


def _parse(loads: Callable[[Any], Any], text: str | bytes, language: str) -> Any:
    try:
        value = loads(text)
    except RecursionError:
        raise ParseError(f"nests deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        if type(error) is ValueError:  # Python converts no longer digits to an integer
            raise ParseError(
                "holds an integer of more than 4,300 digits; integers have at most 64 bits"
            ) from None
        reason = str(error)
        raise ParseError(f"is not valid {language}: {reason[:1].lower()}{reason[1:]}") from error
    problem = unholdable(value)
    if problem:
        raise ParseError(problem)
    return value


def unholdable(value: Any, depth: int = 0) -> str:
    """Say what is too deep or too large for later steps in a parsed value, as the end of a
    sentence; "" if nothing is.
    """
    if isinstance(value, int) and not -MAX_INTEGER <= value <= MAX_INTEGER:
        return "holds an integer of more than 64 bits"
    if not isinstance(value, dict | list):
        return ""
    if depth == MAX_DEPTH:
        return f"nests deeper than {MAX_DEPTH} levels"
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, dict | list | int) and (problem := unholdable(item, depth + 1)):
            return problem
    return ""


def imported(path: str) -> Any:
    """Import the object that a dotted path names, such as "module.Class"."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def lazy(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package whose names, the keys of `homes`, load from these
    modules on first use.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return imported(f"{package}.{homes[name]}.{name}")

    return load


def listed(words: Iterable[str], conjunction: str = "and") -> str:
    """Write words as a sentence lists them: a, b and c."""
    *first, last = words
    if first:
        return f"{', '.join(first)} {conjunction} {last}"
    return last


def toml_value(value: Any) -> str:
    """Write a value on one line of TOML. A value without a form in TOML has the form of Python."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, dict):
        fields = [f"{_key(str(name))} = {toml_value(item)}" for name, item in value.items()]
        return "{" + ", ".join(fields) + "}"
    if hasattr(value, "isoformat"):  # a date or a time
        return str(value.isoformat())
    return repr(value)


def _key(name: str) -> str:
    if _BARE_KEY.fullmatch(name):
        return name
    return _string(name)


def _string(text: str) -> str:
    """Quote a string. TOML has the escapes of JSON, except that TOML wants DEL escaped."""
    import json

    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


# -- processes -------------------------------------------------------------------------------------


_PR_SET_PDEATHSIG = 1
_SPIN_COUNT = "20000"
_ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
"""Names of torch's allocator settings; torch before 2.9 reads the second."""


def prepare_torch() -> None:
    """Set the variables that torch reads at its import, unless the user has set them. Call this
    before importing torch.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        # Idle OpenMP threads spin for a moment only, so that processes which share the cores do not
        # starve each other.
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
    if not _ALLOCATOR & os.environ.keys():
        # Activations cannot use segments of a fixed size that the KV cache leaves behind, so out of
        # memory would depend on what ran before.
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process, a child, when `parent`, which forked it, dies (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 if it has ended or belongs to another user."""
    import psutil  # here, since most processes never ask

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def peak_resident_bytes() -> int:
    """Return the largest resident memory that this process has had so far, without its children."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # psutil has no peak on Linux
    if sys.platform == "darwin":
        return peak
    return peak * 1024


def total_memory(
    groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> int:
    """Return the bytes of memory that this process may take: the memory of the machine, or the
    smallest limit of its control groups. `groups` is their mount point, and `own` names the groups
    of the process.
    """
    import psutil

    limits = [int(psutil.virtual_memory().total)]
    listed = own.read_text(encoding="utf-8") if own.is_file() else ""
    for kinds, path in re.findall(r"^\d+:(.*?):/*(.*)", listed, re.MULTILINE):
        limit = groups / path / "memory.max"  # The second version, without kinds.
        if "memory" in kinds.split(","):
            limit = groups / "memory" / path / "memory.limit_in_bytes"
        for folder in limit.parents:
            with suppress(OSError, ValueError):  # A group without a limit, or not seen from here.
                limits.append(int((folder / limit.name).read_text(encoding="utf-8")))
    return min(limits)

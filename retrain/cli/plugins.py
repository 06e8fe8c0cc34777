"""`retrain plugins`: the names of every kind, built in and installed."""

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from importlib.metadata import EntryPoint

from retrain.cli.shared import Form, print_json
from retrain.config.names import installed_plugins, table
from retrain.errors import ConfigurationError
from retrain.plugins import KINDS, place_of, user_code


@dataclass(frozen=True)
class Row:
    kind: str
    """"" for an installed plugin, which serves the key that names it."""
    name: str
    signature: str
    source: str
    error: str = ""
    """The reason why it does not load; "" if it does."""


def command(form: Form = "text") -> None:
    """List what every key that takes a plugin can be: built in, and installed.

    It loads installed plugins and prints why one does not load, such as an error of its module or a
    name that occurs twice.
    """
    builtin = [
        Row(kind, name, expected.forms, "built in")
        for kind, expected in KINDS.items()
        for name in table(kind)
    ]
    points = sorted(installed_plugins(), key=lambda point: point.name)
    installed = [_installed(point, builtin, points) for point in points]
    if form == "json":
        print_json([asdict(row) for row in (*builtin, *installed)])
    else:
        print("\n".join(_lines(builtin, installed)))


def _lines(builtin: Sequence[Row], installed: Sequence[Row]) -> Iterator[str]:
    from retrain.records.terminal import GAP, clean, table_lines

    for kind, expected in KINDS.items():
        names = [row.name for row in builtin if row.kind == kind]
        yield f"{kind}: {expected.key}, {expected.forms}"
        yield f"{GAP}{', '.join(names)}"
    yield "installed (entry points of the group retrain.plugins, for the key that names them)"
    rows = [
        (row.name, row.signature, row.source, row.error and f"ERROR: {row.error}")
        for row in installed
    ]
    yield from map(clean, table_lines(rows, indent=GAP))
    if not rows:
        yield f"{GAP}none"
    yield "Any key above also takes a dotted path; `retrain init-plugin` writes one to start from."


def _installed(point: EntryPoint, builtin: Sequence[Row], points: Sequence[EntryPoint]) -> Row:
    """Describe an installed plugin: its signature, or why a run could not use it."""
    signature = error = ""
    try:
        # The list must not contain the output of a module.
        with user_code("loading it", ConfigurationError), redirect_stdout(sys.stderr):
            signature = f"{point.attr}{inspect.signature(point.load())}"
    except ConfigurationError as failed:
        error = str(failed)
    own = " and ".join(KINDS[row.kind].key for row in builtin if row.name == point.name)
    if own:
        error = f"for {own} its name is a built-in one; rename it"
    if sum(other.name == point.name for other in points) > 1:
        error = "two plugins have its name; rename or uninstall one"
    return Row("", point.name, signature, place_of(point), error)

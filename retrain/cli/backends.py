"""`retrain backends`: the engines and backends, what this machine has of them, and what each can
do.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from retrain.cli.shared import Form, print_json
from retrain.errors import ConfigurationError

if TYPE_CHECKING:
    from retrain.backends.declared import Entry


def command(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Show this part, and what it does with each key."),
    ] = "",
    form: Form = "text",
) -> None:
    """List engines and backends: what each is and can do, what this machine has, and which versions
    its tests used.
    """
    from retrain.backends.declared import catalog

    known = list(catalog())
    entries = [entry for entry in known if name in ("", entry.name)]
    if not entries:
        raise ConfigurationError(
            f"{name!r} is not a built-in engine or backend; these are"
            f" {', '.join(entry.name for entry in known)}."
        )
    if form == "json":
        print_json([entry.to_json() for entry in entries])
    else:
        print("\n".join(_one(entries[0]) if name else _all(entries)))


def _all(entries: "Sequence[Entry]") -> Iterator[str]:
    for title, kind in (
        ("Training backends ([backend] backend)", "backend"),
        ("Inference engines ([inference] engine)", "engine"),
    ):
        yield title
        for entry in entries:
            if entry.kind == kind:
                yield from _lines(entry)
        yield ""
    yield "`retrain backends NAME` says what becomes of each key of the configuration."


def _one(entry: "Entry") -> Iterator[str]:
    """Print one engine or backend with its use of each key."""
    from retrain.config.names import bracketed
    from retrain.records.terminal import GAP, table_lines

    yield from _lines(entry)
    yield ""
    rows = [(bracketed(row.key), row.use, row.because) for row in entry.keys]
    yield from table_lines(rows, indent=GAP)


def _lines(entry: "Entry") -> Iterator[str]:
    from retrain.records.terminal import GAP, table_lines

    installed = [f"{name} {found}" for name, found in entry.installed.items() if found]
    here, install = ", ".join(installed), ""
    if not entry.packages:
        here = here or "needs nothing"
    elif not here:
        here, install = "not installed", entry.install
    rows = [
        ("can", entry.words),
        ("verified", entry.verified),
        ("here", here),
        ("install", install),
    ]
    yield f"{GAP}{entry.name}: {entry.what}"
    yield from table_lines([row for row in rows if row[1]], indent=2 * GAP)

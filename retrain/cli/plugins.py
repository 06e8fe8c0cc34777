"""`retrain plugins`: the names of every kind, built in and installed."""

import ast
import importlib.util
import symtable
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from retrain.cli.shared import JsonOnly, print_json


@dataclass(frozen=True)
class Row:
    kind: str
    """"" for an installed plugin, which serves the key that names it."""
    name: str
    signature: str
    source: str
    error: str = ""
    """Why it cannot be loaded, as far as its source tells; "" if nothing stands against it."""


def command(as_json: JsonOnly = False) -> None:
    """List what every key that takes a plugin can be: built in, and installed.

    An installed plugin is read and not imported. What stands against loading it is said: a module
    that is missing, a name that is not in it, a name that is found twice.
    """
    builtin, installed = list(_builtin()), _installed()
    if as_json:
        print_json([asdict(row) for row in (*builtin, *installed)])
    else:
        print("\n".join(_lines(builtin, installed)))


def _lines(builtin: Sequence[Row], installed: Sequence[Row]) -> Iterator[str]:
    from retrain.plugins import KINDS
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


def _builtin() -> Iterator[Row]:
    from retrain.config.names import table
    from retrain.plugins import KINDS

    for kind, expected in KINDS.items():
        for name in table(kind):
            yield Row(kind, name, expected.forms, "built in")


def _installed() -> list[Row]:
    from retrain.plugins import KINDS

    points = sorted(entry_points(group="retrain.plugins"), key=lambda point: point.name)
    places = Counter(point.name for point in points)
    own: dict[str, list[str]] = {}
    for row in _builtin():
        own.setdefault(row.name, []).append(KINDS[row.kind].key)
    rows = []
    for point in points:
        signature, error = _read(point)
        if places[point.name] > 1:
            error = error or "its name is found twice; rename or uninstall one"
        if point.name in own:
            keys = " and ".join(own[point.name])
            error = error or f"for {keys} its name is found twice, being built in; rename it"
        package = point.dist.name if point.dist else "an installed package"
        rows.append(Row("", point.name, signature, f"{point.value} of {package}", error))
    return rows


def _read(point: EntryPoint) -> tuple[str, str]:
    """Read the signature of an entry point from its file, and what stands against loading it."""
    file = _file_of(point.module)
    if file is None:
        return "", f"there is no module {point.module}"
    # Compiled code tells nothing.
    if file.suffix != ".py":
        return "", ""
    source = file.read_bytes()
    try:
        tree = ast.parse(source)
        symbols = symtable.symtable(source.decode(), str(file), "exec").get_symbols()
    except (SyntaxError, ValueError) as error:
        return "", f"{file} is not Python ({error})"
    imported = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    bound = {each.get_name() for each in symbols if each.is_assigned() or each.is_imported()}
    # A star import or the module's own __getattr__ may bring any name.
    is_open = any(alias.name == "*" for node in imported for alias in node.names)
    if point.attr not in bound and not is_open and "__getattr__" not in bound:
        return "", f"{file} has no {point.attr}"
    missing = [name for name in _packages(imported) if importlib.util.find_spec(name) is None]
    needs = ""
    if missing:
        needs = f"it imports {', '.join(missing)}, which is not installed"
    return _signature(tree, point.attr), needs


def _packages(imported: Sequence[ast.Import | ast.ImportFrom]) -> Iterator[str]:
    """The top-level packages that a module imports whenever it is imported itself."""
    for node in imported:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif node.module and not node.level:
            yield node.module.partition(".")[0]


def _signature(tree: ast.Module, name: str) -> str:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return f"{name}({ast.unparse(node.args)})"
        if isinstance(node, ast.ClassDef) and node.name == name:
            return f"class {name}({', '.join(map(ast.unparse, node.bases))})"
    return ""


def _file_of(module: str) -> Path | None:
    """Find the file of a module without running it or the packages that hold it."""
    parts = module.split(".")
    spec = importlib.util.find_spec(parts[0])
    for depth in range(2, len(parts) + 1):
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(".".join(parts[:depth]), spec.submodule_search_locations)
    if spec is not None and spec.origin is not None:
        return Path(spec.origin)
    return None

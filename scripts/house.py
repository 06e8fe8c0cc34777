"""How the project is laid out, counted: `python scripts/house.py [ROOT]` prints sizes beside their
budgets, the functions above MAX_NODES and the circles. With `--budget` it exits with 1 where a budget
is exceeded; `make lint` runs it.

Size is counted in syntax nodes, which no formatter moves. A room is a package folder, or a module
at the top of `retrain/`. An arrow is one room that imports another, at any depth of a function; a
circle is a set of rooms, or of files, that import each other. tests/test_architecture.py checks the
same numbers.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pathlib import Path

Arrows = dict[str, set[str]]
Function = ast.FunctionDef | ast.AsyncFunctionDef

MAX_NODES = 250
"""What a reader can hold at once."""


BUDGETS: dict[str, int] = {
    "retrain/*.py": 9_664,
    "retrain/advantages/": 10_652,
    "retrain/analysis/": 26_721,
    "retrain/assets/": 1_801,
    "retrain/audit/": 1_002,
    "retrain/backends/": 21_529,
    "retrain/campaign/": 8_508,
    "retrain/cli/": 14_054,
    "retrain/config/": 25_365,
    "retrain/data/": 11_365,
    "retrain/environments/": 5_432,
    "retrain/explain/": 4_879,
    "retrain/inference_engine/": 20_393,
    "retrain/inspect/": 3_586,
    "retrain/model/": 25_039,
    "retrain/records/": 12_742,
    "retrain/report/": 6_074,
    "retrain/rewards/": 15_832,
    "retrain/run/": 23_611,
    "retrain/squeeze/": 5_591,
    "retrain/tracking/": 7_072,
    "retrain/xray/": 1_895,
    "scripts/": 15_632,
    "examples/": 2_116,
    "core/": 132,
    "bytes of the package's other files": 6_897_353,
    "lines of tests": 50_507,
    "lines of benchmarks": 5_361,
    "words of the pages": 65_712,
}
"""The most of each that there may be. A budget only falls: lower it when you remove something.

A name with a slash at its end is a folder of Python code, in syntax nodes; "retrain/*.py" are the
modules at the top.
"""
_PLAIN_SUFFIXES = {".py", ".pyc"}


def sizes(root: Path) -> dict[str, int]:
    """Measure everything that has a budget."""
    code = {path: nodes_of(ast.parse(path.read_text(encoding="utf-8"))) for path in _code(root)}
    found: Counter[str] = Counter()
    for path, nodes in code.items():
        parts = path.relative_to(root).parts
        if parts[0] == "retrain":
            found["retrain/*.py" if len(parts) == 2 else f"retrain/{parts[1]}/"] += nodes
        else:
            found[f"{parts[0]}/"] += nodes
    other = [path for path in (root / "retrain").rglob("*") if path.is_file()]
    found["bytes of the package's other files"] = sum(
        path.stat().st_size for path in other if path.suffix not in _PLAIN_SUFFIXES
    )
    found["lines of tests"] = _lines(root / "tests")
    found["lines of benchmarks"] = _lines(root / "benchmarks")
    pages = [*(root / "docs").rglob("*.md"), *(root / name for name in _TOP_PAGES)]
    found["words of the pages"] = sum(
        len(page.read_text(encoding="utf-8").split()) for page in pages
    )
    return dict(found)


_TOP_PAGES = ("README.md", "AGENTS.md", "CONTRIBUTING.md")


def _code(root: Path) -> Iterator[Path]:
    for folder in ("retrain", "scripts", "examples", "core"):
        yield from sorted((root / folder).rglob("*.py"))


def _lines(folder: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob("*.py"))


def check_budgets(root: Path) -> int:
    """Print each budget that is exceeded; return the exit code."""
    found = sizes(root)
    over = [
        f"{name}: {size:,}, the budget is {BUDGETS.get(name, 0):,}"
        for name, size in found.items()
        if size > BUDGETS.get(name, 0)
    ]
    for line in over:
        print(f"{line}. A new feature pays with a removal: take something out of it.")
    return 1 if over else 0


def main(root: Path) -> None:
    """Print each size beside its budget, the functions above MAX_NODES, and the circles."""
    print("| what | size | budget |\n|---|---|---|")
    for name, size in sizes(root).items():
        print(f"| {name} | {size:,} | {BUDGETS.get(name, 0):,} |")
    trees = parse_package(root)
    for path, function in large_functions(trees):
        place = f"{path.relative_to(root)}:{function.lineno}"
        print(f"{nodes_of(function)} nodes: {function.name} ({place})")
    for circle in circles_of(room_arrows(root, trees)) + circles_of(module_arrows(root, trees)):
        print(f"Circle: {', '.join(sorted(circle))}")


def files(root: Path) -> list[Path]:
    """Every module of `root`/retrain; what it hands out as a file, such as a paper's plugin, is
    none.
    """
    package = root / "retrain"
    return sorted(set(package.rglob("*.py")) - set((package / "assets").rglob("*.py")))


def parse_package(root: Path) -> dict[Path, ast.Module]:
    """The syntax tree of every module of `root`/retrain."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in files(root)}


# -- functions -------------------------------------------------------------------------------------


def functions(trees: dict[Path, ast.Module]) -> Iterator[tuple[Path, Function]]:
    """Every function and method with its file."""
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, Function):
                yield path, node


def nodes_of(tree: ast.AST) -> int:
    """Syntax nodes, which no formatter moves; whether a name is read or written is none."""
    return sum(not isinstance(node, ast.expr_context) for node in ast.walk(tree))


def large_functions(trees: dict[Path, ast.Module]) -> list[tuple[Path, Function]]:
    """The functions above MAX_NODES, each with its file."""
    return [
        (path, function) for path, function in functions(trees) if nodes_of(function) > MAX_NODES
    ]


# -- imports ---------------------------------------------------------------------------------------


def module_of(root: Path, path: Path) -> str:
    """retrain/model/text.py -> retrain.model.text, retrain/model/__init__.py -> retrain.model."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(root: Path, path: Path) -> str:
    """retrain/model/text.py -> retrain.model, retrain/types.py -> retrain.types."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts if len(parts) == 2 and parts[-1] != "__init__" else parts[:-1])


@cache
def imports_of(tree: ast.Module) -> tuple[str, ...]:
    """What a module imports, at any depth of a function; kept, since a walk visits every node."""
    return tuple(imported(ast.walk(tree)))


def imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Dotted names that these nodes import: `from a.b import c` gives a.b.c, whether c is a module
    or a name in a.b.
    """
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def enclosing(name: str, known: Collection[str]) -> str:
    """The longest part of a dotted name that is known; "" if none is."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name


def file_arrows(root: Path, trees: dict[Path, ast.Module]) -> Iterator[tuple[Path, str]]:
    """(file, room that it imports), its own room left out."""
    rooms = {room_of(root, path) for path in trees}
    for path, tree in trees.items():
        for name in imports_of(tree):
            other = (
                enclosing(name, rooms) if name != "retrain.__version__" else ""
            )  # which runs nothing of retrain/__init__.py
            if other and other != room_of(root, path):
                yield path, other


def room_arrows(root: Path, trees: dict[Path, ast.Module]) -> Arrows:
    """Each room with the rooms that it imports."""
    arrows: Arrows = {room: set() for room in sorted({room_of(root, path) for path in trees})}
    for path, other in file_arrows(root, trees):
        arrows[room_of(root, path)].add(other)
    return arrows


def module_arrows(root: Path, trees: dict[Path, ast.Module], *, by_name: bool = False) -> Arrows:
    """Each module with the modules that it imports. A package stands for its `__init__.py`.

    `by_name`: and with those that a string of it names, which it may import when it runs.
    """
    modules = {module_of(root, path): tree for path, tree in trees.items()}
    arrows: Arrows = {}
    for module, tree in modules.items():
        names = set(imports_of(tree)) - {"retrain.__version__"}
        if by_name:
            names |= {name for name in named_in(tree) if enclosing(name, modules) != "retrain"}
        arrows[module] = {enclosing(name, modules) for name in names} - {"", module}
    return arrows


def named_in(tree: ast.Module) -> Iterator[str]:
    """Dotted names of the package that are written as strings."""
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, str) and re.fullmatch(r"retrain(\.\w+)+", value):
            yield value


def circles_of(arrows: Arrows) -> list[set[str]]:
    """The sets of two or more that import each other."""
    return [members for members in strong_components(arrows) if len(members) > 1]


def strong_components(arrows: Arrows) -> list[set[str]]:
    """Sets of rooms that reach each other, each after those that it imports (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[set[str]] = []

    def visit(room: str) -> None:
        index[room] = low[room] = len(index)
        stack.append(room)
        for other in sorted(arrows[room]):
            if other not in index:
                visit(other)
                low[room] = min(low[room], low[other])
            elif other in stack:
                low[room] = min(low[room], index[other])
        if low[room] == index[room]:
            members = set(stack[stack.index(room) :])
            del stack[stack.index(room) :]
            components.append(members)

    for room in arrows:
        if room not in index:
            visit(room)
    return components


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    here = Path(arguments[0]) if arguments else Path(__file__).resolve().parents[1]
    if "--budget" in sys.argv:
        sys.exit(check_budgets(here))
    main(here)

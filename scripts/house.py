"""How the package is laid out, counted: `python scripts/house.py [ROOT]` prints one Markdown table.

A room is a package folder or a module that lies loose at the top of `retrain/`. An arrow is one room that imports another, at any
depth of a function; a circle is a set of rooms that import each other; the floors are the longest chain of arrows, with each
circle counted as one.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median

Arrows = dict[str, set[str]]


def main(root: Path) -> None:
    """Print the table of the package below `root`."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((root / "retrain").rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    lengths = [_lines(node) for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    private, once, tiny = private_functions(texts, trees)
    sizes = [text.count("\n") for text in texts.values()]
    arrows = room_arrows(root, trees)
    circles = strong_components(arrows)
    rows = {
        "function length, mean / median / longest (lines)": f"{mean(lengths):.1f} / {median(lengths):g} / {max(lengths)}",
        "private functions with one caller (of these at most 4 lines)": f"{once} of {private} ({tiny})",
        "files in the package, median lines, under 60 lines": f"{len(sizes)}, {median(sizes):g}, {sum(size < 60 for size in sizes)}",
        "loose files at the top of retrain/": str(len(list((root / "retrain").glob("*.py")))),
        "rooms / floors / import arrows / circles": (
            f"{len(arrows)} / {floors(arrows, circles)} / {sum(map(len, arrows.values()))} / {sum(len(circle) > 1 for circle in circles)}"
        ),
    }
    print("| measure | value |\n|---|---|")
    for name, value in rows.items():
        print(f"| {name} | {value} |")
    for circle in circles:
        if len(circle) > 1:
            print(f"\nCircle: {', '.join(sorted(circle))}")


def _lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def private_functions(texts: dict[Path, str], trees: dict[Path, ast.Module]) -> tuple[int, int, int]:
    """Private functions; those mentioned once beside their definition; those of these with at most four lines."""
    mentions = Counter(name for text in texts.values() for name in re.findall(r"\b_[a-z]\w*", text))
    private = [
        node
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("_") and not node.name.startswith("__")
    ]
    once = [node for node in private if mentions[node.name] <= 2]
    return len(private), len(once), sum(_lines(node) <= 4 for node in once)


def room_arrows(root: Path, trees: dict[Path, ast.Module]) -> Arrows:
    """Each room with the rooms that it imports."""
    rooms = {_room(root, path) for path in trees}
    arrows: Arrows = {room: set() for room in sorted(rooms)}
    for path, tree in trees.items():
        for name in _imported(tree):
            while name and name not in rooms:
                name = name.rpartition(".")[0]
            if name and name != _room(root, path):
                arrows[_room(root, path)].add(name)
    return arrows


def _room(root: Path, path: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts if len(parts) == 2 and parts[-1] != "__init__" else parts[:-1])


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("retrain."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "retrain":
            # `from retrain import x` reaches the module x: retrain/__init__.py itself hands names out lazily and runs nothing.
            yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name != "__version__")


def strong_components(arrows: Arrows) -> list[set[str]]:
    """Rooms that reach each other, in the order in which they can be built (Tarjan 1972)."""
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


def floors(arrows: Arrows, components: list[set[str]]) -> int:
    """The longest chain of imports, a circle counted as one room."""
    height: dict[str, int] = {}
    for component in components:  # what a component imports comes before it
        below = [height[other] for room in component for other in arrows[room] - component]
        height |= dict.fromkeys(component, 1 + max(below, default=0))
    return max(height.values())


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1])

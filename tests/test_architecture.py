"""The direction of imports, and what an import promises.

`cli -> campaign, analysis -> trainer -> backends, rewards, advantages, data -> types, config`.
"""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "retrain"
HEAVY = {"torch", "transformers", "peft", "datasets", "wandb", "trackio", "tensorboard", "pandas", "scipy", "math_verify", "httpx", "ray"}

LAYERS: tuple[set[str], ...] = (
    {"children", "disk", "errors", "noise", "parallel", "parsing", "pool", "threads", "types"},
    {"config"},
    {
        "advantages",
        "backends",
        "checkpoint",
        "data",
        "declared",
        "fused",
        "hub",
        "inference_engine",
        "plugins",
        "rewards",
        "sepa",
        "tokenization",
    }
    | {"tracking", "vocabulary"},
    {"the run"},
    {"campaign", "analysis", "explain", "inspect", "report", "squeeze"},
    {"cli", "__main__"},
)
"""A part imports its own layer and those before it. A module at the top of the package that is not listed belongs to the run."""

APART: dict[str, set[str]] = {
    "advantages": {"backends", "data", "inference_engine", "rewards", "tokenization", "tracking"},
    "rewards": {"advantages", "backends", "checkpoint", "inference_engine", "tokenization", "tracking"},
    "data": {"advantages", "backends", "checkpoint", "inference_engine", "tracking"},
    "inference_engine": {"advantages", "backends", "checkpoint", "data", "rewards", "tokenization", "tracking", "vocabulary"},
    "backends": {"checkpoint", "data", "rewards", "tracking"},
    "tracking": {"advantages", "backends", "data", "inference_engine", "rewards", "tokenization"},
}
"""Neighbours of one layer that have no business with each other."""


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str:
    """retrain.backends.local.loss -> backends"""
    return module.split(".")[1] if "." in module else ""


def layer_of(part: str) -> int:
    return next((rank for rank, parts in enumerate(LAYERS) if part in parts), 3)


def imports(path: Path, *, module_level: bool = False) -> Iterator[str]:
    """Absolute names of everything that a module imports; with `module_level` only what importing it runs at once."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = executed_at_import(tree) if module_level else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ([f"{node.module}.{alias.name}" for alias in node.names] if node.module == "retrain" else [node.module])


def executed_at_import(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from executed_at_import(child)


def test_no_import_is_relative() -> None:
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}:{node.lineno}"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_imports_point_one_way(path: Path) -> None:
    part = part_of(name_of(path))
    if not part:
        return  # retrain/__init__.py hands out the names of every layer
    imported = {part_of(name) for name in imports(path) if name.startswith("retrain.")} - {part, "__version__"}
    above = {other for other in imported if layer_of(other) > layer_of(part)}
    assert not above, f"{name_of(path)} imports {sorted(above)} from above"
    assert not imported & APART.get(part, set()), f"{name_of(path)} imports {sorted(imported & APART[part])}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "advantages").glob("*.py")), ids=name_of)
def test_credit_knows_no_model(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(path)} & {"torch", "transformers", "peft"}


@pytest.mark.parametrize("path", sorted((PACKAGE / "inference_engine").glob("*.py")), ids=name_of)
def test_an_engine_knows_no_text(path: Path) -> None:
    assert not {name for name in imports(path) if "token" in name.rpartition(".")[2] or name.startswith("tokenizers")}


def reached_from(start: str) -> set[str]:
    """retrain's modules that importing `start` runs, packages on the way included."""
    paths = {name_of(path): path for path in modules()}
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name in reached or name not in paths:
            continue
        reached.add(name)
        waiting += [name.rpartition(".")[0], *imports(paths[name], module_level=True)]
    return reached


def test_what_help_touches_imports_nothing_heavy() -> None:
    paths = {name_of(path): path for path in modules()}
    for name in reached_from("retrain.cli.main"):
        loaded = {imported.split(".")[0] for imported in imports(paths[name], module_level=True)}
        assert not loaded & (HEAVY | {"numpy", "pydantic", "rich", "typer", "tomlkit"}), name


@pytest.mark.parametrize("module", sorted(name_of(path) for path in modules() if part_of(name_of(path)) == "analysis"))
def test_reading_runs_loads_no_model_library(module: str) -> None:
    """0.2 GiB and two seconds of every `retrain status`."""
    paths = {name_of(path): path for path in modules()}
    for name in reached_from(module):
        loaded = {imported.split(".")[0] for imported in imports(paths[name], module_level=True)}
        assert not loaded & {"torch", "transformers", "peft", "datasets"}, name


@pytest.mark.parametrize("part", ["cli", "config", "errors", "types", "noise", "tracking", "checkpoint", "advantages", "sepa", "plugins"])
def test_light_parts_import_heavy_packages_only_where_they_are_used(part: str) -> None:
    for path in modules():
        if part_of(name_of(path)) == part:
            loaded = {imported.split(".")[0] for imported in imports(path, module_level=True)}
            assert not loaded & HEAVY, f"{name_of(path)} imports {sorted(loaded & HEAVY)} at module level"


@pytest.mark.parametrize(
    "promise",
    [
        "retrain:train",
        "retrain:load_config",
        "retrain:load_runs",
        "retrain.advantages:TransformSpec",
        "retrain.advantages:TransformContext",
        "retrain.advantages:TransformOutput",
        "retrain.config:load_config",
        "retrain.config:TrainConfig",
        "retrain.data:Example",
        "retrain.data:register_source",
        "retrain.rewards:",
        "retrain.advantages.sepa:SEPAController",
        "retrain.backpressure:",
        "retrain.campaign:run_campaign",
        "retrain.campaign:plan_campaign",
        "retrain.squeeze:analyze_adapter",
        "retrain.squeeze:compress_adapter",
        "retrain.inference_engine:",
        "retrain.backends:",
    ],
)
def test_promised_imports_hold(promise: str) -> None:
    module, _, name = promise.partition(":")
    imported = importlib.import_module(module)
    assert not name or getattr(imported, name) is not None


def test_importing_retrain_loads_no_model_library() -> None:
    code = "import sys, retrain; sys.stdout.write(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {name.split(".")[0] for name in loaded} & (HEAVY | {"numpy", "pydantic"})


def test_every_declared_dependency_is_imported_by_the_package() -> None:
    """A core dependency or an extra comes with the code that needs it; the tools of the dev extra are run, not imported."""
    declared = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {name: wanted for name, wanted in declared["optional-dependencies"].items() if name != "dev"}
    named = {constant for path in modules() for constant in imported_names(path)}
    for where, requirements in {"dependencies": declared["dependencies"], **extras}.items():
        for requirement in requirements:
            name = re.match(r"[A-Za-z0-9._-]+", requirement).group()  # type: ignore[union-attr]
            assert IMPORTED_AS.get(name, name.replace("-", "_")) in named, f"{where}: {name} is imported nowhere"
    pinned = {
        line.partition("==")[0] for line in (PACKAGE.parent / "constraints.txt").read_text(encoding="utf-8").splitlines() if "==" in line
    }
    wanted = [*declared["dependencies"], *(item for group in declared["optional-dependencies"].values() for item in group)]
    assert pinned <= {re.match(r"[A-Za-z0-9._-]+", item).group() for item in wanted}  # type: ignore[union-attr]


IMPORTED_AS = {"python-dotenv": "dotenv"}


def imported_names(path: Path) -> Iterator[str]:
    """Top-level packages that a module imports, by a statement or by `import_module` and the functions that wrap it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                yield from (alias.name.partition(".")[0] for alias in names)
            case ast.ImportFrom(module=str(module)):
                yield module.partition(".")[0]
            case ast.Call(func=called, args=[ast.Constant(value=str(name)), *_]) if ast.unparse(called).endswith(
                ("import_module", "import_extra")
            ):
                yield name.partition(".")[0]

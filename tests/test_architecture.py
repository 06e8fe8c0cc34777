"""The direction of imports, and what an import promises.

The arrows between rooms are those that `python scripts/house.py` counts: a room is a package
folder, or a module at the top of `retrain/`.
"""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from retrain.backends.base import BACKENDS
from retrain.config import dump_toml
from retrain.inference_engine.base import ENGINES
from scripts import house
from tests.runs import small

ROOT = Path(__file__).resolve().parents[1]
HEAVY = {
    "torch",
    "transformers",
    "peft",
    "datasets",
    "wandb",
    "trackio",
    "tensorboard",
    "pandas",
    "scipy",
    "math_verify",
    "httpx",
    "ray",
}
MAX_NODES = house.MAX_NODES

LAYERS: tuple[set[str], ...] = (
    {"distributed", "errors", "install", "noise", "system", "types", "web"},
    {"config", "plugins"},
    {
        "advantages",
        "backends",
        "backpressure",
        "data",
        "environments",
        "inference_engine",
        "model",
        "records",
        "rewards",
        "sepa",
    },
    {"tracking"},
    {"analysis", "run"},
    {"audit", "campaign", "explain", "inspect", "report", "squeeze", "xray"},
    {"cli"},
    {"__main__"},
)
"""A room imports rooms of its own layer and of those before it."""

APART: dict[str, set[str]] = {
    "advantages": {"backends", "data", "inference_engine", "model", "records", "rewards"},
    "backends": {"data", "records", "rewards"},
    "environments": {"advantages", "backends", "inference_engine", "model", "rewards"},
    "data": {"advantages", "backends", "inference_engine", "records"},
    "inference_engine": {"advantages", "backends", "data", "records", "rewards"},
    "model": {"advantages", "backends", "data", "inference_engine", "records", "rewards"},
    "records": {
        "advantages",
        "backends",
        "data",
        "environments",
        "inference_engine",
        "model",
        "rewards",
    },
    "rewards": {"advantages", "backends", "data", "inference_engine", "model"},
    "tracking": {"advantages", "backends", "data", "inference_engine", "model", "rewards"},
    "analysis": {"run"},
    "run": {"analysis"},
}
"""Rooms that a room does not import, although its layer would allow it."""


NAMED_IN_A_CIRCLE: Counter[str] = Counter(
    {
        "backends": 24,
        "config": 25,
        "data": 5,
        "environments": 4,
        "inference_engine": 18,
        "model": 10,
        "plugins": 1,
        "records": 1,
        "rewards": 6,
    }
)
"""Files of each room in the one circle that the tables of built-in names close: `config` names the
engines, backends, rewards and so on, and these read the configuration. It may only fall."""


def part_of(name: str) -> str:
    """retrain.backends.local.loss -> backends; "" for the package itself."""
    return name.split(".")[1] if "." in name else ""


def layer_of(room: str) -> int:
    return next(rank for rank, rooms in enumerate(LAYERS) if room in rooms)


NAMES = [house.module_of(ROOT, path) for path in house.files(ROOT)]


@cache
def trees() -> dict[Path, ast.Module]:
    return house.parse_package(ROOT)


@cache
def modules() -> dict[str, ast.Module]:
    return {house.module_of(ROOT, path): tree for path, tree in trees().items()}


@cache
def arrows() -> list[tuple[Path, str, str]]:
    """(file, its room, room that it imports); "" is retrain/__init__.py, which hands out names of
    every layer.
    """
    found = house.file_arrows(ROOT, trees())
    return [
        (path.relative_to(ROOT), part_of(house.room_of(ROOT, path)), part_of(other))
        for path, other in found
    ]


@pytest.fixture(scope="module", autouse=True)
def forgotten() -> Iterator[None]:
    """The trees are 660,000 objects, which every later collection of garbage would visit."""
    yield
    for kept in (trees, modules, house.imports_of):
        kept.cache_clear()


def modules_of(part: str) -> list[str]:
    return [name for name in NAMES if part_of(name) == part]


def top_packages(module: str) -> set[str]:
    """Packages that importing the module alone loads at once."""
    return {
        name.partition(".")[0] for name in house.imported(executed_at_import(modules()[module]))
    }


def executed_at_import(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, house.Function | ast.Lambda):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from executed_at_import(child)


# -- the direction of imports ----------------------------------------------------------------------


def test_every_room_has_a_layer() -> None:
    rooms = {part_of(room) for room in house.room_arrows(ROOT, trees())} - {""}
    assert rooms == set().union(*LAYERS)


def test_imports_point_one_way() -> None:
    assert not [
        f"{path} imports {other or 'retrain'}"
        for path, room, other in arrows()
        if room and (not other or layer_of(other) > layer_of(room))
    ]


def test_no_circle_of_rooms_imports_itself() -> None:
    assert not house.circles_of(house.room_arrows(ROOT, trees()))


def test_no_circle_of_files_imports_itself() -> None:
    assert not house.circles_of(house.module_arrows(ROOT, trees()))


def test_no_more_files_of_several_rooms_name_each_other_in_a_circle() -> None:
    """A table of built-in names imports its parts by name, in a string, when it is first asked."""
    circles = house.circles_of(house.module_arrows(ROOT, trees(), by_name=True))
    rooms = [Counter(map(part_of, circle)) for circle in circles]
    assert all(found <= NAMED_IN_A_CIRCLE for found in rooms if len(found) > 1)


@pytest.mark.parametrize("part", APART)
def test_neighbors_stay_apart(part: str) -> None:
    assert not [
        f"{path} imports {other}"
        for path, room, other in arrows()
        if room == part and other in APART[part]
    ]


def test_no_import_is_relative() -> None:
    for path, tree in trees().items():
        for node in ast.walk(tree):
            assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}:{node.lineno}"


def test_a_function_has_few_enough_parts_to_be_read_at_once() -> None:
    long = [
        (str(path), one.name, house.nodes_of(one))
        for path, one in house.functions(trees())
        if house.nodes_of(one) > MAX_NODES
    ]
    assert not long


@pytest.mark.parametrize("module", modules_of("advantages"))
def test_credit_knows_no_model(module: str) -> None:
    assert not {name.partition(".")[0] for name in house.imports_of(modules()[module])} & {
        "torch",
        "transformers",
        "peft",
    }


@pytest.mark.parametrize(
    "module",
    [
        name
        for name in modules_of("inference_engine")
        if name.rpartition(".")[2] not in ("texts", "mlx")
    ],
)
def test_an_engine_knows_no_text(module: str) -> None:
    """But for texts, for servers that take nothing else, and mlx, which tells the server
    where the model's files are.
    """
    text = {"retrain.model.text", "retrain.model.vocabulary", "tokenizers"}
    assert not [
        name
        for name in house.imports_of(modules()[module])
        if house.enclosing(name, text) or "okenizer" in name
    ]


PARTS = {*BACKENDS, *ENGINES}


def names_a_part(node: ast.Compare) -> bool:
    """The comparison is with the name of a built-in backend or engine, alone or among others."""
    sides = [node.left, *node.comparators]
    config = any(re.search(r"\b(backend|engine)$", ast.unparse(side)) for side in sides)
    named = {
        part.value
        for side in sides
        for part in ast.walk(side)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    }
    return bool(config and named & PARTS)


def test_no_code_compares_the_name_of_a_backend_or_an_engine() -> None:
    """It asks what the part declares, so that a new one is added in one place."""
    assert not [
        f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare) and names_a_part(node)
    ]


# -- what an import loads --------------------------------------------------------------------------


def reached_from(start: str) -> set[str]:
    """retrain's modules that importing `start` runs, the packages that hold them included."""
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        module = house.enclosing(waiting.pop(), modules())
        if module and module not in reached:
            reached.add(module)
            waiting += [
                module.rpartition(".")[0],
                *house.imported(executed_at_import(modules()[module])),
            ]
    return reached


@pytest.mark.parametrize("start", modules_of("analysis"))
def test_reading_runs_loads_no_model_library(start: str) -> None:
    """0.2 GiB and two seconds of every `retrain status`."""
    for module in reached_from(start):
        assert not top_packages(module) & {"torch", "transformers", "peft", "datasets"}, module


@pytest.mark.parametrize(
    "part",
    [
        "cli",
        "config",
        "errors",
        "types",
        "noise",
        "system",
        "records",
        "tracking",
        "advantages",
        "plugins",
    ],
)
def test_light_parts_import_heavy_packages_only_where_they_are_used(part: str) -> None:
    for module in modules_of(part):
        assert not top_packages(module) & HEAVY, module


PROMISED: dict[str, tuple[str, ...]] = {
    "retrain": ("train", "load_config", "load_runs"),
    "retrain.advantages": ("TransformSpec", "TransformContext", "TransformOutput"),
    "retrain.advantages.sepa": ("SEPAController",),
    "retrain.backends": (),
    "retrain.backpressure": (),
    "retrain.campaign": ("run_campaign", "plan_campaign"),
    "retrain.config": ("load_config", "TrainConfig"),
    "retrain.data": ("Example", "register_source"),
    "retrain.inference_engine": (),
    "retrain.rewards": (),
    "retrain.sepa": ("SEPAController",),
    "retrain.squeeze": ("analyze_adapter", "compress_adapter"),
}


@pytest.mark.parametrize("module", PROMISED)
def test_promised_imports_hold(module: str) -> None:
    imported = importlib.import_module(module)
    assert all(getattr(imported, name) is not None for name in PROMISED[module])


def test_importing_retrain_loads_no_model_library() -> None:
    code = "import sys, retrain; sys.stdout.write(' '.join(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {name.split(".")[0] for name in loaded} & (HEAVY | {"numpy", "pydantic"})


def test_every_declared_dependency_is_imported_by_the_package() -> None:
    """A core dependency or an extra comes with the code that needs it; the tools of the extras dev
    and docs are run, not imported.
    """
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {
        name: wanted
        for name, wanted in declared["optional-dependencies"].items()
        if name not in ("dev", "docs")
    }
    named = {package for tree in trees().values() for package in packages_named_in(tree)}
    for where, requirements in {"dependencies": declared["dependencies"], **extras}.items():
        for requirement in requirements:
            name = re.match(r"[A-Za-z0-9._-]+", requirement).group()  # type: ignore[union-attr]
            assert IMPORTED_AS.get(name, name.replace("-", "_")) in named, (
                f"{where}: {name} is imported nowhere"
            )
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.partition("==")[0] for line in constraints if "==" in line}
    wanted = [
        *declared["dependencies"],
        *(item for group in declared["optional-dependencies"].values() for item in group),
    ]
    assert pinned <= {re.match(r"[A-Za-z0-9._-]+", item).group() for item in wanted}  # type: ignore[union-attr]


IMPORTED_AS = {"python-dotenv": "dotenv", "pyzmq": "zmq"}


def packages_named_in(tree: ast.Module) -> Iterator[str]:
    """Top-level packages that a module imports, by a statement or by `import_module` and the
    functions that wrap it.
    """
    yield from (name.partition(".")[0] for name in house.imports_of(tree))
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=called, args=[ast.Constant(value=str(name)), *_]) if ast.unparse(
                called
            ).endswith(("import_module", "import_extra")):
                yield name.partition(".")[0]


def test_no_test_file_imports_another() -> None:
    """What two files need is a helper, which has a name of its own."""
    shared = re.compile(
        r"^\s*(from (tests\.)?test_\w+ import|import (tests\.)?test_)", re.MULTILINE
    )
    assert not [
        path.name
        for path in (ROOT / "tests").glob("**/*.py")
        if shared.search(path.read_text(encoding="utf-8"))
    ]


def test_names_of_tests_have_at_most_80_characters() -> None:
    name = re.compile(r"def (test_\w{76,})")
    files = (ROOT / "tests").glob("**/*.py")
    assert not [long for path in files for long in name.findall(path.read_text(encoding="utf-8"))]


COUNTS = """
import sys
from retrain.config import load
read, count = load.read_toml, []
load.read_toml = lambda *given, **named: count.append(given) or read(*given, **named)
from retrain.cli.main import main
main(sys.argv[1:])
ours = [name for name in sys.modules if name.partition(".")[0] == "retrain"]
sys.stderr.write(f"\\n{len(count)} {len(ours)}")
"""


@pytest.mark.parametrize(("command", "modules"), [([], 176), (["explain"], 183)])
def test_a_command_reads_its_file_once_and_imports_no_more_than_today(
    command: list[str], modules: int, tmp_path: Path
) -> None:
    """The number of modules may only fall."""
    file = tmp_path / "one.toml"
    file.write_text(dump_toml(small(tmp_path / "run", training={"max_steps": 1})))
    argv = [sys.executable, "-c", COUNTS, *command, str(file)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    files, imported = map(int, done.stderr.splitlines()[-1].split())
    assert files == 1 and imported <= modules

"""The built-in names of everything that a plugin can also be, and the form of a plugin's name.

A value is accepted when it is built in, registered from Python, an installed entry point, or has the form of a dotted
path. No plugin is imported here: a dotted path that leads nowhere is found when the run starts.
"""

import importlib
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any

from retrain.config.violations import RuleViolations, Violation

ALIASES: dict[str, str] = {
    "algorithm.entropy_mask_rho": "algorithm.surprisal_mask_rho",
    "logging.strategic_grams": "planning.strategic_grams",
}
"""Accepted keys beside the canonical ones; giving both is an error."""


def canonical_keys(data: dict[str, Any]) -> dict[str, Any]:
    """A copy of `data` in which aliases have moved, and dr_grpo has brought its aggregation along.

    Raises RuleViolations where a key and its alias are both given.
    """
    data, both = moved_aliases(data)
    if both:
        raise RuleViolations([Violation((alias, ALIASES[alias]), _both_given(alias, ALIASES[alias])) for alias in both])
    _complete_dr_grpo(data)
    return data


def moved_aliases(data: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A copy of `data` with aliases under their canonical key, and the aliases that stayed because both are given."""
    copy = {name: dict(section) if isinstance(section, dict) else section for name, section in data.items()}
    return copy, [alias for alias, canonical in ALIASES.items() if not _move(copy, alias, canonical)]


def _move(data: dict[str, Any], alias: str, canonical: str) -> bool:
    """False when both are given."""
    section, _, name = alias.partition(".")
    if not isinstance(data.get(section), dict) or name not in data[section]:
        return True
    target, _, target_name = canonical.partition(".")
    if not isinstance(data.setdefault(target, {}), dict) or target_name in data[target]:
        return False
    data[target][target_name] = data[section].pop(name)
    return True


def _both_given(alias: str, canonical: str) -> str:
    return f"{bracketed(alias)} is another name of {bracketed(canonical)} and both are given; keep the second"


def _complete_dr_grpo(data: dict[str, Any]) -> None:
    """dr_grpo is GRPO's advantage with constant aggregation, so an aggregation that was not given follows from it."""
    algorithm = data.get("algorithm")
    loss = data.get("loss", {})
    if isinstance(algorithm, dict) and algorithm.get("algorithm_mode") == "dr_grpo" and isinstance(loss, dict):
        data["loss"] = {"aggregation": "constant", **loss}


def bracketed(path: str) -> str:
    """Write "section.key" as a user sees it in a file: [section] key."""
    section, _, name = path.partition(".")
    return f"[{section}] {name}"


_TABLES: dict[str, tuple[str, str]] = {
    "advantage": ("retrain.advantages.episode", "ADVANTAGES"),
    "transform": ("retrain.advantages.transforms", "TRANSFORMS"),
    "uncertainty": ("retrain.advantages.uncertainty", "KINDS"),
    "algorithm": ("retrain.advantages.algorithms", "RECIPES"),
    "reward": ("retrain.rewards.scoring", "REWARDS"),
    "data": ("retrain.data.sources", "SOURCES"),
    "engine": ("retrain.inference_engine.base", "ENGINES"),
    "backend": ("retrain.backends.base", "BACKENDS"),
}
"""Where the table of each kind stands, beside the functions: the only list of its names and their traits. None of these modules imports a
model library, and they are imported when the first configuration is checked.
"""


def table(kind: str) -> Any:
    """The names of a kind, most of them mapped to what they mean."""
    module, name = _TABLES[kind]
    return getattr(importlib.import_module(module), name)


class _BuiltinNames(Mapping[str, tuple[str, ...]]):
    """Kind -> its names, read from the tables when they are asked for."""

    def __getitem__(self, kind: str) -> tuple[str, ...]:
        return tuple(table(kind))

    def __iter__(self) -> Iterator[str]:
        return iter(_TABLES)

    def __len__(self) -> int:
        return len(_TABLES)


BUILTIN_NAMES: Mapping[str, tuple[str, ...]] = _BuiltinNames()


def transforms_with(trait: str) -> frozenset[str]:
    """The built-in transforms whose spec has this field set, such as "needs_planning"."""
    return frozenset(name for name, spec in table("transform").items() if getattr(spec, trait))


def canonical_uncertainty(name: str) -> str:
    """The built-in kind that an alias means; any other name as it is."""
    from_alias = importlib.import_module("retrain.advantages.uncertainty").canonical_kind
    return str(from_alias(name))


DATA_FILE_SUFFIXES = (".jsonl", ".parquet")
PLUGIN_GROUP = "retrain.plugins"

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_registered: dict[str, set[str]] = {}


def register_name(kind: str, name: str) -> None:
    """Make the configuration accept `name` for `kind`, for parts that Python code registers while it runs."""
    _registered.setdefault(kind, set()).add(name)


def is_dotted(name: str) -> bool:
    """Whether `name` has the form of a plugin's path, such as my_module.my_advantage."""
    return _DOTTED.fullmatch(name) is not None


def is_known(kind: str, name: str) -> bool:
    """Whether the schema accepts `name`; entry points are looked up last, since reading them costs milliseconds."""
    if name in BUILTIN_NAMES[kind] or name in _registered.get(kind, ()):
        return True
    if kind == "data" and is_data_location(name):
        return True
    return is_dotted(name) or any(point.name == name for point in entry_points(group=PLUGIN_GROUP))


def is_data_location(source: str) -> bool:
    """A hub data set (hub:NAME), or a file or folder rather than a name."""
    if source.startswith("hub:"):
        return len(source) > len("hub:")
    return "/" in source or source.endswith(DATA_FILE_SUFFIXES)


def names_of(kind: str) -> tuple[str, ...]:
    return BUILTIN_NAMES[kind] + tuple(sorted(_registered.get(kind, ())))


def last_part(name: str) -> str:
    return name.rpartition(".")[2] if is_dotted(name) else name


def condition_label(advantage_mode: str, transform_mode: str, algorithm_mode: str = "") -> str:
    """The name of a condition: `{advantage}+{transform}`, the last part of dotted paths, or the algorithm."""
    if algorithm_mode:
        return last_part(algorithm_mode)
    return f"{last_part(advantage_mode)}+{last_part(transform_mode)}"

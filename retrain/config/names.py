"""Names of everything built-in or pluggable, and aliases of keys. For an unknown name, the module
finds the nearest known name, or the key that other trainers call so.

A valid value is a built-in name, a name registered from Python, an installed entry point, or a
dotted path. This module imports no plugin: the start of the run finds a dotted path that leads
nowhere.
"""

import re
import tomllib
from collections.abc import Hashable, Iterable, Mapping
from difflib import get_close_matches
from functools import cache, lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal

from retrain.system import Json, imported, search_path

ALIASES: dict[str, str] = {
    "algorithm.entropy_mask_rho": "algorithm.surprisal_mask_rho",
    "logging.strategic_grams": "planning.strategic_grams",
    "algorithm.reference": "algorithm.teacher",
    "algorithm.reference_prompt": "algorithm.teacher_prompt",
    "algorithm.reference_coef": "algorithm.teacher_coef",
    "inference.patience_s": "inference.retry_timeout_s",
    "inference.mismatch_limit": "inference.max_logprob_diff",
    "training.dynamic_sampling": "training.max_resamples",
}
"""Second name of a key -> its canonical name; giving both is an error."""
TEACHERS = ("base", "start", "answer")
"""Values of `[algorithm] teacher` that are not the folder of an adapter."""
RENAMED_VALUES = {
    ("algorithm.teacher", "gold"): "answer",
    ("reward.combine", "normalise_then_sum"): "normalize_then_sum",
    ("loss.aggregation", "dr_grpo"): "constant",
    ("loss.aggregation", "seq-mean-token-sum-norm"): "constant",
}
"""Key and its value in 0.10 and before, or in other trainers -> the value's name here."""


def moved_aliases(data: Json) -> tuple[Json, list[str]]:
    """Return a copy of `data` with aliases moved to their canonical key, and the aliases that stay
    because the data has both.
    """
    data, both = copied(data), []
    for alias, canonical in ALIASES.items():
        section, _, name = alias.partition(".")
        target, _, target_name = canonical.partition(".")
        if not isinstance(data.get(section), dict) or name not in data[section]:
            continue
        if not isinstance(data.setdefault(target, {}), dict) or target_name in data[target]:
            both.append(alias)
        else:
            data[target][target_name] = data[section].pop(name)
    return data, both


def copied(sections: Json) -> Json:
    """Return a copy with tables that the caller may change."""
    return {
        name: dict(section) if isinstance(section, dict) else section
        for name, section in sections.items()
    }


def fixed_aggregation(algorithm_mode: str) -> str:
    """Return the value of `[loss] aggregation` that belongs to a built-in algorithm; "" if the user
    chooses it.
    """
    return getattr(table("algorithm").get(algorithm_mode), "aggregation", "")


def by_path(tables: Mapping[str, Any]) -> Json:
    """Map "section.key" to the value; what is not a table has no keys."""
    values: Json = {}
    for section, keys in tables.items():
        if isinstance(keys, Mapping):
            values |= {f"{section}.{key}": value for key, value in keys.items()}
    return values


def bracketed(path: str) -> str:
    """Write "section.key" as a user sees it in a file: [section] key."""
    section, _, name = path.partition(".")
    return f"[{section}] {name}"


# -- built-in names --------------------------------------------------------------------------------

_TABLES: dict[str, str] = {
    "advantage": "retrain.advantages.episode.ADVANTAGES",
    "transform": "retrain.advantages.transforms.TRANSFORMS",
    "uncertainty": "retrain.advantages.transforms.KINDS",
    "algorithm": "retrain.config.recipes.RECIPES",
    "reward": "retrain.rewards.scoring.REWARDS",
    "data": "retrain.data.sources.SOURCES",
    "sampler": "retrain.data.samplers.SAMPLERS",
    "engine": "retrain.inference_engine.base.ENGINES",
    "backend": "retrain.backends.base.BACKENDS",
    "environment": "retrain.environments.loading.PROVIDERS",
    "loss": "retrain.backends.losses.LOSSES",
    "correction": "retrain.backends.losses.CORRECTIONS",
    "aggregation": "retrain.backends.losses.AGGREGATIONS",
}
"""Kind -> the table next to the functions, which is the only list of its names and their traits.

The modules of the tables import the configuration, so this module imports them by name, and only to
check the first configuration. Their modules import no model library.
"""


def table(kind: str) -> Any:
    """Return the built-in names of a kind, most of them mapped to what they mean."""
    return imported(_TABLES[kind])


def part_class(kind: Literal["backend", "engine"], name: str) -> Any:
    """Return the class of a built-in backend or engine, whose attributes are all facts about it.
    For any other name, return the base class, whose facts hold for plugins.
    """
    module = _TABLES[kind].rpartition(".")[0]
    return imported(f"{module}.{kind}_kind")(name)


def builtin_names(kind: str) -> tuple[str, ...]:
    names = tuple(table(kind))
    if kind == "algorithm":
        names += recipe_names()
    return names


PAPERS = Path(__file__).resolve().parents[1] / "assets" / "papers"
"""One file for each paper, NAME.toml, and NAME.py with its plugins."""
OWN_PLUGINS = "retrain.assets.papers."
"""Package of the plugins of recipes; they come with retrain, so they are not foreign code."""


@cache
def recipe_names() -> tuple[str, ...]:
    """Return the papers whose settings an `algorithm_mode` names: the papers whose file sets no
    `algorithm_mode`.
    """
    texts = {file.stem: file.read_text(encoding="utf-8") for file in PAPERS.glob("*.toml")}
    return tuple(sorted(name for name, text in texts.items() if "\nalgorithm_mode" not in text))


def is_recipe(algorithm_mode: str) -> bool:
    """True if the name means settings of many keys, the modes among them."""
    return algorithm_mode in recipe_names()


def replaces_modes(algorithm_mode: str) -> bool:
    """True if `algorithm_mode` takes the place of advantage_mode and transform_mode."""
    return bool(algorithm_mode) and not is_recipe(algorithm_mode)


def transforms_with(trait: str) -> frozenset[str]:
    """Return the built-in transforms whose spec has this field set, such as "needs_planning"."""
    return frozenset(name for name, spec in table("transform").items() if getattr(spec, trait))


def canonical_uncertainty(name: str) -> str:
    """Return the built-in kind that an alias means; any other name as it is."""
    return str(imported("retrain.advantages.transforms.canonical_kind")(name))


# -- names that are not built in -------------------------------------------------------------------

DATA_FILE_SUFFIXES = (".jsonl", ".parquet")
PLUGIN_GROUP = "retrain.plugins"
"""The group of entry points under which installed packages offer plugins."""

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
registered_sources: set[str] = set()
"""Names of [data] source that Python code registers while it runs."""


def names_of(kind: str) -> tuple[str, ...]:
    """Return the built-in names of a kind, then the registered ones."""
    return builtin_names(kind) + (tuple(sorted(registered_sources)) if kind == "data" else ())


def is_known(kind: str, name: str) -> bool:
    """True if the configuration accepts `name`."""
    return (
        name in names_of(kind)
        or is_dotted(name)
        or (kind == "data" and is_data_location(name))
        # Ask this last, since the first look takes milliseconds.
        or any(point.name == name for point in installed_plugins())
    )


def installed_plugins() -> tuple[EntryPoint, ...]:
    """Return the entry points of every installed plugin."""
    return _installed_plugins(search_path())


@lru_cache(maxsize=1)
def _installed_plugins(
    installed: Hashable,  # noqa: ARG001 - the key of the cache
) -> tuple[EntryPoint, ...]:
    """Read the entry points once per set of installed packages: a run asks for a dozen names."""
    return tuple(entry_points(group=PLUGIN_GROUP))


def is_dotted(name: str) -> bool:
    """True if `name` has the form of a plugin's path, such as my_module.my_advantage."""
    return _DOTTED.fullmatch(name) is not None


def is_data_location(source: str) -> bool:
    """True if `source` is a hub data set (hub:NAME), a file or a folder rather than a name."""
    if source.startswith("hub:"):
        return len(source) > len("hub:")
    return "/" in source or source.endswith(DATA_FILE_SUFFIXES)


def source_task(source: str) -> str:
    """Return the task that the problems of an evaluation source are, where there are several: the
    last part of its name, without a file's suffix.
    """
    name = source.removeprefix("hub:").rpartition("/")[2]
    for suffix in DATA_FILE_SUFFIXES:
        name = name.removesuffix(suffix)
    return _last_part(name)


def condition_label(advantage_mode: str, transform_mode: str, algorithm_mode: str = "") -> str:
    """Return the label of a condition: `{advantage}+{transform}`, or the algorithm. The label uses
    only the last part of a dotted path.
    """
    if algorithm_mode:
        return _last_part(algorithm_mode)
    return f"{_last_part(advantage_mode)}+{_last_part(transform_mode)}"


def folder_name(label: str) -> str:
    """Return a condition's label in characters that a folder's name may have."""
    return _NOT_IN_A_FOLDER.sub("_", label)


_NOT_IN_A_FOLDER = re.compile(r"[^A-Za-z0-9+._-]")


def _last_part(name: str) -> str:
    """Return the last part of a dotted path; any other name as it is."""
    return name.rpartition(".")[2] if is_dotted(name) else name


# -- unknown names ---------------------------------------------------------------------------------


_DATA = tomllib.loads(Path(__file__).with_name("synonyms.toml").read_text(encoding="utf-8"))
SYNONYMS: dict[str, str] = _DATA["synonyms"]
"""Names in other trainers and short forms -> the key that does the same or takes its place.
"section.name" is what the name means in that section alone."""

PREFIXES = {"bp_": "backpressure", "optim_": "optimizer", "tinker_": "backend"}
"""Beginnings of flags in an earlier project of this name -> the section of the key that the rest
names.
"""

LEGACY_PREFIX = "prime_rl_"
"""The beginning of removed keys of [backend]; `retrain migrate-config` moves them to
[backend.options].
"""

ABSENT: dict[str, str] = {
    name: group["instead"] for group in _DATA["absent"] for name in group["names"]
}
"""Names in other trainers without a key here, or with "_" the beginning of such names -> the
alternative, as a clause.
"""

NAME_CUTOFF = 0.75
"""Minimum similarity between a mistyped name and a key. Below it, most guesses name a key that was
not meant."""


def nearest(word: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the candidate closest to a mistyped word in any case, or None if none is close."""
    names = {name.lower(): name for name in candidates}
    close = get_close_matches(word[:_MAX_CHARACTERS].lower(), names, n=1, cutoff=cutoff)
    return names[close[0]] if close else None


_MAX_CHARACTERS = 100
"""Number of characters to compare: no name is longer, and a comparison takes quadratic time."""


def synonym(name: str, section: str = "") -> str | None:
    """Return the "section.key" for a name in another trainer, None for any other name; dashes count
    as underscores.
    """
    word = _word(name)
    prefixed = (
        f"{home}.{word.removeprefix(prefix)}"
        for prefix, home in PREFIXES.items()
        if word.startswith(prefix) and not section
    )
    return SYNONYMS.get(f"{section}.{word}") or SYNONYMS.get(word) or next(prefixed, None)


def instead(name: str) -> str:
    """Return, as a clause, what replaces another trainer's setting that has no key here; "" for any
    other name.
    """
    word = _word(name)
    return ABSENT.get(word) or ABSENT.get(f"{word.partition('_')[0]}_", "")


def _word(name: str) -> str:
    return name.lower().replace("-", "_")

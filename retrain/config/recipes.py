"""Recipes: an `algorithm_mode` replaces the pair of advantage_mode and transform_mode, and
`algorithm_mode = "dapo"` means all settings of a paper. A key of the file overrides them, and they
override the defaults.

A paper's recipe holds the method's settings from its file in retrain/assets/papers. The model, the
data, the budget and the folder in that file belong to the lab, so the recipe omits them.
"""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

from pydantic import BaseModel

from retrain.config.names import (
    OWN_PLUGINS,
    PAPERS,
    by_path,
    is_dotted,
    is_recipe,
    replaces_modes,
)
from retrain.system import Json


@dataclass(frozen=True)
class Recipe:
    """The advantage and the transform behind a built-in `algorithm_mode`."""

    advantage: str
    transform: str
    aggregation: str = ""
    """The `[loss] aggregation` that belongs to the algorithm: unset means this value, and retrain
    refuses any other. "" leaves the choice to the user.
    """


RECIPES: dict[str, Recipe] = {
    "grpo_none": Recipe("grpo", "none"),
    "maxrl_none": Recipe("maxrl", "none"),
    "maxrl_gtpo": Recipe("maxrl", "gtpo"),
    "maxrl_gtpo_hicra": Recipe("maxrl", "gtpo_hicra"),
    "maxrl_gtpo_sepa": Recipe("maxrl", "gtpo_sepa"),
    "grpo_constant": Recipe("grpo", "none", aggregation="constant"),
    "distill": Recipe("none", "distill"),
}


def modes_of(algorithm: str, advantage: str, transform: str) -> tuple[str, str]:
    """Return the advantage and the transform in use, or ("", "") for an algorithm plugin."""
    if replaces_modes(algorithm):
        built_in = RECIPES.get(algorithm, Recipe("", ""))
        return built_in.advantage, built_in.transform
    if is_recipe(algorithm) and not advantage:  # a condition that is not an arm yet
        advantage, transform = (recipe(algorithm)[path] for path in _MODES)
    return advantage, transform


METHOD = ("updates_per_batch", "minibatches", "max_resamples")
"""Keys of [training] that belong to a method."""
_FRAME = ("model", "logging", "data.source", "loss.max_grad_norm")
"""Sections and keys of a paper's file that belong to the lab."""
_FOLLOWS: dict[str, tuple[str, ...]] = {
    "algorithm.advantage_mode": ("algorithm.advantage_params",),
    "algorithm.transform_mode": ("algorithm.transform_params",),
    "loss.mode": ("loss.params", "loss.clip_low", "loss.clip_high", "loss.dual_clip"),
    "reward.type": ("reward.weights", "reward.combine", "reward.params", "reward.overlong_buffer"),
    "data.sampler": ("data.sampler_params",),
}
"""Key -> keys that only apply to its value in the recipe; another value from the user drops them.
"""
_MODES = ("algorithm.advantage_mode", "algorithm.transform_mode")


@cache
def recipe(name: str) -> Json:
    """Map "section.key" to the value that the recipe `name` gives it. Plugins in the file's folder
    get their full path, so that retrain finds them from every folder.
    """
    with (PAPERS / f"{name}.toml").open("rb") as file:
        sections = tomllib.load(file)
    values = {path: _full_path(value) for path, value in by_path(sections).items()}
    return {path: value for path, value in values.items() if _belongs(path, value)}


def _belongs(path: str, value: Any) -> bool:
    section, _, key = path.partition(".")
    if section in _FRAME or path in _FRAME or (path, value) == ("reward.type", "match"):
        return False
    return section != "training" or key in METHOD


def _full_path(value: Any) -> Any:
    if isinstance(value, list):
        return [_full_path(item) for item in value]
    if isinstance(value, str) and is_dotted(value):
        module = value.partition(".")[0]
        if (PAPERS / f"{module}.py").is_file():
            return OWN_PLUGINS + value
    return value


def above_recipe(data: Mapping[str, Any]) -> Json:
    """Return the sections plus the missing keys from the recipe that [algorithm] algorithm_mode
    names; without a recipe, return `data` unchanged.
    """
    name = str(_table(data.get("algorithm")).get("algorithm_mode", ""))
    if not is_recipe(name):
        return dict(data)
    return _filled(data, _wanted(name, _given(data)))


def above_recipe_of_condition(data: Mapping[str, Any], name: str) -> Json:
    """Return a campaign's base sections on top of the recipe that a condition names, without the
    modes, which come from the condition.
    """
    given = {path: value for path, value in _given(data).items() if path not in _MODES}
    wanted = _wanted(name, given)
    return _filled(data, {path: value for path, value in wanted.items() if path not in _MODES})


def _given(data: Mapping[str, Any]) -> Json:
    return by_path({section: _table(keys) for section, keys in data.items()})


def _filled(data: Mapping[str, Any], values: Mapping[str, Any]) -> Json:
    """Return a copy of the sections with more values."""
    sections = dict(data)
    for path, value in values.items():
        section, _, key = path.partition(".")
        below = sections.get(section, {})
        if isinstance(below, dict | BaseModel):  # for anything else validation has a sentence
            sections[section] = {**_table(below), key: value}
    return sections


def _wanted(name: str, given: Mapping[str, Any]) -> Json:
    """Return the keys that a recipe adds to the given keys, and its tables with the given entries
    on top.
    """
    values = recipe(name)
    dropped = {
        follower
        for path, followers in _FOLLOWS.items()
        if path in given and given[path] != values.get(path)
        for follower in followers
    }
    wanted: Json = {}
    for path, value in values.items():
        if path in dropped:
            continue
        if path not in given:
            wanted[path] = value
        elif isinstance(value, dict) and isinstance(given[path], dict):
            wanted[path] = {**value, **given[path]}
    return wanted


def _table(section: Any) -> Json:
    """Return the given keys of a section, in whichever form it comes."""
    if isinstance(section, BaseModel):
        return section.model_dump(exclude_unset=True, by_alias=True)
    if isinstance(section, dict):
        return section
    return {}


def departures(name: str, value_of: Callable[[str], Any]) -> Json:
    """Map the keys of the recipe `name` that have another value to that value; {} without a recipe.
    The result omits keys that only apply together with such a key. `value_of` gives the value of
    "section.key".
    """
    if not is_recipe(name):
        return {}
    values = {path: (value, value_of(path)) for path, value in recipe(name).items()}
    other = {path: given for path, (value, given) in values.items() if given != value}
    followers = set(chain.from_iterable(_FOLLOWS.get(path, ()) for path in other))
    return {path: value for path, value in other.items() if path not in followers}

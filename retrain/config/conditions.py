"""The conditions of a campaign: what each sets over the shared base, and the campaign as one of them sees it.

A condition sets any key of a run: dotted (`loss.mode = "ppo"`), as a table (`loss = { mode = "ppo" }`), or by its bare name where
one section alone has it (`lr = 1e-4`).
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from retrain.config.names import ALIASES
from retrain.config.suggestions import nearest
from retrain.config.violations import Origin
from retrain.errors import ConfigurationError

if TYPE_CHECKING:
    from retrain.config.schema import Condition, TrainConfig

OWN_KEYS = ("advantage_mode", "transform_mode", "algorithm_mode", "label")
FOR_ALL = ("campaign", "resume", "squeeze")
"""Sections of a campaign as a whole."""
GIVEN_BY_CAMPAIGN = {
    "training.seed": "[campaign] seeds gives it",
    "training.max_steps": "conditions are compared after the same steps, so [campaign] max_steps gives it",
    "logging.log_dir": "each run has its own folder",
    "logging.label": "label names the condition",
    "backend.devices": "[campaign] devices_per_run and workers_per_device share the devices out",
    "algorithm.advantage_mode": "write advantage_mode",
    "algorithm.transform_mode": "write transform_mode",
    "algorithm.algorithm_mode": "write algorithm_mode",
}
"""Keys that a condition cannot set, and why."""


def gather_sets(table: Mapping[str, Any]) -> dict[str, Any]:
    """A condition's table with its settings of other keys under `sets`, by "section.key"; names that are no key stay, to be refused."""
    gathered: dict[str, Any] = {}
    sets: dict[str, Any] = {}
    for name, value in table.items():
        if name in OWN_KEYS or name == "sets":
            gathered[name] = value
            continue
        for path, item in _paths(name, value):
            (sets if _settable(path) else gathered)[path] = item
    return gathered | ({"sets": {**gathered.get("sets", {}), **sets}} if sets else {})


def _paths(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Key ("section.key") and value of each setting that one name of the table stands for."""
    from retrain.config.keys import section_models

    if name in section_models() and isinstance(value, dict):
        for key, item in value.items():
            yield ALIASES.get(f"{name}.{key}", f"{name}.{key}"), item
        return
    homes = _homes(name)
    path = homes[0] if len(homes) == 1 else name
    yield ALIASES.get(path, path), value


def _homes(name: str) -> list[str]:
    """The keys of a run that are called `name`."""
    from retrain.config.keys import homes_of

    return [path for path in homes_of(name) if path.partition(".")[0] not in FOR_ALL]


def _settable(path: str) -> bool:
    from retrain.config.keys import keys_by_path

    return path in keys_by_path() and path.partition(".")[0] not in FOR_ALL and path not in GIVEN_BY_CAMPAIGN


def unknown_setting(name: str) -> str:
    """Why a condition cannot set `name`, as the end of a sentence."""
    from retrain.config.keys import all_keys, key_meant, keys_by_path

    if name in GIVEN_BY_CAMPAIGN:
        return f"{name} is not for a condition; {GIVEN_BY_CAMPAIGN[name]}"
    if name in keys_by_path():
        return f"{name} is not for a condition; [{name.partition('.')[0]}] belongs to the whole campaign"
    if homes := _homes(name):
        return f"{name} is a key of several sections; write {' or '.join(homes)}"
    meant = key_meant(name.rpartition(".")[2])
    near = meant.path if meant else nearest(name, [*OWN_KEYS, *keys_by_path(), *(key.name for key in all_keys())])
    hint = f"did you mean {near}?" if near else "a condition has advantage_mode and transform_mode, or algorithm_mode, a label, and any key"
    return f"{name} is not a key of a condition; {hint}"


def arms(config: "TrainConfig") -> "tuple[TrainConfig, ...]":
    """The campaign once for each condition: with it alone, and what it sets put over the base. A single run is its own only arm.

    Raises ConfigurationError for values and combinations that a condition makes wrong.
    """
    if config.campaign is None:
        return (config,)
    return tuple(arm(config, condition) for condition in config.conditions)


def arm(config: "TrainConfig", condition: "Condition") -> "TrainConfig":
    from retrain.config.load import config_from_mapping, given_values

    data = given_values(config)
    for path, value in condition.sets.items():
        section, _, name = path.partition(".")
        data[section] = {**data.get(section, {}), name: value}
    modes = condition.model_dump(include={"advantage_mode", "transform_mode", "algorithm_mode"}, exclude_unset=True)
    data["campaign"] = {**data["campaign"], "conditions": [modes | {"label": condition.label}]}
    return config_from_mapping(data, origin=Origin(config.source_path, config._origin.given))


def arm_problems(config: "TrainConfig") -> list[str]:
    """The sentences of every condition that sets something wrong, each with the condition's number; once where it is all of them."""
    if config.campaign is None or not any(condition.sets for condition in config.conditions):
        return []
    found: dict[str, list[int]] = {}
    for number, condition in enumerate(config.conditions, start=1):
        try:
            arm(config, condition)
        except ConfigurationError as error:
            for problem in error.problems:
                found.setdefault(problem, []).append(number)
    return [_located(config, problem, numbers) for problem, numbers in found.items()]


def _located(config: "TrainConfig", problem: str, numbers: list[int]) -> str:
    if len(numbers) == len(config.conditions) > 1:
        return problem
    place, _, sentence = problem.partition(": ")
    which = f"number {numbers[0]}" if len(numbers) == 1 else f"numbers {', '.join(map(str, numbers))}"
    return f"{place}: [[campaign.conditions]] {which}: {sentence}"

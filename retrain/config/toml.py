"""A configuration as TOML text: the canonical form that a run's folder stores, and values in sentences."""

import json
import re
from collections.abc import Iterator
from datetime import date, time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrain.config.schema import TrainConfig

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def toml_value(value: Any) -> str:
    """A value on one line, as TOML writes it; what TOML has no form for, as Python does."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(str(name))} = {toml_value(item)}" for name, item in value.items()) + "}"
    if isinstance(value, date | time):
        return value.isoformat()
    return repr(value)


def _string(text: str) -> str:
    """JSON's escapes are TOML's, but for DEL, which TOML wants escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else _string(name)


def dump_toml(config: "TrainConfig") -> str:
    """Every key with its value, under canonical names. Loading the text gives an equal configuration.

    Keys whose being unset says something that no value can say are left out while they are unset, and so are [squeeze] and
    [campaign], whose presence has a meaning.
    """
    from retrain.config.keys import section_models

    sections = ["\n".join(_section(config, name)) for name in section_models() if name not in PRESENCE_SECTIONS or config.is_set(name)]
    return "\n\n".join(sections) + "\n"


PRESENCE_SECTIONS = ("squeeze", "campaign")
"""Sections that do something by being there."""


def _section(config: "TrainConfig", section: str) -> Iterator[str]:
    from retrain.config.keys import all_keys

    yield f"[{section}]"
    for key in all_keys():
        if key.section == section and key.path != "campaign.conditions" and not (key.meaningful_unset and not config.is_set(key.path)):
            yield f"{key.name} = {toml_value(_storable(key.path, config.value(key.path)))}"
    if section == "campaign" and config.campaign is not None:
        for condition in config.campaign.conditions:
            yield "\n[[campaign.conditions]]"
            settings = condition.model_dump(exclude_unset=True).items()
            yield from (f"{name} = {toml_value(_storable(name, value))}" for name, value in settings)


def _storable(path: str, value: Any) -> Any:
    """environment.args may hold null, which JSON has and TOML has not."""
    return json.dumps(value, ensure_ascii=False) if path == "environment.args" and _holds_none(value) else value


def _holds_none(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_none, value.values()))
    return any(map(_holds_none, value)) if isinstance(value, list) else value is None

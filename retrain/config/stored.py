"""A configuration as a run's folder stores it: its text, its hash, and the keys that may differ at
a resume.
"""

import hashlib
import json
from pathlib import Path
from shlex import quote
from typing import Any

from retrain.config.keys import Key, all_keys, section_models
from retrain.config.schema import TrainConfig
from retrain.config.sections import bare_value
from retrain.config.values import items_within
from retrain.system import toml_value


def dump_toml(config: TrainConfig) -> str:
    """Write every key with its value, under canonical names, as TOML. Loading the text gives an
    equal configuration.

    It leaves out unset keys whose absence has a meaning, and sections that act by their presence.
    """
    sections = []
    for section, model in section_models().items():
        if model.traits.acts_by_presence and not config.is_set(section):
            continue
        lines = [f"[{section}]"]
        for key in all_keys():
            unset = key.traits.meaningful_unset and not config.is_set(key.path)
            if key.section == section and key.path != "campaign.conditions" and not unset:
                lines.append(f"{key.name} = {_stored_value(key.path, config.value(key.path))}")
        for condition in (
            config.campaign.conditions if section == "campaign" and config.campaign else ()
        ):
            lines.append("\n[[campaign.conditions]]")
            settings = condition.model_dump(exclude_unset=True).items()
            lines += [f"{path} = {_stored_value(path, value)}" for path, value in settings]
        sections.append("\n".join(lines))
    return "\n\n".join(sections) + "\n"


def run_command(folder: Path) -> str:
    """Return the command line that continues the run in `folder`, whatever file and flags began it:
    they are all in its config.toml.
    """
    return f"retrain {_argument(folder / 'config.toml')} --resume {_argument(folder)}"


def _argument(path: Path) -> str:
    """Quote a path for a shell. One that begins with a dash would read as a flag."""
    return quote(f"./{path}" if str(path).startswith("-") else str(path))


def begun_by(config: TrainConfig) -> str:
    """Return the command line that began a campaign, without its folder: the file and the flags
    above it. "" for one made in Python, which has its own way to give `[resume] from`.
    """
    file, origins = config.source_path, config._provenance.origins
    if file is None:
        return ""
    given = [
        f"{key.flag}={bare_value(config.value(key.path))}"
        for key in all_keys()
        if origins.get(key.path, "").startswith("flag ")
        and key.path not in ("resume.from", "logging.log_dir")
    ]
    return " ".join(map(quote, ["retrain", str(file), *given]))


def campaign_command(begun: str, folder: Path) -> str:
    """Return the command line that continues a campaign in `folder` that `begun` began."""
    return f"{begun} --resume {_argument(folder)}".lstrip()


def _stored_value(path: str, value: Any) -> str:
    """Write one value as TOML. environment.args may hold null, for which TOML has no form, so the
    file then stores JSON.
    """
    if path == "environment.args" and any(item is None for _, item in items_within(value)):
        value = json.dumps(value, ensure_ascii=False)
    return toml_value(value)


def config_hash(config: TrainConfig) -> str:
    """sha256 (hex) over every value that must not change at resume; equal runs on other devices of
    a kind hash equal.
    """
    fixed = [
        key.path
        for key in all_keys()
        if not key.traits.may_change_at_resume and key.path != "backend.devices"
    ]
    values = {path: _jsonable(config.value(path)) for path in fixed}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


WITH_OTHER_STEPS = ("training.lr_schedule", "training.lr_horizon")
"""Keys that may change at a resume that changes max_steps, since a falling rate depends on
max_steps.
"""


def resume_differences(stored: TrainConfig, current: TrainConfig, fixed: str = "") -> list[str]:
    """Return one sentence for each value that a resumed run may not change, with both values; empty
    if it may resume. The section `fixed` may not change either.
    """
    differing = differing_keys(stored, current)
    other_steps = any(key.path == "training.max_steps" for key in differing)
    return [
        f"[{key.section}] {key.name} = {shown_value(current, key.path)} differs from"
        f" {shown_value(stored, key.path)}, the run's own value, and cannot change at resume"
        f"{' without another max_steps' if key.path in WITH_OTHER_STEPS else ''};"
        " restore it, or start a new run."
        for key in differing
        if (key.section == fixed or not key.traits.may_change_at_resume)
        and not (other_steps and key.path in WITH_OTHER_STEPS)
    ]


def differing_keys(stored: TrainConfig, current: TrainConfig) -> list[Key]:
    """Return the keys whose values differ, in the order of the schema."""

    def kinds(config: TrainConfig) -> list[str]:
        return [device.partition(":")[0] for device in config.backend.device_list]

    differing = [
        key
        for key in all_keys()
        if _jsonable(stored.value(key.path)) != _jsonable(current.value(key.path))
    ]
    # Devices of the same kind are equivalent, and the machine chooses an unset device.
    both = stored.is_set("backend.devices") and current.is_set("backend.devices")
    if not both or kinds(stored) == kinds(current):
        differing = [key for key in differing if key.path != "backend.devices"]
    return differing


def _jsonable(value: Any) -> Any:
    if isinstance(value, list):
        return [item.model_dump() if hasattr(item, "model_dump") else item for item in value]
    return value


def shown_value(config: TrainConfig, path: str) -> str:
    """Return the value of a key as TOML, or `unset`."""
    value = config.value(path)
    if value is None:
        return "unset"
    return toml_value(_jsonable(value))

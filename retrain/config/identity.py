"""What makes two configurations the same run: the hash in a checkpoint's manifest, and what may differ at resume."""

import hashlib
import json
from typing import Any

from retrain.config.keys import all_keys
from retrain.config.schema import TrainConfig
from retrain.config.toml import toml_value

FREE_SECTIONS = frozenset({"evaluation", "logging"})
FREE_KEYS = frozenset(
    {
        "resume.from",
        "training.max_hours",
        "training.max_steps",
        "training.save_every",
        "training.keep_checkpoints",
        "reward.workers",
        "backend.adapter_path",
        "backend.shard_base",
        "inference.mismatch_limit",
        "inference.url",
        "model.base_url",
        "backend.max_concurrent",
        "backend.throttle_dir",
    }
)
"""What may differ between a run and its resumption, beside devices of the same kind."""


def may_differ(path: str) -> bool:
    return path in FREE_KEYS or path.partition(".")[0] in FREE_SECTIONS


def config_hash(config: TrainConfig) -> str:
    """sha256 (hex) over every value that must not change at resume; equal runs on other devices of a kind hash equal."""
    fixed = [key.path for key in all_keys() if not may_differ(key.path) and key.path != "backend.devices"]
    values = {path: _jsonable(config.value(path)) for path in fixed}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def resume_differences(stored: TrainConfig, current: TrainConfig) -> list[str]:
    """One sentence for each value that a resumed run may not change, with both values; empty when it may go on."""
    return [
        f"[{key.section}] {key.name} = {_shown(current, key.path)} differs from {_shown(stored, key.path)}, with which the run was "
        "started, and cannot change at resume; take the old value, or start a new run."
        for key in all_keys()
        if _differs(key.path, stored, current)
    ]


def _differs(path: str, stored: TrainConfig, current: TrainConfig) -> bool:
    if may_differ(path):
        return False
    if path == "backend.devices":
        named = stored.is_set(path) and current.is_set(path)  # an unset device is chosen by the machine
        return named and _kinds(stored) != _kinds(current)
    return bool(_jsonable(stored.value(path)) != _jsonable(current.value(path)))


def _kinds(config: TrainConfig) -> list[str]:
    return [device.partition(":")[0] for device in config.backend.device_list]


def _jsonable(value: Any) -> Any:
    return [item.model_dump() if hasattr(item, "model_dump") else item for item in value] if isinstance(value, list) else value


def _shown(config: TrainConfig, path: str) -> str:
    value = config.value(path)
    return "unset" if value is None else toml_value(_jsonable(value))

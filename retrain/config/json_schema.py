"""The JSON Schema of a configuration file, with which an editor completes and checks it."""

from typing import Any

from retrain.config.names import ALIASES, bracketed
from retrain.config.schema import TrainConfig
from retrain.system import Json


def json_schema() -> Json:
    """Return every section and key with its type, default and help. Each alias is a property of its
    section too.
    """
    schema: Json = _plain(TrainConfig.model_json_schema(by_alias=True))
    for alias, canonical in ALIASES.items():
        section, _, name = alias.partition(".")
        target, _, target_name = canonical.partition(".")
        properties = schema["$defs"][section.capitalize()]["properties"]
        properties[name] = {
            **schema["$defs"][target.capitalize()]["properties"][target_name],
            "description": f"Another name of {bracketed(canonical)}.",
        }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "retrain configuration",
    }


def _plain(value: Any) -> Any:
    """Return a JSON Schema without the marks that `key` adds to it."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items() if name != "traits"}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value

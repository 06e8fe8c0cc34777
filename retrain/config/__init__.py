"""Configuration: one schema, one loader. Names are imported when first used, so that `retrain --help` needs no pydantic."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrain.config.load import config_from_mapping, load_config, with_drawn_seed
    from retrain.config.schema import Condition, TrainConfig

__all__ = ["Condition", "TrainConfig", "config_from_mapping", "load_config", "with_drawn_seed"]

_HOMES = {
    "Condition": "schema",
    "TrainConfig": "schema",
    "config_from_mapping": "load",
    "load_config": "load",
    "with_drawn_seed": "load",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

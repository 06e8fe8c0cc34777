"""Configuration: one schema, one loader. Names load on first use, so that `retrain --help` needs no
pydantic.
"""

from typing import TYPE_CHECKING

from retrain.system import lazy

if TYPE_CHECKING:
    from retrain.config.load import (
        config_from_mapping,
        config_from_toml,
        load_config,
        load_stored,
        replaced,
        with_drawn_seed,
    )
    from retrain.config.schema import Condition, TrainConfig
    from retrain.config.stored import config_hash, dump_toml, resume_differences
    from retrain.config.unused import unused_keys


__all__ = [
    "Condition",
    "TrainConfig",
    "config_from_mapping",
    "config_from_toml",
    "config_hash",
    "dump_toml",
    "load_config",
    "load_stored",
    "replaced",
    "resume_differences",
    "unused_keys",
    "with_drawn_seed",
]

_HOMES = {
    "Condition": "schema",
    "TrainConfig": "schema",
    "config_from_mapping": "load",
    "config_hash": "stored",
    "dump_toml": "stored",
    "load_config": "load",
    "load_stored": "load",
    "config_from_toml": "load",
    "replaced": "load",
    "resume_differences": "stored",
    "unused_keys": "unused",
    "with_drawn_seed": "load",
}

__getattr__ = lazy(__name__, _HOMES)

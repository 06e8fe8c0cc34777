"""Tables over tables."""

from collections.abc import Mapping
from typing import Any


def deep_merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """A new table in which `above` wins, and tables that both hold are merged."""
    merged = dict(below)
    for name, value in above.items():
        old = merged.get(name)
        merged[name] = deep_merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged

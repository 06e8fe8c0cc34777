"""Share the parts that consecutive runs of a process load only once: tokenizers and prompts, inside
`shared_parts`.

`model.load.shared_models` keeps the weights.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Part = TypeVar("Part")

_kept: dict[Hashable, Any] | None = None
"""Inside `shared_parts`: the parts, by the key of their inputs."""


@contextmanager
def shared_parts() -> Iterator[None]:
    """Keep what `shared` makes inside, so that consecutive runs make it once."""
    global _kept  # noqa: PLW0603 - one store per process, which a campaign turns on and off
    before, _kept = _kept, {}
    try:
        yield
    finally:
        _kept = before


def shared(key: Hashable, make: Callable[[], Part]) -> Part:
    """Return what `make` returns, or returned earlier for an equal key. With None as the key it
    always calls `make`.
    """
    if _kept is None or key is None:
        return make()
    if key not in _kept:
        _kept[key] = make()
    part: Part = _kept[key]
    return part

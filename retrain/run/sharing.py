"""Parts that runs which follow each other in one process need only once: tokenizers and prompts,
kept while `shared_parts` is open.

Weights are kept by `model.load.shared_models`.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Part = TypeVar("Part")

_kept: dict[Hashable, Any] | None = None
"""Inside `shared_parts`: the parts by what they were made from."""


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
    """Return what `make` returns, or returned earlier for an equal key. None is the key of what
    must be made anew.
    """
    if _kept is None or key is None:
        return make()
    if key not in _kept:
        _kept[key] = make()
    part: Part = _kept[key]
    return part

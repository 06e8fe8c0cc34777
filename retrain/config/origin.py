"""Where a configuration came from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Origin:
    """The file of a configuration, and the place of each value that a file, a variable or a flag gave."""

    path: Path | None = None
    given: Mapping[str, str] = field(default_factory=dict)
    """ "section.key" to "file", "environment NAME" or "flag --name"; keys left to their default are absent."""
    foreign: bool = False
    """Found in a run's folder, which anyone may have made: code that it names is not run."""

"""A broken rule between keys, as data until the loader knows which file it stands in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Provenance:
    """The file of a configuration, and the place of each value that a file, a variable or a flag gave."""

    path: Path | None = None
    origins: Mapping[str, str] = field(default_factory=dict)
    """ "section.key" to "file", "environment NAME" or "flag --name"; keys left to their default are absent."""
    foreign: bool = False
    """Found in a run's folder, which anyone may have made: code that it names is not run."""


@dataclass(frozen=True)
class Violation:
    keys: tuple[str, ...]
    """The keys that the rule reads, as "section.key"; the first is the one to mend."""
    message: str
    """One sentence without its full stop."""


class RuleViolations(ValueError):
    """Rules that a configuration breaks although each value alone is allowed."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        self.violations = tuple(violations)
        super().__init__("; ".join(violation.message for violation in violations))

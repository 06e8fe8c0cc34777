"""A broken rule between keys, as data until the loader knows which file it stands in."""

from collections.abc import Sequence
from dataclasses import dataclass


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

"""Building blocks of the schema: a strict section, and keys with documentation and traits."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator
from pydantic.fields import FieldInfo

from retrain.config.values import (
    MAX_SEED,
    check_path,
    check_serializable,
    check_server_url,
    check_table,
)
from retrain.system import listed


@dataclass(frozen=True)
class Traits:
    """Properties of a key, or of every key of a section, besides its values. retrain derives lists
    of keys from them (`Key.traits`).
    """

    meaningful_unset: bool = False
    """True if omitting the key has a meaning that no value expresses, so that a written
    configuration omits it too.
    """
    acts_by_presence: bool = False
    """True if the presence of the section has a meaning, so that a written configuration omits an
    unset section.
    """
    may_change_at_resume: bool = False
    own_to_a_run: bool = False
    """True if runs that differ in this key remain comparable, because it does not change the
    training.
    """
    sizes_memory: bool = False
    sets_step_time: bool = False
    """True if the duration of a step depends strongly on it."""
    whole_campaign: bool = False
    """True if the key is about a campaign as a whole, so that a condition cannot set it."""
    not_for_a_condition: str = ""
    """The reason why a condition cannot set it, and the key to set instead."""
    echoes_training: bool = False
    """True if an unset key has the value of the key of the same name in [training], which the bare
    name means.
    """
    applies_when: str = ""
    """The values of another key of its section with which it has an effect, as "mode in (ppo)" or
    "kl_coef not in (0)"."""
    movable: bool = False
    """True if retrain reads the key again in each step, so that `[schedule]` may move it."""
    parameter_of: tuple[str, ...] = ()
    """The rewards whose judgment depends on it; "plugin" stands for every plugin."""
    needs: str = ""
    """The capabilities that the key needs, as space-separated words of backends and engines
    (`backends.base.Backend.lacks`).
    """

    def __or__(self, other: "Traits") -> "Traits":
        """Return a key's own traits, and its section's where it has none."""
        return Traits(**{name: getattr(self, name) or getattr(other, name) for name in _TRAITS})


NO_TRAITS = Traits()
_TRAITS = tuple(trait.name for trait in fields(Traits))


def key(default: Any, doc: str, *, example: Any = None, **marks: Any) -> Any:
    """Declare a key with its default and its documentation.

    The annotated file shows `example` if the key has no default. `marks` are the key's Traits, and
    pydantic's ge, gt, le, lt, min_length and alias.
    """
    traits = {name: marks.pop(name) for name in _TRAITS if name in marks}
    if example is not None:
        marks["examples"] = [example]
    return Field(default, description=doc, json_schema_extra={"traits": traits}, **marks)


def traits_of(field: FieldInfo) -> Traits:
    """Return the traits that `key` received."""
    extra: Any = field.json_schema_extra or {"traits": {}}
    return Traits(**extra["traits"])


@dataclass(frozen=True)
class Applicability:
    """A parsed `applies_when`: "other" or "other not" in some values."""

    path: str
    values: tuple[str, ...]
    unless: bool
    """True if it applies with every other value."""

    @classmethod
    def parse(cls, section: str, text: str) -> "Applicability":
        name, unless, values = re.fullmatch(r"(\w+) (not )?in \((.+)\)", text).groups()  # type: ignore[union-attr]
        return cls(f"{section}.{name}", tuple(values.split(", ")), bool(unless))

    def fails(self, config: Any) -> bool:
        """True if the key has no effect; a key that [schedule] moves takes other values too."""
        if self.path in config.schedule.points:
            return False
        value = config.value(self.path)
        # This writes -0.0 as 0.
        shown = f"{value or 0:g}" if isinstance(value, int | float) else str(value)
        return (shown in self.values) == self.unless

    @property
    def otherwise(self) -> str:
        """Return why the key has no effect, as a clause."""
        name = self.path.partition(".")[2]
        values = listed((v if v.isdecimal() else f'"{v}"' for v in self.values), "or")
        if self.unless:
            return f"{name} is {values}"
        return f"it belongs to {name} = {values}"


@dataclass(frozen=True)
class Violation:
    """A broken rule between keys. The loader adds the file and makes a sentence of it."""

    keys: tuple[str, ...]
    """The keys that the rule reads, as "section.key"; the first is the key to fix."""
    message: str
    """One sentence without its full stop."""


Violations = Iterator[Violation]


class RuleViolations(ValueError):
    """Raised for a configuration that breaks rules although each of its values is valid alone."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        self.violations = tuple(violations)
        super().__init__("; ".join(violation.message for violation in violations))


def repeated(values: Iterable[Any]) -> list[Any]:
    """Return the first repeated value, in a list; [] without a repetition."""
    return [value for value, count in Counter(values).items() if count > 1][:1]


Strings = list[str]
PathText = Annotated[str, AfterValidator(check_path)]
ServerURL = Annotated[str, AfterValidator(check_server_url)]
Table = Annotated[dict[str, Any], AfterValidator(check_table)]
Positive = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]


class Section(BaseModel):
    """A strict, frozen and closed table: an unknown key is an error, "5" is not 5, and nan and inf
    are not numbers.
    """

    # Built once, inside the configuration that holds them, and not each by itself before.
    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True
    )
    traits: ClassVar[Traits] = NO_TRAITS
    """The traits of every key of the section."""

    def is_set(self, name: str) -> bool:
        """True if the user gave the key."""
        return ("from_" if name == "from" else name) in self.model_fields_set

    _is_holdable = field_validator("*")(check_serializable)

    def problems(self, config: Any) -> Violations:  # noqa: ARG002 - most have no rule
        """Yield the combinations with other keys that would change the meaning of a run in silence.
        These checks need neither the model nor the machine. The part that knows these refuses other
        combinations.
        """
        yield from ()

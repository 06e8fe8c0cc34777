"""Every key of the schema as data: its type in words, its default, its flag and its environment
variable.
"""

from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

from pydantic.fields import FieldInfo

from retrain.config.fields import choices_of, describe_field, members, type_name
from retrain.config.names import ALIASES, synonym
from retrain.config.section import NO_TRAITS, Section, Traits, traits_of
from retrain.config.sections import AllSections, Condition

BARE_SECTIONS = ("model", "algorithm", "training", "optimizer", "backend", "logging")
"""Sections whose keys are flags by their bare name; every other section's flags carry its name in
front."""

NAMED_FLAGS = {"resume.from": "--resume"}

SHORT_TABLE_FLAGS = {
    "algorithm.params": "--algorithm-param",
    "algorithm.advantage_params": "--advantage-param",
    "algorithm.transform_params": "--transform-param",
    "algorithm.uncertainty_params": "--uncertainty-param",
}
"""Second names for tables that a user fills by repetition, one key=value each time."""


@dataclass(frozen=True)
class Key:
    """One key of one section."""

    section: str
    name: str
    field: FieldInfo
    default: Any
    traits: Traits = NO_TRAITS
    """The traits of the key and of its section."""

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def doc(self) -> str:
        return self.field.description or ""

    @property
    def flag(self) -> str:
        if self.path in NAMED_FLAGS:
            return NAMED_FLAGS[self.path]
        return flag_of(self.section, self.name)

    @property
    def variable(self) -> str:
        return f"RETRAIN_{self.section}_{self.name}".upper()

    @property
    def allowed(self) -> str:
        """The allowed values in words."""
        return describe_field(self.field)

    @property
    def choices(self) -> tuple[str, ...]:
        """The names that the key takes: the members of a closed set, or the built-in names."""
        return choices_of(self.field)

    @property
    def takes_plugin(self) -> bool:
        """True if a value may name a plugin."""
        named = choices_of(self.field, lambda kind: (f"plugin {kind}",))
        return any(name.startswith("plugin ") for name in named)

    @property
    def type_name(self) -> str:
        """The type as the documentation's tables show it."""
        return type_name(self.field.annotation)

    @property
    def kinds(self) -> frozenset[type]:
        """The plain Python types that a value can have: bool, int, float, str, list, dict."""
        return frozenset(chain.from_iterable(one.plain for one in members(self.field.annotation)))

    @property
    def item_kinds(self) -> frozenset[type]:
        """The plain types of a list's items."""
        lists = [one for one in members(self.field.annotation) if one.kind is list]
        items = chain.from_iterable(members(one.args[0]) for one in lists)
        return frozenset(chain.from_iterable(item.plain for item in items))


def flag_of(section: str, name: str) -> str:
    """Return the flag of a key. Outside the everyday sections, the flag begins with the section."""
    return "--" + (name if section in BARE_SECTIONS else f"{section}_{name}").replace("_", "-")


@cache
def section_models() -> dict[str, type[Section]]:
    """Map section names to their classes, in the order of the schema."""
    fields = AllSections.model_fields.items()
    return {name: next(members(field.annotation)).kind for name, field in fields}


@cache
def all_keys() -> tuple[Key, ...]:
    return tuple(
        Key(
            section,
            field.alias or name,
            field,
            field.get_default(call_default_factory=True),
            traits_of(field) | model.traits,
        )
        for section, model in section_models().items()
        for name, field in model.model_fields.items()
    )


@cache
def keys_by_path() -> dict[str, Key]:
    return {key.path: key for key in all_keys()}


@cache
def homes_of(name: str) -> tuple[str, ...]:
    """Return the paths of every section's key with the name `name`."""
    return tuple(
        key.path for key in all_keys() if key.name == name and not key.traits.echoes_training
    )


CONDITION_KEYS = tuple(
    field.alias or name for name, field in Condition.model_fields.items() if name != "sets"
)
"""The keys that describe a condition itself; everything else in its table is a key of a run that it
sets."""


def condition_homes(name: str) -> list[str]:
    """Return the keys of a run with the name `name`."""
    return [path for path in homes_of(name) if not keys_by_path()[path].traits.whole_campaign]


def is_settable(path: str) -> bool:
    """True if a condition may set the key "section.key"."""
    key = keys_by_path().get(path)
    return key is not None and not key.traits.whole_campaign and not key.traits.not_for_a_condition


def key_meant(name: str, section: str = "") -> Key | None:
    """Return the key that another trainer calls `name`, or the only key of that name in all
    sections; dashes count as underscores.
    """
    homes = homes_of(name.lower().replace("-", "_"))
    path = (
        ALIASES.get(f"{section}.{name}")
        or synonym(name, section)
        or (homes[0] if len(homes) == 1 else "")
    )
    return keys_by_path().get(path)


@cache
def flags() -> dict[str, str]:
    """Map every flag to its "section.key". The map includes aliases and second names of tables, but
    not dotted forms.
    """
    named = [(key.flag, key.path) for key in all_keys()]
    named += [(flag, path) for path, flag in SHORT_TABLE_FLAGS.items()]
    named += [(flag_of(*alias.split(".")), alias) for alias in ALIASES]
    table: dict[str, str] = {}
    for flag, path in named:
        if table.setdefault(flag, path) != path:
            raise ValueError(f"the flag {flag} would mean both {table[flag]} and {path}")
    return table

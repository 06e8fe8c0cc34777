"""Every key of the schema as data: its type in words, its default, its flag and its environment
variable.
"""

import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from retrain.config.names import ALIASES, builtin_names, synonym
from retrain.config.section import NO_TRAITS, Section, Traits, traits_of
from retrain.config.sections import AllSections, Condition
from retrain.config.values import MAX_SEED, OpenName
from retrain.system import listed

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
"""Second names for tables that are filled by repetition, one key=value each time."""


@dataclass(frozen=True)
class Key:
    """One key of one section."""

    section: str
    name: str
    field: FieldInfo
    default: Any
    traits: Traits = NO_TRAITS
    """The key's own traits and its section's."""

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
        return _type_name(self.field.annotation)

    @property
    def kinds(self) -> frozenset[type]:
        """The plain Python types that a value can have: bool, int, float, str, list, dict."""
        return frozenset(chain.from_iterable(one.plain for one in _members(self.field.annotation)))

    @property
    def item_kinds(self) -> frozenset[type]:
        """The plain types of a list's items."""
        lists = [one for one in _members(self.field.annotation) if one.kind is list]
        items = chain.from_iterable(_members(one.args[0]) for one in lists)
        return frozenset(chain.from_iterable(item.plain for item in items))


def flag_of(section: str, name: str) -> str:
    """Name the flag of a key: the bare key in the everyday sections; in the others the section
    stands in front.
    """
    return "--" + (name if section in BARE_SECTIONS else f"{section}_{name}").replace("_", "-")


@cache
def section_models() -> dict[str, type[Section]]:
    """Map section names to their classes, in the order of the schema."""
    fields = AllSections.model_fields.items()
    return {name: next(_members(field.annotation)).kind for name, field in fields}


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
    """The paths of every section's key that is called `name`."""
    return tuple(
        key.path for key in all_keys() if key.name == name and not key.traits.echoes_training
    )


CONDITION_KEYS = tuple(
    field.alias or name for name, field in Condition.model_fields.items() if name != "sets"
)
"""The keys that describe a condition itself; everything else in its table is a key of a run that it
sets."""


def condition_homes(name: str) -> list[str]:
    """The keys of a run that are called `name`."""
    return [path for path in homes_of(name) if not keys_by_path()[path].traits.whole_campaign]


def is_settable(path: str) -> bool:
    """True if a condition may set the key "section.key"."""
    key = keys_by_path().get(path)
    return key is not None and not key.traits.whole_campaign and not key.traits.not_for_a_condition


def key_meant(name: str, section: str = "") -> Key | None:
    """The key that another trainer calls `name`, or the only key of that name in all sections;
    dashes count as underscores.
    """
    homes = homes_of(name.lower().replace("-", "_"))
    path = synonym(name, section) or (homes[0] if len(homes) == 1 else "")
    return keys_by_path().get(path)


@cache
def flags() -> dict[str, str]:
    """Map every flag to its "section.key". Aliases and second names of tables are included, dotted
    forms are not.
    """
    named = [(key.flag, key.path) for key in all_keys()]
    named += [(flag, path) for path, flag in SHORT_TABLE_FLAGS.items()]
    named += [(flag_of(*alias.split(".")), alias) for alias in ALIASES]
    table: dict[str, str] = {}
    for flag, path in named:
        if table.setdefault(flag, path) != path:
            raise ValueError(f"the flag {flag} would mean both {table[flag]} and {path}")
    return table


def choices_of(
    field: FieldInfo, names: Callable[[str], tuple[str, ...]] = builtin_names
) -> tuple[str, ...]:
    """Return the names that a field takes: the members of a closed set, or what `names` gives for
    its kind of plugin.
    """
    found = (member.choices(names) for member in _members(field.annotation, field.metadata))
    return tuple(dict.fromkeys(chain.from_iterable(found)))


def describe_field(field: FieldInfo) -> str:
    """The allowed values of a field in words: "an integer of at least 1", '"mean" or "min"'."""
    return _in_words(field.annotation, field.metadata)


@dataclass(frozen=True)
class _Member:
    """One member of a type's union; a type without a union has one."""

    kind: Any
    """Literal, list, dict or a plain type."""
    args: tuple[Any, ...]
    metadata: tuple[Any, ...]
    """The metadata of Annotated, on the member and on the union."""

    @property
    def plain(self) -> list[type]:
        """The Python types of its values."""
        if self.kind is Literal:
            return list(dict.fromkeys(map(type, self.args)))
        return [self.kind]

    @property
    def type_name(self) -> str:
        if self.kind is list:
            return f"list[{_type_name(self.args[0])}]"
        if self.kind is dict or issubclass(self.plain[0], BaseModel):
            return "table"
        return " or ".join(kind.__name__ for kind in self.plain)

    def choices(self, names: Callable[[str], tuple[str, ...]]) -> Iterator[str]:
        for item in self.metadata:
            if isinstance(item, OpenName):
                yield from names(item.kind)
        if self.kind is Literal:
            yield from (str(value) for value in self.args if value)
        if self.kind is list:
            for item in _members(self.args[0]):
                yield from item.choices(names)

    @property
    def words(self) -> str:
        for item in self.metadata:
            if isinstance(item, OpenName):
                return _open_words(item)
            check = getattr(getattr(item, "func", None), "__name__", "")
            if check in _SPECIAL:
                return _SPECIAL[check]
        if self.kind is Literal:
            return listed((f'"{value}"' for value in self.args), "or")
        bounds = [_BOUNDS[type(one)].format(one) for one in self.metadata if type(one) in _BOUNDS]
        if self.kind is list:
            some = " of at least one" if bounds else ""
            return f"a list{some}, each {_in_words(self.args[0])}"
        if self.kind is Condition:
            return (
                "a table with advantage_mode and transform_mode, or algorithm_mode, a label, and"
                " any other key as section.key"
            )
        if self.args[1:] == (list[Any],):
            return "a table of lists"
        shown = " and ".join(bounds).replace(str(MAX_SEED), "2**32 - 1")
        return f"{_WORDS[self.kind]} {shown}".rstrip()


def _members(annotation: Any, metadata: Iterable[Any] = ()) -> Iterator[_Member]:
    """The members of a union, with Annotated wrappers and None taken off."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        # pydantic keeps constraints plain on a field, and inside a FieldInfo on an item of a list
        own = (item.metadata if isinstance(item, FieldInfo) else [item] for item in args[1:])
        yield from _members(args[0], (*chain.from_iterable(own), *metadata))
    elif origin in (Union, types.UnionType):
        for member in args:
            yield from _members(member, metadata)
    elif annotation is not types.NoneType:
        yield _Member(origin or annotation, args, tuple(metadata))


def _type_name(annotation: Any) -> str:
    return " or ".join(dict.fromkeys(member.type_name for member in _members(annotation)))


def _in_words(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    words = (member.words for member in _members(annotation, metadata))
    return ", or ".join(dict.fromkeys(words))


_WORDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    dict: "a table",
}
_BOUNDS = {
    annotated_types.Ge: "of at least {0.ge}",
    annotated_types.Gt: "above {0.gt}",
    annotated_types.Le: "at most {0.le}",
    annotated_types.Lt: "below {0.lt}",
    annotated_types.MinLen: "that is not empty",
}
_SPECIAL = {
    "check_devices": "cpu, mps, gpu:N or cuda:N, or two of them with a comma",
    "check_label": "letters, digits and ._+=~-, at most 80",
    "check_svd_device": "cpu, mps, cuda, gpu:N or cuda:N",
    "check_grams": "a list of strings, a JSON array of strings, or a comma-separated string",
    "table_from_json": "a table, or a string with a JSON object",
}
"""The values that a check allows, by its name."""


def _open_words(item: OpenName) -> str:
    """The names that a key takes where plugins may add to them."""
    names = ", ".join(builtin_names(item.kind))
    empty = "empty, " if item.may_be_empty else ""
    if item.kind == "data":
        return f"{empty}{names}, hub:NAME[:config][:split], a path, or a dotted plugin path"
    return f"{empty}{names}, or a dotted plugin path such as my_module.my_{item.kind}"

"""Every key of the schema as data: its type in words, its default, its flag and its environment
variable.
"""

import types
from collections.abc import Callable
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
    """The key's own traits and those of its section."""

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
        return any(
            name.startswith("plugin ")
            for name in choices_of(self.field, lambda kind: (f"plugin {kind}",))
        )

    @property
    def type_name(self) -> str:
        """The type as the documentation's tables show it."""
        return _type_name(self.field.annotation)

    @property
    def kinds(self) -> frozenset[type]:
        """The plain Python types that a value can have: bool, int, float, str, list, dict."""
        return frozenset(_plain_types(self.field.annotation))

    @property
    def item_kinds(self) -> frozenset[type]:
        """The plain types of a list's items."""
        return frozenset(
            kind
            for part in _flatten(self.field.annotation)
            if get_origin(part) is list
            for kind in _plain_types(get_args(part)[0])
        )


def flag_of(section: str, name: str) -> str:
    """Name the flag of a key: the bare key in the everyday sections; in the others the section
    stands in front.
    """
    return "--" + (name if section in BARE_SECTIONS else f"{section}_{name}").replace("_", "-")


@cache
def section_models() -> dict[str, type[Section]]:
    """Map section names to their classes, in the order of the schema."""
    models: dict[str, type[Section]] = {}
    for name, field in AllSections.model_fields.items():
        models[name] = next(
            part
            for part in _flatten(field.annotation)
            if isinstance(part, type) and issubclass(part, Section)
        )
    return models


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
    table: dict[str, str] = {}
    for key in all_keys():
        _add(table, key.flag, key.path)
    for path, flag in SHORT_TABLE_FLAGS.items():
        _add(table, flag, path)
    for alias in ALIASES:
        _add(table, flag_of(*alias.split(".")), alias)
    return table


def _add(table: dict[str, str], flag: str, path: str) -> None:
    if flag in table:
        raise ValueError(f"the flag {flag} would mean both {table[flag]} and {path}")
    table[flag] = path


def choices_of(
    field: FieldInfo, names: Callable[[str], tuple[str, ...]] = builtin_names
) -> tuple[str, ...]:
    """Return the names that a field takes: the members of a closed set, or what `names` gives for
    its kind of plugin.
    """
    return _choices(field.annotation, field.metadata, names)


def describe_field(field: FieldInfo) -> str:
    """The allowed values of a field in words: "an integer of at least 1", '"mean" or "min"'."""
    return _describe(field.annotation, list(field.metadata))


def _flatten(annotation: Any) -> list[Any]:
    """The members of a union, with Annotated wrappers taken off."""
    if get_origin(annotation) is Annotated:
        return _flatten(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return list(chain.from_iterable(_flatten(member) for member in get_args(annotation)))
    return [annotation]


def _plain_types(annotation: Any) -> list[type]:
    plain: list[type] = []
    for part in _flatten(annotation):
        if get_origin(part) is Literal:
            plain.extend(type(value) for value in get_args(part))
        elif part is not type(None):
            plain.append(get_origin(part) or part)
    return plain


def _type_name(annotation: Any) -> str:
    names: list[str] = []
    for part in _flatten(annotation):
        if get_origin(part) is list:
            names.append(f"list[{_type_name(get_args(part)[0])}]")
        elif get_origin(part) is dict or (isinstance(part, type) and issubclass(part, BaseModel)):
            names.append("table")
        elif part is not type(None):
            names.extend(kind.__name__ for kind in _plain_types(part))
    return " or ".join(dict.fromkeys(names))


def _choices(
    annotation: Any, metadata: list[Any], names: Callable[[str], tuple[str, ...]]
) -> tuple[str, ...]:
    found: list[str] = []
    for item in metadata:
        if isinstance(item, OpenName):
            found.extend(names(item.kind))
    if get_origin(annotation) is Annotated:
        inner, *extra = get_args(annotation)
        return (*found, *_choices(inner, extra, names))
    if get_origin(annotation) is Literal:
        return (*found, *(str(value) for value in get_args(annotation) if value))
    for part in get_args(annotation):
        if not isinstance(part, (str, int)):
            found.extend(_choices(part, [], names))
    return tuple(dict.fromkeys(found))


_WORDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    dict: "a table",
    dict[str, list[Any]]: "a table of lists",
}


def _describe(annotation: Any, metadata: list[Any]) -> str:
    if get_origin(annotation) is Annotated:
        inner, *extra = get_args(annotation)
        return _describe(inner, [*extra, *metadata])
    for item in metadata:
        if isinstance(item, OpenName):
            return _describe_open(item)
        if getattr(item, "func", None) is not None and item.func.__name__ in _SPECIAL:
            return _SPECIAL[item.func.__name__]
    if get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not type(None)]
        return ", or ".join(_describe(member, metadata) for member in members)
    if get_origin(annotation) is Literal:
        *first, last = [f'"{value}"' for value in get_args(annotation)]
        return f"{', '.join(first)} or {last}" if first else last
    if get_origin(annotation) is list:
        inner = _describe(get_args(annotation)[0], [])
        least = any(isinstance(item, annotated_types.MinLen) for item in _constraints(metadata))
        return f"a list{' of at least one' if least else ''}, each {inner}"
    if isinstance(annotation, type) and issubclass(annotation, Condition):
        return (
            "a table with advantage_mode and transform_mode, or algorithm_mode, a label, and any"
            " other key as section.key"
        )
    words = _WORDS.get(annotation) or _WORDS[get_origin(annotation)]
    return words + _range(metadata)


_SPECIAL = {
    "check_devices": "cpu, mps, gpu:N or cuda:N, or two of them with a comma",
    "check_label": "letters, digits and ._+=~-, at most 80",
    "check_svd_device": "cpu, mps, cuda, gpu:N or cuda:N",
    "check_grams": "a list of strings, a JSON array of strings, or a comma-separated string",
    "table_from_json": "a table, or a string with a JSON object",
}


def _describe_open(item: OpenName) -> str:
    names = ", ".join(builtin_names(item.kind))
    empty = "empty, " if item.may_be_empty else ""
    if item.kind == "data":
        return f"{empty}{names}, hub:NAME[:config][:split], a path, or a dotted plugin path"
    return f"{empty}{names}, or a dotted plugin path such as my_module.my_{item.kind}"


def _constraints(metadata: list[Any]) -> list[Any]:
    """Return the constraints of a type. pydantic keeps them plain on a field, and inside a
    FieldInfo on an item of a list.
    """
    return [
        inner
        for item in metadata
        for inner in (item.metadata if isinstance(item, FieldInfo) else [item])
    ]


def _range(metadata: list[Any]) -> str:
    words: list[str] = []
    for item in _constraints(metadata):
        if isinstance(item, annotated_types.Ge):
            words.append(f"of at least {item.ge}")
        elif isinstance(item, annotated_types.Gt):
            words.append(f"above {item.gt}")
        elif isinstance(item, annotated_types.Le):
            words.append(f"at most {'2**32 - 1' if item.le == MAX_SEED else item.le}")
        elif isinstance(item, annotated_types.Lt):
            words.append(f"below {item.lt}")
        elif isinstance(item, annotated_types.MinLen):
            words.append("that is not empty")
    if words:
        return " " + " and ".join(words)
    return ""

"""Descriptions of a schema field in words: its names, its type and its range."""

import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from retrain.config.names import builtin_names
from retrain.config.values import MAX_SEED, OpenName
from retrain.system import listed


def choices_of(
    field: FieldInfo, names: Callable[[str], tuple[str, ...]] = builtin_names
) -> tuple[str, ...]:
    """Return the names that a field takes: the members of a closed set, or what `names` gives for
    its kind of plugin.
    """
    found = (member.choices(names) for member in members(field.annotation, field.metadata))
    return tuple(dict.fromkeys(chain.from_iterable(found)))


def describe_field(field: FieldInfo) -> str:
    """Return a field's valid values in words: "an integer of at least 1", '"mean" or "min"'."""
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
            return f"list[{type_name(self.args[0])}]"
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
            for item in members(self.args[0]):
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
        if isinstance(self.kind, type) and issubclass(self.kind, BaseModel):
            return (
                "a table with advantage_mode and transform_mode, or algorithm_mode, a label, and"
                " any other key as section.key"
            )
        if self.args[1:] == (list[Any],):
            return "a table of lists"
        shown = " and ".join(bounds).replace(str(MAX_SEED), "2**32 - 1")
        return f"{_WORDS[self.kind]} {shown}".rstrip()


def members(annotation: Any, metadata: Iterable[Any] = ()) -> Iterator[_Member]:
    """Yield the members of a union, with Annotated wrappers and None taken off."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        # pydantic keeps constraints plain on a field, and inside a FieldInfo on an item of a list.
        own = (item.metadata if isinstance(item, FieldInfo) else [item] for item in args[1:])
        yield from members(args[0], (*chain.from_iterable(own), *metadata))
    elif origin in (Union, types.UnionType):
        for member in args:
            yield from members(member, metadata)
    elif annotation is not types.NoneType:
        yield _Member(origin or annotation, args, tuple(metadata))


def type_name(annotation: Any) -> str:
    return " or ".join(dict.fromkeys(member.type_name for member in members(annotation)))


def _in_words(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    words = (member.words for member in members(annotation, metadata))
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
    """Return the names that a key takes where plugins may add to them."""
    names = ", ".join(builtin_names(item.kind))
    empty = "empty, " if item.may_be_empty else ""
    if item.kind == "data":
        return f"{empty}{names}, hub:NAME[:config][:split], a path, or a dotted plugin path"
    return f"{empty}{names}, or a dotted plugin path such as my_module.my_{item.kind}"

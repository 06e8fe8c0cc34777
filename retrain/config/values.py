"""Types of values that a plain type does not describe: devices, paths, labels, tables, strategic
grams, names that a plugin may add to.
"""

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any
from urllib.parse import urlsplit

from pydantic import BeforeValidator, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from retrain.config.names import (
    ALIASES,
    RENAMED_VALUES,
    builtin_names,
    canonical_uncertainty,
    is_known,
)
from retrain.system import Json, ParseError, expanded, is_path_text, parse_json, unholdable

MAX_SEED = 2**32 - 1
MAX_COMPLETIONS = 1_000_000
"""Most completions per step. A step holds all rows at once, and far more would exhaust any machine
before the first sample.
"""
_DEVICE = re.compile(r"cpu|mps|(?:gpu|cuda):(0|[1-9]\d*)")
LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=~-]{0,79}")
_HOST = re.compile(r"((?!-)[\w-]{1,63}\.)*(?!-)[\w-]{1,63}\.?", re.ASCII)
"""Names and IPv4 addresses. An underscore, which no domain has, is in names of containers."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_REQUEST = re.compile(r"((/chat)?/completions|/models|/generate|/health)/?$")
"""Ends of the addresses of single requests."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_SVD_DEVICE = re.compile(r"cpu|mps|cuda|(?:gpu|cuda):(0|[1-9]\d*)")


def refuse(problem: str, *, whole: bool = False) -> PydanticCustomError:
    """Return a refusal that the loader turns into a sentence about the value: `problem` is its
    predicate, such as "is not a device". With `whole`, the loader does not list the allowed values.
    """
    # Pydantic cannot hold a lone surrogate.
    printable = problem.encode(errors="backslashreplace").decode()
    return PydanticCustomError("refused", "{problem}", {"problem": printable, "whole": whole})


@dataclass(frozen=True)
class OpenName:
    """Marks a string key that takes a built-in name or a plugin."""

    kind: str
    may_be_empty: bool = False

    def check(self, value: str) -> str:
        if not value and self.may_be_empty:
            return value
        if self.kind == "uncertainty":
            value = canonical_uncertainty(value)
        if self.kind == "data":
            value = check_path(value)
        if not is_known(self.kind, value):
            raise refuse("is not known")
        return value

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Editors offer the built-in names and accept any other."""
        return {**handler(schema), "examples": list(builtin_names(self.kind))}


def with_former_names(path: str) -> BeforeValidator:
    """Accept other names of this key's values."""
    return BeforeValidator(lambda value: RENAMED_VALUES.get((path, str(value)), value))


def normalize_device(name: str) -> str:
    """Return torch's name of a device: gpu:N is cuda:N."""
    return name.replace("gpu:", "cuda:")


def parse_devices(text: str) -> tuple[str, ...]:
    """Return the torch names in a comma-separated list such as "gpu:0,gpu:1"; one device, or two
    for split mode.
    """
    devices = tuple(part.strip() for part in text.split(","))
    for device in devices:
        if not _DEVICE.fullmatch(device):
            raise refuse(
                "is not a device"
                if len(devices) == 1
                else f'names "{device}", which is not a device'
            )
    if len(set(map(normalize_device, devices))) < len(devices):
        raise refuse("names a device twice")
    if len(devices) > 2:
        raise refuse(f"names {len(devices)} devices")
    return tuple(map(normalize_device, devices))


def check_devices(text: str) -> str:
    parse_devices(text)
    return text


def check_path(text: str) -> str:
    """Expand ~ and variables in a path. Refuse a path that no file system can hold."""
    if not is_path_text(text):
        raise refuse("is not a path: it holds a NUL character or a name of more than 255 bytes")
    if _CONTROL.search(text):
        raise refuse("holds a control character, such as a line break; leave it out", whole=True)
    try:
        os.fsencode(text)
    except UnicodeEncodeError as error:
        raise refuse(
            f"holds {text[error.start]!r}, which this locale's encoding ({error.encoding}) lacks;"
            " set PYTHONUTF8=1",
            whole=True,
        ) from None
    try:
        return expanded(text)
    except ParseError as error:
        raise refuse(str(error), whole=True) from None


def check_server_url(text: str) -> str:
    """Check the HTTP address of a server; empty means none."""
    if not text:
        return text
    import httpx

    try:
        url, port = httpx.URL(text), urlsplit(text).port
    except (httpx.InvalidURL, ValueError):
        good = False
    else:
        host = url.raw_host.decode()
        named = ":" in host or bool(_HOST.fullmatch(host))  # httpx has looked at an IPv6 address
        good = url.scheme in ("http", "https") and named and port != 0 and " " not in text
    if not good:
        raise refuse(
            "is not the address of a server; write one such as http://127.0.0.1:8000", whole=True
        )
    if "?" in text or "#" in text:
        raise refuse(
            "has a query or a fragment, which requests would lose; end it before the ? or #",
            whole=True,
        )
    if request := _REQUEST.search(text):
        raise refuse(
            f"is the address of a request, not of its server; leave {request[0]} out", whole=True
        )
    return text


def check_label(text: str) -> str:
    """Check a condition's label, which becomes part of folder names."""
    if text and not LABEL.fullmatch(text):
        raise refuse(
            "cannot name a folder (at most 80 letters, digits and ._+=~-, a letter or digit first)"
        )
    return text


def check_svd_device(text: str) -> str:
    if not _SVD_DEVICE.fullmatch(text):
        raise refuse("is not a device")
    return text


def check_variable(name: str) -> str:
    """Check the name of an environment variable; empty means none. retrain would store an API key
    with the configuration.
    """
    if name and not _VARIABLE.fullmatch(name):
        raise refuse(
            "is not the name of an environment variable; put the key itself into a variable, and"
            " name that one here"
        )
    return name


def check_prices(prices: list[float]) -> list[float]:
    if len(prices) not in (0, 2):
        raise refuse("is not two prices, of a million tokens read and of a million tokens written")
    return prices


def parse_grams(value: str | list[str]) -> list[str]:
    """Parse strategic grams from a JSON array, a comma-separated string or a list, stripped and
    without empty ones or repetitions.

    An empty list means the default grams. Refuses a gram without a word character, which could
    never match.
    """
    parts: Any = value.split(",") if isinstance(value, str) else value
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            parts = parse_json(value)
        except ParseError as error:
            raise refuse(f"starts like a JSON array and {error}") from error
        if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
            raise refuse("is a JSON array whose items are not all strings")
    grams: dict[str, str] = {}
    for part in (part.strip() for part in parts):
        if part and not re.search(r"\w", part):
            raise refuse(f'holds "{part}", a gram without a word')
        if part:
            grams.setdefault(part.lower(), part)
    return list(grams.values())


def named_layers(value: Any) -> Any:
    """Return [] for peft's name of all linear layers, else the value."""
    return [] if value in ("all-linear", ["all-linear"]) else value


def check_grams(value: str | list[str]) -> str | list[str]:
    parse_grams(value)
    return value


def check_table(table: Json) -> Json:
    """Refuse what neither JSON nor a stored configuration can say: nan, inf, dates, and null
    outside of JSON.
    """
    _check_items(table, may_hold_null=False)
    return table


MAX_COMBINATIONS = 1000
"""The most combinations of a grid: a campaign of more would not end, and its plan is slow to
check."""


def check_grid(table: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Check a table as `check_table` does; refuse a repeated value, and a grid of too many
    combinations.
    """
    table = {ALIASES.get(path, path): values for path, values in check_table(table).items()}
    for path, values in table.items():
        twice = next((one for place, one in enumerate(values) if one in values[:place]), None)
        if twice is not None:
            raise refuse(f'gives "{path}" the value {twice!r} twice')
    size = math.prod(map(len, table.values()))
    if size > MAX_COMBINATIONS:
        raise refuse(f"makes {size:,} combinations, more than {MAX_COMBINATIONS:,}")
    return table


def check_arguments(table: Json) -> Json:
    """Check a table as `check_table` does, but allow null, which JSON has."""
    _check_items(table, may_hold_null=True)
    return table


def _check_items(table: Json, may_hold_null: bool) -> None:
    for name, item in items_within(check_serializable(table)):
        if not isinstance(name, str):
            raise refuse(f"holds the key {name!r}, which is not a string")
        if isinstance(item, float) and not math.isfinite(item):
            raise refuse(f"holds {item}, which is not a finite number")
        held = isinstance(item, dict | list | str | int | float)
        if not held and not (item is None and may_hold_null):
            raise refuse(f"holds {item}, which is a {type(item).__name__}; write it as a string")


def check_serializable(value: Any) -> Any:
    """Refuse nesting deeper than later steps allow, integers beyond 64 bits, and text with an
    unpaired surrogate, which no UTF-8 file can hold.
    """
    problem = unholdable(value)
    if problem:
        raise refuse(problem)
    for text in chain([value], *items_within(value)):
        if isinstance(text, str) and _SURROGATE.search(text):
            raise refuse("contains an unpaired surrogate, which UTF-8 cannot encode")
    return value


def items_within(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (name, item) of everything nested in tables and lists; an item of a list has the name
    "".
    """
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = zip(repeat(""), value)
    for name, item in items:
        yield name, item
        yield from items_within(item)


def table_from_json(value: Any) -> Any:
    """Parse a table from a JSON string. Returns any other value unchanged for the type check."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return {}
    try:
        table = parse_json(value)
    except ParseError as error:
        raise refuse(str(error)) from error
    if not isinstance(table, dict):
        raise refuse("is JSON, but not an object")
    return table

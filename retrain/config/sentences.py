"""Sentences about wrong values: pydantic's errors become one sentence each, with place, section,
key, value, valid values and the nearest name.
"""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from retrain.config.fields import choices_of
from retrain.config.keys import (
    CONDITION_KEYS,
    Key,
    all_keys,
    condition_homes,
    key_meant,
    keys_by_path,
    section_models,
)
from retrain.config.names import (
    ALIASES,
    DATA_FILE_SUFFIXES,
    LEGACY_PREFIX,
    NAME_CUTOFF,
    bracketed,
    instead,
    names_of,
    nearest,
    synonym,
)
from retrain.config.overrides import MAX_DIGITS
from retrain.config.removed import farewell
from retrain.config.schema import Condition, Provenance
from retrain.config.section import RuleViolations, Violation
from retrain.errors import MAX_SENTENCES
from retrain.system import is_path_text, listed, toml_value

MAX_VALUE_CHARACTERS = 80
"""Characters of a value that a sentence shows."""

_WHAT_IT_IS = {
    bool: "is a boolean",
    int: "is an integer",
    float: "is a number with a fraction",
    str: "is a string",
    list: "is a list",
    dict: "is a table",
}

_WRONG_NUMBER = {"finite_number": ("is not a finite number", "holds a number that is not finite")}
"""Kind of pydantic's error -> what a number is, and what a list holds."""
_WRONG_NUMBER |= dict.fromkeys(
    ("greater_than", "greater_than_equal", "less_than", "less_than_equal"),
    ("is out of range", "holds a number out of range"),
)


@dataclass(frozen=True)
class KeyLocation:
    """Names the place of a key: a file, a flag or a variable."""

    provenance: Provenance

    def of(self, *paths: str) -> str:
        """Return the place of a violation's keys: the first flag or variable among them, else the
        file.
        """
        given = map(self.provenance.origins.get, paths)
        return next((one for one in given if one and one != "file"), self.file)

    @property
    def file(self) -> str:
        return str(self.provenance.path or "configuration")

    def sentence(self, violation: Violation) -> str:
        return f"{self.of(*violation.keys)}: {_finish(violation.message)}"


def _finish(text: str) -> str:
    return text if text.endswith(("?", ".")) else text + "."


def details_of(error: ValidationError) -> list[ErrorDetails]:
    """Return pydantic's account of each problem. Ask once: there may be a hundred thousand."""
    return error.errors(include_url=False)


def violations_of(details: Iterable[ErrorDetails]) -> list[Violation]:
    """Return the broken rules among the problems."""
    found: list[Violation] = []
    for detail in details:
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, RuleViolations):
            found.extend(cause.violations)
    return found


def wrong_paths(details: Iterable[ErrorDetails]) -> set[str]:
    """Name ("section" or "section.key") of every value that is wrong by itself."""
    return {".".join(map(str, detail["loc"][:2])) for detail in details if detail["loc"]}


def field_sentences(
    problems: Iterable[ErrorDetails], data: Mapping[str, Any], place: KeyLocation
) -> tuple[list[str], int]:
    """Return one sentence for each of the first wrong values, and the number of the others. The
    members of a union count as one.
    """
    grouped: dict[tuple[int | str, ...], list[ErrorDetails]] = {}
    for detail in problems:
        if detail["loc"]:
            in_condition = detail["loc"][:2] == ("campaign", "conditions")
            grouped.setdefault(detail["loc"][: 4 if in_condition else 2], []).append(detail)
    first = islice(grouped.items(), MAX_SENTENCES)
    return [_sentence(loc, details, data, place) for loc, details in first], max(
        0, len(grouped) - MAX_SENTENCES
    )


def _sentence(
    loc: tuple[int | str, ...],
    details: list[ErrorDetails],
    data: Mapping[str, Any],
    place: KeyLocation,
) -> str:
    unknown = details[0]["type"] == "extra_forbidden"
    if len(loc) == 1:
        if unknown:
            text = _unknown_section(str(loc[0]), data)
        else:
            text = f"[{loc[0]}] is a section, and here it is {_shown(data[str(loc[0])])}"
        return f"{place.file}: {_finish(text)}"
    path = f"{loc[0]}.{loc[1]}"
    where = place.of(*_spellings(path))
    # Four parts locate a condition's key: campaign, conditions, number, key.
    if len(loc) == 4:
        return f"{where}: {_finish(_condition_problem(loc, details))}"
    if unknown:
        gone = farewell(path, f"[{loc[0]}] {loc[1]}")
        return f"{where}: {_finish(gone or _unknown_key(str(loc[0]), str(loc[1]), place))}"
    value = _value(data, path, details[0])
    return f"{where}: {_finish(_wrong_value(keys_by_path()[path], value, details))}"


def _spellings(path: str) -> list[str]:
    """Return the own name of a key, then its aliases."""
    return [path, *(alias for alias, canonical in ALIASES.items() if canonical == path)]


def _value(data: Mapping[str, Any], path: str, detail: ErrorDetails) -> Any:
    """Return the given value, under the key's own name or an alias. If a section gathered it from
    other names, as [schedule] does, return the refused value.
    """
    for candidate in _spellings(path):
        section, _, name = candidate.partition(".")
        if name in data.get(section, {}):
            return data[section][name]
    inner = detail["loc"][2:3]
    if inner:
        return {str(inner[0]): detail["input"]}
    return detail["input"]


def _unknown_section(name: str, data: Mapping[str, Any]) -> str:
    if not isinstance(data[name], dict):
        homes = [key.section for key in all_keys() if key.name == name]
        where = f"it belongs under [{homes[0]}]" if homes else "every key belongs under a [section]"
        return f"{name} = {_shown(data[name])} stands outside of a section; {where}"
    near = nearest(name, tuple(section_models()))
    return (
        f"[{name}] is not a section;"
        f" {f'did you mean [{near}]?' if near else 'sections are ' + ', '.join(section_models())}"
    )


def _unknown_key(section: str, name: str, place: KeyLocation) -> str:
    if section == "backend" and name.startswith(LEGACY_PREFIX):
        return (
            f"[backend] {name} is now in [backend.options] {name.removeprefix(LEGACY_PREFIX)};"
            f" run `retrain migrate-config {place.file} --write` to rewrite the file"
        )
    unknown = f"[{section}] {name} is not a key;"
    own = [key.name for key in all_keys() if key.section == section]
    others = [key.section for key in all_keys() if key.name == name]
    # Try the surest guess first and the weakest last.
    meant = synonym(name, section)
    if meant:
        home, _, known = meant.partition(".")
        return f"{unknown} did you mean {'' if home == section else f'[{home}] '}{known}?"
    if others and section == "schedule":
        return f'{unknown} write "{others[0]}.{name}"'
    if others:
        return f"{unknown} {name} belongs under [{others[0]}]"
    clause = instead(name)
    if clause:
        return f"{unknown} {clause}"
    near = nearest(name, own, NAME_CUTOFF)
    if near:
        return f"{unknown} did you mean {near}?"
    elsewhere = nearest(name, [key.name for key in all_keys()], NAME_CUTOFF)
    if elsewhere:
        home = next(key.section for key in all_keys() if key.name == elsewhere)
        return f"{unknown} did you mean [{home}] {elsewhere}?"
    return f"{unknown} keys of [{section}] are {', '.join(own)}"


def _condition_problem(loc: tuple[int | str, ...], details: list[ErrorDetails]) -> str:
    number, name = int(loc[2]) + 1, str(loc[3])
    where = f"[[campaign.conditions]] number {number}"
    if details[0]["type"] == "extra_forbidden":
        return f"{where}: {_unknown_setting(name)}"
    context = details[0].get("ctx", {})
    if name == "label":
        return (
            f"{where}: label = {_shown(details[0]['input'])}"
            f" {context.get('problem', 'is not a string')}"
        )
    value = details[0]["input"]
    if isinstance(value, str):
        near = nearest(value, choices_of(Condition.model_fields[name], names_of))
    else:
        near = None
    suffix = f'did you mean "{near}"?' if near else "give a built-in name or a dotted plugin path"
    return f"{where}: {name} = {_shown(value)} is not known; {suffix}"


def _unknown_setting(name: str) -> str:
    """Return the reason why a condition cannot set `name`."""
    gone = farewell(name)
    if gone:
        return gone
    known = keys_by_path().get(name)
    if known is not None:
        reason = (
            known.traits.not_for_a_condition or f"[{known.section}] belongs to the whole campaign"
        )
        return f"{name} is not for a condition; {reason}"
    homes = condition_homes(name)
    if homes:
        return f"{name} is a key of several sections; write {' or '.join(homes)}"
    section, _, word = name.rpartition(".")
    scheduled = [key.path for key in all_keys() if section == "schedule" and key.name == word]
    if scheduled:
        return f'{name} is not a key of a condition; write schedule."{scheduled[0]}"'
    meant = key_meant(word, section)
    near = (
        meant.path
        if meant
        else nearest(
            name, [*CONDITION_KEYS, *keys_by_path(), *(key.name for key in all_keys())], NAME_CUTOFF
        )
    )
    hint = (
        f"did you mean {near}?"
        if near
        else (
            "a condition has advantage_mode and transform_mode, or algorithm_mode, a label, and"
            " any key"
        )
    )
    return f"{name} is not a key of a condition; {hint}"


def _wrong_value(key: Key, value: Any, details: list[ErrorDetails]) -> str:
    gone = farewell(f"{key.path} = {value}", f"[{key.section}] {key.name} = {_shown(value)}")
    if gone:
        return gone
    refusal = next((detail for detail in details if detail["type"] == "refused"), None)
    # In a list, the refused item is the word with the possible typing error.
    word = (refusal or details[0])["input"] if isinstance(value, list) else value
    near = nearest(word, choices_of(key.field, names_of)) if isinstance(word, str) else None
    wrong = str(refusal["ctx"]["problem"]) if refusal else _what_is_wrong(key, value, details[0])
    allowed = "" if refusal and refusal["ctx"]["whole"] else f"; allowed: {key.allowed}"
    suffix = f'; did you mean "{near}"?' if near and near != value else ""
    takers = _takers(key, word)
    if takers:
        suffix = f'; "{word}" is a value of {listed(takers)}'
    is_source = key.path in ("data.source", "evaluation.source")
    place = _place_named(value) if is_source and isinstance(value, str) else ""
    if place:
        suffix = f'; did you mean "{place}"?'
    return f"[{key.section}] {key.name} = {_shown(value)} {wrong}{allowed}{suffix}"


def _takers(key: Key, word: Any) -> list[str]:
    """Name the keys of [algorithm] and [loss] that take a value written at another one there."""
    methods = [other for other in all_keys() if other.section in ("algorithm", "loss")]
    found = (bracketed(other.path) for other in methods if word in other.choices)
    return list(found) if key.section in ("algorithm", "loss") else []


def _place_named(word: str) -> str:
    """Return the path, as a data source, of a folder or a data file here with the name `word`; ""
    if there is none.
    """
    if is_path_text(word) and Path(word).is_dir():
        return f"./{word}"
    return next(
        (
            word + suffix
            for suffix in DATA_FILE_SUFFIXES
            if is_path_text(word) and Path(word + suffix).is_file()
        ),
        "",
    )


def _what_is_wrong(key: Key, value: Any, detail: ErrorDetails) -> str:
    kind = detail["type"]
    if kind in ("too_short", "string_too_short") or (value == [] and list in key.kinds):
        return "is empty"
    if kind in _WRONG_NUMBER:
        return _WRONG_NUMBER[kind][isinstance(value, list)]
    if (
        int in key.kinds
        and isinstance(value, str)
        and len(value) >= MAX_DIGITS
        and value.lstrip("+-").isdecimal()
    ):
        return "has too many digits"
    if kind == "string_unicode":
        return (
            "holds bytes that are not text in this locale's encoding"
            f" ({sys.getfilesystemencoding()}); set PYTHONUTF8=1"
        )
    if type(value) not in key.kinds and not (type(value) is int and float in key.kinds):
        if type(value) is float and int in key.kinds and value.is_integer():
            return f"is a float; write {value:.0f}"
        return _WHAT_IT_IS.get(type(value), f"is a {type(value).__name__}")
    if isinstance(value, list):
        return f"holds {_shown(detail['input'])}"
    return "is not one of its values"


def _shown(value: Any) -> str:
    text = toml_value(value)
    if len(text) <= MAX_VALUE_CHARACTERS:
        return text
    return text[: MAX_VALUE_CHARACTERS - 3] + "..."

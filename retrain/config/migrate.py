"""Rewriting keys that were removed, with comments, order and spacing kept.

`[backend] prime_rl_transport = "zmq"` becomes `transport = "zmq"` under `[backend.options]`.
"""

import difflib
from collections.abc import MutableMapping
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import InlineTable, Item, Table

from retrain.errors import ConfigurationError

BACKEND = "backend"
LEGACY_PREFIX = "prime_rl_"


def migrate_text(text: str, name: str = "the configuration") -> str:
    """The text with legacy keys in their new place; the same text, byte for byte, when there are none.

    Raises ConfigurationError for text that is not TOML, and for a key given in both places with different values.
    """
    try:
        document = tomlkit.parse(text)
    except TOMLKitError as error:
        message = str(error)
        raise ConfigurationError(f"{name} is not valid TOML: {message[:1].lower()}{message[1:].rstrip('.')}.") from error
    backend = document.get(BACKEND)
    if not isinstance(backend, MutableMapping):
        return text
    legacy = [key for key in backend if key.startswith(LEGACY_PREFIX)]
    if not legacy:
        return text
    adds_section = "options" not in backend and isinstance(backend, Table) and f"[{BACKEND}]" in text
    options = _options_of(backend, name, adds_section)
    for key in legacy:
        _move(backend, options, key, name)
    if adds_section and list(document)[-1] != BACKEND:
        options.add(tomlkit.nl())  # type: ignore[attr-defined]  # a blank line before the section that follows
    return _with_line_ends_of(text, tomlkit.dumps(document))


def unified_diff(old: str, new: str, name: str) -> str:
    """The difference as `diff -u` shows it; empty when there is none."""
    lines = difflib.unified_diff(old.splitlines(keepends=True), new.splitlines(keepends=True), name, f"{name} (migrated)")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _options_of(backend: MutableMapping[str, Any], name: str, adds_section: bool) -> MutableMapping[str, Any]:
    if "options" not in backend:
        backend["options"] = tomlkit.table() if adds_section else tomlkit.inline_table()
    options = backend["options"]
    if not isinstance(options, MutableMapping):
        raise ConfigurationError(f"{name}: [backend] options is not a table; make it one and migrate again.")
    return options


def _move(backend: MutableMapping[str, Any], options: MutableMapping[str, Any], key: str, name: str) -> None:
    new_key = key.removeprefix(LEGACY_PREFIX)
    value = backend[key]
    if new_key in options and options[new_key] != value:
        raise ConfigurationError(
            f"{name}: [backend] {key} = {_shown(value)} and [backend.options] {new_key} = {_shown(options[new_key])} "
            "contradict each other; delete one and migrate again."
        )
    del backend[key]
    if isinstance(options, InlineTable) and value.trivia.comment:
        _keep_comment(options, value.trivia.comment)
    if new_key not in options:
        options[new_key] = value


def _keep_comment(options: InlineTable, comment: str) -> None:
    """An inline table has no room for comments inside, so the comment joins the one behind it."""
    options.comment(f"{options.trivia.comment}; {comment.lstrip('# ')}".removeprefix("; "))


def _shown(value: Any) -> str:
    return value.as_string() if isinstance(value, Item) else str(value)


def _with_line_ends_of(old: str, new: str) -> str:
    """tomlkit ends the lines that it adds with a bare newline; a file of CRLF lines stays one."""
    return new.replace("\r\n", "\n").replace("\n", "\r\n") if "\r\n" in old else new

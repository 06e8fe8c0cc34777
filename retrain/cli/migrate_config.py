"""`retrain migrate-config`: rewrite keys that were removed, with comments and order kept.

Without a flag it only shows the difference; load_config stays strict until the file is rewritten.
"""

import difflib
import json
import shutil
import sys
import tomllib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tomlkit
import typer
from tomlkit import TOMLDocument
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import InlineTable, Item, Table

from retrain.cli.shared import AsJson, Form, refuse_several
from retrain.config.names import LEGACY_PREFIX
from retrain.config.removed import farewell, removed
from retrain.errors import ConfigurationError, EnvironmentFailure
from retrain.records.disk import replace_file

BACKEND = "backend"


def migrate_text(text: str, name: str = "the configuration") -> str:
    """Move the legacy keys of a TOML text to their new place, and delete those that left; without
    any, the text is returned byte for byte.

    Raises ConfigurationError for text that is not TOML, and for a key given in both places with
    different values.
    """
    try:
        document = tomlkit.parse(text)
    except TOMLKitError as error:
        message = str(error)
        raise ConfigurationError(
            f"{name} is not valid TOML: {message[:1].lower()}{message[1:].rstrip('.')}."
        ) from error
    left = _keys_that_left(document)
    for section, key in left:
        del document[section][key]
    backend = document.get(BACKEND)
    keys = backend if isinstance(backend, MutableMapping) else ()
    legacy = [key for key in keys if key.startswith(LEGACY_PREFIX)]
    if legacy:
        _move_all(document, legacy, text, name)
    if not legacy and not left:
        return text
    # Tomlkit ends the lines that it adds with a bare newline, also in a CRLF file.
    migrated = tomlkit.dumps(document)
    if "\r\n" in text:
        return migrated.replace("\r\n", "\n").replace("\n", "\r\n")
    return migrated


def _keys_that_left(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The section and name of each key in the document that left the configuration; of one that
    lost a value only, a person has to choose another.
    """
    rows = (name.split(".") for name in removed() if "." in name and " = " not in name)
    sections = {name: keys for name, keys in document.items() if isinstance(keys, Mapping)}
    return [(section, key) for section, key in rows if key in sections.get(section, ())]


def _move_all(document: TOMLDocument, legacy: list[str], text: str, name: str) -> None:
    backend: Any = document[BACKEND]
    # Only below a header [backend] can a header [backend.options] follow; elsewhere options stays
    # inline.
    adds_section = (
        "options" not in backend and isinstance(backend, Table) and f"[{BACKEND}]" in text
    )
    if "options" not in backend:
        backend["options"] = tomlkit.table() if adds_section else tomlkit.inline_table()
    options = backend["options"]
    if not isinstance(options, MutableMapping):
        raise ConfigurationError(
            f"{name}: [backend] options is not a table; make it one and migrate again."
        )
    for key in legacy:
        _move(backend, options, key, name)
    if adds_section and list(document)[-1] != BACKEND:
        options.add(tomlkit.nl())  # type: ignore[attr-defined]  # a blank line before the section that follows


def unified_diff(old: str, new: str, name: str) -> str:
    """Return the difference as `diff -u` shows it; empty if there is none."""
    lines = difflib.unified_diff(
        old.splitlines(keepends=True), new.splitlines(keepends=True), name, f"{name} (migrated)"
    )
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


def _move(
    backend: MutableMapping[str, Any], options: MutableMapping[str, Any], key: str, name: str
) -> None:
    new_key = key.removeprefix(LEGACY_PREFIX)
    value = backend[key]
    if new_key in options and options[new_key] != value:
        raise ConfigurationError(
            f"{name}: [backend] {key} = {_shown(value)} and [backend.options] {new_key} ="
            f" {_shown(options[new_key])} contradict each other; delete one and migrate again."
        )
    del backend[key]
    if isinstance(options, InlineTable) and value.trivia.comment:
        # An inline table has no room for comments inside, so the comment joins the one behind it.
        options.comment(
            f"{options.trivia.comment}; {value.trivia.comment.lstrip('# ')}".removeprefix("; ")
        )
    if new_key not in options:
        options[new_key] = value


def _shown(value: Any) -> str:
    if isinstance(value, Item):
        return value.as_string()
    return str(value)


def command(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="The configuration; left out with --stdin."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Exit 1 if the file needs migration; write nothing.")
    ] = False,
    write: Annotated[bool, typer.Option("--write", help="Rewrite the file in place.")] = False,
    backup: Annotated[
        bool, typer.Option("--backup", help="With --write: keep the old file as FILE.bak.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Write the result to this file instead.")
    ] = None,
    stdin: Annotated[
        bool, typer.Option("--stdin", help="Read the configuration from standard input.")
    ] = False,
    stdout: Annotated[
        bool, typer.Option("--stdout", help="Print the whole result instead of the difference.")
    ] = False,
    form: Form = "text",
    as_json: AsJson = False,
) -> None:
    """Rewrite removed keys of an older configuration; without a flag, show the difference."""
    _check_usage(
        path, check=check, write=write, backup=backup, output=output, stdin=stdin, stdout=stdout
    )
    if path is None:
        name, old = "standard input", sys.stdin.read()
    else:
        name, old = str(path), _read(path)
    done = Migration(name, old, migrate_text(old, name))
    if output is not None:
        _write_new(output, done)
    elif write and path is not None:
        _rewrite(path, done, backup=backup)
    if as_json or form == "json":
        print(json.dumps(done.to_json(), indent=2, ensure_ascii=False))
    else:
        for sentence in done.deleted:
            print(sentence, file=sys.stderr)
        sys.stdout.write(done.new if stdout else _result(done, check=check))
    if check and done.is_needed:
        raise typer.Exit(1)


def _result(done: "Migration", *, check: bool) -> str:
    """The text to print: what was written, what `check` finds, or the difference."""
    if done.said:
        return "\n".join(done.said) + "\n"
    if not done.is_needed:
        return f"{done.name} needs no migration.\n"
    if check:
        return (
            f"{done.name} needs migration; `retrain migrate-config` with --write or --output does"
            " it.\n"
        )
    return unified_diff(done.old, done.new, done.name)


@dataclass
class Migration:
    """The fate of one configuration."""

    name: str
    old: str
    new: str
    wrote: Path | None = None
    backup: Path | None = None
    said: list[str] = field(default_factory=list)

    @property
    def is_needed(self) -> bool:
        return self.old != self.new

    @property
    def deleted(self) -> list[str]:
        """One sentence for each key that is deleted."""
        return [
            f"Deleted: {farewell(f'{section}.{key}', f'[{section}] {key}')}."
            for section, key in _keys_that_left(tomllib.loads(self.old))
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "file": self.name,
            "needs_migration": self.is_needed,
            "difference": unified_diff(self.old, self.new, self.name),
            "migrated": self.new,
            "deleted": self.deleted,
            "wrote": str(self.wrote) if self.wrote else None,
            "backup": str(self.backup) if self.backup else None,
        }


def _check_usage(
    path: Path | None,
    *,
    check: bool,
    write: bool,
    backup: bool,
    output: Path | None,
    stdin: bool,
    stdout: bool,
) -> None:
    if (path is None) != stdin:
        raise ConfigurationError(
            "migrate-config reads one configuration: name a file, or give --stdin and no file."
        )
    given = {"--check": check, "--write": write, "--output": output, "--stdout": stdout}
    refuse_several(given, "see the difference")
    if write and stdin:
        raise ConfigurationError(
            "--write rewrites a file and --stdin has none; use --stdout or --output."
        )
    if backup and not write:
        raise ConfigurationError("--backup keeps the old file of --write; give both.")


def _read(path: Path) -> str:
    try:
        # Bytes, so that the file's line ends stay as they are.
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        raise ConfigurationError(f"{path} does not exist.") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{path} is not UTF-8 ({error.reason} at byte {error.start}); a TOML file is."
        ) from error
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from error


def _write_new(output: Path, done: Migration) -> None:
    """Write a new file, never over another one. The same command twice is safe, because the same
    content is no change.
    """
    try:
        with output.open("xb") as file:
            file.write(done.new.encode("utf-8"))
    except FileExistsError as error:
        if output.is_file() and _read(output) == done.new:
            done.said.append(f"{output} holds the result already.")
            return
        raise ConfigurationError(
            f"--output {output} exists with other content and is not overwritten; name another"
            " file."
        ) from error
    except OSError as error:
        raise EnvironmentFailure(
            f"--output {output} cannot be written: {error.strerror}."
        ) from error
    done.wrote = output
    done.said.append(f"Wrote {output}.")


def _rewrite(path: Path, done: Migration, *, backup: bool) -> None:
    if not done.is_needed:
        return
    # A link to a configuration stays a link.
    target = path.resolve()
    try:
        if backup:
            copy, number = path.with_name(f"{path.name}.bak"), 2
            # An older backup is never lost.
            while copy.exists():
                copy, number = path.with_name(f"{path.name}.bak{number}"), number + 1
            shutil.copy2(path, copy)
            done.backup = copy
            done.said.append(f"Kept the old file as {copy}.")
        mode = target.stat().st_mode
        replace_file(target, done.new)
        target.chmod(mode)
    except OSError as error:
        raise EnvironmentFailure(f"{path} cannot be rewritten: {error.strerror}.") from error
    done.wrote = path
    done.said.append(f"Rewrote {path}.")

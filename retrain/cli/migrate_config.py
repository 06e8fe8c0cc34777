"""`retrain migrate-config`: rewrite keys that this version no longer has, and keep comments and
order.

Without a flag it only shows the difference; load_config refuses the file until you rewrite it.
"""

import difflib
import json
import shutil
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Annotated, Any

import tomlkit
import typer
from tomlkit.items import InlineTable, Table

from retrain.cli.shared import Form, refuse_several, write_files
from retrain.config.load import parse_named, read_text
from retrain.config.names import LEGACY_PREFIX, bracketed, by_path
from retrain.config.removed import REDEFINED, farewell, removed
from retrain.errors import ConfigurationError
from retrain.records.disk import replace_file
from retrain.system import Json, toml_value


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
) -> None:
    """Rewrite removed keys of an older configuration; without a flag, show the difference."""
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
    name, old = str(path or "standard input"), read_text(path) if path else _standard_input()
    result = _migrated(old, name)
    if output is not None:
        write_files({output: result["migrated"]}, "name another file with --output")
        result["wrote"] = str(output)
    elif write and path and result["needs_migration"]:
        result |= {"wrote": name, "backup": _rewrite(path, result["migrated"], backup)}
    if form == "json":
        print(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        _print(result, stdout, check)
    if check and result["needs_migration"]:
        raise typer.Exit(1)


def _standard_input() -> str:
    try:
        return sys.stdin.read().removeprefix("\ufeff")
    except UnicodeDecodeError:
        raise ConfigurationError("standard input is not UTF-8 text; save it as UTF-8.") from None


def _migrated(old: str, name: str) -> Json:
    new, sections = migrate_text(old, name), parse_named(old, name)
    left = _left_to_decide(sections)
    return {
        "file": name,
        "needs_migration": old != new or bool(left),
        "difference": unified_diff(old, new, name),
        "migrated": new,
        "deleted": [
            f"Deleted: {farewell(path, bracketed(path))}." for path in _keys_that_left(sections)
        ],
        "left_to_decide": [f"Yours to change: {farewell(one)}." for one in left],
        "advice": [REDEFINED]
        * ('"algorithm_mode": "dr_grpo"' in json.dumps(sections, default=str)),
        "wrote": None,
        "backup": None,
    }


def _print(result: Json, whole: bool, check: bool) -> None:
    """Print which keys it deletes, which a person has to change and which have another meaning now.
    Then print the whole result, the written file, what `check` finds, or the difference.
    """
    for sentence in (*result["deleted"], *result["left_to_decide"], *result["advice"]):
        print(sentence, file=sys.stderr)
    name = result["file"]
    if whole:
        print(result["migrated"], end="")
    elif result["wrote"]:
        if result["backup"]:
            print(f"Kept the old file as {result['backup']}.")
        print(f"Wrote {result['wrote']}.")
    elif not result["needs_migration"]:
        print(f"{name} needs no migration.")
    elif check:
        how = (
            "`retrain migrate-config` with --write or --output does it"
            if result["difference"]
            else "make the changes above"
        )
        print(f"{name} needs migration; {how}.")
    else:
        print(result["difference"], end="")


def _rewrite(path: Path, new: str, backup: bool) -> str | None:
    """Replace a file, and return the path of its copy if `backup` asks for one."""
    copy, number = path.with_name(f"{path.name}.bak"), 1
    if backup:
        # Keep older backups.
        while copy.exists():
            number += 1
            copy = path.with_name(f"{path.name}.bak{number}")
        shutil.copy2(path, copy)
    # A link to a configuration stays a link.
    target = path.resolve()
    mode = target.stat().st_mode
    replace_file(target, new)
    target.chmod(mode)
    return str(copy) if backup else None


def unified_diff(old: str, new: str, name: str) -> str:
    """Return the difference as `diff -u` shows it; empty if there is none."""
    lines = difflib.unified_diff(
        old.splitlines(), new.splitlines(), name, f"{name} (migrated)", lineterm=""
    )
    return "".join(f"{line}\n" for line in lines)


def migrate_text(text: str, name: str = "the configuration") -> str:
    """Move the legacy keys of a TOML text to their new place, and delete the keys that this version
    no longer has. Without such keys, return the text byte for byte.

    Raises ConfigurationError for text that is not TOML, and for a key given in both places with
    different values.
    """
    sections = parse_named(text, name)
    left = _keys_that_left(sections)
    legacy = [path for path in by_path(sections) if path.startswith(f"backend.{LEGACY_PREFIX}")]
    if not left and not legacy:
        return text
    document: Any = tomlkit.parse(text)
    for path in left:
        section, _, key = path.partition(".")
        del document[section][key]
    if legacy:
        _move(document, legacy, "[backend]" in text, name)
    # Tomlkit ends the lines that it adds with a bare newline, also in a CRLF file.
    migrated = tomlkit.dumps(document)
    if "\r\n" in text:
        return migrated.replace("\r\n", "\n").replace("\n", "\r\n")
    return migrated


def _keys_that_left(sections: Json) -> list[str]:
    """Return each "section.key" that left the configuration."""
    given = by_path(sections)
    return [path for path in removed() if path in given]


def _left_to_decide(sections: Json) -> list[str]:
    """Return each value that left, and each key that left in a condition or the grid of a
    campaign.
    """
    named = [f"{path} = {value}" for path, value in by_path(sections).items()]
    campaign = sections.get("campaign")
    if isinstance(campaign, dict):
        tables = [campaign.get("grid"), *(campaign.get("conditions") or [])]
        for table in (one for one in tables if isinstance(one, dict)):
            named += [*table, *by_path(table)]
    return [name for name in dict.fromkeys(named) if farewell(name)]


def _move(document: Any, legacy: list[str], has_header: bool, name: str) -> None:
    """Move the legacy keys of [backend] to its options."""
    backend, adds_table = document["backend"], False
    if "options" not in backend:
        # Only below a header [backend] can a header [backend.options] follow; elsewhere options
        # stays inline.
        adds_table = has_header and isinstance(backend, Table)
        backend["options"] = tomlkit.table() if adds_table else tomlkit.inline_table()
    options = backend["options"]
    if not isinstance(options, MutableMapping):
        raise ConfigurationError(
            f"{name}: [backend] options is not a table. Make it one and migrate again."
        )
    for path in legacy:
        key = path.removeprefix("backend.")
        value, new_key = backend[key], key.removeprefix(LEGACY_PREFIX)
        del backend[key]
        if isinstance(options, InlineTable) and value.trivia.comment:
            # An inline table has no room for comments inside, so they join the comment behind it.
            comments = (options.trivia.comment, value.trivia.comment.lstrip("# "))
            options.comment("; ".join(filter(None, comments)))
        if options.setdefault(new_key, value) != value:
            raise ConfigurationError(
                f"{name}: [backend] {key} = {toml_value(value)} and [backend.options] {new_key}"
                f" = {toml_value(options[new_key])} contradict each other. Delete one and"
                " migrate again."
            )
    if adds_table and list(document)[-1] != "backend":
        # A blank line before the section that follows.
        options.add(tomlkit.nl())

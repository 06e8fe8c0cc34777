"""`retrain man`: the manual, whole or by topic, for people and programs."""

import json
import os
import shutil
import sys
from typing import Annotated, Any

import typer

from retrain.cli.manual import Topic, read_source, source_path, synced, topics_of
from retrain.cli.shared import AsJson, Form, refuse_several
from retrain.errors import ConfigurationError, EnvironmentFailure


def command(
    name: Annotated[
        str,
        typer.Argument(
            metavar="TOPIC",
            help="One topic: quickstart, a section of the configuration, a command.",
        ),
    ] = "",
    topic: Annotated[str, typer.Option(help="The same as TOPIC.")] = "",
    list_topics: Annotated[
        bool, typer.Option("--list-topics", help="Print the names of the topics.")
    ] = False,
    path: Annotated[
        bool,
        typer.Option("--path", help="Print where the manual's source lies, to search or edit it."),
    ] = False,
    sync: Annotated[
        bool, typer.Option("--sync", help="Make the generated parts of the source anew.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Exit 1 if `--sync` would change the source.")
    ] = False,
    form: Form = "text",
    as_json: AsJson = False,
) -> None:
    """Read the manual: in a pager in a terminal, as it is in a pipe, or as JSON."""
    given = {
        f"--topic {name}": name,
        f"--topic {topic}": topic,
        "--list-topics": list_topics,
        "--path": path,
        "--sync": sync,
        "--check": check,
    }
    refuse_several(given, "read the manual")
    if path:
        print(source_path())
    elif sync or check:
        _sync(write=sync)
    else:
        _print(name or topic, as_json=as_json or form == "json", names_only=list_topics)


def _print(name: str, *, as_json: bool, names_only: bool) -> None:
    """One topic or, without a name, all of them."""
    topics = topics_of(read_source())
    if name:
        found = [_topic(topics, name)]
    else:
        found = list(topics.values())
    if as_json:
        rows = [_as_json(each, contents=not names_only) for each in found]
        print(json.dumps(rows[0] if name else rows, indent=2, ensure_ascii=False))
    elif names_only:
        print("\n".join(_overview(found)))
    else:
        _show("\n".join(f"== {each.name} ==\n\n{each.text}" for each in found))


def _topic(topics: dict[str, Topic], name: str) -> Topic:
    """Find a topic by its name, [name] too. Raises ConfigurationError with the nearest name, or
    with the section of a key.
    """
    found = topics.get(name.strip("[]").lower())
    if found:
        return found
    from retrain.config.keys import keys_by_path
    from retrain.config.names import nearest

    key = name.removeprefix("--").replace("-", "_")
    homes = [
        each.section
        for path, each in keys_by_path().items()
        if key in (path, each.name, each.flag[2:].replace("-", "_"))
    ]
    if homes:
        section = f"`retrain man {homes[0]}` has that section, `retrain help {key}` the key."
        raise ConfigurationError(f"{name} is a key of [{homes[0]}]: {section}")
    near = nearest(name, topics)
    hint = "`retrain man --list-topics` lists them."
    if near:
        hint = f"did you mean {near}?"
    raise ConfigurationError(f"{name!r} is not a topic of the manual; {hint}")


def _overview(topics: list[Topic]) -> list[str]:
    from retrain.cli.parameters import columns
    from retrain.cli.usage import MAX_WIDTH

    width = min(shutil.get_terminal_size().columns, MAX_WIDTH)
    return columns(
        [(each.name, each.summary.removeprefix(f"[{each.name}]").strip()) for each in topics], width
    )


def _as_json(topic: Topic, *, contents: bool) -> dict[str, Any]:
    """A topic; a section of the configuration with its keys as data."""
    row: dict[str, Any] = {"name": topic.name, "kind": topic.kind, "summary": topic.summary}
    if not contents:
        return row
    row["text"] = topic.text
    if topic.kind == "section":
        from retrain.config.keys import all_keys

        row["keys"] = [
            {"key": key.path, "type": key.type_name,
            "default": key.field.get_default(call_default_factory=True), "allowed": key.allowed,
             "flag": key.flag, "variable": key.variable, "doc": key.doc}
            for key in all_keys() if key.section == topic.name
        ]  # fmt: skip
    return row


def _sync(*, write: bool) -> None:
    """Refresh the source or, without `write`, say whether it needs that and exit with 1 if so."""
    from retrain.records.disk import replace_file

    path, old = source_path(), read_source()
    new = synced(old)
    before, after = topics_of(old), topics_of(new)
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if old == new:
        print(f"{path} is up to date.")
    elif write:
        try:
            replace_file(path, new)
        except OSError as error:
            raise EnvironmentFailure(f"{path} cannot be written: {error.strerror}.") from error
        print(f"Refreshed {', '.join(changed)} in {path}.")
    else:
        print(f"{path} is out of date ({', '.join(changed)}); `retrain man --sync` refreshes it.")
        raise typer.Exit(1)


def _show(text: str) -> None:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        sys.stdout.write(text)
        return
    import pydoc

    # As git sets it: less ends at once where all fits, and leaves it on the screen.
    os.environ.setdefault("LESS", "FRX")
    pydoc.pager(text)

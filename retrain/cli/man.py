"""`retrain man`: the manual, whole or by topic, for people and programs."""

import json
import os
import sys
import textwrap
from typing import Annotated, Any

import typer

from retrain.cli.help import about
from retrain.cli.manual import WIDTH, Topic, read_source, source_path, synced, topics_of
from retrain.cli.shared import Form, refuse_several


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
    name = name or topic
    if path:
        print(source_path())
        return
    if sync or check:
        _sync(write=sync)
        return
    topics = topics_of(read_source())
    found = list(topics.values())
    if name:
        found = [topics.get(name.strip("[]").lower()) or Topic(name, about(name))]
    if form == "json":
        rows = [_as_json(each, contents=not list_topics) for each in found]
        print(json.dumps(rows[0] if name else rows, indent=2, ensure_ascii=False))
    elif list_topics:
        for each in found:
            summary = each.summary.removeprefix(f"[{each.name}]").strip()
            print(textwrap.fill(f"  {each.name:<16}{summary}", WIDTH, subsequent_indent=" " * 18))
    else:
        _show("\n".join(f"== {each.name} ==\n\n{each.text}" for each in found))


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
    if old == new:
        print(f"{path} is up to date.")
    elif write:
        replace_file(path, new)
        print(f"Refreshed {path}.")
    else:
        print(f"{path} is out of date; `retrain man --sync` refreshes it.")
        raise typer.Exit(1)


def _show(text: str) -> None:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        sys.stdout.write(text)
        return
    import pydoc

    # As git sets it: less ends at once where all fits, and leaves it on the screen.
    os.environ.setdefault("LESS", "FRX")
    pydoc.pager(text)

"""`retrain man`: the manual, whole or by topic, for people and programs."""

import json
import os
import sys
import textwrap
from typing import Annotated, Any

import typer

from retrain.cli.help import FOOTER, about, reference
from retrain.cli.manual import (
    BEGIN,
    END,
    GENERATED,
    HEADING,
    WIDTH,
    Topic,
    read_source,
    source_path,
    topics_of,
)
from retrain.cli.shared import Form, refuse_several
from retrain.cli.usage import COMMANDS, usage


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
        bool, typer.Option("--sync", help="Write the generated parts of the source again.")
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
    if path:
        print(source_path())
    elif sync or check:
        _sync(write=sync)
    else:
        _print(name or topic, form, list_topics)


def _print(name: str, form: str, names_only: bool) -> None:
    """Print one topic, or all topics without a name."""
    topics = topics_of(read_source())
    found = list(topics.values())
    if name:
        found = [topics.get(name.strip("[]").lower()) or Topic(name, about(name))]
    if form == "json":
        rows = [_as_json(each, contents=not names_only) for each in found]
        print(json.dumps(rows[0] if name else rows, indent=2, ensure_ascii=False))
    elif names_only:
        for each in found:
            summary = each.summary.removeprefix(f"[{each.name}]").strip()
            print(textwrap.fill(f"  {each.name:<16}{summary}", WIDTH, subsequent_indent=" " * 18))
    else:
        _show("\n".join(f"== {each.name} ==\n\n{each.text}" for each in found))


def _as_json(topic: Topic, *, contents: bool) -> dict[str, Any]:
    """Return a topic, or a section of the configuration with its keys as data."""
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
    """Refresh the source. Without `write`, say whether it needs that and exit with 1 if so."""
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


def synced(source: str) -> str:
    """Return the source with new generated parts, each at the end of its topic. Handwritten text
    stays, and parts of topics that no longer exist disappear.
    """
    parts = _generated_parts()
    texts = {name: GENERATED.sub("", topic.source) for name, topic in topics_of(source).items()}
    pieces = [HEADING.split(source)[0]]
    for name in dict.fromkeys([*texts, *parts]):
        text = texts.get(name, "")
        if name in parts:
            text = f"{text.rstrip()}\n\n{BEGIN}\n{parts[name].strip()}\n{END}\n\n"
        if text.strip():
            pieces.append(f"== {name} =={text}")
    return "".join(pieces)


def _generated_parts() -> dict[str, str]:
    """Map each topic with a generated part to that part."""
    from retrain.cli.parameters import help_page
    from retrain.config.keys import section_models

    parts = {"overview": f"{usage()}\n{FOOTER}"}
    for name, summary in COMMANDS.items():
        parts[name] = f"{summary[:1].upper()}{summary[1:]}.\n\n{help_page(name, WIDTH)}"
    return parts | {name: reference(name) for name in section_models()}


def _show(text: str) -> None:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        sys.stdout.write(text)
        return
    import pydoc

    # git sets the same: less ends at once if all fits, and leaves the text on the screen.
    os.environ.setdefault("LESS", "FRX")
    pydoc.pager(text)

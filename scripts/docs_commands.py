"""docs/commands.md: every command with an example, its arguments and options, made from the
commands themselves.
"""

from collections.abc import Iterator

import typer

from retrain.cli.parameters import command_named
from retrain.cli.usage import COMMANDS, EXAMPLES, FLAGS, SWITCHES

PAGES = {
    "explain": "capacity-planning.md",
    "status": "reading-a-run.md",
    "eval": "comparing.md",
    "export": "use-your-adapter.md",
    "compare": "comparing.md",
    "report": "reading-a-run.md",
    "inspect": "reading-a-run.md",
    "audit": "rewards.md",
    "verify": "resuming.md",
    "diff": "resuming.md",
    "power": "comparing.md",
    "xray": "xray.md",
    "serve": "inference-engines.md",
    "backends": "backends.md",
    "plugins": "plugins.md",
    "init-plugin": "plugins.md",
}
"""Command -> the page of docs/ that shows what it prints."""

INTRODUCTION = """\
# Commands

Look up every command and its options. `retrain COMMAND --help` prints the same.

## retrain [FILE.toml] [flags]

Does what the file describes: a training run, a campaign if it has `[campaign]`, or a squeeze job if
it has `[squeeze] adapter_path`. Without a file it reads ./retrain.toml. It first loads a file
named `.env` in the current folder, for keys and tokens.

```bash
retrain examples/lab.toml --seed 42 --lr 1e-4 --log-dir logs/lab_s42
```
"""

EXIT_CODES = """\
## Exit codes

| code | meaning |
|---|---|
| 0 | done |
| 1 | the run failed, or a bug: the message says which |
| 2 | wrong usage or configuration; retrain changed nothing |
| 3 | the machine lacks something: a package, memory, a server |
| 129, 130, 143 | stopped by SIGHUP, Ctrl-C or SIGTERM, and saved: [resume it](resuming.md) |
"""


def commands_document() -> str:
    """The text of docs/commands.md."""
    flags = _table(
        ("flag", "what it does"),
        ((f"`{flag}`", text) for flag, text in {**SWITCHES, **FLAGS}.items()),
    )
    every = (
        "The most used flags; every key of the configuration has one, in [its"
        " table](configuration.md)."
    )
    return (
        "\n\n".join(
            [INTRODUCTION.rstrip(), every, flags, *map(_command, COMMANDS), EXIT_CODES.rstrip()]
        )
        + "\n"
    )


def help_records(name: str) -> list[tuple[str, str]]:
    """Return each argument and option of a command with its help."""
    command = command_named(name)
    context = typer.Context(command)
    records = [parameter.get_help_record(context) for parameter in command.params]
    return [record for record in records if record]


def _command(name: str) -> str:
    rows = [(f"`{head}`", text) for head, text in help_records(name)]
    page = f"[More of it]({PAGES[name]})." if name in PAGES else ""
    parts = [
        f"## retrain {name}",
        *(" ".join(part.split()) for part in (command_named(name).help or "").split("\n\n")),
        f"```bash\n{EXAMPLES[name]}\n```",
        _table(("argument or option", "what it does"), rows) if rows else "",
        page,
    ]
    return "\n\n".join(part for part in parts if part)


def _table(heads: tuple[str, str], rows: Iterator[tuple[str, str]] | list[tuple[str, str]]) -> str:
    escaped = [tuple(cell.replace("|", "\\|") for cell in row) for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, ("---", "---"), *escaped])

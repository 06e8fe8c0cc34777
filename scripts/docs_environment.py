"""docs/environment-variables.md: the variables that a run reads, from the topic `variables` of the
manual, and the prefix of every section.
"""

import re
import textwrap
from collections.abc import Iterator

from retrain.cli.manual import read_source, topics_of

_ENTRY = re.compile(
    r"^  (?P<names>[A-Z(][^\n]*?)(?:  +|\n +)(?P<what>\S[^\n]*(?:\n {10,}[^\n]*)*)", re.MULTILINE
)
INTRODUCTION = """\
# Environment variables

Keep keys out of files, set a key for many runs, or run without a network.

retrain first loads a file `.env` in the current folder. A variable of the shell wins over that file.

```text
HF_TOKEN=...
WANDB_API_KEY=...
RETRAIN_LOGGING_WANDB_PROJECT=sums
```

`make docs` writes this page from the manual (`retrain man variables`).
"""


def environment_document() -> str:
    """The text of docs/environment-variables.md."""
    parts = [INTRODUCTION.rstrip()]
    for title, block in _blocks(topics_of(read_source())["variables"].text):
        rows = [
            f"| {_names(entry['names'])} | {' '.join(entry['what'].split())} |"
            for entry in _ENTRY.finditer(block)
        ]
        if rows:
            parts += [f"## {title}", "\n".join(["| variable | what it does |", "|---|---|", *rows])]
    each = (
        "`RETRAIN_TRAINING_LR=1e-4` sets `[training] lr`. The names of the section and of the key"
        " are in capitals, for every section of the [configuration](configuration.md)."
    )
    parts.append("## Of each section\n\n" + "\n".join(textwrap.wrap(each, 100)))
    return "\n\n".join(parts) + "\n"


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """The title and the lines of each indented block."""
    title = "Keys of the configuration"
    for part in text.split("\n\n"):
        if part.startswith("  "):
            yield title, part
        elif part.endswith(":"):
            title = part.removesuffix(":").split(",")[0]


def _names(names: str) -> str:
    return names if names.startswith("(") else ", ".join(f"`{one}`" for one in names.split(", "))

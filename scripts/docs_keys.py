"""The files that are made from the schema: examples/all_keys.toml, the tables of
docs/configuration.md, the JSON Schema.
"""

import json
import textwrap
from collections.abc import Iterator

from retrain.cli.init import template_text
from retrain.config.json_schema import json_schema
from retrain.config.keys import Key, all_keys, section_models
from retrain.config.names import ALIASES, bracketed
from retrain.config.schema import BACKEND_OPTIONS, DEFAULT_CONDITIONS
from retrain.system import toml_value

WIDTH = 110
"""Columns of comments."""


def annotated_toml() -> str:
    """Every key with its default and its documentation. As it stands, it loads as the defaults.

    Keys whose being unset says something, and sections that act by being there, are commented out.
    """
    header = (
        "Every key with its default; delete what you do not change. "
        "A key or section that is commented out does what its comment says while unset."
    )
    sections = ["\n".join(_annotated_section(name)) for name in section_models()]
    return "\n".join([*_comment(header), "", *("\n\n".join(sections)).split("\n")]) + "\n"


def _annotated_section(section: str) -> Iterator[str]:
    off = "# " if section_models()[section].traits.acts_by_presence else ""
    yield from _comment(_doc_of_section(section))
    yield f"{off}[{section}]"
    for key in _keys_of(section):
        if key.path == "campaign.conditions":
            continue
        # The names that a key takes are added where its documentation does not say them.
        unnamed = ":" not in key.doc and any(choice not in key.doc for choice in key.choices)
        yield from _comment(f"{key.doc[:-1]}: {', '.join(key.choices)}." if unnamed else key.doc)
        example = (key.field.examples or [None])[0] if key.default is None else key.default
        yield (
            f"{off or ('# ' if key.traits.meaningful_unset else '')}{key.name} ="
            f" {toml_value(example)}"
        )
    if section == "campaign":
        yield "# The conditions; without any, these five."
        for condition in DEFAULT_CONDITIONS:
            yield "# [[campaign.conditions]]"
            yield from (
                f"# {name} = {toml_value(value)}"
                for name, value in condition.model_dump(exclude_unset=True).items()
            )


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent="# ",
        subsequent_indent="# ",
        break_on_hyphens=False,
        break_long_words=False,
    )


def _keys_of(section: str) -> list[Key]:
    return [key for key in all_keys() if key.section == section]


def _doc_of_section(section: str) -> str:
    return (section_models()[section].__doc__ or "").split("\n")[0]


CONFIGURATION = """\
# Configuration

Look up every key of a run's TOML file and its flag. Without a file, `retrain` reads `retrain.toml`
in the current folder.

```bash
retrain init --output my.toml      # a file to change; `--list` shows others
retrain explain my.toml            # every value and where it comes from
```

```toml
[model]
# a hub id, a local folder, or "lab"
model = "Qwen/Qwen3-4B-Instruct-2507"

[data]
# math, gsm8k, lab, hub:NAME, a .jsonl or .parquet file, a plugin
source = "gsm8k"

[reward]
# match, math, custom, judge, random, or several with weights
type = "math"

[algorithm]
# grpo, maxrl, rloo, grpo_std, reinforce, reinforce_pp, a plugin
advantage_mode = "maxrl"
# none, gtpo, hicra, gtpo_hicra, gtpo_sepa, ..., a plugin
transform_mode = "gtpo_sepa"

[training]
max_steps = 100
batch_size = 4     # prompts per step
group_size = 8     # completions per prompt
max_tokens = 1024

[evaluation]
every = 25
at_start = true
```

## Order of precedence

A later one wins: the defaults, a [recipe](advantages.md#whole-algorithms-algorithm_mode), the file,
[environment variables](environment-variables.md), flags.

- **Flags.** Every key is one: `--seed 42`, `--lr 1e-4`, `--wandb-project my-run`. A name that two
  sections have carries its section: `--loss-mode`. The tables below name the flag where it is not
  `--` and the key. `--resume DIR` continues a run.
- **Tables of parameters.** `--algorithm-param key=value`, `--advantage-param key=value` and
  `--transform-param key=value` may occur several times.
- **An editor** completes and checks a file whose first line is
  `#:schema docs/retrain.schema.json`; `retrain help config --json` prints that schema.
- **Every key counts.** retrain uses it, refuses it, or reports it as unused. A wrong key gets a sentence
  before step 0.
- **A file of an older version**: `retrain migrate-config my.toml` shows what it would change, and
  `--write` does it.

## The data set

`[data] source = "math"` is the 4,551 problems of hendrycks/MATH's training set in five subjects, from
the EleutherAI mirror: intermediate algebra, precalculus, number theory, counting and probability,
geometry. The hub's library downloads it once and keeps it. `max_examples` takes fewer.
[Your own data](data.md) are a file, and [an environment](environments.md) answers back.

## Every key

`make docs` writes these tables. [all_keys.toml](../examples/all_keys.toml) has them as one file, and
`retrain help config` prints it.
"""


def markdown_tables() -> str:
    """The page of the configuration: how it is read, and one table a section."""
    parts = [CONFIGURATION.rstrip()]
    for section in section_models():
        parts.append(f"### [{section}]\n\n{_doc_of_section(section)}")
        rows = [_row(key) for key in _keys_of(section)]
        parts.append(
            "\n".join(
                [
                    "| key | type | default | what it does |",
                    "|---|---|---|---|",
                    *rows,
                ]
            )
        )
        if section == "backend":
            parts.extend(_options_table(backend) for backend in BACKEND_OPTIONS)
    parts.append(
        "### Other names\n\n"
        + "\n".join(
            f"- `{bracketed(a)}` is another name of `{bracketed(c)}`." for a, c in ALIASES.items()
        )
    )
    return "\n\n".join(parts) + "\n"


def _row(key: Key) -> str:
    default = "unset" if key.default is None else f"`{toml_value(key.default)}`"
    return _cells(f"`{key.name}`", key.type_name, default, f"{key.doc} {_allowed(key)}".rstrip())


def _allowed(key: Key) -> str:
    """What its type does not say: the values, and a flag that its name does not tell."""
    plain = {"a string", "true or false", "an integer", "a number", key.type_name}
    allowed = "" if key.allowed in plain else f"*{key.allowed[0].upper()}{key.allowed[1:]}.*"
    flag = "" if key.flag == f"--{key.name.replace('_', '-')}" else f"`{key.flag}`"
    return f"{allowed} {flag}".strip()


def _options_table(backend: str) -> str:
    fields = BACKEND_OPTIONS[backend].model_fields.items()
    options = [Key("backend.options", name, field, field.get_default()) for name, field in fields]
    rows = [
        _cells(
            f"`{key.name}`",
            key.type_name,
            f"`{toml_value(key.default)}`",
            f"{key.doc} *{key.allowed[0].upper()}{key.allowed[1:]}.*",
        )
        for key in options
    ]
    return "\n".join(
        [
            f"#### [backend.options] of {backend}\n",
            "| key | type | default | what it does |",
            "|---|---|---|---|",
            *rows,
        ]
    )


def _cells(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def artifacts() -> dict[str, str]:
    """Paths in the repository and what they must hold. retrain.toml is what `retrain init`
    writes.
    """
    return {
        "retrain.toml": template_text("quickstart"),
        "examples/all_keys.toml": annotated_toml(),
        "docs/configuration.md": markdown_tables(),
        "docs/retrain.schema.json": json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n",
    }

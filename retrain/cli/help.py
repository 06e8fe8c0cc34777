"""`retrain help [NAME]`: the short page with the names of all keys; or a key, a section, a command,
or all keys with their flags.
"""

import json
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from retrain.cli.usage import COMMANDS, MAX_WIDTH, usage
from retrain.errors import ConfigurationError

if TYPE_CHECKING:
    from retrain.config.keys import Key

FOOTER = """\
--flag VALUE and --flag=VALUE; --switch and --no-switch; lists as 1,2 or [1, 2];
tables as repeated KEY=VALUE. --section.key VALUE works for every key, and
RETRAIN_<SECTION>_<KEY> sets it from the environment.
A later one wins: defaults, recipe, file, environment, flags.
"""
_PAPERS_FIRST = """\
algorithm_mode = "NAME" takes the settings of a paper; your file wins over them:
"""
_PAPERS_LAST = """\
`retrain explain FILE --algorithm-mode NAME` shows what it sets; docs/papers.md has
its formula, its source and what is not reproduced. It also has the papers whose
algorithm is a plugin, or needs a teacher: you start from their file.
"""
_ASK = """\
`retrain help KEY` says what a key does, `retrain help SECTION` all keys of a
section, `retrain man` everything; --KEY VALUE sets one (outside of model,
algorithm, training, optimizer, backend and logging: --SECTION-KEY VALUE).
"""


def command(
    topic: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A key, a section, a command, papers, or config, for every key.",
        ),
    ] = "",
    section: Annotated[
        str, typer.Argument(help="After config: one section, such as training.")
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="With config: the JSON Schema of a file, for an editor.")
    ] = False,
) -> None:
    """Print the short page and the names of all keys; or what there is to know about one name."""
    if as_json:
        if topic != "config" or section:
            raise ConfigurationError(
                "--json of `retrain help` prints the JSON Schema of the whole configuration; write"
                " `retrain help config --json`."
            )
        from retrain.config.json_schema import json_schema

        print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
    elif not topic:
        print(usage() + "\n" + key_names(80), end="")
    elif topic == "config":
        print(reference(section), end="")
    elif topic == "papers" and not section:
        print(papers_page(), end="")
    elif section:
        raise ConfigurationError(
            f"retrain help takes one name, and {section!r} is one too many; `retrain help config"
            " SECTION` takes two."
        )
    elif topic in COMMANDS:
        from retrain.cli.parameters import help_page

        print(help_page(topic, MAX_WIDTH), end="")
    else:
        print(_page(topic), end="")


def key_names(width: int) -> str:
    """The name of every key by section, and how to ask for one."""
    from retrain.config.keys import all_keys, section_models

    lines = ["Keys:"]
    for section in section_models():
        names = " ".join(key.name for key in all_keys() if key.section == section)
        lines += textwrap.wrap(
            f"{f'[{section}]':<15} {names}", width, initial_indent="  ", subsequent_indent=" " * 18
        )
    return "\n".join(lines) + f"\n\n{_ASK}"


def papers_page() -> str:
    """The papers that `algorithm_mode` names, one line each."""
    from retrain.config.names import PAPERS, recipe_names
    from retrain.records.terminal import table_lines

    rows = []
    for name in recipe_names():
        title = (PAPERS / f"{name}.toml").read_text("utf-8").splitlines()[0]
        rows.append((name, title.removeprefix("# ")))
    return "\n".join([_PAPERS_FIRST, *table_lines(rows, indent="  "), "", _PAPERS_LAST])


def _page(name: str) -> str:
    """A section, or the keys of a name: lr, training.lr, --lr. Raises ConfigurationError for any
    other name.
    """
    from retrain.config.keys import all_keys, key_meant, section_models
    from retrain.config.names import ALIASES, NAME_CUTOFF, instead, nearest
    from retrain.config.removed import farewell, removed_key

    word = name.strip("[]")
    if word in section_models():
        return reference(word)
    path = ALIASES.get(word, word)
    keys = [key for key in all_keys() if path in (key.name, key.path, key.flag)]
    if not keys and (meant := key_meant(word.removeprefix("--"))):
        keys = [meant]
    if not keys:
        names = [*COMMANDS, *section_models()]
        for key in all_keys():
            names += [key.name, key.flag]
        near = nearest(word, names, NAME_CUTOFF)
        clause = instead(word.removeprefix("--"))
        gone = farewell(word) or farewell(removed_key(word.removeprefix("--")), name)
        if gone:
            raise ConfigurationError(f"{gone}.")
        hint = "`retrain help` lists all."
        if clause:
            hint = f"{clause}."
        elif near:
            hint = f"did you mean `retrain help {near}`?"
        raise ConfigurationError(f"{name!r} is not a key, a section or a command; {hint}")
    return "\n".join(
        f"[{key.section}]\n" + "\n".join(_about(key, MAX_WIDTH)) + "\n" for key in keys
    )


def reference(section: str, width: int = MAX_WIDTH) -> str:
    """Every key, or the keys of one section. Raises ConfigurationError for a section that does not
    exist.
    """
    from retrain.config.keys import all_keys, section_models
    from retrain.config.names import nearest

    names = tuple(section_models())
    if section and section not in names:
        near = nearest(section, names)
        raise ConfigurationError(
            f"{section!r} is not a section;"
            f" {f'did you mean {near}?' if near else 'sections are ' + ', '.join(names) + '.'}"
        )
    lines = []
    for name, model in section_models().items():
        if section not in ("", name):
            continue
        lines.append(f"[{name}]  {(model.__doc__ or '').splitlines()[0]}")
        for key in (key for key in all_keys() if key.section == name):
            lines += _about(key, width)
        if name == "backend":
            lines += _options(width)
        lines.append("")
    return "\n".join(lines) + "\n" + FOOTER


def _options(width: int) -> Iterator[str]:
    """The keys of the table [backend.options]."""
    from retrain.config.keys import Key
    from retrain.config.schema import BACKEND_OPTIONS

    for backend, model in BACKEND_OPTIONS.items():
        for name, field in model.model_fields.items():
            yield from _about(
                Key("backend.options", name, field, field.get_default()),
                width,
                f"--options {name}=VALUE, for {backend}",
            )


def _about(key: "Key", width: int, flag: str = "") -> Iterator[str]:
    from retrain.config.keys import SHORT_TABLE_FLAGS
    from retrain.system import toml_value

    if key.default is None:
        default = "unset"
    else:
        default = toml_value(key.default)
    short = ""
    if key.path in SHORT_TABLE_FLAGS:
        short = f", {SHORT_TABLE_FLAGS[key.path]} KEY=VALUE"
    head = f"{flag or key.flag}{short}  ({key.name} = {default})"
    yield from textwrap.wrap(
        head,
        width,
        initial_indent="  ",
        subsequent_indent="      ",
        break_on_hyphens=False,
        break_long_words=False,
    )
    words = f"{key.doc} Allowed: {key.allowed}."
    yield from textwrap.wrap(
        words, width, initial_indent="      ", subsequent_indent="      ", break_on_hyphens=False
    )

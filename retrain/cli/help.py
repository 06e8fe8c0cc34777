"""`retrain help [NAME]`: the short page with the names of all keys, or the page of one name."""

import json
import textwrap
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from retrain.cli.manual import WIDTH, read_source, topics_of
from retrain.cli.usage import usage
from retrain.errors import ConfigurationError

if TYPE_CHECKING:
    from retrain.config.keys import Key

FOOTER = """\
Write --flag VALUE or --flag=VALUE, --switch or --no-switch, a list as 1,2 or
[1, 2], a table as repeated KEY=VALUE. --section.key VALUE works for every key,
and RETRAIN_<SECTION>_<KEY> sets it from the environment.
A later one wins: defaults, recipe, file, environment, flags.
"""
_PAPERS_FIRST = """\
algorithm_mode = "NAME" takes the settings of a paper; your file wins over them:
"""
_PAPERS_LAST = """\
`retrain explain FILE --algorithm-mode NAME` shows what it sets; docs/papers.md has
its formula, its source and its gaps. It also has the papers whose
algorithm is a plugin, or needs a teacher: you start from their file.
"""
_ASK = """\
`retrain help KEY` says what a key does, `retrain help SECTION` all keys of a
section, `retrain man` everything. --KEY VALUE sets one. Outside of model,
algorithm, training, optimizer, backend and logging use --SECTION-KEY VALUE.
"""


def command(
    topic: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A key, a value, a section, a command, papers, or config, for every key.",
        ),
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="With config: the JSON Schema of a file, for an editor.")
    ] = False,
) -> None:
    """Print the short page and the names of all keys; or what there is to know about one name."""
    if as_json and topic != "config":
        raise ConfigurationError(
            "--json of `retrain help` prints the JSON Schema of the whole configuration; write"
            " `retrain help config --json`."
        )
    if as_json:
        from retrain.config.json_schema import json_schema

        print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
    else:
        print(about(topic), end="")


def about(name: str) -> str:
    """Return the page of a name. The name is a topic of the manual, a key (lr, training.lr, --lr),
    a value of a key, or another trainer's name for a key.

    Raises ConfigurationError with the nearest name for an unknown name.
    """
    pages = {"": _short_page, "config": every_key, "papers": papers_page}
    if name in pages:
        return pages[name]()
    topics = topics_of(read_source())
    topic = topics.get(name.strip("[]").lower())
    if topic:
        return topic.text
    from retrain.config.keys import all_keys, key_meant
    from retrain.config.names import ALIASES

    path, meant = ALIASES.get(name, name), key_meant(name.removeprefix("--"))
    title, keys = "", [key for key in all_keys() if path in (key.name, key.path, key.flag)]
    if meant and meant not in keys:
        keys = [meant, *keys]
    if not keys:
        title = f"{_paper_titles().get(name, name)} is a value of:\n\n"
        keys = [key for key in all_keys() if name in key.choices]
    if not keys:
        raise _unknown(name, topics)
    return title + "".join(f"[{key.section}]\n{_about(key)}\n" for key in keys)


def _unknown(name: str, topics: Iterable[str]) -> ConfigurationError:
    from retrain.config.keys import all_keys
    from retrain.config.names import NAME_CUTOFF, builtin_names, instead, nearest
    from retrain.config.removed import farewell, removed_key

    word = name.removeprefix("--")
    gone = farewell(name) or farewell(removed_key(word), name)
    if gone:
        return ConfigurationError(f"{gone}.")
    names = [*topics, *builtin_names("algorithm"), *(key.name for key in all_keys())]
    near, clause = nearest(word, names, NAME_CUTOFF), instead(word)
    hint = "`retrain help` and `retrain man --list-topics` list what there is."
    if clause:
        hint = f"{clause}."
    elif near:
        hint = f"did you mean `retrain help {near}`?"
    return ConfigurationError(f"{name!r} is not a key, a value, a section or a command; {hint}")


def _short_page() -> str:
    """Return the name of every key by section, and how to ask for one."""
    from retrain.config.keys import all_keys, section_models

    lines = [f"{usage()}\nKeys:"]
    for section in section_models():
        names = " ".join(key.name for key in all_keys() if key.section == section)
        head = f"  {f'[{section}]':<15} "
        lines += textwrap.wrap(head + names, WIDTH, subsequent_indent=" " * 18)
    return "\n".join(lines) + f"\n\n{_ASK}"


def _paper_titles() -> dict[str, str]:
    """Return the papers that `algorithm_mode` names, with the first line of their files."""
    from retrain.config.names import PAPERS, recipe_names

    texts = {name: (PAPERS / f"{name}.toml").read_text("utf-8") for name in recipe_names()}
    return {name: text.partition("\n")[0].removeprefix("# ") for name, text in texts.items()}


def papers_page() -> str:
    """Return the papers that `algorithm_mode` names, one line each."""
    from retrain.records.terminal import table_lines

    rows = table_lines(list(_paper_titles().items()), indent="  ")
    return "\n".join([_PAPERS_FIRST, *rows, "", _PAPERS_LAST])


def every_key() -> str:
    """Return every section with its keys."""
    from retrain.config.keys import section_models

    return "\n".join(map(reference, section_models())) + f"\n{FOOTER}"


def reference(section: str) -> str:
    """Return the keys of one section."""
    from retrain.config.keys import Key, all_keys, section_models
    from retrain.config.schema import BACKEND_OPTIONS

    lines = [f"[{section}]  {(section_models()[section].__doc__ or '').partition(chr(10))[0]}"]
    lines += [_about(key) for key in all_keys() if key.section == section]
    if section == "backend":
        lines += [
            _about(
                Key("backend.options", name, field, field.get_default()),
                f"--options {name}=VALUE, for {backend}",
            )
            for backend, model in BACKEND_OPTIONS.items()
            for name, field in model.model_fields.items()
        ]
    return "\n".join(lines) + "\n"


def _about(key: "Key", flag: str = "") -> str:
    """Return a key's flag and default, its meaning and its allowed values."""
    from retrain.config.keys import SHORT_TABLE_FLAGS
    from retrain.system import toml_value

    fill = partial(textwrap.fill, width=WIDTH, subsequent_indent=" " * 6, break_on_hyphens=False)
    default, head = "unset", flag or key.flag
    if key.default is not None:
        default = toml_value(key.default)
    if key.path in SHORT_TABLE_FLAGS:
        head += f", {SHORT_TABLE_FLAGS[key.path]} KEY=VALUE"
    words = f"{key.doc} Allowed: {key.allowed}."
    return f"{fill(f'  {head}  ({key.name} = {default})')}\n{fill(' ' * 6 + words)}"

"""`retrain help [config [SECTION]]`: the short page, or every key of the configuration with its flag."""

import textwrap
from typing import Annotated

import typer

from retrain.cli.usage import usage
from retrain.errors import ConfigurationError

_WIDTH = 110
"""Columns of the text about a key."""
_FOOTER = """\
--flag VALUE and --flag=VALUE; --switch and --no-switch; lists as 1,2 or [1, 2]; tables as repeated KEY=VALUE.
--section.key VALUE works for every key. RETRAIN_<SECTION>_<KEY> sets a key from the environment.
A later one wins: defaults, file, environment, flags.
"""


def command(
    topic: Annotated[str, typer.Argument(help="config, for every key with its flag, default and allowed values.")] = "",
    section: Annotated[str, typer.Argument(help="One section of the configuration, such as training.")] = "",
) -> None:
    """Print the short page, or with `config` the reference of the configuration."""
    if not topic:
        print(usage(), end="")
    elif topic == "config":
        print(reference(section), end="")
    else:
        raise ConfigurationError(f"retrain help {topic!r} is not known; there is `retrain help` and `retrain help config [SECTION]`.")


def reference(section: str) -> str:
    """Every key, or those of one section. Raises ConfigurationError for a section that does not exist."""
    from retrain.config.keys import SHORT_TABLE_FLAGS, all_keys, section_models
    from retrain.config.suggestions import nearest
    from retrain.parsing import toml_value

    names = tuple(section_models())
    if section and section not in names:
        near = nearest(section, names)
        raise ConfigurationError(
            f"{section!r} is not a section; {f'did you mean {near}?' if near else 'sections are ' + ', '.join(names) + '.'}"
        )
    lines = []
    for name, model in section_models().items():
        if section not in ("", name):
            continue
        lines.append(f"[{name}]  {(model.__doc__ or '').splitlines()[0]}")
        for key in (key for key in all_keys() if key.section == name):
            default = "unset" if key.default is None else toml_value(key.default)
            short = f", {SHORT_TABLE_FLAGS[key.path]} KEY=VALUE" if key.path in SHORT_TABLE_FLAGS else ""
            lines.append(f"  {key.flag}{short}  ({key.name} = {default})")
            words = f"{key.doc} Allowed: {key.allowed}."
            lines += textwrap.wrap(words, _WIDTH, initial_indent="      ", subsequent_indent="      ")
        lines.append("")
    return "\n".join(lines) + "\n" + _FOOTER

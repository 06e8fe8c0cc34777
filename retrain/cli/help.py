"""`retrain help [config [SECTION]]`: the short page, or every key of the configuration with its flag."""

from typing import Annotated

import typer

from retrain.cli.usage import usage
from retrain.errors import ConfigurationError


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
    from retrain.config.keys import section_models
    from retrain.config.reference import help_text
    from retrain.config.suggestions import nearest

    names = tuple(section_models())
    if section and section not in names:
        near = nearest(section, names)
        raise ConfigurationError(
            f"{section!r} is not a section; {f'did you mean {near}?' if near else 'sections are ' + ', '.join(names) + '.'}"
        )
    return help_text(section or None)

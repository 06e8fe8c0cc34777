"""A command with its arguments and options as typer reads them from its signature, and one sentence
for each wrong use.
"""

import importlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from retrain.cli.usage import EXAMPLES, MAX_WIDTH
from retrain.errors import ConfigurationError
from retrain.system import ParseError, expanded

if TYPE_CHECKING:
    from typer.core import TyperCommand

_USAGE_ERROR: Any = typer.BadParameter.__bases__[0]
"""Typer gives this class no name of its own."""
_CONTEXT: Any = {"max_content_width": MAX_WIDTH, "help_option_names": ["--help", "-h"]}


def command_named(name: str) -> "TyperCommand":
    """Import the module of a command and return the command with its arguments and options."""
    module = importlib.import_module(f"retrain.cli.{name.replace('-', '_')}")
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    # Typer wraps no line below a \b.
    settings = {"epilog": f"\b\nExample: {EXAMPLES[name]}"} | getattr(module, "SETTINGS", {})
    app.command(name, **settings)(module.command)
    command: TyperCommand = typer.main.get_command(app)  # type: ignore[assignment]  # typed as click.Command
    return command


def run_command(name: str, arguments: Sequence[str]) -> int:
    """Run a command and return its exit code. Raises ConfigurationError for a wrong use."""
    command = command_named(name)
    if any("--format" in parameter.opts for parameter in command.params):
        arguments = ["--format=json" if one == "--json" else one for one in arguments]
    try:
        # Do not call typer's `app()`: it would replace the hook that masks secrets by its own
        # hook.
        with command.make_context(f"retrain {name}", list(arguments), **_CONTEXT) as context:
            for parameter in command.params:
                word, shown = str(parameter.name), parameter.opts[0]
                if not shown.startswith("-"):
                    shown = str(parameter.metavar)
                given = context.params.get(word)
                context.params[word] = given_path(given, f"{shown} of `retrain {name}`")
            command.invoke(context)
    except typer.Exit as stop:
        return stop.exit_code
    except _USAGE_ERROR as error:
        raise ConfigurationError(_wrong_use(name, error, arguments)) from None
    return 0


def given_path(value: Any, where: str) -> Any:
    """Expand ~ and variables in a text, a path or a list of them; return any other value as it is.

    Raises ConfigurationError, which begins with `where`, for an unknown user or variable.
    """
    if isinstance(value, list | tuple):
        return [given_path(one, where) for one in value]
    if not isinstance(value, str | Path):
        return value
    try:
        return type(value)(expanded(str(value)))
    except ParseError as error:
        raise ConfigurationError(f"{where} = {str(value)!r} {error}.") from None


def help_page(name: str, width: int) -> str:
    """Return `retrain NAME --help`, in lines of at most `width` columns."""
    command = command_named(name)
    context = typer.Context(command, info_name=f"retrain {name}", terminal_width=width, **_CONTEXT)
    return command.get_help(context) + "\n"


def _wrong_use(name: str, error: Any, arguments: Sequence[str]) -> str:
    """Say in one sentence what typer found in the arguments of a command."""
    option = getattr(error, "option_name", "")
    if option:
        from retrain.config.removed import farewell

        gone = farewell(f"{name} {option}", f"{option} of `retrain {name}`")
        if gone:
            return f"{gone}."
    found = error.format_message().rstrip(".").replace("Input ", "it ").replace("Value error, ", "")
    # Typer says no more of what is missing than its name.
    if not error.message:
        found += f" ({error.param.help.rstrip('.')})"
    for one, following in pairwise([*arguments, ""]):
        flag, equals, value = one.partition("=")
        value = value if equals else following
        if flag in getattr(getattr(error, "param", None), "opts", ()) and repr(value) not in found:
            found += f", and got {value!r}"
    return (
        f"`retrain {name}`: {found[:1].lower()}{found[1:]}. An example is `{EXAMPLES[name]}`,"
        f" and `retrain {name} --help` says more."
    )

"""A command's arguments and options, read from the signature that typer reads: its help page, and a
sentence for each wrong use.
"""

import importlib
import inspect
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from typer.models import ArgumentInfo, OptionInfo

from retrain.cli.init import template_names
from retrain.cli.usage import EXAMPLES
from retrain.config.names import NAME_CUTOFF, nearest
from retrain.config.removed import farewell
from retrain.errors import ConfigurationError
from retrain.system import ParseError, expanded, listed

_ANY_FLAG = "[--KEY VALUE]..."
"""In the usage of a command that also takes the configuration's flags."""
_WORDS = {
    int: ("N", "a whole number"),
    float: ("X", "a number"),
    str: ("TEXT", "a text"),
    Path: ("PATH", "a path"),
}
_HELP = ("--help", "Print this page.")


@dataclass(frozen=True)
class Parameter:
    word: str
    """Its name in the command's signature."""
    name: str
    """--option, or an argument's name."""
    value: str
    """The value after an option: "N", "text|json"; "" for a switch and for an argument."""
    text: str
    """Its help, with its default."""
    allowed: str
    """The values in words."""
    is_option: bool
    is_required: bool
    is_repeatable: bool

    @property
    def head(self) -> str:
        return f"{self.name} {self.value}".rstrip()

    @property
    def in_usage(self) -> str:
        dots = "..." if self.is_repeatable and not self.name.endswith("...") else ""
        if self.is_required:
            return self.name + dots
        return f"[{self.name}{dots}]"


def module_of(name: str) -> ModuleType:
    """Import the module of a command."""
    return importlib.import_module(f"retrain.cli.{name.replace('-', '_')}")


def takes_flags(name: str) -> bool:
    """Return True if the configuration's flags may follow."""
    return "context_settings" in getattr(module_of(name), "SETTINGS", {})


@cache
def parameters_of(name: str) -> tuple[Parameter, ...]:
    """The arguments and options of a command, in the order of its signature."""
    signature = inspect.signature(module_of(name).command, eval_str=True)
    return tuple(
        _parameter(given, get_args(given.annotation))
        for given in signature.parameters.values()
        if get_args(given.annotation)
    )


def _parameter(given: inspect.Parameter, annotation: Sequence[Any]) -> Parameter:
    kind, info = annotation
    assert isinstance(info, ArgumentInfo | OptionInfo)
    if get_origin(kind) in (Union, UnionType):
        members = [part for part in get_args(kind) if part is not type(None)]
    else:
        members = [kind]
    several = get_origin(members[0]) is list
    if several:
        inner = get_args(members[0])[0]
    else:
        inner = members[0]
    is_option, required = isinstance(info, OptionInfo), given.default is inspect.Parameter.empty
    value, allowed = _values(inner, info)
    text = info.help or ""
    if not required and given.default not in (None, "", False, Path()):
        text += f" Default: {given.default}."
    return Parameter(
        given.name,
        _name(given.name, info),
        (info.metavar or value) if is_option else "",
        text,
        allowed,
        is_option,
        required,
        several,
    )


def _name(word: str, info: ArgumentInfo | OptionInfo) -> str:
    if isinstance(info, ArgumentInfo):
        return info.metavar or word.upper()
    # The first word of an annotation's Option(...) is taken for its default until typer builds the
    # command.
    flags = [flag for flag in (info.default, *(info.param_decls or ())) if isinstance(flag, str)]
    if flags:
        return flags[0]
    return f"--{word.replace('_', '-')}"


def _values(kind: Any, info: ArgumentInfo | OptionInfo) -> tuple[str, str]:
    """The values as they stand behind an option, and in words."""
    if kind is bool:
        return "", "no value"
    if get_origin(kind) is Literal or issubclass(kind, StrEnum):
        choices = [str(choice) for choice in get_args(kind) or kind]
        return "|".join(choices), listed(choices, "or")
    value, words = _WORDS[kind]
    limits = [
        f"{side} {limit:g}"
        for side, limit in (("at least", info.min), ("at most", info.max))
        if limit is not None
    ]
    return value, words + (f" of {' and '.join(limits)}" if limits else "")


# -- paths -----------------------------------------------------------------------------------------


def expand_paths(name: str, given: dict[str, Any]) -> None:
    """Expand ~ and variables in every text that a command was given; all of them may be paths."""
    for parameter in parameters_of(name):
        where = f"{parameter.name} of `retrain {name}`"
        given[parameter.word] = given_path(given[parameter.word], where)


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


# -- the help page ---------------------------------------------------------------------------------


def usage_line(name: str) -> str:
    """`retrain compare CAMPAIGN_DIR | RUN... [options]`."""
    parts = [parameter.in_usage for parameter in parameters_of(name) if not parameter.is_option]
    file = getattr(module_of(name), "FILE_ARGUMENT", "")
    flags = _ANY_FLAG if takes_flags(name) else ""
    return " ".join(filter(None, ["retrain", name, *parts, file, "[options]", flags]))


def description(name: str) -> list[str]:
    """The paragraphs that say what a command does, each on one line."""
    return [
        " ".join(paragraph.split())
        for paragraph in inspect.cleandoc(module_of(name).command.__doc__).split("\n\n")
    ]


def help_page(name: str, width: int) -> str:
    """`retrain NAME --help`, in lines of at most `width` columns."""
    fill = partial(textwrap.fill, width=width, break_on_hyphens=False)
    parts = [fill(f"Usage: {usage_line(name)}", subsequent_indent="       ")]
    parts += map(fill, description(name))
    parameters = parameters_of(name)
    for title, is_option in (("Arguments:", False), ("Options:", True)):
        rows = [(each.head, each.text) for each in parameters if each.is_option is is_option]
        rows += [_HELP] * is_option
        if rows:
            parts.append("\n".join([title, *columns(rows, width)]))
    return "\n\n".join([*parts, f"Example: {EXAMPLES[name]}"]) + "\n"


def columns(rows: Sequence[tuple[str, str]], width: int) -> list[str]:
    """Names on the left, texts on the right; a name too long for its column has its own line."""
    left = max((len(head) for head, _ in rows if len(head) <= width * 2 // 5), default=0) + 4
    lines = []
    for head, text in rows:
        filled = textwrap.wrap(text, width - left, break_on_hyphens=False) or [""]
        if len(head) + 4 > left:
            lines.append(f"  {head}")
        else:
            lines.append(f"  {head:<{left - 2}}{filled.pop(0)}")
        lines += [" " * left + line for line in filled]
    return lines


# -- wrong uses ------------------------------------------------------------------------------------


def wrong_use(name: str, arguments: Sequence[str], error: Any) -> str:
    """Say in one sentence what typer's UsageError found in the arguments of a command."""
    more = f"`retrain {name} --help` says more"
    # By name, since typer exports none of these classes.
    if type(error).__name__ == "NoSuchOption":
        return _unknown_option(name, error.option_name)
    extra = re.search(r"unexpected extra argument\S* \((.*)\)", str(error))
    if extra:
        given = extra.group(1)
        hint = f"{more}."
        if name == "init" and given in template_names():
            hint = f"did you mean `retrain init --template {given}`?"
        return f"`{usage_line(name)}` has no place for {given!r}; {hint}"
    if type(error).__name__ == "MissingParameter":
        return _missing(name, error.param.name)
    option = getattr(error, "option_name", "")
    if not option and getattr(error, "param", None):
        option = error.param.opts[0]
    meant = next((each for each in parameters_of(name) if each.name == option), None)
    if meant is None:
        return f"`retrain {name}`: {error.format_message().rstrip('.')}; {more}."
    given = _value_of(option, arguments)
    got = repr(given)
    if type(error).__name__ == "BadOptionUsage" and not given:  # an option without a value
        got = "none"
    return f"{option} of `retrain {name}` takes {meant.allowed}, and got {got}."


def _unknown_option(name: str, option: str) -> str:
    gone = farewell(f"{name} {option}", f"{option} of `retrain {name}`")
    if gone:
        return f"{gone}."
    near = nearest(
        option, [each.name for each in parameters_of(name) if each.is_option], NAME_CUTOFF
    )
    hint = f"`retrain {name} --help` says more."
    if near:
        hint = f"did you mean {near}?"
    return f"{option} is not an option of `retrain {name}`; {hint}"


def _missing(name: str, parameter: str) -> str:
    """`parameter` is the name in the command's signature."""
    absent = next(each for each in parameters_of(name) if each.word == parameter)
    meaning = absent.text.rstrip(".")
    if not meaning[1:2].isupper():  # TOML stays as it is
        meaning = f"{meaning[:1].lower()}{meaning[1:]}"
    return f"`retrain {name}` needs {absent.name}: {meaning}; such as `{EXAMPLES[name]}`."


def _value_of(option: str, arguments: Sequence[str]) -> str:
    """The value that the arguments give to an option."""
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == option:
            if equals:
                return value
            return " ".join(arguments[index + 1 : index + 2])
    return ""

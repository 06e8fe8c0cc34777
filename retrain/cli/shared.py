"""Parts that several commands share: options, the .env file, and lines of progress on standard
error.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from retrain.cli.parameters import given_path
from retrain.errors import ConfigurationError, EnvironmentFailure

if TYPE_CHECKING:
    from retrain.config import TrainConfig
    from retrain.config.overrides import Overrides

FLAGS_FOLLOW: dict[str, Any] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
    "options_metavar": "[OPTIONS] [--KEY VALUE]...",
}
"""SETTINGS of a command that leaves the configuration's flags to their own parser."""

Alpha = Annotated[float, typer.Option(help="Family-wise error rate of all comparisons.")]
Checkpoint = Annotated[
    int | None, typer.Option(help="The checkpoint after this many steps; by default the newest.")
]
Contrast = Annotated[
    list[str] | None,
    typer.Option(
        metavar="A:B",
        help="Compare condition A with condition B; repeat it for a family of pairs.",
    ),
]
Control = Annotated[
    bool,
    typer.Option("--control", help="The campaign's random-reward condition is the baseline."),
]
FORM_HELP = "How to print it; --json alone means json."
Form = Annotated[Literal["text", "json"], typer.Option("--format", "--json", help=FORM_HELP)]
LowerIsBetter = Annotated[
    bool, typer.Option("--lower-is-better", help="A negative difference is the improvement.")
]
Margin = Annotated[
    float | None,
    typer.Option(help="Call differences below this equivalent (TOST), such as 0.02."),
]
Trust = Annotated[
    bool, typer.Option("--trust", help="Run the Python code that a run's folder names.")
]


def load_dotenv() -> bool:
    """Set the variables of ./.env that the environment lacks; False without such a file."""
    path = Path(".env")
    if not path.is_file():
        return False
    from dotenv import load_dotenv as load

    try:
        load(path, override=False)
    except (ValueError, OSError) as error:  # It is not UTF-8, or has a NUL.
        raise ConfigurationError(
            f"{path} is not readable ({error}); write lines NAME=value in UTF-8, or remove it."
        ) from error
    return True


def flags_after(context: typer.Context, takes: str, places: int = 0) -> "Overrides":
    """Read the arguments after a command's own options. Raises ConfigurationError for more than
    `places` words that are not flags; `takes` says what the command takes.
    """
    from retrain.config.overrides import parse_overrides

    overrides = parse_overrides(context.args)
    if len(overrides.rest) > places:
        raise ConfigurationError(f"retrain {takes}; {overrides.rest[places]!r} is one too many.")
    return overrides


def load_named(overrides: "Overrides") -> "TrainConfig":
    """Load the file among the flags, or else ./retrain.toml."""
    from retrain.config import load_config

    return load_config(next((given_path(word, "FILE") for word in overrides.rest), None), overrides)


def refuse_several(given: Mapping[str, object], otherwise: str) -> None:
    """Raise ConfigurationError for several of the flags; `otherwise` says what the command does
    without any.
    """
    flags = [flag for flag, value in given.items() if value]
    if len(flags) > 1:
        raise ConfigurationError(
            f"{' and '.join(flags)} exclude each other: give one, or none to {otherwise}."
        )


def write_files(files: Mapping[Path, str], instead: str, force: bool = False) -> list[Path]:
    """Write all of the files or none, with their folders, and return the files that did not have
    this text already.

    Raises ConfigurationError for an existing file with other text, unless `force` is True;
    `instead` says what to do.
    """
    new = {
        path: text
        for path, text in files.items()
        if not (path.is_file() and path.read_bytes() == text.encode())
    }
    for path in new:
        if path.is_dir():
            raise ConfigurationError(
                f"--output {path} is a folder; name a file, such as {path / 'retrain.toml'}."
            )
        if path.exists() and not force:
            raise ConfigurationError(f"{path} exists, and retrain never overwrites it; {instead}.")
    for path, text in new.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
        except FileNotFoundError as error:  # For example, the path is below /proc.
            raise EnvironmentFailure(f"{path} is not writable; name another place.") from error
        except OSError as error:
            if error.filename is None and path.is_file():  # The disk holds a part of the file.
                path.unlink()
                error.filename = str(path)
            raise
    return list(new)


def pair_of(text: str) -> tuple[str, str]:
    """Split a --contrast. Raises ConfigurationError unless it has the form of two labels with a
    colon between them.
    """
    candidate, colon, baseline = text.partition(":")
    if not (candidate and colon and baseline) or candidate == baseline:
        raise ConfigurationError(
            f"--contrast {text} is not two conditions as A:B, which compares A with B."
        )
    return candidate, baseline


def refuse_two_baselines(control: bool, baseline: str | None) -> None:
    """Raise ConfigurationError for --control together with --baseline."""
    if control and baseline:
        raise ConfigurationError(
            f"--control and --baseline {baseline} both name the baseline; give one."
        )


def print_json(content: Any) -> None:
    """Print a result as JSON; in a table a number that is not finite becomes null."""
    from retrain.records.jsonl import finite

    if isinstance(content, Mapping):
        content = finite(content)
    print_masked(json.dumps(content, indent=2))


def print_masked(text: str) -> None:
    """Print a result without credentials and control characters."""
    from retrain.records.redact import Redactor
    from retrain.records.terminal import clean

    print(clean(Redactor().text(text.removesuffix("\n"))))


def print_progress(line: str) -> None:
    """Print a line on standard error, since standard output is for the result."""
    from retrain.records.terminal import clean

    print(clean(line), file=sys.stderr, flush=True)

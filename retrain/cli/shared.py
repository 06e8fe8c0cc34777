"""What several commands share: options, the .env file, and lines of progress on standard error."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from retrain.errors import ConfigurationError

Alpha = Annotated[float, typer.Option(help="Family-wise error rate of all comparisons.")]
AsJson = Annotated[bool, typer.Option("--json", help="The same as --format json.")]
Figure = Annotated[
    Path | None, typer.Option(help="Also draw it: a file that ends in .svg, .pdf or .png.")
]
Form = Annotated[Literal["text", "json"], typer.Option("--format", help="How to print it.")]
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
    """Set the variables of ./.env that are not set yet; False where there is no such file."""
    path = Path(".env")
    if not path.is_file():
        return False
    from dotenv import load_dotenv as load

    try:
        load(path, override=False)
    except (ValueError, OSError) as error:  # not UTF-8, or a NUL, which no variable can hold
        raise ConfigurationError(
            f"{path} cannot be read ({error}); it holds lines NAME=value in UTF-8: correct or"
            " remove it."
        ) from error
    return True


def print_progress(line: str) -> None:
    """Print a line on standard error, since standard output is for the result."""
    from retrain.records.terminal import clean

    print(clean(line), file=sys.stderr, flush=True)


_PICTURES = (".svg", ".pdf", ".png")


def check_figure(figure: Path | None) -> None:
    """Raises ConfigurationError for a picture whose format is not known or whose folder is not
    there.
    """
    if figure is not None and figure.suffix not in _PICTURES:
        raise ConfigurationError(
            f"--figure {figure} ends in none of {', '.join(_PICTURES)}; give one, such as"
            f" {figure.stem}.svg."
        )
    if figure is not None and not figure.parent.is_dir():
        raise ConfigurationError(
            f"--figure {figure} lies in no folder; make {figure.parent} or name another."
        )

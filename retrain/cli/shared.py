"""What several commands share: options, the .env file, and lines of progress on standard error."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from retrain.errors import ConfigurationError

Alpha = Annotated[float, typer.Option(help="Family-wise error rate of all comparisons.")]
AsJson = Annotated[bool, typer.Option("--json", help="The same as --format json.")]
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
Correction = Annotated[
    Literal["maxt", "holm"] | None,
    typer.Option(
        help=(
            "Adjust p by joint sign flips of whole seeds (maxt), or by Holm; by default as the"
            " campaign planned, else maxt."
        )
    ),
]
Failed = Annotated[
    Literal["exclude", "worst"],
    typer.Option(help="Leave pairs with a failed run out, or count that run as the worst result."),
]
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


def pair_of(text: str) -> tuple[str, str]:
    """Split a --contrast. Raises ConfigurationError unless it is two labels with a colon between
    them.
    """
    candidate, colon, baseline = text.partition(":")
    if not (candidate and colon and baseline) or candidate == baseline:
        raise ConfigurationError(
            f"--contrast {text} is not two conditions as A:B; A is compared with B."
        )
    return candidate, baseline


def refuse_two_baselines(control: bool, baseline: str | None) -> None:
    """Raise ConfigurationError for --control beside --baseline."""
    if control and baseline:
        raise ConfigurationError(
            f"--control and --baseline {baseline} both name the baseline; give one of them."
        )


def print_progress(line: str) -> None:
    """Print a line on standard error, since standard output is for the result."""
    from retrain.records.terminal import clean

    print(clean(line), file=sys.stderr, flush=True)


PICTURES = (".svg", ".pdf", ".png")


def check_figure(figure: Path | None) -> None:
    """Raises ConfigurationError for a picture whose format is not known or whose folder is not
    there.
    """
    if figure is not None and figure.suffix not in PICTURES:
        raise ConfigurationError(
            f"--figure {figure} ends in none of {', '.join(PICTURES)}; give one, such as"
            f" {figure.stem}.svg."
        )
    if figure is not None and not figure.parent.is_dir():
        raise ConfigurationError(
            f"--figure {figure} lies in no folder; make {figure.parent} or name another."
        )

"""`retrain report DIR`: one HTML page of a run or a campaign."""

from pathlib import Path
from typing import Annotated

import typer

from retrain.cli.shared import Trust, print_progress
from retrain.errors import ConfigurationError, EnvironmentFailure
from retrain.install import install_hint, missing_package

_EXTRA = ("jinja2", "matplotlib")


def command(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A run's folder, a campaign's, or one that holds runs."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            help="The page; DIR/report.html by default. Pictures of the figures go next to it."
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(help="The baseline condition; the first by default."),
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="Metric to compare, as in `retrain compare`.")
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Another transform in the token viewer, next to the run's own."
        ),
    ] = None,
    trust: Trust = False,
) -> None:
    """Make a page of curves, paired differences, verdicts, costs, completions and tokens; it needs
    no network and no server.
    """
    if missing := missing_package(*_EXTRA):
        raise EnvironmentFailure(
            f'retrain report needs the extra "report" ({missing} is missing);'
            f" {install_hint('report')}."
        )
    from retrain.records.run_folder import RunFolder
    from retrain.records.terminal import clean
    from retrain.report.data import ReportRequest
    from retrain.report.page import write_report

    request = ReportRequest(folder, baseline, metric, against or (), trust)
    _check_output(output)
    page = output or RunFolder(folder).report
    pictures, notes = write_report(request, page)
    print(clean(f"Report: {page}"))
    for picture in pictures:
        print(clean(f"Picture: {picture}"))
    for note in notes:
        print_progress(note)


def _check_output(output: Path | None) -> None:
    """Raise ConfigurationError for an output that is a folder, a device or a picture."""
    if output is None:
        return
    if output.suffix in (".svg", ".png"):
        raise ConfigurationError(
            f"--output {output} would be an HTML page; name it .html. Its figures go next to it"
            " as svg and png."
        )
    # The page replaces what is there, and must not replace /dev/null.
    if output.exists() and not output.is_file():
        raise ConfigurationError(
            f"--output {output} is a folder or a device; name the page, such as report.html."
        )

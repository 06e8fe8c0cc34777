"""`retrain report DIR`: one HTML page of a run or a campaign, as a file or served on this
machine.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from retrain.cli.shared import (
    Alpha,
    Contrast,
    Control,
    Correction,
    Failed,
    LowerIsBetter,
    Margin,
    Trust,
    pair_of,
    print_progress,
    refuse_two_baselines,
)
from retrain.errors import ConfigurationError, EnvironmentFailure
from retrain.install import install_hint, missing_package

if TYPE_CHECKING:
    from retrain.report.data import ReportRequest

_EXTRA = ("jinja2", "matplotlib")
PICTURES = (".svg", ".pdf", ".png")


Figures = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Also write the figures, the table and a methods sentence for a paper here.",
    ),
]
Formats = Annotated[
    str, typer.Option("--format", help="Formats of --figures, with commas: svg, pdf, png.")
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port of --serve; 0 takes a free one.")]
Refresh = Annotated[float, typer.Option(min=0.5, help="Seconds between updates, with --serve.")]


def command(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A run's folder, a campaign's, or one that holds runs."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            help="The page; DIR/report.html by default. Pictures of the figures go beside it."
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(help="The condition that the others are compared with; the first by default."),
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="Metric to compare, as in `retrain compare`.")
    ] = None,
    control: Control = False,
    contrast: Contrast = None,
    correction: Correction = None,
    failed: Failed = "exclude",
    alpha: Alpha = 0.05,
    margin: Margin = None,
    lower_is_better: LowerIsBetter = False,
    against: Annotated[
        list[str] | None,
        typer.Option(help="Another transform beside the run's own in the token viewer."),
    ] = None,
    trust: Trust = False,
    steps: Annotated[
        int, typer.Option(min=0, help="Number of steps of a run whose completions are shown.")
    ] = 4,
    figures: Figures = None,
    form: Formats = "svg,pdf",
    serve: Annotated[
        bool,
        typer.Option(
            "--serve",
            help="Serve the page at 127.0.0.1, updated while runs continue, until Ctrl-C.",
        ),
    ] = False,
    port: Port = 0,
    refresh: Refresh = 5.0,
) -> None:
    """Make a page of curves, paired differences, verdicts, costs, completions and tokens; it needs
    no network and no server.
    """
    _check_extra()
    from retrain.analysis.verdict import TestSettings
    from retrain.records.run_folder import RunFolder
    from retrain.report.data import ReportRequest

    refuse_two_baselines(control, baseline)
    test = TestSettings(
        alpha=alpha,
        margin=margin,
        lower_is_better=lower_is_better,
        correction=correction,
        failed=failed,
    )
    pairs = [pair_of(text) for text in contrast or []]
    request = ReportRequest(
        folder, baseline, metric, test, against or (), steps, trust, control, pairs
    )
    _check_output(output, figures, serve=serve)
    formats = _formats(form)
    if serve:
        _serve(request, port, refresh)
    else:
        _write(request, output or RunFolder(folder).report, figures, formats)


def _write(
    request: "ReportRequest", output: Path, figures: Path | None, formats: Sequence[str]
) -> None:
    from retrain.records.terminal import clean
    from retrain.report.page import write_report

    written = write_report(request, output, figures, formats)
    print(clean(f"Report: {written.page}"))
    for picture in written.pictures:
        print(clean(f"{'Picture' if picture.suffix in PICTURES else 'File'}: {picture}"))
    for note in written.notes:
        print_progress(note)


def _check_extra() -> None:
    """Raise EnvironmentFailure if a package of the extra is not installed."""
    missing = missing_package(*_EXTRA)
    if missing:
        raise EnvironmentFailure(
            f'retrain report needs the extra "report" ({missing} is missing);'
            f" {install_hint('report')}."
        )


def _formats(text: str) -> list[str]:
    """Raise ConfigurationError for a format that no figure has."""
    from retrain.report.paper import FORMATS

    formats = [name.strip() for name in text.split(",")]
    for name in formats:
        if name not in FORMATS:
            raise ConfigurationError(
                f"--format {text}: {name!r} is no format of a figure; name some of"
                f" {', '.join(FORMATS)}, with commas between them."
            )
    return formats


def _check_output(output: Path | None, figures: Path | None, *, serve: bool) -> None:
    """Raise ConfigurationError for an output beside --serve, for a folder, and for a picture."""
    for flag, path in (("--output", output), ("--figures", figures)):
        if path is not None and serve:
            raise ConfigurationError(
                f"{flag} {path} and --serve are two ways to see a report; give one of them."
            )
    if figures is not None and figures.is_file():
        raise ConfigurationError(f"--figures {figures} is a file; name a folder.")
    if output is None:
        return
    if output.suffix in PICTURES:
        raise ConfigurationError(
            f"--output {output} would be a page of HTML; name it .html, and get pictures with"
            f" --figures FOLDER --format {output.suffix[1:]}."
        )
    if output.is_dir():
        raise ConfigurationError(
            f"--output {output} is a folder; name the page, such as {output / 'report.html'}."
        )


def _serve(request: "ReportRequest", port: int, refresh: float) -> None:
    from retrain.report.serve import ReportServer

    with ReportServer(request, port, refresh) as server:
        server.page()  # a folder without runs is said here, not in a browser
        print(f"Report: {server.url}", flush=True)
        print("Ctrl-C ends it.", file=sys.stderr, flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:  # how one stops it
            return

"""The report of a folder, and its files: the page, and a picture of each figure beside it."""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from retrain.errors import EnvironmentFailure
from retrain.records.checkpoint import replace_file
from retrain.report.data import Request, gather
from retrain.report.figures import draw_figures
from retrain.report.page import Live, render
from retrain.report.theme import to_png


@dataclass(frozen=True)
class Written:
    page: Path
    pictures: list[Path]


def build_page(request: Request, live: Live | None = None) -> str:
    """The HTML, as a file or for a server."""
    data = gather(request)
    return render(data, draw_figures(data), datetime.now(), live)


def write_report(request: Request, output: Path) -> Written:
    """`output` and, beside it, <its name>-<figure>.png for every figure. Each file is replaced as a whole.

    Raises EnvironmentFailure where they cannot be written.
    """
    data = gather(request)
    figures = draw_figures(data)
    pictures = []
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        for drawn in figures:
            picture = output.with_name(f"{output.stem}-{drawn.name}.png")
            _replace_bytes(picture, to_png(drawn.figure, drawn.name))
            pictures.append(picture)
        replace_file(output, render(data, figures, datetime.now()))
    except OSError as error:
        raise EnvironmentFailure(f"{output} cannot be written: {error.strerror or error}; name another file with --output.") from error
    return Written(output, pictures)


def _replace_bytes(path: Path, content: bytes) -> None:
    aside = path.with_name(f".tmp-{path.name}")
    aside.write_bytes(content)
    aside.replace(path)

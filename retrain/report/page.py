"""The report as one HTML file: no network, no address outside it, everything that a model wrote escaped and made visible."""

import base64
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from retrain.analysis.compare import Comparison
from retrain.analysis.comparison_text import arm_table, contrast_table, details, explanation, heading, sharing
from retrain.analysis.measures import WINDOW
from retrain.analysis.status import RunStatus, duration
from retrain.errors import EnvironmentFailure
from retrain.records.checkpoint import replace_file
from retrain.records.redact import Redactor
from retrain.records.terminal import visible
from retrain.report.curves import Arm
from retrain.report.data import ReportData, Request, gather
from retrain.report.figures import draw_figures
from retrain.report.panels import Drawn
from retrain.report.theme import to_png, to_svg
from retrain.report.token_view import token_view

_TEMPLATES = "templates"
_RECENT = 10
"""Steps at the end of training whose mean the table of conditions shows: enough to see where a run has come to."""
_FEW_RUNS = 12
"""The table of so many is open at first."""


@dataclass(frozen=True)
class Shown:
    """One figure in the page."""

    name: str
    title: str
    caption: str
    svg: Markup


@dataclass(frozen=True)
class Live:
    """What a served page knows, to ask its server whether there is anything new."""

    version: str
    """Of the files that it was made from."""
    refresh_s: float
    """Between two questions."""


def render(data: ReportData, figures: Sequence[Drawn], made: datetime, live: Live | None = None) -> str:
    """The page, as a file or for a server."""
    script, style = _asset("report.js"), _asset("report.css")
    shown = [Shown(drawn.name, drawn.title, drawn.caption, _svg(drawn)) for drawn in figures]
    return (
        _environment()
        .get_template("report.html")
        .render(
            data=data,
            made=f"{made:%Y-%m-%d %H:%M:%S}",
            policy=content_policy(script, live=live is not None),
            live=live,
            style=Markup(style),
            script=Markup(script),
            tiles=_tiles(data),
            figures=shown,
            arms=_arm_rows(data.arms) if not data.single else None,
            arm_head=("condition", "runs", "steps", "held-out", f"training, last {_RECENT} steps", "tokens/s", "s/step"),
            runs=[_run_row(status) for status in data.statuses],
            runs_open=len(data.statuses) <= _FEW_RUNS,
            tokens=[token_view(run) for run in data.tokens],
            comparison=data.comparison,
            **(_verdicts(data.comparison) if data.comparison else {}),
        )
    )


def _verdicts(comparison: Comparison) -> dict[str, Any]:
    """What the section of that name needs."""
    shared = {sharing(contrast) for contrast in comparison.contrasts}
    return {
        "heading": heading(comparison),
        "arm_table": arm_table(comparison),
        "contrasts": contrast_table(comparison),
        "shared_by_all": shared.pop() if len(shared) == 1 else "",
        "sentences": [
            (contrast, explanation(contrast, comparison), sharing(contrast), list(details(contrast, comparison)))
            for contrast in comparison.contrasts
        ],
    }


def content_policy(script: str, *, live: bool) -> str:
    """Nothing is loaded from anywhere, and this script alone runs; a served page may ask its own server."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = ["default-src 'none'", "style-src 'unsafe-inline'", f"script-src 'sha256-{digest}'", "img-src data:"]
    rules += ["connect-src 'self'"] if live else []
    return "; ".join([*rules, "base-uri 'none'", "form-action 'none'"])


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(_TEMPLATES, name).read_text(encoding="utf-8")


def _environment() -> Environment:
    assert __package__
    environment = Environment(
        loader=PackageLoader(__package__, _TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_harmless(Redactor()),
    )
    environment.globals["number"] = _number
    return environment


def _harmless(redactor: Redactor) -> Callable[[Any], Any]:
    """For every expression of the template: what is not our own markup is text, its secrets masked, its unseen characters shown."""

    def finalize(value: Any) -> Any:
        return value if isinstance(value, Markup) else redactor.text(visible(str(value)))

    return finalize


def _svg(drawn: Drawn) -> Markup:
    """matplotlib escapes the texts in it; they are labels of conditions, made visible as all text is."""
    return Markup(visible(to_svg(drawn.figure, drawn.name, drawn.title)))


# -- numbers in words ----------------------------------------------------------------------------------------------------


def _number(value: float | None, form: str = ".3g") -> str:
    return "–" if value is None else format(value, form)


def _tiles(data: ReportData) -> list[tuple[str, str]]:
    """(name, value): what one wants to know first."""
    return _run_tiles(data) if data.single else _campaign_tiles(data)


def _run_tiles(data: ReportData) -> list[tuple[str, str]]:
    (status,), (arm,) = data.statuses, data.arms
    tiles = [("state", str(status.state)), ("steps", f"{status.steps} of {status.max_steps}")]
    points = arm.held_out[0]
    if points:
        before = f"{points[0].accuracy:.1%} → " if len(points) > 1 else ""
        tiles.append((f"held-out pass@1, step {points[-1].step}", f"{before}{points[-1].accuracy:.1%}"))
    curves = arm.curves[0]
    tiles.append((f"training accuracy, last {min(WINDOW, arm.longest)} steps", _number(curves.last("correct_rate", WINDOW), ".1%")))
    tiles.append(("tokens a second", _number(curves.median("tokens_per_s"), ",.0f")))
    tiles.append(("seconds a step", _number(curves.median("step_time_s"))))
    if status.remaining_s is not None:
        tiles.append(("left", duration(status.remaining_s)))
    return tiles


def _campaign_tiles(data: ReportData) -> list[tuple[str, str]]:
    done = sum(status.state == "done" for status in data.statuses)
    steps = sum(status.steps for status in data.statuses)
    planned = max((status.max_steps or 0 for status in data.statuses), default=0) * len(data.statuses) if data.kind == "campaign" else 0
    seconds = sum(float(np.nansum(curves.values["step_time_s"])) for arm in data.arms for curves in arm.curves)
    tiles = [("runs done", f"{done} of {len(data.statuses)}"), ("conditions", str(len(data.arms))), ("seeds", str(data.seeds))]
    return [*tiles, ("steps", f"{steps:,} of {planned:,}" if planned > steps else f"{steps:,}"), ("time in steps", duration(seconds))]


def _arm_rows(arms: Sequence[Arm]) -> list[tuple[str, ...]]:
    """label, runs, steps, held-out and training accuracy, tokens/s, s/step; rates are means over the runs.

    Training accuracy is that of the runs that have come to the arm's last step: one that is on its way would pull it down.
    """
    return [
        (
            arm.label,
            str(len(arm.runs)),
            str(arm.longest),
            _number(_mean([points[-1].accuracy for points in arm.held_out if points]), ".1%"),
            _number(_mean([curves.last("correct_rate", _RECENT) for curves in arm.curves if len(curves.steps) == arm.longest]), ".1%"),
            _number(_mean([curves.median("tokens_per_s") for curves in arm.curves]), ",.0f"),
            _number(_mean([curves.median("step_time_s") for curves in arm.curves])),
        )
        for arm in arms
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _run_row(status: RunStatus) -> tuple[str, ...]:
    """Columns: name, state, steps, correct, reward, held-out, tokens/s, s/step, note."""
    return (
        status.name,
        str(status.state),
        f"{status.steps}/{status.max_steps}" if status.max_steps else "–",
        _number(status.correct_rate, ".1%"),
        _number(status.mean_reward, ".3f"),
        _number(status.held_out, ".1%"),
        _number(status.tokens_per_s, ",.0f"),
        _number(status.median_step_time_s),
        status.note,
    )


@dataclass(frozen=True)
class Written:
    page: Path
    pictures: list[Path]


def build_page(request: Request, live: Live | None = None) -> str:
    """The HTML, as a file or for a server."""
    data = gather(request)
    return render(data, draw_figures(data), datetime.now().astimezone(), live)


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
        replace_file(output, render(data, figures, datetime.now().astimezone()))
    except OSError as error:
        raise EnvironmentFailure(f"{output} cannot be written: {error.strerror or error}; name another file with --output.") from error
    return Written(output, pictures)


def _replace_bytes(path: Path, content: bytes) -> None:
    aside = path.with_name(f".tmp-{path.name}")
    aside.write_bytes(content)
    aside.replace(path)

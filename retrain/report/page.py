"""Pages as one HTML file that loads nothing: the report, with its token-credit viewer (every token
with a shade per quantity and its numbers). The page escapes text from a model, and shows its
invisible characters.
"""

import base64
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from retrain.analysis.compare import Comparison
from retrain.analysis.comparison_text import arm_table, contrast_table, sections, seed_line
from retrain.analysis.explanation import remarks
from retrain.analysis.headline import answer, name_of
from retrain.analysis.status import RunStatus
from retrain.errors import EnvironmentFailure
from retrain.inspect import Quantity
from retrain.inspect.credit import CompletionCredit, StepCredit
from retrain.inspect.shading import levels, scale_of, values_of
from retrain.inspect.terminal import heading
from retrain.records.disk import replace_file
from retrain.records.redact import Redactor
from retrain.records.terminal import counted, duration, visible
from retrain.report.data import (
    ConditionCurves,
    InspectedRun,
    ReportData,
    ReportRequest,
    read_report_data,
)
from retrain.report.drawing import PageFigure, to_picture, to_svg
from retrain.report.figures import draw_figures

# -- tokens ----------------------------------------------------------------------------------------


_MAX_COMPLETIONS = 4
_MAX_TOKENS = 1500
_LETTERS = {
    Quantity.ADVANTAGE: "a",
    Quantity.SURPRISAL: "s",
    Quantity.ENTROPY: "e",
    Quantity.LOG_RATIO: "r",
}


@dataclass(frozen=True)
class TokenSpan:
    text: str
    classes: str
    """One shade per quantity (a-3: the third on the negative side), and `plan` inside a planning
    phrase."""
    numbers: str
    ends_line: bool


@dataclass(frozen=True)
class CompletionView:
    heading: str
    columns: Sequence[tuple[str, Sequence[TokenSpan]]]
    """(condition, tokens) for each transform shown."""
    left_out: int
    """Number of tokens not shown."""


@dataclass(frozen=True)
class TokenView:
    run: InspectedRun
    step: int
    prompt: str
    completions: Sequence[CompletionView]
    scales: Sequence[tuple[str, str, str]]
    """(letter, quantity, size that gets the strongest shade)."""
    notes: Sequence[str]


def token_view(run: InspectedRun) -> TokenView:
    """Build the view of the prompt's completions with the largest advantages."""
    credit = run.credit
    slot = credit.liveliest_slot()
    unknown = {
        Quantity.ENTROPY: credit.table.entropies is None,
        Quantity.LOG_RATIO: credit.table.log_ratios is None,
    }
    scales = {
        quantity: scale_of(credit, quantity) for quantity in Quantity if not unknown.get(quantity)
    }
    return TokenView(
        run=run,
        step=credit.step,
        prompt=credit.prompt(slot) or "(not stored)",
        completions=[
            _completion(credit, credit.completion(number), scales)
            for number in credit.of_slot(slot)[:_MAX_COMPLETIONS]
        ],
        scales=[
            (_LETTERS[quantity], quantity.value, f"{scale:.3g}")
            for quantity, scale in scales.items()
        ],
        notes=credit.notes,
    )


def _completion(
    credit: StepCredit, completion: CompletionCredit, scales: dict[Quantity, float]
) -> CompletionView:
    return CompletionView(
        heading=heading(completion),
        columns=[(label, _spans(completion, label, scales)) for label in credit.labels],
        left_out=max(0, len(completion.pieces) - _MAX_TOKENS),
    )


def _spans(
    completion: CompletionCredit, label: str, scales: dict[Quantity, float]
) -> list[TokenSpan]:
    count = len(completion.pieces)
    shades = {
        _LETTERS[quantity]: levels(values_of(completion, quantity, label), scale, count)
        for quantity, scale in scales.items()
    }
    spans = []
    for position, piece in enumerate(completion.pieces[:_MAX_TOKENS]):
        planning = completion.planning is not None and bool(completion.planning[position])
        classes = [
            f"{letter}{levels[position]}" for letter, levels in shades.items() if levels[position]
        ]
        spans.append(
            TokenSpan(
                text=piece.replace("\n", "↵") or "◌",
                classes=" ".join([*classes, "plan"] if planning else classes),
                numbers=_numbers(completion, label, position, planning),
                ends_line=piece.endswith("\n"),
            )
        )
    return spans


def _numbers(completion: CompletionCredit, label: str, position: int, planning: bool) -> str:
    stages = " → ".join(
        f"{stage} {values[position]:+.4f}" for stage, values in completion.stages[label].items()
    )
    parts = [f"token {position}", stages, f"surprisal {completion.surprisals[position]:.3f}"]
    if completion.entropies is not None:
        parts.append(f"entropy {completion.entropies[position]:.3f}")
    if completion.log_ratios is not None:
        parts.append(f"log-ratio {completion.log_ratios[position]:+.1e}")
    if completion.kept is not None:
        parts.append(f"one of {completion.kept[position]} tokens")
    return ", ".join([*parts, "planning"] if planning else parts)


# -- the report ------------------------------------------------------------------------------------


_TEMPLATES = "templates"
_FEW_RUNS = 12
"""Up to this number of runs their table opens at first."""


@dataclass(frozen=True)
class ShownFigure:
    """A figure in the form for the page."""

    name: str
    title: str
    caption: str
    svg: Markup


def render(data: ReportData, figures: Sequence[PageFigure], made: datetime) -> str:
    """Return the page as HTML."""
    script, style = asset("report.js"), asset("report.css")
    # matplotlib escapes the texts in a figure; they are labels of conditions, made visible as all
    # text is.
    shown = [
        ShownFigure(
            drawn.name,
            drawn.title,
            drawn.caption,
            Markup(visible(to_svg(drawn.figure, drawn.name, drawn.title))),
        )
        for drawn in figures
    ]
    return (
        environment()
        .get_template("report.html")
        .render(
            data=data,
            made=f"{made:%Y-%m-%d %H:%M:%S}",
            policy=content_policy(script),
            style=Markup(style),
            script=Markup(script),
            tiles=list(_run_tiles(data) if data.single else _campaign_tiles(data)),
            figures=shown,
            arms=_arm_rows(data.arms) if not data.single else None,
            arm_head=(
                "condition",
                "runs",
                "steps",
                "held-out",
                "training, last tenth",
                "tokens/s",
                "s/step",
            ),
            runs=[_run_row(status) for status in data.statuses],
            runs_open=len(data.statuses) <= _FEW_RUNS,
            tokens=[token_view(run) for run in data.tokens],
            comparison=data.comparison,
            **(_verdicts(data.comparison) if data.comparison else {}),
        )
    )


def _verdicts(comparison: Comparison) -> dict[str, Any]:
    """Return the variables of the template's section "verdicts"."""
    own, shared = remarks(comparison)
    return {
        "answer": answer(comparison),
        "planned": comparison.planned,
        "arm_table": arm_table(comparison),
        "contrasts": contrast_table(comparison),
        "seed_lines": [seed_line(contrast, comparison) for contrast in comparison.contrasts],
        "sentences": [
            (contrast, name_of(contrast, comparison), conclusion, rest)
            for contrast, (conclusion, *rest) in zip(comparison.contrasts, own, strict=True)
        ],
        "shared": shared,
        "sections": list(sections(comparison)),
    }


def content_policy(script: str) -> str:
    """Return a content security policy: load nothing, and run only this script."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src"
        " data:; base-uri 'none'; form-action 'none'"
    )


def asset(name: str) -> str:
    """Return a file of the folder `templates`."""
    return resources.files(__package__).joinpath(_TEMPLATES, name).read_text(encoding="utf-8")


def environment() -> Environment:
    """Load the templates so that every expression in them becomes safe text without secrets."""
    assert __package__
    redactor = Redactor()

    def finalize(value: Any) -> Any:
        """All but our own markup becomes text, with secrets masked and invisible characters
        shown.
        """
        if isinstance(value, Markup):
            return value
        return redactor.text(visible(str(value)))

    made = Environment(
        loader=PackageLoader(__package__, _TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=finalize,
    )
    made.globals["number"] = _number
    return made


# -- numbers in words ------------------------------------------------------------------------------


def _number(value: float | None, form: str = ".3g") -> str:
    if value is None:
        return "–"
    return format(value, form)


def _campaign_tiles(data: ReportData) -> Iterator[tuple[str, str]]:
    """Yield the (name, value) pairs that a reader wants to know first."""
    runs = len(data.statuses)
    yield "runs done", f"{sum(status.state == 'done' for status in data.statuses)} of {runs}"
    yield "conditions", str(len(data.arms))
    yield "seeds", str(data.seeds)
    steps = sum(status.steps for status in data.statuses)
    planned = 0
    if data.kind == "campaign":  # `retrain status` counts the same: a skipped run takes none.
        wanted = sum(status.state != "skipped" for status in data.statuses)
        planned = wanted * max((status.max_steps or 0 for status in data.statuses), default=0)
    yield "steps", f"{steps:,} of {planned:,}" if planned > steps else f"{steps:,}"
    curves = chain.from_iterable(arm.curves for arm in data.arms)
    seconds = sum(float(np.nansum(one.values["step_time_s"])) for one in curves)
    yield "time in steps", duration(seconds)


def _run_tiles(data: ReportData) -> Iterator[tuple[str, str]]:
    (status,), (arm,) = data.statuses, data.arms
    yield "state", str(status.state)
    yield "steps", f"{status.steps} of {status.max_steps}"
    taken = arm.runs[0].sft_records
    if taken:
        losses = f"loss {_number(taken[0].loss)} → {_number(taken[-1].loss)}"
        yield f"supervised stage, {counted(len(taken), 'step')}", losses
    points = arm.held_out[0]
    if points:
        before = f"{points[0].accuracy:.1%} → " if len(points) > 1 else ""
        last = points[-1]
        yield f"held-out pass@1, step {last.step}", f"{before}{last.accuracy:.1%}"
    curves, tenth = arm.curves[0], last_tenth(arm)
    yield (
        f"training accuracy, last tenth ({counted(tenth, 'step')})",
        _number(curves.last_accuracy(tenth), ".1%"),
    )
    yield "tokens per second", _number(curves.median("tokens_per_s"), ",.0f")
    yield "seconds per step", _number(curves.median("step_time_s"))
    if status.remaining_s is not None:
        yield "left", duration(status.remaining_s)


def _arm_rows(arms: Sequence[ConditionCurves]) -> list[tuple[str, ...]]:
    """Return one row per condition under `arm_head`; rates are means over the runs.

    Training accuracy counts only the runs that have reached the condition's last step, since any
    other run would lower it.
    """
    return [
        (
            arm.label,
            str(len(arm.runs)),
            str(arm.longest),
            _number(_mean([points[-1].accuracy for points in arm.held_out if points]), ".1%"),
            _number(
                _mean(
                    [
                        curves.last_accuracy(last_tenth(arm))
                        for curves in arm.curves
                        if len(curves.steps) == arm.longest
                    ]
                ),
                ".1%",
            ),
            _number(_mean([curves.median("tokens_per_s") for curves in arm.curves]), ",.0f"),
            _number(_mean([curves.median("step_time_s") for curves in arm.curves])),
        )
        for arm in arms
    ]


def last_tenth(arm: ConditionCurves) -> int:
    """Return the number of steps that the last tenth of a run has, at least 1."""
    return max(1, arm.longest // 10)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if known:
        return sum(known) / len(known)
    return None


def _run_row(status: RunStatus) -> tuple[str, ...]:
    """Return the cells name, state, steps, correct, reward, held-out, tokens/s, s/step and note."""
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
class ReportFiles:
    page: Path
    pictures: list[Path]
    notes: Sequence[str]
    """The parts that the page could not show, a sentence each."""


def build_page(request: ReportRequest) -> str:
    """Read a folder, draw its figures and render the page."""
    data = read_report_data(request)
    return render(data, draw_figures(data), datetime.now().astimezone())


@contextmanager
def _writing(output: Path) -> Iterator[None]:
    """Make the folder of `output`. Raises EnvironmentFailure if the disk refuses it."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise EnvironmentFailure(
            f"{output} cannot be written: {error.strerror or error}; name another file with"
            " --output."
        ) from error


def write_report(request: ReportRequest, output: Path) -> ReportFiles:
    """Write the page to `output`, and every figure to <its stem>-<figure>.svg and .png in the same
    folder. Replaces each file atomically. Raises EnvironmentFailure if the disk refuses a file.
    """
    data = read_report_data(request)
    figures = draw_figures(data)
    pictures = []
    with _writing(output):
        for drawn in figures:
            for form in ("svg", "png"):
                picture = output.with_name(f"{output.stem}-{drawn.name}.{form}")
                replace_file(picture, to_picture(drawn.figure, drawn.name, form))
                pictures.append(picture)
        replace_file(output, render(data, figures, datetime.now().astimezone()))
    return ReportFiles(output, pictures, data.notes)

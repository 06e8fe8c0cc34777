"""Write the HTML page of a report from the data and the figures."""

import base64
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from itertools import chain, product
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from retrain.analysis.compare import Comparison
from retrain.analysis.comparison_text import HIDDEN, Table, arm_table, blocks, contrast_table
from retrain.analysis.headline import answer
from retrain.analysis.status import CampaignStatus, RunStatus
from retrain.errors import EnvironmentFailure
from retrain.inspect import Quantity
from retrain.inspect.credit import CompletionCredit
from retrain.inspect.shading import levels, scale_of, values_of
from retrain.inspect.terminal import heading, numbers
from retrain.records.disk import replace_file
from retrain.records.redact import Redactor
from retrain.records.terminal import counted, duration, number, picked, visible
from retrain.report.data import (
    ConditionCurves,
    InspectedRun,
    ReportData,
    ReportRequest,
    read_report_data,
)
from retrain.report.drawing import SERIES, PageFigure, to_picture, to_svg
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


def token_view(run: InspectedRun) -> dict[str, Any]:
    """Return the template's variables for the completions of the prompt with the largest
    advantages.
    """
    credit = run.credit
    slot = credit.liveliest_slot()
    shown = [credit.completion(number) for number in credit.of_slot(slot)[:_MAX_COMPLETIONS]]
    scales = {
        quantity: scale_of(credit, quantity)
        for quantity in Quantity
        if values_of(shown[0], quantity, credit.labels[0]) is not None
    }
    return {
        "run": run,
        "step": credit.step,
        "prompt": credit.prompt(slot) or "(not stored)",
        "notes": credit.notes,
        "scales": [(_LETTERS[one], one.value, f"{scale:.3g}") for one, scale in scales.items()],
        "completions": [
            {
                "heading": heading(one),
                "columns": [(label, list(_spans(one, label, scales))) for label in credit.labels],
                "left_out": len(one.pieces) - _MAX_TOKENS,
            }
            for one in shown
        ],
    }


def _spans(
    completion: CompletionCredit, label: str, scales: dict[Quantity, float]
) -> Iterator[TokenSpan]:
    count = len(completion.pieces)
    shades = {
        _LETTERS[quantity]: levels(values_of(completion, quantity, label), scale, count)
        for quantity, scale in scales.items()
    }
    for position, piece in enumerate(completion.pieces[:_MAX_TOKENS]):
        classes = [
            f"{letter}{shade[position]}" for letter, shade in shades.items() if shade[position]
        ]
        stages = [
            f"{stage} {values[position]:+.4f}" for stage, values in completion.stages[label].items()
        ]
        facts = [f"{name} {value}" for name, value in numbers(completion, position).items()]
        if completion.planning is not None and completion.planning[position]:
            classes.append("plan")
            facts.append("planning")
        yield TokenSpan(
            text=piece.replace("\n", "↵") or "◌",
            classes=" ".join(classes),
            numbers=", ".join([f"token {position}", " → ".join(stages), *facts]),
            ends_line=piece.endswith("\n"),
        )


# -- the report ------------------------------------------------------------------------------------


_TEMPLATES = "templates"
_FEW_RUNS = 12
"""Up to this number of runs their table opens at first."""
_TURN = re.compile(
    r"(?:<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>)(\w+)(?:<\|end_header_id\|>)?\s+"
    r"(.*?)\s*(?:<\|im_end\|>|<\|eot_id\|>|<end_of_turn>|\Z)",
    re.DOTALL,
)


def turns(prompt: str) -> list[tuple[str, str]]:
    """Return the (role, text) of each turn of a chat; other prompts are one turn without a role."""
    return [turn for turn in _TURN.findall(prompt) if turn[1]] or [("", prompt)]


def render(data: ReportData, figures: Sequence[PageFigure]) -> str:
    """Return the page as HTML."""
    script, style = asset("report.js"), asset("report.css")
    # matplotlib escapes the texts in a figure; they are labels of conditions, made visible as all
    # text is.
    shown = [
        (drawn, Markup(visible(to_svg(drawn.figure, drawn.name, drawn.title)))) for drawn in figures
    ]
    comparison = data.comparison
    return (
        environment()
        .get_template("report.html")
        .render(
            data=data,
            made=f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S}",
            policy=content_policy(script),
            style=Markup(style),
            script=Markup(script),
            colors={arm.label: place % len(SERIES) for place, arm in enumerate(data.arms)},
            tiles=list(_run_tiles(data) if data.single else _campaign_tiles(data)),
            figures=shown,
            arms=_arm_table(data.arms),
            runs=(_RUN_HEAD, [_run_row(status) for status in data.statuses]),
            runs_open=len(data.statuses) <= _FEW_RUNS,
            tokens=[token_view(run) for run in data.tokens],
            answer=answer(comparison) if comparison else "",
            results=_results(comparison) if comparison else None,
            details=[
                block
                for block in (blocks(comparison, HIDDEN) if comparison else ())
                if block.title not in ("", *_SHOWN)
            ],
        )
    )


_SHOWN = ("Notes", "Left out")
"""The sections of a comparison that are not behind the page's details."""


def _results(comparison: Comparison) -> Table:
    """Return a row per condition: its runs, then its difference from the baseline."""
    head, rows = arm_table(comparison)
    more, contrasts = contrast_table(comparison, HIDDEN)
    differences = {name: cells for name, *cells in contrasts}
    merged = [[*row, *differences.get(row[0], [""] * len(more[1:]))] for row in rows]
    names = [*head, *more[1:]]
    shown = [column for column, name in enumerate(names) if name != "pairs"]
    shown.sort(key=lambda column: " per " in names[column])  # The cost comes last.
    return picked(names, shown), [picked(row, shown) for row in merged]


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
    made.globals |= {"number": number, "turns": turns}
    return made


# -- numbers in words ------------------------------------------------------------------------------


def _campaign_tiles(data: ReportData) -> Iterator[tuple[str, str]]:
    """Yield the (name, value) pairs of a campaign's progress."""
    whole = CampaignStatus(data.folder, tuple(data.statuses))
    yield "runs done", f"{whole.counts.get('done', 0)} of {len(whole.runs)}"
    yield "seeds", str(data.seeds)
    still = f" of {whole.max_steps:,}" if whole.max_steps > whole.steps else ""
    yield "steps", f"{whole.steps:,}{still}"
    curves = chain.from_iterable(arm.curves for arm in data.arms)
    yield "time in steps", duration(sum(float(one.known("step_time_s").sum()) for one in curves))


def _run_tiles(data: ReportData) -> Iterator[tuple[str, str]]:
    """Yield the (name, value) pairs that a reader of a run wants to know first."""
    (status,), (arm,) = data.statuses, data.arms
    curves, tenth, points = arm.curves[0], last_tenth(arm), arm.held_out[0]
    yield "state", str(status.state)
    yield "steps", f"{status.steps} of {status.max_steps}"
    if points:
        shown = " → ".join(
            f"{point.accuracy:.1%}" for point in dict.fromkeys((points[0], points[-1]))
        )
        yield f"held-out pass@1, step {points[-1].step}", shown
    else:
        yield "held-out pass@1", "not evaluated"
    yield (
        f"training accuracy, last tenth ({counted(tenth, 'step')})",
        number(curves.last_accuracy(tenth), ".1%"),
    )
    taken = arm.runs[0].sft_records
    if taken:
        losses = f"loss {number(taken[0].loss, '.3g')} → {number(taken[-1].loss, '.3g')}"
        yield f"supervised stage, {counted(len(taken), 'step')}", losses
    yield "tokens per second", number(curves.median("tokens_per_s"), ",.0f")
    yield "time in steps", duration(float(curves.known("step_time_s").sum()))
    if status.remaining_s is not None:
        yield "left", duration(status.remaining_s)


def _arm_table(arms: Sequence[ConditionCurves]) -> Table:
    """Return one row per condition; numbers are means over the runs.

    Training accuracy counts only the runs that have reached the condition's last step, since any
    other run would lower it.
    """
    medians = {
        "tokens/s": ("tokens_per_s", ",.0f"),
        "s/step": ("step_time_s", ".3g"),
        "sampling, s": ("time_sample_s", ".3g"),
        "learning, s": ("time_learn_s", ".3g"),
    }
    rows = []
    for arm in arms:
        evaluated = [points[-1].accuracy for points in arm.held_out if points]
        whole = [curves for curves in arm.curves if len(curves.steps) == arm.longest]
        row = [
            *(arm.label, str(len(arm.runs)), str(arm.longest), _mean(evaluated, ".1%")),
            _mean([curves.last_accuracy(last_tenth(arm)) for curves in whole], ".1%"),
        ]
        for field, form in medians.values():
            row.append(_mean([curves.median(field) for curves in arm.curves], form))
        rows.append(row)
    return ["condition", "runs", "steps", "held-out", "training, last tenth", *medians], rows


_RUN_HEAD = ("run", "state", "step", "correct", "reward", "held-out", "tokens/s", "s/step", "note")


def _run_row(status: RunStatus) -> tuple[str, ...]:
    return (
        status.name,
        str(status.state),
        f"{status.steps}/{status.max_steps or '-'}",
        number(status.correct_rate, ".1%"),
        number(status.mean_reward, ".3f"),
        number(status.held_out, ".1%"),
        number(status.tokens_per_s, ",.0f"),
        number(status.median_step_time_s, ".3g"),
        status.note,
    )


def last_tenth(arm: ConditionCurves) -> int:
    """Return the number of steps that the last tenth of a run has, at least 1."""
    return max(1, arm.longest // 10)


def _mean(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    return number(sum(known) / len(known) if known else None, form)


def build_page(request: ReportRequest) -> str:
    """Read a folder, draw its figures and render the page."""
    data = read_report_data(request)
    return render(data, draw_figures(data))


def write_report(request: ReportRequest, output: Path) -> tuple[list[Path], Sequence[str]]:
    """Write the page to `output`, and every figure to <its stem>-<figure>.svg and .png in the same
    folder. Replaces each file atomically. Returns the pictures, and a sentence for each part that
    the page could not show. Raises EnvironmentFailure if the disk refuses a file.
    """
    data = read_report_data(request)
    figures, pictures = draw_figures(data), []
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        for drawn, form in product(figures, ("svg", "png")):
            pictures.append(output.with_name(f"{output.stem}-{drawn.name}.{form}"))
            replace_file(pictures[-1], to_picture(drawn.figure, drawn.name, form))
        replace_file(output, render(data, figures))
    except OSError as error:
        raise EnvironmentFailure(
            f"{output} cannot be written: {error.strerror or error}; name another file with"
            " --output."
        ) from error
    return pictures, data.notes

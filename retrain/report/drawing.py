"""Draw the parts of a report: colors and sizes, figures as SVG and PNG, curves with bands, rates
as percentages, rows of dots.

In the page every color is a CSS variable, so one drawing serves the light and the dark theme. A PNG
has the light colors.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO, StringIO
from itertools import product
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from retrain.analysis.statistics import Floats
from retrain.report.data import Band, HeldOutPoint, ReportData, window_for

_WIDTH = 5.1
"""In inches. At this width a desktop page enlarges a figure, and a phone hardly shrinks it."""
_HEIGHT = 3.1
_ROW_HEIGHT = 0.56
_NAME_HEIGHT = 0.2
_LABELS_HEIGHT = 0.8
ROW_NAME = 34
"""Characters of a name above a row."""
_MAX_BANDS = 5
_MARKED_STEPS = 12
"""Up to this number of points, a line shows each."""
_NAME_WIDTH = 18
"""Characters of a name at the end of a line."""
_EDGE = 0.02
"""Margin of a rate's axis beyond 0 and 1, so that a line there is visible."""
INK = "#1d2530"
MUTED = "#5d6877"
GRID = "#dfe3e9"
PAPER = "#ffffff"
SERIES = ("#0069a8", "#cc4e00", "#007a57", "#a63d84", "#8a6500", "#3b3fb6", "#5f6670", "#b3261e")
"""Colors of the series, after Okabe and Ito, but darker. Nearly everyone can distinguish them, and
their contrast with white is at least 4.5:1.
"""

_VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", PAPER: "--paper"} | {
    color: f"--series-{index}" for index, color in enumerate(SERIES)
}
_STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.size": 11.5,
    "axes.titlesize": 11.5,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "text.color": INK,
    "text.parse_math": False,  # A label is text, whatever it holds.
    "axes.unicode_minus": True,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "svg.fonttype": "none",
}
_PNG_DPI = 200
_FILE_METADATA: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "svg": {"Creator": None, "Date": None},
}
"""Format -> metadata that removes the date and the library version from the file."""
_NO_METADATA = {"Creator": None, "Date": None, "Format": None, "Type": None}


def shortened(words: str, width: int) -> str:
    """Leave out the middle of words that are too long; the table has the whole name."""
    half = width // 2
    return words if len(words) <= width else f"{words[: half - 1]}…{words[-half:]}"


def series(index: int) -> str:
    return SERIES[index % len(SERIES)]


@contextmanager
def drawing(name: str) -> Iterator[None]:
    """Draw figures in the report's style; the same `name` and data give the same bytes."""
    settings: Any = {**_STYLE, "svg.hashsalt": name}
    with mpl.rc_context(settings):
        yield


def to_svg(figure: Figure, name: str, description: str) -> str:
    """Return an <svg> element for a page that defines the CSS variables. `name` makes its ids
    unique in the page.
    """
    out = StringIO()
    with drawing(name):
        figure.savefig(out, format="svg", metadata=_NO_METADATA)
    text = out.getvalue()
    # The page has the namespaces, the size and the colors, and all figures share its ids.
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = (
        re.sub(r'\s(?:xmlns(?::\w+)?|version|width|height)="[^"]*"', "", text[: text.index(">")])
        + text[text.index(">") :]
    )
    text = text.replace("xlink:href", "href")
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    for color, variable in _VARIABLES.items():
        text = text.replace(color, f"var({variable})")
    label = description.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def to_picture(figure: Figure, name: str, form: str = "png") -> bytes:
    """Return the bytes of a png or svg file on white; the same data give the same bytes."""
    out = BytesIO()
    with drawing(name):
        figure.savefig(
            out, format=form, dpi=_PNG_DPI, facecolor=PAPER, metadata=_FILE_METADATA[form]
        )
    return out.getvalue()


@dataclass(frozen=True)
class PageFigure:
    name: str
    """The name of its file and its anchor in the page."""
    title: str
    caption: str
    figure: Figure


def empty_figure(height: float = _HEIGHT) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def as_percentages(axes: Axes) -> None:
    """Show rates as percentages, on an axis that fits the data within 0 and 1."""
    axes.autoscale(axis="y")
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    low, high = axes.get_ylim()
    axes.set_ylim(max(-_EDGE, low), min(1 + _EDGE, high))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0 if high - low > 0.05 else 1))


# -- lines -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lines:
    """A figure of lines over the steps: its fields and their form."""

    name: str
    title: str
    fields: Mapping[str, str]
    """Field -> its name at the end of the line in the report of a single run; the second field has
    a dashed line."""
    ylabel: str
    percent: bool = False
    smooth: bool = True
    from_zero: bool = False
    optional: bool = False
    """True hides the figure if it has the same value at every step of every run."""
    evaluated: bool = False
    """True adds the held-out evaluations of a single run."""
    note: str = ""
    """About the dashed lines if there is a second field."""


@dataclass(frozen=True)
class Name:
    """The name of a line, which stands at its right end."""

    height: float
    """The line's last value."""
    words: str
    color: str


def line_figure(data: ReportData, lines: Lines) -> PageFigure | None:
    """Return one line per condition, dashed for a second field; None if the first field is absent
    from all runs.
    """
    window = window_for(max(arm.longest for arm in data.arms)) if lines.smooth else 1
    figure, axes = empty_figure(max(_HEIGHT, _NAME_HEIGHT * len(data.arms) + _LABELS_HEIGHT))
    second = [*lines.fields][1:]
    names = _draw_lines(axes, data, lines, window)
    if not names or (lines.optional and axes.dataLim.height == 0):
        return None
    if lines.evaluated:
        names += _draw_held_out(axes, data.arms[0].held_out[0])
    axes.set(xlabel="step", ylabel=lines.ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.margins(x=0.02)
    if lines.percent:
        as_percentages(axes)
    elif lines.from_zero:
        axes.set_ylim(0, 1.06 * axes.dataLim.y1)
    write_names(axes, names)
    has_note = not second or any(arm.band(second[0]) for arm in data.arms)
    caption = f"{_line_words(data, window)} {lines.note * has_note}".strip()
    return PageFigure(lines.name, lines.title, caption, figure)


def _draw_lines(axes: Axes, data: ReportData, lines: Lines, window: int) -> list[Name]:
    """Draw the lines, and return their names."""
    names = []
    for (index, arm), (place, field) in product(enumerate(data.arms), enumerate(lines.fields)):
        band, color = arm.band(field, window), series(index)
        if band is None:
            continue
        if data.single and window > 1 and (raw := arm.band(field)):  # Draw each step, thin.
            axes.plot(raw.steps, raw.mean, color=color, alpha=0.28, linewidth=1)
        banded, dashed = _has_bands(data), place > 0
        _draw_band(axes, band, color, percent=lines.percent, dashed=dashed, banded=banded)
        words = lines.fields[field] if data.single else arm.label
        if data.single or not dashed:  # A note explains the dashes of several conditions.
            names.append(Name(band.mean[-1], words, color))
    return names


def _draw_band(
    axes: Axes, band: Band, color: str, *, percent: bool, dashed: bool, banded: bool
) -> None:
    if band.sd is not None and banded:
        low, high = band.mean - band.sd, band.mean + band.sd
        if percent:
            low, high = np.clip((low, high), 0.0, 1.0)
        axes.fill_between(band.steps, low, high, color=color, alpha=0.14, linewidth=0)
    marker = "o" if len(band.steps) <= _MARKED_STEPS else ""
    style: Any = (0, (4, 2)) if dashed else "-"
    axes.plot(band.steps, band.mean, color=color, linestyle=style, marker=marker, markersize=5)


def _draw_held_out(axes: Axes, points: Sequence[HeldOutPoint]) -> list[Name]:
    """Draw the evaluations of a run as dots with their intervals over the problems."""
    accuracy = np.array([point.accuracy for point in points])
    errors = np.abs(np.array([point.interval for point in points]).T - accuracy)
    steps = [point.step for point in points]
    axes.errorbar(
        steps, accuracy, yerr=errors, fmt="o", color=INK, capsize=3, markersize=5, zorder=3
    )
    if steps[0] < 0:  # The supervised stage is left of this line.
        axes.axvline(0, color=MUTED, linewidth=1, linestyle=":")
    return [Name(accuracy[-1], "held-out", INK)]


def write_names(axes: Axes, names: Sequence[Name]) -> None:
    """Write the names of lines to the right of the axes, at the heights of the lines; names that
    would overlap move apart.
    """
    low, high = axes.get_ylim()
    names = sorted(names, key=lambda name: name.height)
    wanted = (np.array([name.height for name in names]) - low) / (high - low)
    height = axes.figure.bbox.height / axes.figure.dpi - _LABELS_HEIGHT
    apart = _NAME_HEIGHT / height * np.arange(len(names))
    places = np.maximum.accumulate(wanted - apart) + apart
    places -= (places - wanted).mean()
    places += max(0.0, -places[0]) - max(0.0, places[-1] - 1)
    for name, place in zip(names, places, strict=True):
        axes.annotate(
            shortened(name.words, _NAME_WIDTH),
            (1, place),
            xytext=(5, 0),
            xycoords="axes fraction",
            textcoords="offset points",
            va="center",
            fontsize=11,
            color=name.color,
        )


def _has_bands(data: ReportData) -> bool:
    """True unless every condition has one run, or more conditions would hide each other's bands."""
    return len(data.arms) <= _MAX_BANDS and any(len(arm.runs) > 1 for arm in data.arms)


def _line_words(data: ReportData, window: int) -> str:
    """Return a sentence on what the lines average; `window` is the number of steps in a running
    mean.
    """
    smoothed = f"mean of {window} steps" if window > 1 else ""
    if data.single:
        return f"Bold: {smoothed}; thin: each step." if smoothed else ""
    band = "; band: one standard deviation between runs" if _has_bands(data) else ""
    return f"Line: mean over the runs{', ' * bool(smoothed)}{smoothed}{band}."


# -- rows ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    words: str
    values: Floats
    """[n] one dot each."""
    mean: float
    bounds: Floats | None
    """The ends of its interval."""
    color: str
    weight: str = "normal"


def row_figure(rows: int) -> tuple[Figure, Axes]:
    return empty_figure(0.9 + _ROW_HEIGHT * rows)


def draw_rows(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw the values of each row as dots, and above them their mean with its interval and the
    words, which cover lines behind them.
    """
    behind = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.0}
    for place, row in enumerate(rows):
        dots = np.full(len(row.values), -place - 0.18)
        axes.plot(row.values, dots, "o", color=row.color, alpha=0.6, markersize=5, mew=0)
        if row.bounds is not None:
            axes.plot(row.bounds, [-place, -place], color=row.color, linewidth=2.4)
        axes.plot([row.mean], [-place], "D", color=row.color, markersize=6.5)
        axes.annotate(
            row.words,
            (0, 0.26 - place),
            xycoords=("axes fraction", "data"),
            va="bottom",
            fontsize=11,
            weight=row.weight,
            bbox=behind,
        )
    axes.set_ylim(-len(rows) + 0.5, 0.75)
    axes.tick_params(left=False, labelleft=False)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="y", visible=False)

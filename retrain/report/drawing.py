"""Draw the parts of a report: colors and sizes, figures as SVG, PDF and PNG, curves with bands,
rates as percentages, rows of dots, legends.

In the page every color is a CSS variable, so one drawing serves the light and the dark theme. A PNG
has the light colors.
"""

import math
import re
from collections.abc import Iterator, Mapping
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
from retrain.report.data import ReportData, window_for

_WIDTH = 5.1
_HEIGHT = 3.1
_LEGEND_ROW = 0.23
ROW_HEIGHT = 0.56
"""Height of a row in inches. At this width a desktop page enlarges a figure, and a phone hardly
shrinks it.
"""
_EDGE = 0.02
"""Margin of a rate's axis beyond 0 and 1, so that a line there is visible."""
INK = "#1d2530"
MUTED = "#5d6877"
GRID = "#dfe3e9"
PAPER = "#ffffff"
MARKERS = ("o", "s", "^", "v", "P", "X", "p", "*")
"""Marks of the series, for a reader who does not see their colors; a diamond is a mean."""
SERIES = ("#0069a8", "#cc4e00", "#007a57", "#a63d84", "#8a6500", "#3b3fb6", "#5f6670", "#b3261e")
"""Colors of the series, after Okabe and Ito, but darker. Nearly everyone can distinguish them, and
their contrast with white is at least 4.5:1.
"""

_VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", PAPER: "--paper"} | {
    colour: f"--series-{index}" for index, colour in enumerate(SERIES)
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
    "legend.frameon": False,
    "legend.fontsize": 11,
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
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
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


# -- building blocks -------------------------------------------------------------------------------


@dataclass(frozen=True)
class PageFigure:
    name: str
    """The name of its file and its anchor in the page."""
    title: str
    caption: str
    figure: Figure


@dataclass(frozen=True)
class Lines:
    """A figure of lines over the steps: its fields and their form."""

    name: str
    title: str
    fields: Mapping[str, str]
    """Field -> "" for the first field, and the meaning of the dashed line for a second one."""
    ylabel: str = ""
    percent: bool = False
    smooth: bool = True
    limits: tuple[float, float] | None = None
    from_zero: bool = False
    note: str = ""
    """The note on the dashed line if there is a second field, else on the figure."""
    single_label: str = ""
    """Label of the line in the report of a single run."""


def line_figure(data: ReportData, lines: Lines) -> PageFigure | None:
    """Return one line per condition, dashed for a second field; None if the first field is absent
    from all runs.
    """
    first, *second = lines.fields
    arms = [(index, arm) for index, arm in enumerate(data.arms) if arm.has(first)]
    if not arms:
        return None
    window = window_for(max(arm.longest for _, arm in arms)) if lines.smooth else 1
    figure, axes = empty_figure()
    for (index, arm), field in product(arms, lines.fields):
        band = arm.band(field, window)
        if band is None:
            continue
        colour = series(index)
        if data.single and window > 1 and (raw := arm.band(field)):  # Draw each step, thin.
            axes.plot(raw.steps + 1, raw.mean, color=colour, alpha=0.28, linewidth=1)
        # The legend has the conditions alone; a note explains the dashes.
        style: dict[str, Any] = {"linestyle": (0, (4, 2))}
        if not lines.fields[field]:
            style = {"label": (data.single and lines.single_label) or arm.label}
        draw_band(axes, band.steps + 1, band.mean, band.sd, colour, **style)
    _scale(axes, lines)
    has_dashes = any(arm.has(field) for field in second for _, arm in arms)
    note = lines.note if has_dashes or not second else ""
    words = filter(None, (_line_words(data, window), note))
    return PageFigure(lines.name, lines.title, " ".join(words), figure)


def _scale(axes: Axes, lines: Lines) -> None:
    """Scale the steps to the right, and the values over the range that suits them."""
    axes.set(xlabel="step", ylabel=lines.ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if lines.percent:
        as_percentages(axes)
    elif lines.limits:
        axes.set_ylim(*lines.limits)
    elif lines.from_zero:
        axes.set_ylim(0, 1.06 * axes.dataLim.y1)


def _line_words(data: ReportData, window: int) -> str:
    """Return a sentence on what the lines average; `window` is the number of steps in a running
    mean.
    """
    if data.single:
        if window > 1:
            return f"Bold: mean of {window} steps; thin: each step."
        return ""
    smoothed = f", mean of {window} steps" if window > 1 else ""
    return f"Line: mean over the runs{smoothed}{sd_words(data)}."


def draw_band(
    axes: Axes, steps: Floats, mean: Floats, sd: Floats | None, colour: str, **style: Any
) -> None:
    if sd is not None:
        axes.fill_between(steps, mean - sd, mean + sd, color=colour, alpha=0.14, linewidth=0)
    if len(steps) == 1:
        style.setdefault("marker", "o")
    axes.plot(steps, mean, color=colour, **style)


def sd_words(data: ReportData) -> str:
    several = any(len(arm.runs) > 1 for arm in data.arms)
    return "; band: one standard deviation between runs" if several else ""


def empty_figure(height: float = _HEIGHT) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def without_scale(axes: Axes) -> None:
    """Remove the numbers on the left side of a figure of rows."""
    axes.tick_params(left=False, labelleft=False)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="y", visible=False)


def row_label(axes: Axes, height: float, words: str, weight: str = "normal") -> None:
    """Write a label above its row, from the left edge, so that it covers lines behind it."""
    behind = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.0}
    axes.annotate(
        words,
        (0, height),
        xycoords=("axes fraction", "data"),
        va="bottom",
        fontsize=11,
        weight=weight,
        bbox=behind,
    )


def draw_row(
    axes: Axes, place: float, values: Floats, mean: float, bounds: Floats | None, colour: str
) -> None:
    """Draw [n] values as dots, and above them their mean with a line between two bounds."""
    axes.plot(
        values,
        np.full(len(values), place - 0.18),
        "o",
        color=colour,
        alpha=0.6,
        markersize=5,
        markeredgewidth=0,
    )
    if bounds is not None:
        axes.plot(bounds, [place, place], color=colour, linewidth=2.4)
    axes.plot([mean], [place], "D", color=colour, markersize=6.5)


def as_percentages(axes: Axes) -> None:
    """Show rates as percentages, on an axis that fits the data within 0 and 1."""
    axes.autoscale(axis="y")
    low, high = axes.get_ylim()
    axes.set_ylim(max(-_EDGE, low), min(1 + _EDGE, high))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0 if high - low > 0.05 else 1))


def add_legend(figure: Figure, least: int) -> None:
    """Add a legend above the axes, where it covers no line; the figure grows by its rows. With
    fewer than `least` labels there is none.
    """
    (axes,) = figure.axes
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) < least:
        return
    columns = 2 if max(map(len, labels)) > 14 else 3
    if max(map(len, labels)) > 26:
        columns = 1
    rows = math.ceil(len(labels) / columns)
    figure.set_figheight(figure.get_figheight() + _LEGEND_ROW * rows)
    figure.legend(
        handles,
        labels,
        loc="outside upper left",
        ncols=columns,
        handlelength=1.6,
        columnspacing=1.4,
        borderaxespad=0.1,
    )

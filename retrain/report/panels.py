"""The building blocks of a report's figures: curves with bands, rates as percentages, rows of dots, and legends above the axes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from retrain.analysis.statistics import Floats
from retrain.report.curves import window_for
from retrain.report.data import ReportData
from retrain.report.theme import PAPER, series

_WIDTH = 5.1
_HEIGHT = 3.1
_LEGEND_ROW = 0.23
ROW_HEIGHT = 0.56
"""Height of a row in inches. At this width a figure is enlarged in a column of a desktop page and hardly shrunk on a phone."""
_EDGE = 0.02
"""Margin of a rate's axis beyond 0 and 1, so that a line there is visible."""


@dataclass(frozen=True)
class Drawn:
    name: str
    """Names its file and its anchor in the page."""
    title: str
    caption: str
    figure: Figure


@dataclass(frozen=True)
class Lines:
    """A figure of lines over the steps: which fields it shows, and how."""

    name: str
    title: str
    fields: Mapping[str, str]
    """Field -> "" for the first, and what the dashed line of a second one is."""
    ylabel: str = ""
    percent: bool = False
    smooth: bool = True
    limits: tuple[float, float] | None = None
    from_zero: bool = False
    note: str = ""
    """On the dashed line if there is a second field, else on the figure."""
    single_label: str = ""
    """Label of the line in the report of a single run."""


def line_figure(data: ReportData, lines: Lines) -> Drawn | None:
    """One line per condition, dashed for a second field. None if no run has the first field."""
    first = next(iter(lines.fields))
    arms = [(index, arm) for index, arm in enumerate(data.arms) if arm.has(first)]
    if not arms:
        return None
    window = window_for(max(arm.longest for _, arm in arms)) if lines.smooth else 1
    figure, axes = empty_figure()
    for (index, arm), (field, kind) in product(arms, lines.fields.items()):
        band = arm.band(field, window)
        if band is None:
            continue
        if data.single and window > 1 and (raw := arm.band(field)):  # each step, thin
            axes.plot(raw.steps + 1, raw.mean, color=series(index), alpha=0.28, linewidth=1)
        label = None if kind else (lines.single_label if data.single else "") or arm.label
        style: dict[str, Any] = {"linestyle": (0, (4, 2))} if kind else {}
        draw_band(axes, band.steps + 1, band.mean, band.sd, series(index), label=label, **style)
    axes.set(xlabel="step", ylabel=lines.ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if lines.percent:
        as_percentages(axes)
    elif lines.limits:
        axes.set_ylim(*lines.limits)
    elif lines.from_zero:
        axes.set_ylim(0, 1.06 * axes.dataLim.y1)
    dashed = lines.note if len(lines.fields) == 1 or any(arm.has(list(lines.fields)[1]) for _, arm in arms) else ""
    smoothed = f"mean of {window} steps"
    words = f"Line: mean over the runs{f', {smoothed}' if window > 1 else ''}{sd_words(data)}."
    if data.single:
        words = f"Bold: {smoothed}; thin: each step." if window > 1 else ""
    return Drawn(lines.name, lines.title, " ".join(filter(None, (words, dashed))), figure)


def draw_band(axes: Axes, steps: Floats, mean: Floats, sd: Floats | None, colour: str, **style: Any) -> None:
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
    axes.annotate(words, (0, height), xycoords=("axes fraction", "data"), va="bottom", fontsize=11, weight=weight, bbox=behind)


def draw_row(axes: Axes, place: float, values: Floats, mean: float, bounds: Floats | None, colour: str) -> None:
    """Draw [n] values as dots, and above them their mean with a line between two bounds."""
    axes.plot(values, np.full(len(values), place - 0.18), "o", color=colour, alpha=0.6, markersize=5, markeredgewidth=0)
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
    """Add a legend above the axes, where it covers no line; the figure grows by its rows. With fewer than `least` labels there is none."""
    (axes,) = figure.axes
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) < least:
        return
    columns = 2 if max(map(len, labels)) > 14 else 3
    if max(map(len, labels)) > 26:
        columns = 1
    rows = math.ceil(len(labels) / columns)
    figure.set_figheight(figure.get_figheight() + _LEGEND_ROW * rows)
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, handlelength=1.6, columnspacing=1.4, borderaxespad=0.1)

"""The figures of a report: each a function from the data to a drawing, or None where there is nothing to draw."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from retrain.analysis.compare import Comparison
from retrain.analysis.statistics import Floats
from retrain.analysis.verdict import Verdict
from retrain.report.curves import PHASES, Arm, window_for
from retrain.report.data import ReportData, SqueezeCurve
from retrain.report.theme import GRID, INK, MUTED, PAPER, drawing, series

mpl.use("Agg")

_WIDTH = 5.1
_HEIGHT = 3.1
_LEGEND_ROW = 0.23
_ROW = 0.56
"""Inches. The width is chosen so that a column of a desktop page enlarges it and a phone hardly shrinks it."""
_EDGE = 0.02
"""Of a rate's axis beyond 0 and 1, so that a line there can be seen."""


@dataclass(frozen=True)
class Drawn:
    name: str
    """Of its file and its place in the page."""
    title: str
    caption: str
    figure: Figure


def draw_figures(data: ReportData) -> list[Drawn]:
    """Every figure that the data has something for."""
    makers: Sequence[Callable[[ReportData], Drawn | None]] = (
        _training,
        _held_out,
        _differences,
        _entropy,
        _sepa,
        _lengths,
        _signal,
        _throughput,
        _phases,
        _squeeze,
    )
    drawn = []
    for maker in makers:
        with drawing(maker.__name__):
            found = maker(data)
            if found:
                _legend(found.figure, least=2 if len(data.arms) < 2 else 1)
                drawn.append(found)
    return drawn


# -- learning ------------------------------------------------------------------------------------------------------------


def _training(data: ReportData) -> Drawn | None:
    drawn = _curves(data, "training", "Training accuracy", {"correct_rate": ""}, percent=True)
    if drawn and data.single and (points := data.arms[0].held_out[0]):
        (axes,) = drawn.figure.axes
        accuracy = np.array([point.accuracy for point in points])
        bounds = np.array([point.interval for point in points]).T
        errors = np.abs(bounds - accuracy)
        style: dict[str, Any] = {"fmt": "o", "color": INK, "capsize": 3, "markersize": 5, "linewidth": 1.4, "zorder": 3}
        axes.errorbar([point.step for point in points], accuracy, yerr=errors, label="held-out pass@1, 95% interval", **style)
        _percent(axes)
        return Drawn("training", "Training and held-out accuracy", f"{drawn.caption} Dots: held-out problems.", drawn.figure)
    return drawn


def _held_out(data: ReportData) -> Drawn | None:
    bands = [(arm, arm.held_out_band()) for arm in data.arms]
    if data.single or not any(band for _, band in bands):
        return None
    figure, axes = _empty()
    for index, (arm, band) in enumerate(bands):
        if band:
            _draw_band(axes, band.steps, band.mean, band.spread, series(index), label=arm.label, marker="o", markersize=4.5)
    _percent(axes)
    axes.set(xlabel="steps completed", ylabel="pass@1")
    caption = f"Mean over the runs{_spread_words(data)}, on problems that were not trained on."
    return Drawn("held-out", "Held-out accuracy", caption, figure)


def _differences(data: ReportData) -> Drawn | None:
    comparison = data.comparison
    if comparison is None:
        return None
    scale = 100.0 if comparison.metric.is_rate else 1.0
    contrasts = comparison.contrasts
    figure, axes = _empty(height=0.9 + _ROW * len(contrasts))
    labels = [arm.label for arm in data.arms]
    axes.axvline(0.0, color=MUTED, linewidth=1)
    for row, contrast in enumerate(contrasts):
        found, place = contrast.conclusion, -float(row)
        colour = series(labels.index(contrast.condition) if contrast.condition in labels else row + 1)
        values = scale * np.array(list(contrast.differences.values()))
        axes.plot(values, np.full(len(values), place), "o", color=colour, alpha=0.35, markersize=5, markeredgewidth=0)
        if found.interval:
            axes.plot(scale * np.array(found.interval), [place, place], color=colour, linewidth=2.4)
        axes.plot([scale * found.mean], [place], "D", color=colour, markersize=6.5)
        weight = "normal" if found.verdict is Verdict.INCONCLUSIVE else "bold"
        words = f"{contrast.condition}: {found.verdict}"
        _row_label(axes, place + 0.26, words, weight)
    axes.set(ylim=(-len(contrasts) + 0.55, 0.75), xlabel=_difference_words(comparison))
    axes.tick_params(left=False, labelleft=False)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="y", visible=False)
    confidence = f"{100 * (1 - comparison.rules.alpha):g}%"
    caption = f"Dots: one seed each. Diamond and line: their mean with its {confidence} interval. {_better(comparison)}"
    return Drawn("differences", f"Differences from {comparison.baseline}, paired by seed", caption, figure)


def _difference_words(comparison: Comparison) -> str:
    unit = " (percentage points)" if comparison.metric.is_rate else ""
    return f"difference in {comparison.metric.name}{unit}"


def _better(comparison: Comparison) -> str:
    return f"{'Left' if comparison.rules.lower_is_better else 'Right'} of 0 is better."


# -- what the policy is like ---------------------------------------------------------------------------------------------


def _entropy(data: ReportData) -> Drawn | None:
    """Entropy where the engine recorded it, else surprisal, which is never called entropy."""
    if any(arm.has("exec_entropy_mean") for arm in data.arms):
        kind, title = "entropy", "Entropy of the policy"
    else:
        kind, title = "surprisal", "Surprisal of the sampled tokens"
    fields = {f"exec_{kind}_mean": "", f"plan_{kind}_mean": "planning"}
    return _curves(data, "entropy", title, fields, ylabel="nats a token", note="Dashed: tokens inside planning phrases.")


def _sepa(data: ReportData) -> Drawn | None:
    return _curves(data, "sepa", "SEPA's lambda", {"sepa_lambda": ""}, smooth=False, limits=(-0.03, 1.03))


def _lengths(data: ReportData) -> Drawn | None:
    return _curves(data, "lengths", "Length of the completions", {"completion_tokens_mean": ""}, ylabel="tokens", from_zero=True)


def _signal(data: ReportData) -> Drawn | None:
    title = "Informative groups"
    note = "The fraction of the groups with at least two different rewards; the others have no gradient."
    return _curves(data, "signal", title, {"informative_fraction": ""}, percent=True, note=note)


# -- what it costs -------------------------------------------------------------------------------------------------------


def _throughput(data: ReportData) -> Drawn | None:
    return _curves(data, "throughput", "Throughput", {"tokens_per_s": ""}, ylabel="tokens a second", from_zero=True)


def _phases(data: ReportData) -> Drawn | None:
    arms = [arm for arm in data.arms if arm.has("step_time_s")]
    if not arms:
        return None
    names = [phase.removeprefix("time_").removesuffix("_s") for phase in PHASES]
    seconds = np.array([[_median(arm, phase) for phase in PHASES] for arm in arms])
    totals = np.maximum([_median(arm, "step_time_s") for arm in arms], seconds.sum(axis=1))
    parts = np.column_stack([seconds, totals - seconds.sum(axis=1)])
    figure, axes = _empty(height=1.0 + _ROW * len(arms))
    places = -np.arange(len(arms), dtype=float)
    left = np.zeros(len(arms))
    for column, name in enumerate([*names, "other"]):
        colour = GRID if name == "other" else series(column)
        axes.barh(places - 0.12, parts[:, column], left=left, height=0.4, color=colour, label=name)
        left += parts[:, column]
    for place, arm, total in zip(places, arms, totals, strict=True):
        words = f"{arm.label}: {total:.3g} s"
        _row_label(axes, place + 0.12, words)
    axes.set(ylim=(-len(arms) + 0.6, 0.6), xlabel="seconds a step")
    axes.tick_params(left=False, labelleft=False)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="y", visible=False)
    caption = "Medians over the steps. Rewards are scored while other completions are sampled; reward is the wait after the last one."
    return Drawn("phases", "Time by phase", caption, figure)


def _median(arm: Arm, field: str) -> float:
    """Over all steps of all runs; 0 where none has it."""
    values = np.concatenate([curves.values[field] for curves in arm.curves])
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else 0.0


def _squeeze(data: ReportData) -> Drawn | None:
    curve = data.squeeze
    if curve is None:
        return None
    figure, axes = _empty()
    ranks = np.array(curve.ranks, float)
    axes.fill_between(ranks, np.array(curve.lowest), np.array(curve.highest), color=series(0), alpha=0.18, linewidth=0, label="all layers")
    axes.plot(ranks, np.array(curve.mean), "o-", color=series(0), markersize=4.5, label="mean over the layers")
    axes.axhline(curve.threshold, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), label=f"threshold {curve.threshold:.0%}")
    axes.axvline(curve.recommended, color=series(1), linewidth=1.4, label=f"recommended rank {curve.recommended}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [f"{rank:g}" for rank in ranks])
    axes.minorticks_off()
    _percent(axes)
    axes.set(xlabel="rank", ylabel="variance kept")
    return Drawn("squeeze", "What the adapter needs of its rank", _squeeze_caption(curve), figure)


def _squeeze_caption(curve: SqueezeCurve) -> str:
    judged = "the mean over the layers" if curve.rule == "mean" else "the worst layer"
    of = f" of {curve.adapter}" if curve.adapter else ""
    return f"Squared singular values kept by each rank of the adapter{of}; the recommendation goes by {judged}."


# -- drawing -------------------------------------------------------------------------------------------------------------


def _curves(
    data: ReportData,
    name: str,
    title: str,
    fields: dict[str, str],
    *,
    ylabel: str = "",
    percent: bool = False,
    smooth: bool = True,
    limits: tuple[float, float] | None = None,
    from_zero: bool = False,
    note: str = "",
) -> Drawn | None:
    """One line an arm over the steps; a second field is dashed. None where no run has the first of the fields."""
    first = next(iter(fields))
    arms = [(index, arm) for index, arm in enumerate(data.arms) if arm.has(first)]
    if not arms:
        return None
    window = window_for(max(arm.longest for _, arm in arms)) if smooth else 1
    figure, axes = _empty()
    for index, arm in arms:
        for field, kind in fields.items():
            band = arm.band(field, window)
            if band is None:
                continue
            if data.single and window > 1 and (raw := arm.band(field)):
                axes.plot(raw.steps + 1, raw.mean, color=series(index), alpha=0.28, linewidth=1)
            label = arm.label if not kind else None
            style: dict[str, Any] = {"linestyle": (0, (4, 2))} if kind else {}
            _draw_band(axes, band.steps + 1, band.mean, band.spread, series(index), label=label, **style)
    axes.set(xlabel="step", ylabel=ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if percent:
        _percent(axes)
    elif limits:
        axes.set_ylim(*limits)
    elif from_zero:
        axes.set_ylim(0, 1.06 * axes.dataLim.y1)
    dashed = note if len(fields) == 1 or any(arm.has(list(fields)[1]) for _, arm in arms) else ""
    return Drawn(name, title, " ".join(filter(None, (_line_words(data, window), dashed))), figure)


def _draw_band(axes: Axes, steps: Floats, mean: Floats, spread: Floats | None, colour: str, **style: Any) -> None:
    if spread is not None:
        axes.fill_between(steps, mean - spread, mean + spread, color=colour, alpha=0.14, linewidth=0)
    if len(steps) == 1:
        style.setdefault("marker", "o")
    axes.plot(steps, mean, color=colour, **style)


def _line_words(data: ReportData, window: int) -> str:
    smoothed = f"mean of {window} steps" if window > 1 else "each step"
    if data.single:
        return f"Bold: {smoothed}; thin: each step." if window > 1 else ""
    return f"Line: mean over the runs{f', {smoothed}' if window > 1 else ''}{_spread_words(data)}."


def _spread_words(data: ReportData) -> str:
    several = any(len(arm.runs) > 1 for arm in data.arms)
    return "; band: one standard deviation between runs" if several else ""


def _empty(height: float = _HEIGHT) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _row_label(axes: Axes, height: float, words: str, weight: str = "normal") -> None:
    """Above what it names, from the left edge; lines behind it do not run through it."""
    behind = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.0}
    axes.annotate(words, (0, height), xycoords=("axes fraction", "data"), va="bottom", fontsize=11, weight=weight, bbox=behind)


def _percent(axes: Axes) -> None:
    """Rates as percentages, around what there is to see and not beyond 0 and 1."""
    axes.autoscale(axis="y")
    low, high = axes.get_ylim()
    axes.set_ylim(max(-_EDGE, low), min(1 + _EDGE, high))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0 if high - low > 0.05 else 1))


def _legend(figure: Figure, least: int) -> None:
    """Above the axes, where it covers no line; the figure grows by its rows. None for fewer labels than `least`."""
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

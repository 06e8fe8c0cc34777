"""The figures of a report: each is a function from the data to a drawing, or to None if there is
nothing to draw.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from retrain.analysis.compare import Comparison
from retrain.analysis.headline import name_of
from retrain.analysis.statistics import t_interval
from retrain.analysis.verdict import Verdict
from retrain.records.terminal import counted
from retrain.report.data import PHASES, ConditionCurves, ReportData, SqueezeCurve
from retrain.report.drawing import (
    GRID,
    INK,
    MARKERS,
    MUTED,
    ROW_HEIGHT,
    Lines,
    PageFigure,
    add_legend,
    as_percentages,
    draw_band,
    draw_row,
    drawing,
    empty_figure,
    line_figure,
    row_label,
    sd_words,
    series,
    to_picture,
    without_scale,
)

_SQUEEZE = "squeeze"
_TRAINING = Lines(
    "training",
    "Training accuracy",
    {"correct_rate": ""},
    ylabel="right completions",
    percent=True,
    single_label="training",
)
_LAMBDA = Lines(
    "sepa",
    "SEPA's lambda",
    {"sepa_lambda": ""},
    ylabel="lambda",
    smooth=False,
    limits=(-0.03, 1.03),
)
_LENGTH = Lines(
    "lengths",
    "Length of the completions",
    {"completion_tokens_mean": ""},
    ylabel="tokens per completion",
    from_zero=True,
)
_INFORMATIVE = Lines(
    "signal",
    "Informative groups",
    {"informative_fraction": ""},
    ylabel="groups with an advantage",
    percent=True,
    note=(
        "The fraction of groups in which some token has an advantage; the others add nothing to the"
        " policy gradient."
    ),
)
_SPEED = Lines(
    "throughput", "Throughput", {"tokens_per_s": ""}, ylabel="tokens per second", from_zero=True
)


def draw_figures(data: ReportData) -> list[PageFigure]:
    """Return every figure that has data."""
    makers: Sequence[Callable[[ReportData], PageFigure | None]] = (
        _held_out,
        _differences,
        _training,
        _entropy,
        *(partial(line_figure, lines=lines) for lines in (_LAMBDA, _LENGTH, _INFORMATIVE, _SPEED)),
        _phases,
        lambda data: squeeze_figure(data.squeeze) if data.squeeze else None,
    )
    drawn = []
    for maker in makers:
        with drawing("report"):
            found = maker(data)
            if found:
                add_legend(found.figure, least=2 if len(data.arms) < 2 else 1)
                drawn.append(found)
    return drawn


# -- learning --------------------------------------------------------------------------------------


def _training(data: ReportData) -> PageFigure | None:
    drawn = line_figure(data, _TRAINING)
    if drawn and data.single and (points := data.arms[0].held_out[0]):
        (axes,) = drawn.figure.axes
        accuracy = np.array([point.accuracy for point in points])
        bounds = np.array([point.interval for point in points]).T
        errors = np.abs(bounds - accuracy)
        style: dict[str, Any] = {
            "fmt": "o",
            "color": INK,
            "capsize": 3,
            "markersize": 5,
            "linewidth": 1.4,
            "zorder": 3,
        }
        axes.errorbar(
            [point.step for point in points],
            accuracy,
            yerr=errors,
            label="held-out pass@1, 95% interval",
            **style,
        )
        as_percentages(axes)
        words = f"{drawn.caption} Dots: held-out pass@1 with its 95% interval over the problems."
        if points[0].step < 0:
            axes.axvline(0, color=MUTED, linewidth=1, linestyle=":")
            words += " The supervised stage is left of 0."
        title = "Training and held-out accuracy"
        return PageFigure("training", title, words, drawn.figure)
    return drawn


def _held_out(data: ReportData) -> PageFigure | None:
    bands = [(arm, arm.held_out_band()) for arm in data.arms]
    steps = {float(step) for _, band in bands if band for step in band.steps}
    if data.single or not steps:
        return None
    if len(steps) == 1:
        return _held_out_once(data, int(*steps))
    figure, axes = empty_figure()
    for index, (arm, band) in enumerate(bands):
        if band:
            draw_band(
                axes,
                band.steps,
                band.mean,
                band.sd,
                series(index),
                label=arm.label,
                marker=MARKERS[index % len(MARKERS)],
                markersize=5,
            )
    as_percentages(axes)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set(xlabel="steps completed", ylabel="held-out pass@1")
    caption = f"Mean over the runs{sd_words(data)}, on problems that were not trained on."
    return PageFigure("held-out", "Held-out accuracy", caption, figure)


def _held_out_once(data: ReportData, step: int) -> PageFigure:
    """Draw one row per condition, since with one evaluation per run there is no curve."""
    arms = [(index, arm) for index, arm in enumerate(data.arms) if any(arm.held_out)]
    figure, axes = empty_figure(height=0.9 + ROW_HEIGHT * len(arms))
    for row, (index, arm) in enumerate(arms):
        values = 100 * np.array([points[-1].accuracy for points in arm.held_out if points])
        mean = float(values.mean())
        bounds = None
        if len(values) > 1:
            # Student's interval of a rate may go beyond its ends.
            bounds = np.clip(t_interval(values), 0.0, 100.0)
        draw_row(axes, -float(row), values, mean, bounds, series(index))
        row_label(axes, -row + 0.26, f"{arm.label}: {mean:.1f}%")
    axes.set(ylim=(-len(arms) + 0.5, 0.75), xlabel="held-out pass@1 (%)")
    without_scale(axes)
    bars = ""
    if any(len(arm.held_out) > 1 for _, arm in arms):
        bars = " with its 95% interval over the runs"
    caption = (
        f"After {counted(step, 'step')}, on problems that were not trained on. Dots: one run each."
        f" Diamond and line: their mean{bars}."
    )
    return PageFigure("held-out", "Held-out accuracy", caption, figure)


def _differences(data: ReportData) -> PageFigure | None:
    comparison = data.comparison
    if comparison is None:
        return None
    figure, axes = empty_figure(height=0.9 + ROW_HEIGHT * len(comparison.contrasts))
    draw_differences(comparison, [arm.label for arm in data.arms], axes)
    against = f" from {comparison.baseline}" if comparison.one_baseline else ""
    title = f"Differences{against}, paired by seed"
    return PageFigure("differences", title, _differences_caption(comparison), figure)


def draw_differences(comparison: Comparison, labels: Sequence[str], axes: Axes) -> None:
    """Draw a row of dots per contrast. `labels`: the conditions in the order of their colors."""
    scale = 100.0 if comparison.metric.is_rate else 1.0
    contrasts = comparison.contrasts
    axes.axvline(0.0, color=MUTED, linewidth=1)
    for row, contrast in enumerate(contrasts):
        found, place = contrast.conclusion, -float(row)
        # The color of the condition's curves, where a run of it has begun.
        index = labels.index(contrast.condition) if contrast.condition in labels else row + 1
        values = scale * np.array(list(contrast.differences.values()))
        interval = scale * np.array(found.interval) if found.interval else None
        draw_row(axes, place, values, scale * found.mean, interval, series(index))
        weight = "normal" if found.verdict is Verdict.INCONCLUSIVE else "bold"
        words = f"{name_of(contrast, comparison)}: {found.word(comparison.test.alpha)}"
        row_label(axes, place + 0.26, words, weight)
    unit = " (percentage points)" if comparison.metric.is_rate else ""
    axes.set(
        ylim=(-len(contrasts) + 0.5, 0.75), xlabel=f"difference in {comparison.metric.name}{unit}"
    )
    without_scale(axes)


_BETTER_SIDE = {
    "lower": "Left of 0 is better.",
    "higher": "Right of 0 is better.",
    None: "Neither side is better.",
}


def _differences_caption(comparison: Comparison) -> str:
    confidence = f"{100 * (1 - comparison.test.alpha):g}%"
    alone = ", not adjusted" if len(comparison.contrasts) > 1 else ""
    better = "lower" if comparison.test.lower_is_better else comparison.metric.better
    return (
        f"Dots: one seed each. Diamond and line: their mean with its {confidence} interval{alone}."
        f" {_BETTER_SIDE[better]}"
    )


# -- what the policy is like -----------------------------------------------------------------------


def _entropy(data: ReportData) -> PageFigure | None:
    """Draw the entropy if the engine recorded it, or else the surprisal under its own name."""
    if any(arm.has("entropy_mean") for arm in data.arms):
        kind, title = "entropy", "Entropy of the policy"
    else:
        kind, title = "surprisal", "Surprisal of the sampled tokens"
    fields = {f"{kind}_mean": "", f"plan_{kind}_mean": "planning"}
    note = "Dashed: tokens inside planning phrases."
    ylabel = f"{kind} (nats per token)"
    return line_figure(data, Lines("entropy", title, fields, ylabel=ylabel, note=note))


# -- what it costs ---------------------------------------------------------------------------------


def _phases(data: ReportData) -> PageFigure | None:
    arms = [arm for arm in data.arms if arm.has("step_time_s")]
    if not arms:
        return None
    names = [phase.removeprefix("time_").removesuffix("_s") for phase in PHASES]
    seconds = np.array([[_median(arm, phase) for phase in PHASES] for arm in arms])
    # Medians do not add up: the phases' may together exceed the step's.
    totals = np.maximum([_median(arm, "step_time_s") for arm in arms], seconds.sum(axis=1))
    parts = np.column_stack([seconds, totals - seconds.sum(axis=1)])
    figure, axes = empty_figure(height=1.0 + ROW_HEIGHT * len(arms))
    places = -np.arange(len(arms), dtype=float)
    left = np.zeros(len(arms))
    for column, name in enumerate([*names, "other"]):
        colour = GRID if name == "other" else series(column)
        axes.barh(places - 0.12, parts[:, column], left=left, height=0.4, color=colour, label=name)
        left += parts[:, column]
    for place, arm, total in zip(places, arms, totals, strict=True):
        words = f"{arm.label}: {total:.3g} s"
        row_label(axes, place + 0.12, words)
    axes.set(ylim=(-len(arms) + 0.6, 0.6), xlabel="seconds per step")
    without_scale(axes)
    caption = (
        "Medians over the steps. Rewards are scored during sampling, so reward is only the wait"
        " after the last completion."
    )
    return PageFigure("phases", "Time by phase", caption, figure)


def _median(arm: ConditionCurves, field: str) -> float:
    """Return the median over all steps of all runs; 0 if no run has the field."""
    values = np.concatenate([curves.values[field] for curves in arm.curves])
    known = values[~np.isnan(values)]
    if len(known):
        return float(np.median(known))
    return 0.0


def squeeze_figure(curve: SqueezeCurve) -> PageFigure:
    """Draw the variance kept by rank, with the threshold and the recommended rank."""
    figure, axes = empty_figure()
    ranks = np.array(curve.ranks, float)
    axes.fill_between(
        ranks,
        np.array(curve.lowest),
        np.array(curve.highest),
        color=series(0),
        alpha=0.18,
        linewidth=0,
        label="lowest to highest layer",
    )
    axes.plot(
        ranks,
        np.array(curve.mean),
        "o-",
        color=series(0),
        markersize=4.5,
        label="mean over the layers",
    )
    axes.axhline(
        curve.threshold,
        color=MUTED,
        linewidth=1,
        linestyle=(0, (4, 3)),
        label=f"threshold {curve.threshold:.0%}",
    )
    axes.axvline(
        curve.recommended,
        color=series(1),
        linewidth=1.4,
        label=f"recommended rank {curve.recommended}",
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [f"{rank:g}" for rank in ranks])
    axes.minorticks_off()
    as_percentages(axes)
    axes.set(xlabel="rank", ylabel="variance kept")
    judged = "the mean over the layers" if curve.rule == "mean" else "the worst layer"
    of = f" of {curve.adapter}" if curve.adapter else ""
    caption = (
        f"Fraction of the squared singular values of the adapter{of} that each rank keeps; {judged}"
        " decides the recommendation."
    )
    return PageFigure(_SQUEEZE, "How much of its rank the adapter needs", caption, figure)


def write_squeeze_picture(curve: SqueezeCurve, path: Path) -> None:
    """Write the squeeze figure as a PNG. Raises OSError."""
    with drawing(_SQUEEZE):
        drawn = squeeze_figure(curve)
        add_legend(drawn.figure, 1)
    path.write_bytes(to_picture(drawn.figure, _SQUEEZE))

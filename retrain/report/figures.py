"""The figures of a report: each is a function from the data to a drawing, or to None if there is
nothing to draw.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from retrain.analysis.compare import Comparison
from retrain.analysis.statistics import t_interval
from retrain.analysis.verdict import Verdict
from retrain.records.terminal import counted
from retrain.report.data import HELD_OUT, ReportData, SqueezeCurve
from retrain.report.drawing import (
    INK,
    MUTED,
    ROW_NAME,
    Lines,
    Name,
    PageFigure,
    Row,
    as_percentages,
    draw_rows,
    drawing,
    empty_figure,
    line_figure,
    row_figure,
    series,
    shortened,
    to_picture,
    write_names,
)

_SQUEEZE = "squeeze"
_HELD_OUT = Lines(
    HELD_OUT,
    "Held-out accuracy",
    {HELD_OUT: ""},
    ylabel="pass@1",
    percent=True,
    smooth=False,
    note="Problems that were not trained on.",
)
_TRAINING = Lines(
    "training",
    "Training accuracy",
    {"correct_rate": "training"},
    ylabel="correct completions",
    percent=True,
)
_ENTROPY = Lines(
    "entropy",
    "Entropy of the policy",
    {"entropy_mean": "all tokens", "plan_entropy_mean": "planning"},
    ylabel="entropy (nats per token)",
    note="Dashed: tokens inside planning phrases.",
)
_SURPRISAL = replace(
    _ENTROPY,
    title="Surprisal of the sampled tokens",
    fields={"surprisal_mean": "all tokens", "plan_surprisal_mean": "planning"},
    ylabel="surprisal (nats per token)",
)
_OTHERS = (
    Lines(
        "lengths",
        "Length of the completions",
        {"completion_tokens_mean": ""},
        ylabel="tokens per completion",
        from_zero=True,
    ),
    Lines(
        "signal",
        "Informative groups",
        {"informative_fraction": ""},
        ylabel="groups with an advantage",
        percent=True,
        optional=True,
        note=(
            "The fraction of groups in which some token has an advantage; the others add nothing to"
            " the policy gradient."
        ),
    ),
    Lines(
        "sepa", "SEPA's lambda", {"sepa_lambda": ""}, ylabel="lambda", smooth=False, optional=True
    ),
)


def draw_figures(data: ReportData) -> list[PageFigure]:
    """Return every figure that has something to say."""
    with drawing("report"):
        return list(filter(None, _figures(data)))


def _figures(data: ReportData) -> Iterator[PageFigure | None]:
    yield _differences(data)
    if not data.arms:
        return
    if not data.single:
        yield _held_out(data)
    yield _training(data)
    yield line_figure(data, _ENTROPY) or line_figure(data, _SURPRISAL)
    for lines in _OTHERS:
        yield line_figure(data, lines)
    if data.squeeze:
        yield squeeze_figure(data.squeeze)


# -- learning --------------------------------------------------------------------------------------


def _training(data: ReportData) -> PageFigure | None:
    if not (data.single and data.arms[0].held_out[0]):
        return line_figure(data, _TRAINING)
    note = "Dots: held-out pass@1 with its 95% interval over the problems."
    if data.arms[0].held_out[0][0].step < 0:
        note += " The supervised stage is left of 0."
    title = "Training and held-out accuracy"
    return line_figure(data, replace(_TRAINING, title=title, note=note, evaluated=True))


def _held_out(data: ReportData) -> PageFigure | None:
    steps = {point.step for arm in data.arms for points in arm.held_out for point in points}
    if len(steps) != 1:
        return line_figure(data, _HELD_OUT)
    # One evaluation per run gives no curve.
    (step,) = steps
    rows = []
    for index, arm in enumerate(data.arms):
        values = 100 * np.array([points[-1].accuracy for points in arm.held_out if points])
        if len(values):
            mean = float(values.mean())
            # Student's interval of a rate may go beyond its ends.
            bounds = np.clip(t_interval(values), 0.0, 100.0) if len(values) > 1 else None
            rows.append(
                Row(
                    f"{shortened(arm.label, ROW_NAME)}: {mean:.1f}%",
                    values,
                    mean,
                    bounds,
                    series(index),
                )
            )
    figure, axes = row_figure(len(rows))
    draw_rows(axes, rows)
    axes.set_xlabel("held-out pass@1 (%)")
    bars = " with its 95% interval over the runs" * any(len(row.values) > 1 for row in rows)
    caption = (
        f"After {counted(step, 'step')}, on problems that were not trained on. Dots: one run"
        f" each. Diamond and line: their mean{bars}."
    )
    return PageFigure(HELD_OUT, "Held-out accuracy", caption, figure)


def _differences(data: ReportData) -> PageFigure | None:
    comparison = data.comparison
    if comparison is None:
        return None
    figure, axes = row_figure(len(comparison.contrasts))
    draw_differences(comparison, [arm.label for arm in data.arms], axes)
    confidence = f"{100 * (1 - comparison.test.alpha):g}%"
    alone = ", not adjusted" if len(comparison.contrasts) > 1 else ""
    margin = " Dotted: the margin of equivalence." * bool(comparison.test.margin)
    caption = (
        f"Dots: one seed each. Diamond and line: their mean with its {confidence} interval{alone}."
        f" {_BETTER_SIDE[comparison.test.direction(comparison.metric.better)]}{margin}"
    )
    title = f"Differences from {comparison.baseline}, paired by seed"
    return PageFigure("differences", title, caption, figure)


def draw_differences(comparison: Comparison, labels: Sequence[str], axes: Axes) -> None:
    """Draw a row of dots per contrast. `labels`: the conditions in the order of their colors."""
    scale = 100.0 if comparison.metric.is_rate else 1.0
    margin = scale * (comparison.test.margin or 0.0)
    for place in {0.0, -margin, margin}:
        axes.axvline(place, color=MUTED, linewidth=1, linestyle=":" if place else "-")
    rows = []
    for row, contrast in enumerate(comparison.contrasts):
        found = contrast.conclusion
        # The color of the condition's curves, where a run of it has begun.
        index = labels.index(contrast.condition) if contrast.condition in labels else row + 1
        rows.append(
            Row(
                f"{shortened(contrast.condition, ROW_NAME)}: {found.word}",
                scale * np.array(list(contrast.differences.values())),
                scale * found.mean,
                scale * np.array(found.interval) if found.interval else None,
                series(index),
                "normal" if found.verdict is Verdict.INCONCLUSIVE else "bold",
            )
        )
    draw_rows(axes, rows)
    unit = " (percentage points)" if comparison.metric.is_rate else ""
    axes.set_xlabel(f"difference in {comparison.metric.name}{unit}")


_BETTER_SIDE = {
    "lower": "Left of 0 is better.",
    "higher": "Right of 0 is better.",
    None: "Neither side is better.",
}


# -- the adapter -----------------------------------------------------------------------------------


def squeeze_figure(curve: SqueezeCurve) -> PageFigure:
    """Draw the variance kept by rank, with the threshold and the recommended rank."""
    figure, axes = empty_figure()
    ranks, means = [row.rank for row in curve.table], [row.mean for row in curve.table]
    lowest, highest = [row.min for row in curve.table], [row.max for row in curve.table]
    axes.fill_between(ranks, lowest, highest, color=MUTED, alpha=0.18, linewidth=0)
    axes.plot(ranks, means, "o-", color=INK, markersize=4.5)
    axes.axhline(curve.threshold, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    axes.axvline(curve.recommended_rank, color=INK, linewidth=1.4, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [f"{rank:g}" for rank in ranks])
    axes.minorticks_off()
    as_percentages(axes)
    axes.set(xlabel="rank", ylabel="variance kept")
    write_names(
        axes,
        [
            Name(means[-1], "mean", INK),
            Name(curve.threshold, f"threshold {curve.threshold:.0%}", MUTED),
        ],
    )
    judged = "mean over the layers" if curve.rule == "mean" else "worst layer"
    caption = (
        "Fraction of the squared singular values of the adapter that each rank keeps; band: lowest"
        f" to highest layer. The {judged} recommends rank {curve.recommended_rank} (dotted)."
    )
    return PageFigure(_SQUEEZE, "How much of its rank the adapter needs", caption, figure)


def write_squeeze_picture(curve: SqueezeCurve, path: Path) -> None:
    """Write the squeeze figure as a PNG. Raises OSError."""
    with drawing(_SQUEEZE):
        drawn = squeeze_figure(curve)
    path.write_bytes(to_picture(drawn.figure, _SQUEEZE))

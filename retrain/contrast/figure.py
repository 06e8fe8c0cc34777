"""The picture of a contrast: the cosine of every pair of arms, and each beside its own noise."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from retrain.contrast.gradients import Contrast
from retrain.report.drawing import GRID, INK, PAPER, drawing, series, write_picture


def write_figure(path: Path, seen: Contrast) -> None:
    """Write both panels; the file's ending says the format (svg, pdf, png)."""
    labels = [arm.label for arm in seen.arms]
    with drawing("contrast"):
        height = 1.6 + 0.42 * len(labels)
        figure = Figure(figsize=(10.2, height), layout="constrained")
        matrix, bars = figure.subplots(1, 2, width_ratios=(1, 1.2))
        _draw_matrix(matrix, seen, labels)
        _draw_bars(bars, seen, labels)
        write_picture(figure, path)


def _draw_matrix(axes: Axes, seen: Contrast, labels: list[str]) -> None:
    places = range(len(labels))
    axes.imshow(seen.cosines, vmin=-1, vmax=1, cmap="RdBu")
    for row in places:
        for column in places:
            value = seen.cosines[row, column]
            axes.text(
                column,
                row,
                f"{value:.3f}",
                ha="center",
                va="center",
                fontsize=8,
                color=PAPER if abs(value) > 0.6 else INK,
            )
    axes.set_title("Cosine of two arms' gradients")
    axes.set_yticks(places, labels)
    axes.set_xticks(places, labels, rotation=30, ha="right")
    axes.tick_params(length=0)
    axes.grid(visible=False)


def _draw_bars(axes: Axes, seen: Contrast, labels: list[str]) -> None:
    places = np.arange(len(labels))
    cosines = [arm.cosine for arm in seen.arms]
    axes.barh(places - 0.18, cosines, 0.32, color=series(0), label=f"to {labels[0]}")
    middles = [arm.halves for arm in seen.arms]
    axes.barh(places + 0.18, middles, 0.32, color=series(1), label="of its own halves")
    below = [max(0.0, arm.halves - arm.halves_low) for arm in seen.arms]
    above = [max(0.0, arm.halves_high - arm.halves) for arm in seen.arms]
    axes.errorbar(middles, places + 0.18, xerr=(below, above), fmt="none", ecolor=INK, capsize=2)
    axes.set_yticks(places, labels)
    axes.invert_yaxis()
    axes.axvline(0, color=GRID)
    axes.set_title("Cosine beside the noise of a batch")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2, frameon=False)

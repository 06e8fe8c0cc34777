"""The variance that each rank of an adapter keeps: a figure of the report, and the picture beside a squeezed adapter."""

from pathlib import Path

import numpy as np

from retrain.report.data import SqueezeCurve
from retrain.report.panels import Drawn, add_legend, as_percentages, empty_figure
from retrain.report.theme import MUTED, drawing, series, to_png

_NAME = "squeeze"


def squeeze_figure(curve: SqueezeCurve) -> Drawn:
    figure, axes = empty_figure()
    ranks = np.array(curve.ranks, float)
    axes.fill_between(
        ranks, np.array(curve.lowest), np.array(curve.highest), color=series(0), alpha=0.18, linewidth=0, label="lowest to highest layer"
    )
    axes.plot(ranks, np.array(curve.mean), "o-", color=series(0), markersize=4.5, label="mean over the layers")
    axes.axhline(curve.threshold, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), label=f"threshold {curve.threshold:.0%}")
    axes.axvline(curve.recommended, color=series(1), linewidth=1.4, label=f"recommended rank {curve.recommended}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [f"{rank:g}" for rank in ranks])
    axes.minorticks_off()
    as_percentages(axes)
    axes.set(xlabel="rank", ylabel="variance kept")
    return Drawn(_NAME, "What the adapter needs of its rank", _caption(curve), figure)


def _caption(curve: SqueezeCurve) -> str:
    judged = "the mean over the layers" if curve.rule == "mean" else "the worst layer"
    of = f" of {curve.adapter}" if curve.adapter else ""
    return f"Squared singular values kept by each rank of the adapter{of}; the recommendation goes by {judged}."


def write_squeeze_picture(curve: SqueezeCurve, path: Path) -> None:
    """A PNG. Raises OSError."""
    with drawing(_NAME):
        drawn = squeeze_figure(curve)
        add_legend(drawn.figure, 1)
    path.write_bytes(to_png(drawn.figure, _NAME))

"""The picture of X-rays: weight, objective and noise over the pass rate, as SVG or PNG."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from retrain.report.drawing import drawing, series
from retrain.xray.binary import Xray
from retrain.xray.text import relative_weight

_RATES = np.linspace(0.005, 0.995, 199)


def write_figure(path: Path, xrays: Sequence[Xray]) -> None:
    """Write the three panels; the file's ending says the format (svg, pdf, png)."""
    with drawing("xray"):
        figure = Figure(figsize=(10.2, 3.4), layout="constrained")
        weight, objective, noise = figure.subplots(1, 3)
        for index, one in enumerate(xrays):
            style = {"color": series(index), "linestyle": ("-", "--", ":", "-.")[index % 4]}
            weight.plot(_RATES, relative_weight(one, _RATES), label=one.name, **style)
            climbed = one.objective([*_RATES, 1.0])
            whole = climbed[-1] if abs(climbed[-1]) > 0 else 1.0
            objective.plot(_RATES, climbed[:-1] / whole, **style)
            noise.plot(_RATES, one.noise(_RATES), **style)
        weight.set(title="Weight of a prompt, 1 at p = 0.5", xlabel="pass rate p", ylabel="f'(p)")
        objective.set(title="Objective, 1 at p = 1", xlabel="pass rate p", ylabel="f(p)")
        noise.set(
            title="Noise over signal of one prompt",
            xlabel="pass rate p",
            ylabel="sd / |mean| of the gradient",
            yscale="log",
        )
        weight.set_ylim(bottom=min(0.0, weight.get_ylim()[0]))
        figure.legend(loc="outside upper center", ncols=min(len(xrays), 5))
        figure.savefig(
            path, facecolor="white", metadata={"Date": None} if path.suffix == ".svg" else None
        )

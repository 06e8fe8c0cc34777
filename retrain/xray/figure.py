"""The picture of X-rays: weight, objective and noise over the pass rate, as SVG, PDF or PNG."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from retrain.report.drawing import drawing, series, write_picture
from retrain.xray.binary import Xray
from retrain.xray.text import relative_weight

_RATES = np.linspace(0.005, 0.995, 199)
_STYLES = ("-", "--", ":", "-.")


def write_figure(path: Path, xrays: Sequence[Xray]) -> None:
    """Write the three panels; the file's ending says the format (svg, pdf, png)."""
    with drawing("xray"):
        figure = Figure(figsize=(10.2, 3.4), layout="constrained")
        weight, objective, noise = figure.subplots(1, 3)
        for index, (name, one) in enumerate(distinct(xrays).items()):
            style = {"color": series(index), "linestyle": _STYLES[index % len(_STYLES)]}
            weight.plot(_RATES, relative_weight(one, _RATES), label=name, **style)
            climbed = one.objective([*_RATES, 1.0])
            objective.plot(_RATES, climbed[:-1] / (climbed[-1] or 1.0), **style)
            noise.plot(_RATES, one.noise(_RATES), **style)
        weight.set(title="Weight, 1 at p = 0.5", xlabel="pass rate p", ylabel="f'(p)")
        weight.set_ylim(bottom=min(0.0, weight.get_ylim()[0]))
        objective.set(title="Objective, 1 at p = 1", xlabel="pass rate p", ylabel="f(p)")
        noise.set(title="Noise / signal of a prompt", xlabel="pass rate p", ylabel="sd / mean")
        noise.set_yscale("log")
        noise.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        noise.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        noise.yaxis.set_minor_formatter(NullFormatter())
        figure.legend(loc="outside upper center", ncols=min(len(xrays), 5))
        write_picture(figure, path)


def distinct(xrays: Sequence[Xray]) -> dict[str, Xray]:
    """One X-ray for those with the same advantages, under a name that counts the others."""
    alike: dict[bytes, list[Xray]] = {}
    for one in xrays:
        alike.setdefault(np.concatenate([one.right, one.wrong]).round(9).tobytes(), []).append(one)
    return {
        f"{ones[0].name} and {len(ones) - 1} alike" if len(ones) > 1 else ones[0].name: ones[0]
        for ones in alike.values()
    }

"""Colours and sizes of the figures, and their conversion to SVG and PNG.

In the page every colour is a CSS variable, so one drawing serves the light and the dark theme; a PNG has the light colours.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO, StringIO
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

INK = "#1d2530"
MUTED = "#5d6877"
GRID = "#dfe3e9"
PAPER = "#ffffff"
SERIES = ("#0069a8", "#cc4e00", "#007a57", "#a63d84", "#8a6500", "#3b3fb6", "#5f6670", "#b3261e")
"""Colours of the series, after Okabe and Ito, but darker: nearly everyone can tell them apart, and their contrast with white is at least
4.5:1."""

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
    "text.parse_math": False,  # a label is text, whatever it holds
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
    """Return an <svg> element for a page that defines the CSS variables. `name` makes its ids unique in the page."""
    out = StringIO()
    with drawing(name):
        figure.savefig(out, format="svg", metadata=_NO_METADATA)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\s(?:xmlns(?::\w+)?|version|width|height)="[^"]*"', "", text[: text.index(">")]) + text[text.index(">") :]
    text = text.replace("xlink:href", "href")
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    label = description.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def to_png(figure: Figure, name: str) -> bytes:
    out = BytesIO()
    with drawing(name):
        figure.savefig(out, format="png", dpi=_PNG_DPI, facecolor=PAPER, metadata={"Software": None})
    return out.getvalue()

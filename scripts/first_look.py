"""Draw README's first picture: what a campaign found, and the credit of each token in one group.

    python scripts/first_look.py CAMPAIGN CONDITION --output docs/first-look.png

Above: the paired difference of each condition from the baseline, with its interval. Below: four
completions of one prompt under CONDITION, each token in the color of its advantage. Needs the extra
`report`; `make first-look` trains the campaign first.
"""

import argparse
import sys
from pathlib import Path
from textwrap import wrap
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from retrain.analysis.headline import answer
from retrain.analysis.runs import campaign_runs
from retrain.errors import ConfigurationError, RetrainError
from retrain.inspect import Quantity
from retrain.inspect.credit import StepCredit, read_step
from retrain.inspect.shading import LEVELS, levels, scale_of
from retrain.report.data import ReportRequest, read_report_data
from retrain.report.drawing import INK, MUTED, PAPER, drawing, to_picture
from retrain.report.figures import draw_differences

SHOWN = 4
"""Completions."""
_LINE = 99
"""Characters of a completion that are shown."""
_REWARD = 11
"""Cells to the left of a completion, for its reward."""
_BELOW = (PAPER, "#fbe9df", "#f9d3bd", "#f3b391", "#e0895a", "#b9562a")
_ABOVE = (PAPER, "#e2eef8", "#c3dcf0", "#98c2e4", "#5d9fd3", "#1f6fb0")
_LETTER: dict[str, Any] = {"family": "monospace", "fontsize": 9.5, "ha": "center", "va": "center"}


def draw(campaign: Path, condition: str) -> Figure:
    """Return the figure. Raises ConfigurationError if the campaign lacks the condition or its tokens,
    or has nothing to compare yet.
    """
    data = read_report_data(ReportRequest(campaign))
    runs = [run for run in campaign_runs(campaign) if run.condition == condition]
    if not runs or data.comparison is None:
        raise ConfigurationError(f"{campaign} has no run of {condition}, or no pair to compare.")
    credit = read_step(runs[0])
    figure = Figure(figsize=(9.2, 5.2), layout="constrained")
    above, below = figure.subplots(2, height_ratios=(3, 1.4))
    draw_differences(data.comparison, [arm.label for arm in data.arms], above)
    above.set_title("\n".join(wrap(answer(data.comparison), 92)), loc="left")
    _completions(credit, below)
    below.set_title(f"{condition}, step {credit.step}: the advantage of each token", loc="left")
    return figure


def _completions(credit: StepCredit, axes: Axes) -> None:
    """Draw the liveliest prompt's completions, a line each, a cell for each character.
    Completions with the same text are shown once.
    """
    scale = scale_of(credit, Quantity.ADVANTAGE)
    axes.axis("off")
    axes.set(xlim=(-_REWARD, _LINE), ylim=(-SHOWN + 0.5, 0.5))
    found = [credit.completion(number) for number in credit.of_slot(credit.liveliest_slot())]
    different = {"".join(one.pieces): one for one in found}
    for line, completion in enumerate(list(different.values())[:SHOWN]):
        axes.text(-_REWARD, -line, f"reward {completion.reward:g}", color=MUTED, va="center")
        shades = levels(completion.advantages(credit.labels[0]), scale, len(completion.pieces))
        place = 0
        for piece, shade in zip(completion.pieces, shades, strict=True):
            shown = piece.replace("\n", "⏎")
            color = (_ABOVE if shade > 0 else _BELOW)[abs(shade)]
            axes.add_patch(Rectangle((place, -line - 0.32), len(shown), 0.64, color=color))
            ink = PAPER if abs(shade) == LEVELS else INK
            for letter in shown:
                axes.text(place + 0.5, -line, letter, color=ink, **_LETTER)
                place += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("campaign", type=Path)
    parser.add_argument("condition")
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    try:
        with drawing("first-look"):
            figure = draw(given.campaign, given.condition)
    except RetrainError as error:
        sys.exit(f"first_look: {error}")
    given.output.write_bytes(to_picture(figure, "first-look"))
    print(f"Picture: {given.output}")


if __name__ == "__main__":
    main()

"""Show a step's credit in a terminal: the text of the completions with every token colored, or a
table with one line per token.

The terminal never interprets model text as markup; escape sequences disappear, and direction marks
appear as text.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from string import ascii_uppercase
from typing import TYPE_CHECKING

import numpy as np

from retrain.inspect import Quantity
from retrain.inspect.credit import CompletionCredit, StepCredit
from retrain.inspect.shading import LEVELS, levels, scale_of, values_of
from retrain.records.terminal import counted, one_line, table_lines, without_escapes
from retrain.types import Float32Array

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

_POSITIVE = ("#d8e9f7", "#aed2ef", "#7db8e4", "#4a9ad6", "#1b75bc")
_NEGATIVE = ("#fbe3d6", "#f7c4a8", "#f0a077", "#e57a48", "#cf5417")
"""Nearly everyone can tell blue from orange. Text is black, on the strongest shade white."""
_DETECTOR_MARKS = {"regex": "underline bold", "semantic": "italic overline"}
"""The style of a token on which two compared detectors differ."""
_MARKED = 8
"""Rows of the table below a colored text."""


def show(
    credit: StepCredit, numbers: Sequence[int], by: Quantity, console: "Console", *, table: bool
) -> None:
    """Print the completions `numbers`, colored or as a `table` with one line per token."""
    for note in credit.notes:
        console.print(note, markup=False, highlight=False)
    if not table:
        console.print(_legend(credit, by))
    shown_prompt = None
    # A file has no width.
    width = console.width if console.file.isatty() else None
    for number in numbers:
        completion = credit.completion(number)
        if completion.slot != shown_prompt:
            shown_prompt = completion.slot
            prompt = one_line(credit.prompt(shown_prompt) or "(not stored)", 400)
            console.print()
            console.print(
                f"Step {credit.step}, prompt {shown_prompt}: {prompt}",
                markup=False,
                highlight=False,
            )
        console.print()
        console.print(heading(completion), style="bold", markup=False, highlight=False)
        if table:
            _print_lines(token_lines(completion, range(len(completion.pieces)), width), console)
        else:
            console.print(_colored(credit, completion, by))
            _print_lines(token_lines(completion, most_marked(completion), width), console)


def _print_lines(lines: Sequence[str], console: "Console") -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def heading(completion: CompletionCredit) -> str:
    """Return the line above a completion, such as "Sample 3, reward 1, 212 tokens, cut off by
    max_tokens".
    """
    reward = "" if completion.reward is None else f", reward {completion.reward:g}"
    end = ", cut off by max_tokens" if completion.truncated else ""
    turns = f" in {counted(len(completion.turns), 'turn')}" if completion.turns else ""
    return (
        f"Sample {completion.sample}{reward},"
        f" {counted(len(completion.pieces), 'token')}{turns}{end}"
    )


def most_marked(completion: CompletionCredit) -> list[int]:
    """Return the positions with the largest advantages under any condition, in reading order."""
    sizes = np.max([np.abs(completion.advantages(label)) for label in completion.stages], axis=0)
    return sorted(np.argsort(-sizes, kind="stable")[:_MARKED].tolist())


# -- the colored text ------------------------------------------------------------------------------


def _colored(credit: StepCredit, completion: CompletionCredit, by: Quantity) -> "RenderableType":
    """Return one column per condition for advantages; the other quantities do not depend on the
    condition.
    """
    from rich.table import Table

    labels = credit.labels if by is Quantity.ADVANTAGE else credit.labels[:1]
    texts = [_text(credit, completion, by, label) for label in labels]
    if len(texts) == 1:
        return texts[0]
    columns = Table(
        *[one_line(label) for label in labels], show_edge=False, pad_edge=False, expand=True
    )
    columns.add_row(*texts)
    return columns


def _text(credit: StepCredit, completion: CompletionCredit, by: Quantity, label: str) -> "Text":
    from rich.text import Text

    text = Text()
    shades = levels(values_of(completion, by, label), scale_of(credit, by), len(completion.pieces))
    said = {turn.start: turn.context for turn in completion.turns if turn.context}
    for position, (piece, shade) in enumerate(
        zip(without_escapes(completion.pieces), shades, strict=True)
    ):
        if position in said:
            text.append(f" [{one_line(said[position].strip(), 400)}] ", "dim italic")
        planning = completion.planning is not None and bool(completion.planning[position])
        # Compared detectors mark the phrases themselves, each in its own way.
        marks = [
            f"{mark} "
            for name, mark in _DETECTOR_MARKS.items()
            if name in completion.detectors and completion.detectors[name][position]
        ]
        text.append(
            _shown(piece), "".join(marks) + _style(shade, planning and not completion.detectors)
        )
        text.append("\n" * piece.count("\n"))
    return text


def _shown(piece: str) -> str:
    """Return a token on one line, with a sign for a token that prints nothing."""
    return one_line(piece.replace("\n", "↵"), 200) or "◌"


def _style(shade: int, planning: bool) -> str:
    mark = "underline bold " if planning else ""
    if shade == 0:
        return mark.strip()
    strong = abs(shade) == LEVELS
    color = (_POSITIVE if shade > 0 else _NEGATIVE)[abs(shade) - 1]
    return f"{mark}{'#ffffff' if strong else '#000000'} on {color}"


def _legend(credit: StepCredit, by: Quantity) -> "Text":
    from rich.text import Text

    scale = scale_of(credit, by)
    text = Text(f"Step {credit.step}, a token's shade is its {by}: ")
    if by in (Quantity.ADVANTAGE, Quantity.LOG_RATIO):
        text.append(f"{-scale:+.3g} and beyond ")
        for shade in range(-LEVELS, 0):
            text.append("  ", _style(shade, planning=False))
    text.append(" 0 ")
    for shade in range(1, LEVELS + 1):
        text.append("  ", _style(shade, planning=False))
    text.append(f" {scale:+.3g} and beyond; ")
    if not credit.detectors:
        text.append("planning phrase", "underline bold")
    for name in credit.detectors:
        text.append(name, _DETECTOR_MARKS[name])
        text.append(" ")
    return text


# -- the table -------------------------------------------------------------------------------------


def token_lines(
    completion: CompletionCredit, positions: Sequence[int], width: int | None = None
) -> list[str]:
    """Return aligned columns: each token's numbers, then its advantage after each stage. With
    several conditions, it has the final advantage under each.

    If the names of the conditions make the lines wider than `width`, they become A, B, ... and the
    first line explains them.
    """
    from rich.cells import cell_len

    lines = list(_columns(completion, positions, _advantages(completion)))
    if width is None or len(completion.stages) == 1 or max(map(cell_len, lines)) <= width:
        return lines
    letters = dict(zip(completion.stages, ascii_uppercase, strict=False))
    legend = "; ".join(f"{letter}: {one_line(label)}" for label, letter in letters.items())
    return [legend, *_columns(completion, positions, _advantages(completion, letters))]


def _columns(
    completion: CompletionCredit, positions: Sequence[int], advantages: Mapping[str, Float32Array]
) -> Iterator[str]:
    """Yield the lines: the token's text and mark on the left, numbers on the right."""
    pieces = without_escapes(completion.pieces)
    planning = {} if completion.planning is None else {"plan": completion.planning}
    masks = completion.detectors or planning
    names = numbers(completion, positions[0]) if positions else ()
    rows = [["token", "text", *masks, *names, *map(one_line, advantages)]]
    rows += [
        [
            *(str(position), f"'{_shown(pieces[position])}'"),
            *("plan" * bool(mask[position]) for mask in masks.values()),
            *numbers(completion, position).values(),
            *(f"{values[position]:+.4f}" for values in advantages.values()),
        ]
        for position in positions
    ]
    right = range(2 + len(masks), len(rows[0]))
    yield from table_lines(rows, right=[0, *right])


def numbers(completion: CompletionCredit, position: int) -> dict[str, str]:
    """Return what the run recorded of a token: its surprisal, and the others where it has them."""
    known = {
        "surprisal": (completion.surprisals, ".3f"),
        "entropy": (completion.entropies, ".3f"),
        "log-ratio": (completion.log_ratios, "+.1e"),
        "kept": (completion.kept, "d"),
    }
    return {
        name: format(values[position], form)
        for name, (values, form) in known.items()
        if values is not None
    }


def _advantages(
    completion: CompletionCredit, letters: Mapping[str, str] | None = None
) -> dict[str, Float32Array]:
    """Map each heading to [T]; `letters` replace the names of the conditions."""
    if len(completion.stages) == 1:
        stages = completion.stages.values()
        return dict(chain.from_iterable(each.items() for each in stages))
    finals = {
        (letters or {}).get(label, label): completion.advantages(label)
        for label in completion.stages
    }
    own, *others = finals
    changes = {
        f"{label}-{own}" if letters else f"change by {label}": finals[label] - finals[own]
        for label in others
    }
    return finals | changes

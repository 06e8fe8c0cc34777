"""A comparison as text for a terminal: what decides in narrow tables, the rest in sentences, wrapped to the width."""

import textwrap
from collections.abc import Iterator, Sequence

from retrain.analysis.compare import Comparison
from retrain.analysis.comparison_text import (
    Table,
    arm_table,
    contrast_table,
    details,
    explanation,
    heading,
    sharing,
    task_table,
    task_words,
)

_GAP = "  "
_SHOWN = (0, 1, 2, 3, 5, 8)
"""Of a contrast's columns: condition, pairs, difference, interval, adjusted p, verdict. The others are in its sentences."""


def to_text(comparison: Comparison, width: int = 80) -> str:
    return "\n".join(_lines(comparison, width)) + "\n"


def _lines(comparison: Comparison, width: int) -> Iterator[str]:
    yield f"Conditions against {comparison.baseline}"
    yield from _wrapped(heading(comparison), width, after="")
    yield ""
    yield from _aligned(arm_table(comparison), width)
    yield ""
    head, rows = contrast_table(comparison)
    yield from _aligned(([head[column] for column in _SHOWN], [[row[column] for column in _SHOWN] for row in rows]), width)
    yield ""
    shared = {sharing(contrast) for contrast in comparison.contrasts}
    if len(shared) == 1:
        yield from _wrapped(next(iter(shared)), width, after="")
    for contrast, row in zip(comparison.contrasts, rows, strict=True):
        yield from _wrapped(f"{contrast.condition}: {explanation(contrast, comparison)}", width)
        said = [*([sharing(contrast)] if len(shared) > 1 else []), _numbers(head, row), *details(contrast, comparison)]
        yield from (line for sentence in said for line in _wrapped(sentence, width, "  "))
    if any(arm.tasks for arm in comparison.arms):
        yield ""
        yield from _wrapped(task_words(comparison), width, after="")
        yield from _aligned(task_table(comparison), width)
    for title, sentences in (("Notes", comparison.notes), ("Left out", comparison.left_out)):
        if sentences:
            yield from ("", f"{title}:")
            for sentence in sentences:
                yield from _wrapped(f"- {sentence}", width)


def _numbers(head: Sequence[str], row: Sequence[str]) -> str:
    """What the narrow table leaves out."""
    left = [f"{name} {cell}" for column, (name, cell) in enumerate(zip(head, row, strict=True)) if column not in _SHOWN and cell]
    return f"Also: {', '.join(left)}."


def _wrapped(text: str, width: int, indent: str = "", after: str = "  ") -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent + after, break_long_words=False, break_on_hyphens=False
    )


def _aligned(table: Table, width: int) -> Iterator[str]:
    """Columns, the first and the last to the left; each row below its label where the lines would be wider than the terminal."""
    head, rows = table
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    below = sum(widths) + len(_GAP) * (len(widths) - 1) > width
    outer = (0, len(widths) - 1)
    for row in (head, *rows):
        cells = [f"{cell:{'<' if place in outer else '>'}{widths[place]}}" for place, cell in enumerate(row)]
        if below:
            yield row[0]
            yield (_GAP + _GAP.join(cells[1:])).rstrip()
        else:
            yield _GAP.join(cells).rstrip()

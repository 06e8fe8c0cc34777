"""Text for a terminal or a page: made harmless, numbers in words, rows in tables."""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate

_ESCAPE_SEQUENCES = re.compile(
    r"""
    (?:\x1b\[|\x9b) [0-?]* [ -/]* [@-~]                     # CSI: colors, cursor
  | (?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])                 # OSC, DCS, SOS, PM, APC up to their end; without one, what follows is text
    (?: [^\x07\x1b\x90\x98\x9c-\x9f]*+ (?:\x07|\x1b\\|\x9c) )?
  | \x1b [ -/]* [0-~]?                                      # every other escape
    """,
    re.VERBOSE,
)
_C0 = [code for code in range(0x20) if chr(code) not in "\t\n"]
_MARKS = {
    code: f"<U+{code:04X}>"
    for code in (0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
}
_HARMLESS = _MARKS | dict.fromkeys([*_C0, *range(0x7F, 0xA0)], "")
_VISIBLE = (
    _MARKS
    | {code: chr(0x2400 + code) for code in _C0}  # These are control pictures.
    | {0x7F: "\u2421"}
    | {code: f"<U+{code:04X}>" for code in (*range(0x80, 0xA0), *range(0xD800, 0xE000))}
)
GAP = "  "


def clean(text: str) -> str:
    """Make a sentence or a table safe to print or store, whatever names and messages it contains.

    It drops escape sequences and controls, and shows direction marks and Unicode's own ends of a
    line as <U+202E>. Line breaks and tabs stay.
    """
    return _ESCAPE_SEQUENCES.sub("", text).translate(_HARMLESS)


def one_line(text: str, limit: int = 120) -> str:
    r"""Put `text` on one line of at most `limit` characters, without escape sequences; line breaks
    become \n, and direction marks <U+202E>.
    """
    text = clean(text[: 4 * limit]).replace("\n", "\\n").replace("\t", " ")
    return text if len(text) <= limit else text[: limit - 1] + "…"


def without_escapes(pieces: Sequence[str]) -> list[str]:
    """Remove the escape sequences of one text in pieces; a sequence may run over several of
    them.
    """
    text = _ESCAPE_SEQUENCES.sub(lambda sequence: "\0" * len(sequence.group()), "".join(pieces))
    ends = accumulate(map(len, pieces))
    return [
        text[end - len(piece) : end].replace("\0", "")
        for piece, end in zip(pieces, ends, strict=True)
    ]


def visible(text: str) -> str:
    """Write out the invisible characters of `text`: controls as their pictures, direction marks and
    unpaired surrogates as <U+202E>.

    Line breaks and tabs stay. This is for a page, which shows the text of an escape sequence
    without harm.
    """
    return text.translate(_VISIBLE)


def encodable(text: str, encoding: str) -> str:
    """Write every character that the encoding lacks, unpaired surrogates included, as an escape."""
    return text.encode(encoding, "backslashreplace").decode(encoding)


# -- numbers and tables, the same for every command ------------------------------------------------


def counted(count: int, noun: str) -> str:
    """Write a count with its noun: 1 run, 2,400 runs."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def number(value: float | None, form: str) -> str:
    """Write a number, or a dash for a missing one."""
    return "-" if value is None else format(value, form)


def duration(seconds: float) -> str:
    """Write seconds in words: 2 h 05 min, 3 min 20 s, 12 s."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    if minutes:
        return f"{minutes} min {whole % 60:02d} s"
    return f"{whole} s"


def table_lines(
    rows: Sequence[Sequence[str]], right: Collection[int] = (), indent: str = ""
) -> Iterator[str]:
    """Yield the lines of a table for a terminal, with columns as wide as their widest cell. Columns
    align left except for those in `right`, and empty columns disappear.
    """
    from rich.cells import cell_len  # A CJK character takes two places.

    columns = [column for column, cells in enumerate(zip(*rows, strict=False)) if any(cells)]
    widths = {column: max(cell_len(row[column]) for row in rows) for column in columns}
    for row in rows:
        padding = {column: " " * (widths[column] - cell_len(row[column])) for column in columns}
        cells = [
            padding[column] + row[column] if column in right else row[column] + padding[column]
            for column in columns
        ]
        yield (indent + GAP.join(cells)).rstrip()


def picked(row: Sequence[str], columns: Iterable[int]) -> list[str]:
    """Return the cells of these columns."""
    return [row[column] for column in columns]


def markdown_lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a Markdown table whose columns align in its source too."""
    clean = [[cell.replace("|", "\\|") for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*clean, strict=True)]
    for index, row in enumerate(clean):
        cells = " | ".join(map(str.ljust, row, widths))
        yield f"| {cells} |"
        if index == 0:
            yield "|" + "|".join("-" * (width + 2) for width in widths) + "|"

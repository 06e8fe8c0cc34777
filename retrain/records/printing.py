"""Numbers in words and rows in tables, the same for every command."""

from collections.abc import Collection, Iterator, Sequence

GAP = "  "


def counted(count: int, noun: str) -> str:
    """Write a count with its noun: 1 run, 2,400 runs."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """Write seconds in words: 2 h 05 min, 3 min 20 s, 12 s."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {whole % 60:02d} s" if minutes else f"{whole} s"


def table_lines(rows: Sequence[Sequence[str]], right: Collection[int] = (), indent: str = "") -> Iterator[str]:
    """Yield the lines of a table for a terminal: columns as wide as their widest cell, aligned left except those in `right`, empty ones
    left out.
    """
    from rich.cells import cell_len  # a CJK character takes two places

    columns = [column for column in range(len(rows[0])) if any(row[column] for row in rows)] if rows else []
    widths = {column: max(cell_len(row[column]) for row in rows) for column in columns}
    for row in rows:
        padding = {column: " " * (widths[column] - cell_len(row[column])) for column in columns}
        cells = [padding[column] + row[column] if column in right else row[column] + padding[column] for column in columns]
        yield (indent + GAP.join(cells)).rstrip()


def markdown_lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A Markdown table whose columns are aligned in its source too."""
    clean = [[cell.replace("|", "\\|") for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*clean, strict=True)]
    for index, row in enumerate(clean):
        yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        if index == 0:
            yield "|" + "|".join("-" * (width + 2) for width in widths) + "|"

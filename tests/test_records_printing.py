"""Counted nouns, durations and tables as every command prints them."""

import pytest
from rich.cells import cell_len

from retrain.records.terminal import counted, duration, markdown_lines, table_lines


def test_one_is_singular_and_every_other_count_plural() -> None:
    assert [counted(count, "run") for count in (0, 1, 2400)] == ["0 runs", "1 run", "2,400 runs"]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(12.4, "12 s"), (200, "3 min 20 s"), (7500, "2 h 05 min"), (3599.6, "1 h 00 min")],
)
def test_a_duration_has_at_most_two_units(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_columns_line_up_where_characters_are_two_cells_wide() -> None:
    lines = list(table_lines([("text", "n"), ("答え", "1"), ("abc", "23")], right=(1,)))
    assert len({cell_len(line) for line in lines}) == 1
    assert [line[-1] for line in lines] == ["n", "1", "3"]


def test_a_column_without_text_is_left_out_and_no_line_ends_in_spaces() -> None:
    lines = list(table_lines([("a", "", "long"), ("bb", "", "c")], indent="  "))
    assert lines == ["  a   long", "  bb  c"]
    assert list(table_lines([])) == []


def test_a_pipe_in_a_cell_does_not_end_a_markdown_cell() -> None:
    assert list(markdown_lines(("label", "n"), [("a|b", "1")])) == [
        "| label | n |",
        "|-------|---|",
        "| a\\|b  | 1 |",
    ]

"""The screen: on a terminal a row per step under a bar over the whole run, elsewhere plain lines.

Nothing here interprets markup, so a model's text stays text.
"""

import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from retrain.records.disk import is_reader_gone
from retrain.records.evaluation import Evaluation
from retrain.records.redact import Redactor
from retrain.records.summary import RunSummary
from retrain.records.terminal import clean, encodable
from retrain.tracking.base import Event, Message, StartEvent, Tracker, Verbosity
from retrain.tracking.lines import lines_of
from retrain.tracking.screen import Bar, Row, Rows


class Console(Tracker):
    """Standard output gets the rows or lines, and standard error the bar."""

    def __init__(
        self,
        verbosity: Verbosity = Verbosity.NORMAL,
        *,
        title: str = "",
        max_steps: int = 0,
        all_groups: bool = False,
        redactor: Redactor | None = None,
        folder: Path = Path(),
        out: TextIO | None = None,
        error: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`title` names the run in its first line on a terminal."""
        self._out = out or sys.stdout
        self._mask = (redactor or Redactor()).text
        self._folder = folder
        self._verbosity = verbosity
        self._all_groups = all_groups
        self._has_rows = self._out.isatty() and verbosity < Verbosity.VERBOSE
        self._rows = Rows(title, max_steps, self._out, folder, all_groups=all_groups)
        self._bar: Bar | None = None
        screen = error or sys.stderr
        if verbosity >= Verbosity.NORMAL and screen.isatty() and not _is_pipe(self._out):
            self._bar = Bar(screen, clock, max_steps, self._masked, at_once=self._has_rows)

    def emit(self, event: Event) -> None:
        with self._watched():
            rows = self._shown(event)
            if rows:
                if self._bar is not None:
                    self._bar.hide()  # so that the two streams never mix
                self._print(rows)
            if self._bar is not None:
                self._bar.show(event)

    def close(self) -> None:
        with self._watched():
            if self._bar is not None:
                self._bar.hide()

    def _shown(self, event: Event) -> list[Row]:
        if self._verbosity == Verbosity.SILENT:
            return []
        if self._verbosity == Verbosity.QUIET:
            if isinstance(event, StartEvent | Message):
                return self._rows.opening(event)
            if not isinstance(event, Evaluation | RunSummary):
                return []
        if self._has_rows:
            return self._rows.of(event)
        lines = lines_of(event, self._folder, all_groups=self._all_groups)
        return [[(line, "")] for line in lines]

    def _print(self, rows: list[Row]) -> None:
        encoding = self._out.encoding or "utf-8"
        for row in rows:
            spans = [(encodable(self._masked(text), encoding), style) for text, style in row]
            if self._has_rows:
                self._rows.print(spans)
            else:
                self._out.write("".join(text for text, _ in spans) + "\n")
        self._out.flush()

    def _masked(self, text: str) -> str:
        return clean(self._mask(text))

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Ignore a reader that goes away (`| head`, a closed terminal): the run continues and
        writes its files.
        """
        try:
            yield
        except OSError as error:
            if not is_reader_gone(error):
                error.filename = (  # a full disk under `> log.txt`, and not the run's
                    "Standard output or error"
                )
                raise
            self._verbosity, self._bar = Verbosity.SILENT, None


def _is_pipe(stream: TextIO) -> bool:
    """True where another program prints what is written, perhaps to the bar's terminal."""
    try:
        return stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):  # a stream without a descriptor
        return False

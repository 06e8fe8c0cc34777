"""The screen: on a terminal a row per step above a bar over the whole run, elsewhere plain lines.

The screen interprets no markup, so a model's text stays text.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from retrain.records.disk import is_reader_gone
from retrain.records.entries import StepRecord
from retrain.records.evaluation import Evaluation
from retrain.records.redact import Redactor
from retrain.records.summary import RunSummary
from retrain.records.terminal import clean, encodable
from retrain.tracking.base import Event, Message, StartEvent, Tracker, Verbosity
from retrain.tracking.lines import lines_of
from retrain.tracking.screen import Row, Rows, Terminal
from retrain.types import Doing

REMINDER_S = 60.0
"""Seconds of silence after which a line tells a pipe what takes so long."""


class Console(Tracker):
    """Rows or lines go to standard output; a pipe's reminders go to standard error."""

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
        self._out, self._error = out or sys.stdout, error or sys.stderr
        self._mask = (redactor or Redactor()).text
        self._folder = folder
        self._verbosity = verbosity
        self._all_groups = all_groups
        self._rows = Rows(title, folder, all_groups=all_groups)
        self._terminal: Terminal | None = None
        self._doing, self._done = "Starting", 0
        self._is_silent = True
        """True if the run has printed no line since the last reminder."""
        self._closed = threading.Event()
        has_bar = verbosity >= Verbosity.NORMAL
        if self._out.isatty():
            self._terminal = Terminal(self._out, max_steps, clock, has_bar=has_bar)
        elif has_bar:
            threading.Thread(target=self._remind, name="console", daemon=True).start()

    def emit(self, event: Event) -> None:
        match event:
            case Message(line) if isinstance(line, Doing) or line.endswith("..."):
                self._doing = line
            case StepRecord():
                self._doing, self._done = "", event.step + 1
            case StartEvent() | Evaluation():
                self._doing = ""
        with self._watched():
            if self._terminal and isinstance(event, RunSummary):
                self._terminal.close()
            for text, style in self._shown(event):
                self._print(self._encodable(text), style)
            self._out.flush()
            if self._terminal:
                self._terminal.show(self._encodable(self._doing), self._done)

    def close(self) -> None:
        self._closed.set()
        with self._watched():
            if self._terminal:
                self._terminal.close()

    def _shown(self, event: Event) -> list[Row]:
        if self._verbosity == Verbosity.SILENT:
            return []
        if self._verbosity == Verbosity.QUIET:
            if isinstance(event, StartEvent | Message):
                return self._rows.opening(event)
            if not isinstance(event, Evaluation | RunSummary):
                return []
        if self._terminal and self._verbosity < Verbosity.VERBOSE:
            return self._rows.of(event)
        lines = lines_of(event, self._folder, all_groups=self._all_groups)
        return [(line, "") for line in lines]

    def _print(self, text: str, style: str) -> None:
        self._is_silent = False
        if self._terminal:
            self._terminal.print(text, style)
        else:
            self._out.write(text + "\n")

    def _encodable(self, text: str) -> str:
        return encodable(clean(self._mask(text)), self._out.encoding or "utf-8")

    def _remind(self) -> None:
        """Tell a pipe once a minute what takes so long."""
        with suppress(OSError):
            while not self._closed.wait(REMINDER_S):
                is_silent, self._is_silent = self._is_silent, True
                if is_silent and self._doing:
                    print(f"Still at: {self._encodable(self._doing)}", file=self._error, flush=True)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Ignore a reader that goes away (`| head`, a closed terminal): the run continues and
        writes its files.
        """
        try:
            yield
        except OSError as error:
            if not is_reader_gone(error):
                error.filename = (  # A disk under `> log.txt` is full, not the disk of the run.
                    "Standard output or error"
                )
                raise
            self._verbosity, self._terminal = Verbosity.SILENT, None

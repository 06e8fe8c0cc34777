"""A run on a terminal: aligned rows above a bar over the whole run."""

import shutil
import sys
from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, TextIO

from retrain.config.mixture import task_of
from retrain.records.entries import StepRecord
from retrain.records.evaluation import Evaluation
from retrain.records.terminal import GAP, counted, one_line
from retrain.tracking.base import Event, GroupScores, Message, StartEvent
from retrain.tracking.lines import evaluation_fields, lines_of, step_fields, task_lines
from retrain.types import LogLine

if TYPE_CHECKING:
    from retrain.config import TrainConfig

Row = tuple[str, str]
"""A line and its style of rich; "" is the terminal's own."""
_COLUMNS = {
    "step": 4,
    "reward": 6,
    "correct": 7,
    "trained": 7,
    "tokens": 6,
    "entropy": 7,
    "time": 6,
    "loss": 7,
    "grad": 5,
    "sepa_l": 6,
    "all right": 9,
    "all wrong": 9,
    "datums": 6,
}
"""Width of each field of a step; a narrow terminal leaves the last ones out."""
_ROWS_A_HEADER = 20
_MIN_WIDTH = 20
_BAR_WIDTH = 12
_BESIDE_WORDS = 46
"""Columns of a bar's counts, times and the bar itself."""
_REFRESHES_PER_S = 2
_ETA_PERIOD_S = 86400.0
"""The ETA uses the mean time of the steps in this period; rich's own 30 s may contain no step."""


def title_of(config: "TrainConfig", condition: str) -> str:
    """Return a run's first line on a terminal, up to its device."""
    source = config.environment.provider or config.data.path or config.data.source
    if config.data.mix:
        source = "+".join(map(task_of, config.data.mix))
    reward = "" if config.environment.provider or config.data.mix else f"/{config.reward.type}"
    training = config.training
    steps = counted(training.max_steps, "step")
    batch = f"{steps} of {training.batch_size} prompts x {training.group_size}"
    return GAP.join(
        (condition, config.model.model, f"{source}{reward}", f"seed {training.seed}", batch)
    )


class Rows:
    """Turns events into the rows of a terminal."""

    def __init__(self, title: str, folder: Path, *, all_groups: bool) -> None:
        self._title = title
        self._folder = folder
        self._all_groups = all_groups
        self._facts: list[str] = []
        """Short forms of the lines before the start; one row shows them."""
        self._started = False
        self._steps = 0

    def of(self, event: Event) -> list[Row]:
        match event:
            case Message(line) if not isinstance(line, LogLine):
                return _wrapped(line, "yellow")
            case StartEvent() | Message():
                return self.opening(event)
            case GroupScores() if not self._all_groups:
                return []
            case StepRecord():
                return self._step(event)
            case Evaluation():
                line = GAP.join(evaluation_fields(event)[:-1])
                return _wrapped(line, "bold cyan") + [(one, "") for one in task_lines(event)]
        lines = lines_of(event, self._folder, all_groups=self._all_groups)
        return [row for line in lines for row in _wrapped(line)]

    def opening(self, event: StartEvent | Message) -> list[Row]:
        """Return the rows before the first step: what runs, what retrain loaded, and the gate."""
        if isinstance(event, StartEvent):
            self._started = True
            title = _wrapped(f"{self._title}{GAP}{event.device}", "bold")
            return title + _wrapped(GAP.join(self._facts))
        brief = event.line.brief if isinstance(event.line, LogLine) else ""
        if self._started:
            return _wrapped(brief)
        self._facts += [brief] if brief else []
        return []

    def _step(self, record: StepRecord) -> list[Row]:
        """Return a step's columns; every few steps their names come first."""
        rows = [(_aligned(step_fields(record)), "" if record.informative_fraction else "yellow")]
        if self._steps % _ROWS_A_HEADER == 0:
            rows.insert(0, (_aligned(dict(zip(_COLUMNS, _COLUMNS, strict=True))), "bold"))
        self._steps += 1
        return rows


def _aligned(texts: Mapping[str, str]) -> str:
    """Put texts below each other by their columns."""
    cells = [f"{texts[name]:>{width}}" for name, width in _COLUMNS.items()]
    ends = accumulate(len(cell) + len(GAP) for cell in cells)
    fits = zip(cells, ends, strict=True)
    return GAP.join(cell for cell, end in fits if end <= _width() + len(GAP))


def _width() -> int:
    """Return the columns of a line that never wraps."""
    return shutil.get_terminal_size().columns - 1


def _wrapped(line: str, style: str = "") -> list[Row]:
    """Break a sentence between words, and indent what follows its first line."""
    lines = wrap(
        line,
        max(_width(), _MIN_WIDTH),
        subsequent_indent=GAP,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [(part, style) for part in lines]


class Terminal:
    """Prints rows above a bar."""

    def __init__(
        self, out: TextIO, max_steps: int, clock: Callable[[], float], *, has_bar: bool
    ) -> None:
        from rich import progress
        from rich.console import Console

        self._console = Console(file=out, highlight=False, markup=False, emoji=False)
        words = progress.TextColumn("{task.description}", style="dim", markup=False)
        columns: list[str | progress.ProgressColumn] = [
            progress.MofNCompleteColumn(),
            progress.BarColumn(_BAR_WIDTH),
            progress.TimeElapsedColumn(),
            "ETA",
            progress.TimeRemainingColumn(),
            words,
        ]
        self._bar = progress.Progress(
            *(columns if max_steps else columns[2:3] + columns[-1:]),
            console=self._console,
            refresh_per_second=_REFRESHES_PER_S,
            speed_estimate_period=_ETA_PERIOD_S,
            transient=True,
            redirect_stderr=sys.stderr.isatty(),
            get_time=clock,
            disable=not (has_bar and self._console.is_interactive),
        )
        self._task = self._bar.add_task("", total=max_steps or None)

    def print(self, text: str, style: str) -> None:
        from rich.text import Text

        self._console.print(Text(text, style), soft_wrap=True)

    def show(self, doing: str, done: int) -> None:
        """Show the number of completed steps, and the current work, in the bar."""
        words = one_line(doing, max(_width() - _BESIDE_WORDS, 1))
        self._bar.update(self._task, description=words, completed=done)
        self._bar.start()

    def close(self) -> None:
        """Remove the bar."""
        self._bar.stop()
        self._bar.disable = True

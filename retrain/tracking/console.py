"""The screen: results as plain lines on standard output, a progress bar on standard error while a step is long.

Nothing here interprets markup, so a model's text stays text.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from retrain.records.disk import is_reader_gone
from retrain.records.entries import EvaluationResult, RunSummary, StepRecord
from retrain.records.redact import Redactor
from retrain.records.terminal import clean, encodable, one_line
from retrain.tracking.base import Tracker

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_BAR_DELAY_S = 1.0
"""A step that is over sooner shows no bar: it would only flicker."""


class Console(Tracker):
    def __init__(
        self,
        *,
        quiet: bool = False,
        redactor: Redactor | None = None,
        folder: Path = Path(),
        out: TextIO | None = None,
        error: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out = out or sys.stdout
        self._mask = (redactor or Redactor()).text
        self._folder = folder
        self._quiet = quiet
        self._bar = None if quiet else _Bar(error or sys.stderr, clock)

    def message(self, line: str) -> None:
        self._print(line)

    def group(self, correct: int, judged: int, reference: str) -> None:
        self._print(group_line(correct, judged, reference))

    def progress(self, label: str, done: int, total: int) -> None:
        with self._watched():
            if self._bar is not None:
                self._bar.show(label, done, total)

    def step(self, record: StepRecord) -> None:
        self._print(step_line(record))

    def evaluation(self, result: EvaluationResult) -> None:
        self._print(evaluation_line(result))

    def finish(self, summary: RunSummary) -> None:
        for line in summary_lines(summary, self._folder):
            self._print(line)

    def close(self) -> None:
        with self._watched():
            if self._bar is not None:
                self._bar.hide()

    def _print(self, line: str) -> None:
        with self._watched():
            if self._bar is not None:
                self._bar.hide()
            if self._quiet:
                return
            text = encodable(clean(self._mask(line)), self._out.encoding or "utf-8")
            self._out.write(text + "\n")
            self._out.flush()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Who watches may go away (`| head`, a terminal that closes) while the run, and its files, go on."""
        try:
            yield
        except OSError as error:
            if not is_reader_gone(error):
                raise
            self._quiet, self._bar = True, None


def group_line(correct: int, judged: int, reference: str) -> str:
    return f"  group: {correct}/{judged} correct | answer={one_line(reference)}"


def step_line(record: StepRecord) -> str:
    fields = [
        f"Step {record.step} [{record.condition}]",
        f"loss={_loss(record)}",
        f"reward={_number(record.mean_reward, '.3f')}",
        f"correct={_number(record.correct_rate, '.1%')}",
        f"datums={_number(record.num_datums, 'd')}",
        f"bs={_number(record.batch_size, 'd')}",
        f"gs={_number(record.group_size, 'd')}",
        f"sepa_l={_number(record.sepa_lambda, '.4f')}",
        f"time={_number(record.step_time_s, '.1f')}s",
    ]
    return " | ".join(fields)


def _loss(record: StepRecord) -> str:
    if record.loss_is_placeholder:
        return f"{_number(record.reported_loss, '.4f')} (asynchronous backend: placeholder)"
    return _number(record.loss, ".4f")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def evaluation_line(result: EvaluationResult) -> str:
    samples = sum(problem.samples for problem in result.problems)
    skipped = sum(problem.could_not_judge for problem in result.problems)
    fields = [f"Evaluation at step {result.step} | {pass_at_1(result)}"]
    fields += [f"pass@{k}={value:.1%}" for k, value in sorted(result.pass_at.items()) if k != 1]
    fields += [f"problems={len(result.problems)}", f"samples={samples}"]
    fields += [f"could_not_judge={skipped}"] if skipped else []
    return " | ".join([*fields, f"time={result.seconds:.1f}s"])


def pass_at_1(result: EvaluationResult) -> str:
    low, high = result.interval
    return f"pass@1={_number(result.pass_at.get(1), '.1%')} [{low:.1%}, {high:.1%}]"


def summary_lines(summary: RunSummary, folder: Path) -> list[str]:
    lines = [f"Run {summary.status}: {summary.steps} steps, {summary.tokens:,} tokens, {summary.seconds:.1f}s."]
    if summary.status != "done":  # the reason is on its way to the other stream
        return [*lines, f"Run folder: {folder} | go on with --resume {folder}"]
    if summary.before is not None and summary.after is not None and summary.before.step != summary.after.step:
        lines.append(f"Held-out {pass_at_1(summary.before)} at step {summary.before.step} -> {pass_at_1(summary.after)}.")
    elif summary.after is not None:
        lines.append(f"Held-out {pass_at_1(summary.after)}.")
    return [*lines, f"Run folder: {folder} | adapter: {folder / summary.adapter}"]


class _Bar:
    """A bar that stands only while it is told to: any line printed takes it away first, so that the two streams never mix."""

    def __init__(self, error: TextIO, clock: Callable[[], float]) -> None:
        self._error = error
        self._terminal = error.isatty()
        self._clock = clock
        self._label = ""
        self._began = 0.0
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def show(self, label: str, done: int, total: int) -> None:
        if not self._terminal:
            return
        if label != self._label:
            self.hide()
            self._label, self._began = label, self._clock()
        if done >= total:
            self.hide()
        elif self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, total=total)
        elif self._clock() - self._began >= _BAR_DELAY_S:
            self._open(done, total)

    def _open(self, done: int, total: int) -> None:
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA", markup=False),
            TimeRemainingColumn(),
            console=RichConsole(file=self._error, stderr=True),  # honours NO_COLOR
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._progress.start()
        self._task = self._progress.add_task(one_line(self._label, 60), completed=done, total=total)

    def hide(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress, self._task = None, None
        self._label = ""

"""The screen: results as plain lines on standard output, a progress bar on standard error while a
step is long.

Nothing here interprets markup, so a model's text stays text.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from retrain.records.disk import is_reader_gone
from retrain.records.entries import StepRecord
from retrain.records.evaluation import Evaluation
from retrain.records.redact import Redactor
from retrain.records.run_folder import RunFolder
from retrain.records.summary import RunSummary
from retrain.records.terminal import clean, encodable, one_line
from retrain.tracking.base import Event, GroupScored, Message, Progress, Tracker

if TYPE_CHECKING:
    from rich import progress as bars

_BAR_DELAY_S = 1.0
"""Seconds before a progress bar appears; in a shorter step it would only flicker."""


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
        if quiet:
            self._bar = None
        else:
            self._bar = _Bar(error or sys.stderr, clock)

    def emit(self, event: Event) -> None:
        match event:
            case Message(line):
                self._print(line)
            case GroupScored():
                self._print(group_line(event))
            case Progress():
                with self._watched():
                    if self._bar is not None:
                        self._bar.show(event)
            case StepRecord():
                self._print(step_line(event))
            case Evaluation():
                for line in (evaluation_line(event), *task_lines(event)):
                    self._print(line)
            case RunSummary():
                for line in summary_lines(event, self._folder):
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
            self._quiet, self._bar = True, None


def group_line(group: GroupScored) -> str:
    return f"  group: {group.correct}/{group.judged} correct | answer={one_line(group.reference)}"


def step_line(record: StepRecord) -> str:
    loss = _number(record.loss, ".4f")
    if record.loss_is_placeholder:
        loss = f"{_number(record.reported_loss, '.4f')} (asynchronous backend: placeholder)"
    fields = [
        f"Step {record.step} [{record.condition}]",
        f"loss={loss}",
        f"reward={_number(record.mean_reward, '.3f')}",
        f"correct={_number(record.correct_rate, '.1%')}",
        f"datums={_number(record.num_datums, 'd')}",
        f"bs={_number(record.batch_size, 'd')}",
        f"gs={_number(record.group_size, 'd')}",
        f"sepa_l={_number(record.sepa_lambda, '.4f')}",
        f"time={_number(record.step_time_s, '.1f')}s",
    ]
    return " | ".join(fields)


def _number(value: float | None, form: str) -> str:
    if value is None:
        return "-"
    return format(value, form)


def evaluation_line(result: Evaluation) -> str:
    samples = sum(problem.samples for problem in result.problems)
    skipped = sum(problem.could_not_judge for problem in result.problems)
    fields = [f"Evaluation at step {result.step} | {pass_at_1(result)}"]
    fields += [
        f"pass@{k}={value:.1%} {_ends(result.interval_at(k))}"
        for k, value in sorted(result.pass_at.items())
        if k != 1
    ]
    fields += [f"problems={len(result.problems)}", f"samples={samples}"]
    fields += [f"could_not_judge={skipped}"] if skipped else []
    return " | ".join([*fields, f"time={result.seconds:.1f}s"])


def pass_at_1(result: Evaluation) -> str:
    return f"pass@1={_number(result.pass_at.get(1), '.1%')} {_ends(result.interval)}"


def task_lines(result: Evaluation) -> list[str]:
    """Lines with the pass@1 of each task and its interval; none if there is only one task."""
    tasks = result.by_task
    if len(tasks) < 2:
        return []
    return [
        f"  {task} | {pass_at_1(part)} | problems={len(part.problems)}"
        for task, part in tasks.items()
    ]


def _ends(interval: tuple[float, float]) -> str:
    return f"[{interval[0]:.1%}, {interval[1]:.1%}]"


def summary_lines(summary: RunSummary, folder: Path) -> list[str]:
    lines = [
        (
            f"Run {summary.status}: {summary.steps} steps, {summary.tokens:,} tokens,"
            f" {summary.seconds:.1f}s."
        )
    ]
    lines += [summary.untrained] if summary.untrained else []
    if summary.status != "done":  # the reason is printed on standard error
        return [
            *lines,
            f"Run folder: {folder} | continue with `{RunFolder(folder).resume_command}`",
        ]
    if (
        summary.before is not None
        and summary.after is not None
        and summary.before.step != summary.after.step
    ):
        before, after = summary.before, summary.after
        gain = ""
        found = after.difference_from(before)
        if found is not None:
            mean, (low, high) = found
            gain = (
                f": {100 * mean:+.1f} pp [{100 * low:+.1f}, {100 * high:+.1f}], paired by problem"
            )
        lines.append(
            f"Held-out {pass_at_1(before)} at step {before.step} -> {pass_at_1(after)}{gain}."
        )
    elif summary.after is not None:
        lines.append(f"Held-out {pass_at_1(summary.after)}.")
    return [*lines, f"Run folder: {folder} | adapter: {folder / summary.adapter}"]


class _Bar:
    """A transient progress bar: it is hidden before any line is printed, so that the two streams
    never mix.
    """

    def __init__(self, error: TextIO, clock: Callable[[], float]) -> None:
        self._error = error
        self._terminal = error.isatty()
        self._clock = clock
        self._label = ""
        self._began = 0.0
        self._bar: bars.Progress | None = None
        self._task: bars.TaskID | None = None

    def show(self, progress: Progress) -> None:
        if not self._terminal:
            return
        if progress.label != self._label:
            self.hide()
            self._label, self._began = progress.label, self._clock()
        if progress.done >= progress.total:
            self.hide()
        elif self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=progress.done, total=progress.total)
        elif self._clock() - self._began >= _BAR_DELAY_S:
            self._open(progress)

    def _open(self, progress: Progress) -> None:
        from rich import progress as bars
        from rich.console import Console as RichConsole

        self._bar = bars.Progress(
            bars.TextColumn("{task.description}", markup=False),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TimeElapsedColumn(),
            bars.TextColumn("ETA", markup=False),
            bars.TimeRemainingColumn(),
            console=RichConsole(file=self._error, stderr=True),  # honours NO_COLOR
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._bar.start()
        self._task = self._bar.add_task(
            one_line(progress.label, 60), completed=progress.done, total=progress.total
        )

    def hide(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar, self._task = None, None
        self._label = ""

"""A run on a terminal: aligned rows, and a bar over the whole run with its ETA."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, TextIO

from retrain.records.entries import StepRecord
from retrain.records.evaluation import Evaluation
from retrain.records.summary import RunSummary
from retrain.records.terminal import counted, number, one_line
from retrain.tracking.base import Event, GroupScores, Message, Progress, StartEvent
from retrain.tracking.lines import group_lines, summary_lines, task_lines
from retrain.types import LogLine

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.console import ConsoleOptions, RenderResult
    from rich.live import Live

    from retrain.config import TrainConfig

Row = list[tuple[str, str]]
"""Pieces of one line, each with a style of rich; "" is the terminal's own."""
_BAR_DELAY_S = 1.0
"""Seconds before the bar appears beside plain lines; in a short run it would only flicker."""
_REFRESHES_PER_S = 2
_MAX_BAR = 30
_MIN_WIDTH = 20
_BAR = "━─"
_SPARKS = "▁▂▃▄▅▆▇█"
_MAX_SPARKS = 40
_GAP = "  "


def title_of(config: "TrainConfig", condition: str) -> str:
    """Return a run's first line on a terminal, up to its device."""
    source = config.environment.provider or config.data.path or config.data.source
    if config.environment.provider:
        reward = ""
    else:
        reward = f"/{config.reward.type}"
    training = config.training
    steps = counted(training.max_steps, "step")
    batch = f"{steps} of {training.batch_size} prompts x {training.group_size}"
    return _GAP.join(
        (condition, config.model.model, f"{source}{reward}", f"seed {training.seed}", batch)
    )


class Rows:
    """Turns events into the rows of a terminal."""

    def __init__(
        self, title: str, max_steps: int, out: TextIO, folder: Path, *, all_groups: bool
    ) -> None:
        self._title = title
        self._max_steps = max_steps
        self._out = out
        self._folder = folder
        self._all_groups = all_groups
        self._facts: list[str] = []
        """Short forms of the lines before the start; one row shows them."""
        self._started = False
        self._correct: list[float] = []
        self._held_out: list[float] = []
        self._console: RichConsole | None = None

    @property
    def console(self) -> "RichConsole":
        """The terminal; it honours NO_COLOR and TERM."""
        if self._console is None:
            from rich.console import Console as RichConsole

            self._console = RichConsole(file=self._out, highlight=False, markup=False, emoji=False)
        return self._console

    def print(self, row: Row) -> None:
        from rich.text import Text

        self.console.print(Text.assemble(*row), soft_wrap=True)

    def of(self, event: Event) -> list[Row]:
        match event:
            case Message(line) if not isinstance(line, LogLine):
                return [[(part, "yellow")] for part in self._wrapped(line)]
            case StartEvent() | Message():
                return self.opening(event)
            case GroupScores(groups):
                shown = []
                if self._all_groups:
                    shown = group_lines(groups, all_groups=True)
                return [[(line, "dim")] for line in shown]
            case StepRecord():
                self._correct += [event.correct_rate] if event.correct_rate is not None else []
                return [self._step(event)]
            case Evaluation():
                self._held_out += [event.pass_at[1]] if 1 in event.pass_at else []
                return [self._evaluation(event), *([(line, "")] for line in task_lines(event))]
            case RunSummary():
                return self._summary(event)
        return []

    def opening(self, event: StartEvent | Message) -> list[Row]:
        """Return the rows before the first step: what runs, what was loaded, and the gate."""
        if isinstance(event, StartEvent):
            self._started = True
            title = self._wrapped(f"{self._title}{_GAP}{event.device}")
            rows: list[Row] = [[(line, "bold")] for line in title]
            return rows + [[(line, "")] for line in self._wrapped(_GAP.join(self._facts))]
        brief = event.line.brief if isinstance(event.line, LogLine) else ""
        if brief and not self._started:
            self._facts.append(brief)
        elif brief:
            return [[(line, "")] for line in self._wrapped(brief)]
        return []

    def _step(self, record: StepRecord) -> Row:
        """Return a step's columns; those that a narrow terminal has no place for are left out, the
        least important ones first.
        """
        columns = [(text, style) for text, style in self._columns(record) if text]
        width = self.console.width - 1
        while len(columns) > 1 and sum(len(text) + len(_GAP) for text, _ in columns) > width + 2:
            columns.pop(_least_important(columns))
        row: Row = []
        for text, style in columns:
            row += [(_GAP, "")] * bool(row) + [(text, style)]
        return row

    def _columns(self, record: StepRecord) -> Row:
        digits = len(str(self._max_steps))
        groups = record.batch_size or 0
        trained = round(groups * (record.informative_fraction or 0.0))
        correct = number(record.correct_rate, ".0%")
        tokens = number(record.completion_tokens_mean, ".0f")
        entropy = _short(record.entropy_mean, 3)
        pooled = ""
        if record.sepa_lambda is not None:
            pooled = f"lambda {_short(record.sepa_lambda)}"
        return [
            (f"step {record.step:>{digits}}", "dim"),
            (f"reward {_short(record.mean_reward):>4}", ""),
            (f"correct {correct:>4}", "red" if record.correct_rate == 0 else "green"),
            (f"trained {trained:>{len(str(groups))}}/{groups}", "" if trained else "bold yellow"),
            (f"{tokens:>4} tok", ""),
            (f"H {entropy:>5}", ""),
            (f"{record.step_time_s or 0.0:>5.1f} s", ""),
            (f"loss {_short(record.loss, 4):>6}", "dim"),
            (f"grad {_short(record.grad_norm):>4}", "dim"),
            (pooled, "dim"),
            (_outcomes(record, len(str(groups))), "dim"),
        ]

    def _evaluation(self, result: Evaluation) -> Row:
        low, high = result.interval
        value = result.pass_at.get(1)
        row: Row = [
            (f"held-out at {result.step}", "bold cyan"),
            (_GAP, ""),
            (number(value, ".1%"), "bold"),
            (f" [{100 * low:.1f}, {100 * high:.1f}]", ""),
        ]
        others = {k: rate for k, rate in sorted(result.pass_at.items()) if k != 1}
        row += [(f"{_GAP}pass@{k} {rate:.1%}", "") for k, rate in others.items()]
        skipped = sum(problem.could_not_judge for problem in result.problems)
        row += [(f"{_GAP}{skipped} could not be judged", "yellow")] * bool(skipped)
        if len(self._held_out) > 1 and self._has_sparks:
            row.append((f"{_GAP}{sparkline(self._held_out)}", "cyan"))
        return row

    def _summary(self, summary: RunSummary) -> list[Row]:
        first, *rest = summary_lines(summary, self._folder)
        rows: list[Row] = [[(line, "bold")] for line in self._wrapped(first)]
        if len(self._correct) > 1 and self._has_sparks:
            ends = [f"{rate:.0%}" for rate in (self._correct[0], self._correct[-1])]
            curve = sparkline(self._correct, max(self.console.width - _MIN_WIDTH - 12, 8))
            rows.append(
                [(f"Correct in training: {ends[0]} ", ""), (curve, "green"), (f" {ends[1]}", "")]
            )
        return rows + [[(part, "")] for line in rest for part in self._wrapped(line)]

    @property
    def _has_sparks(self) -> bool:
        return _encodes(self._out, _SPARKS)

    def _wrapped(self, line: str) -> list[str]:
        """Break a sentence between words, and indent what follows its first line."""
        return wrap(
            line,
            max(self.console.width - 1, _MIN_WIDTH),
            subsequent_indent=_GAP,
            break_long_words=False,
            break_on_hyphens=False,
        )


def _least_important(columns: Row) -> int:
    """Return the index of the column to leave out next: the last one except for the seconds."""
    last = len(columns) - 1
    if columns[last][0].endswith(" s") and last > 1:
        return last - 1
    return last


def _outcomes(record: StepRecord, digits: int) -> str:
    """Return how many groups had only right or only wrong completions."""
    right, wrong = record.groups_skipped_all_correct or 0, record.groups_skipped_all_wrong or 0
    return f"{right:>{digits}} all right {wrong:>{digits}} all wrong"


def _short(value: float | None, places: int = 2) -> str:
    """Write a number without the zero before its point: .61, -.02, 1.25."""
    if value is None or not math.isfinite(value):
        return "-"
    text = f"{value:.{places}f}"
    if text.lstrip("-").startswith("0."):
        return text.replace("0.", ".", 1)
    return text


def _encodes(stream: TextIO, text: str) -> bool:
    with suppress(UnicodeEncodeError, LookupError):
        text.encode(stream.encoding or "utf-8")
        return True
    return False


def sparkline(values: Sequence[float], longest: int = _MAX_SPARKS) -> str:
    """Draw values as one character each, from the lowest to the highest; of more than `longest`
    values each character is the mean of its share.
    """
    count = min(len(values), longest, _MAX_SPARKS)
    cuts = [round(index * len(values) / count) for index in range(count + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(cuts)]
    low, high = min(means), max(means)
    scale = 0.0
    if high > low:
        scale = (len(_SPARKS) - 1) / (high - low)
    return "".join(_SPARKS[round((mean - low) * scale)] for mean in means)


class Bar:
    """A line at the bottom of a terminal: steps done, elapsed time and ETA. It is hidden while
    anything else is printed.
    """

    def __init__(
        self,
        stream: TextIO,
        clock: Callable[[], float],
        max_steps: int,
        masked: Callable[[str], str],
        *,
        at_once: bool,
    ) -> None:
        self._stream = stream
        self._marks = _BAR if _encodes(stream, _BAR) else "#-"
        self._clock = clock
        self._max_steps = max_steps
        self._masked = masked
        self._delay = 0.0 if at_once else _BAR_DELAY_S
        self._began = clock()
        self._done = 0
        self._first: tuple[int, float] | None = None
        """The first step of this session, and when it began."""
        self._doing = "starting"
        self._ended = False
        self._live: Live | None = None

    def show(self, event: Event) -> None:
        """Take up an event, and draw the bar if it is due."""
        match event:
            case Message(line) if isinstance(line, LogLine) and not line.brief:
                self._doing = line
            case StartEvent() | Message():
                self._doing = ""
            case Progress(label, done, total):
                self._doing = f"{label.partition(': ')[2] or label} {done}/{total}"
            case StepRecord():
                self._done, self._doing = event.step + 1, ""
                if self._first is None:
                    self._first = event.step, self._clock() - (event.step_time_s or 0.0)
            case RunSummary():
                self._ended = True
        if self._live is None and not self._ended and self._clock() - self._began >= self._delay:
            self._open()

    def hide(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _open(self) -> None:
        from rich.console import Console as RichConsole
        from rich.live import Live

        self._live = Live(
            self,
            console=RichConsole(file=self._stream, stderr=True),
            refresh_per_second=_REFRESHES_PER_S,
            transient=True,
            redirect_stdout=False,
        )
        self._live.start(refresh=True)

    def __rich_console__(self, console: "RichConsole", options: "ConsoleOptions") -> "RenderResult":
        from rich.text import Text

        # The last two columns are left for the ^C that a terminal shows.
        yield Text.assemble(*self._line(options.max_width - 3), no_wrap=True, overflow="crop")

    def _line(self, width: int) -> Row:
        now = self._clock()
        times = f"{_clock_time(now - self._began)} elapsed{_GAP}ETA {self._left(now)}"
        share = 0.0
        if self._max_steps:
            share = self._done / self._max_steps
        counts = f"{self._done}/{self._max_steps}"
        # Eight columns for the share, with the spaces around it.
        used = len(counts) + len(times) + 8
        cells = max(min(_MAX_BAR, width - used), 0)
        full = round(share * cells)
        rest = width - used - cells - len(_GAP)
        doing = ""
        if rest >= 10:
            encoding = self._stream.encoding or "utf-8"
            words = one_line(self._masked(self._doing), rest)
            doing = _GAP + words.encode(encoding, "replace").decode(encoding)
        return [
            (f"{counts} ", ""),
            (self._marks[0] * full, "green"),
            (self._marks[1] * (cells - full), "dim"),
            (f" {share:>4.0%}{_GAP}{times}", ""),
            (doing, "dim"),
        ]

    def _left(self, now: float) -> str:
        if self._first is None or self._done <= self._first[0]:
            return "-"
        step, began = self._first
        per_step = (now - began) / (self._done - step)
        return _clock_time(per_step * max(self._max_steps - self._done, 0))


def _clock_time(seconds: float) -> str:
    """Write a duration as 1:05 or 2:03:04."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}"

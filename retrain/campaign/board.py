"""Progress of a running campaign: a live table on a terminal, plain lines elsewhere.

The numbers come from the runs' own files, so every launcher looks the same.
"""

import contextlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from retrain.analysis.runs import RECENT, StoredRun
from retrain.campaign.manifest import Manifest, RunEntry, Status
from retrain.campaign.plan import CampaignPlan
from retrain.errors import RetrainError
from retrain.records.disk import reader_may_leave
from retrain.records.redact import Redactor
from retrain.records.run_folder import OUTPUT
from retrain.records.terminal import clean, duration, encodable, one_line

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live

REFRESH_S = 1.0
LINES_EVERY_S = 30.0
"""Seconds between two progress lines of a running run, where there is no terminal."""
_COLUMNS = ("run", "state", "step", "correct so far", "held-out", "left")
_GAP = 2
"""Spaces between two columns."""
_REASON_LENGTH = 400
_ORDER = (
    Status.RUNNING,
    Status.FAILED,
    Status.INTERRUPTED,
    Status.DONE,
    Status.PENDING,
    Status.SKIPPED,
)


@dataclass(frozen=True)
class Progress:
    """The progress of one run; None where there is no number yet."""

    name: str
    status: Status
    steps: int = 0
    max_steps: int = 0
    correct: float | None = None
    """Correct rate over all steps so far."""
    held_out: float | None = None
    """pass@1 of the last evaluation."""
    step_time_s: float | None = None
    reason: str = ""

    @property
    def remaining_s(self) -> float | None:
        if self.step_time_s is not None:
            return (self.max_steps - self.steps) * self.step_time_s
        return None

    def describe(self) -> str:
        """The progress in words, for example: step 12/50, correct so far 45.3%, held-out 61.0%."""
        parts = [f"step {self.steps}/{self.max_steps}"]
        parts += [f"correct so far {self.correct:.1%}"] if self.correct is not None else []
        parts += [f"held-out {self.held_out:.1%}"] if self.held_out is not None else []
        return ", ".join(parts)


def read_progress(plan: CampaignPlan, entry: RunEntry) -> Progress:
    """Read the last metrics of a run; without metrics it is at step 0."""
    stored = StoredRun(plan.folder / entry.dir)
    recent = stored.last_metrics(RECENT)
    times = [record.step_time_s for record in recent if record.step_time_s is not None]
    evaluation = stored.final_evaluation if entry.status is Status.DONE else None
    return Progress(
        name=entry.name,
        status=entry.status,
        steps=stored.steps,
        max_steps=plan.max_steps,
        correct=recent[0].running_correct_rate if recent else None,
        held_out=evaluation.pass_at.get(1) if evaluation else None,
        step_time_s=median(times) if times else None,
        reason=entry.reason or "",
    )


class Board:
    """Use as a context manager. The campaign's thread calls `say`, `started` and `ended`; a second
    thread refreshes the table. A quiet one shows what is said and what ended, and no progress. The
    campaign outlives its reader.
    """

    def __init__(
        self,
        plan: CampaignPlan,
        manifest: Manifest,
        workers: int,
        *,
        quiet: bool = False,
        out: TextIO | None = None,
    ) -> None:
        self._plan = plan
        self._manifest = manifest
        self._workers = workers
        self._quiet = quiet
        self._out = out or sys.stdout
        self._mask = Redactor().text
        self._said: dict[str, Progress] = {}
        """The last line of each run, so that none is repeated."""
        self._final: dict[str, Progress] = {}
        """Runs that are not running, which need not be read again."""
        self._numbers = {entry.name: number for number, entry in enumerate(manifest.runs, start=1)}
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if not self._quiet:
            if self._out.isatty():
                from rich.console import Console
                from rich.live import Live

                console = Console(file=self._out)  # honours NO_COLOR
                self._live = Live(
                    console=console,
                    auto_refresh=False,
                    redirect_stdout=False,
                    redirect_stderr=False,
                )
                self._live.start()
            self._thread = threading.Thread(
                target=self._refresh, name="campaign-board", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        if self._live is not None:
            with reader_may_leave():
                self._live.update(self.table(*self._live.console.size), refresh=True)
                self._live.stop()
            self._live = None  # later lines are printed below the table

    # -- lines -------------------------------------------------------------------------------------

    def say(self, line: str) -> None:
        text = encodable(clean(self._mask(line)), self._out.encoding or "utf-8")
        with reader_may_leave():
            if self._live is not None:
                self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                self._out.write(text + "\n")
                self._out.flush()

    def started(self, name: str) -> None:
        if self._live is None and not self._quiet:
            self.say(f"{self._prefix(name)} started")

    def ended(self, name: str) -> None:
        self._final.pop(name, None)
        if self._live is not None:
            return
        progress = self._progress(self._manifest[name])
        line = f"{self._prefix(name)} {progress.status}: {progress.describe()}"
        if progress.reason:
            line += (
                f" | {one_line(progress.reason, _REASON_LENGTH)} |"
                f" {self._plan.folder / self._manifest[name].dir / OUTPUT}"
            )
        self.say(line)

    def _prefix(self, name: str) -> str:
        total = len(self._numbers)
        return f"[{self._numbers[name]:>{len(str(total))}}/{total}] {name}"

    # -- the refreshing thread ---------------------------------------------------------------------

    def _refresh(self) -> None:
        last_lines = time.monotonic()
        while not self._closing.wait(REFRESH_S):
            # What cannot be written here, the campaign's own next line meets and reports.
            with contextlib.suppress(OSError):
                if self._live is not None:
                    self._live.update(self.table(*self._live.console.size), refresh=True)
                elif time.monotonic() - last_lines >= LINES_EVERY_S:
                    last_lines = time.monotonic()
                    for entry in self._manifest.runs:
                        if entry.status is Status.RUNNING:
                            self._say_progress(self._progress(entry))

    def _say_progress(self, progress: Progress) -> None:
        if progress.steps == 0 or self._said.get(progress.name) == progress:
            return
        self._said[progress.name] = progress
        left = ""
        if progress.remaining_s:
            left = f", {duration(progress.remaining_s)} left"
        self.say(f"{self._prefix(progress.name)} {progress.describe()}{left}")

    # -- the table ---------------------------------------------------------------------------------

    def table(self, width: int = 80, height: int = 25) -> "Group":
        """A line that counts all runs, then the runs that fit a terminal of this size: running ones
        first, then failed ones.

        Reasons follow below the table, one line each: in a column they would displace the numbers.
        """
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        runs = [self._progress(entry) for entry in self._manifest.runs]
        room = max(5, height - 6)
        ordered = sorted(runs, key=lambda run: _ORDER.index(run.status))
        reasons = [
            f"{one_line(run.name)}: {one_line(run.reason, _REASON_LENGTH)}"
            for run in ordered
            if run.reason
        ]
        # At most a quarter of the screen, so that the runs stay in sight.
        del reasons[max(1, room // 4) :]
        shown = ordered[: room - len(reasons)]
        rows = [self._cells(run) for run in shown]
        names_width = _first_width(width, [_COLUMNS, *rows])
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
        for name in _COLUMNS:
            table.add_column(
                name, justify="left" if name in ("run", "state") else "right", no_wrap=True
            )
        for name, *cells in rows:
            row = (shortened_name(name, names_width), *cells)
            table.add_row(*(Text(clean(self._mask(cell))) for cell in row))
        if len(shown) < len(runs):
            table.add_row(Text(f"and {len(runs) - len(shown)} more"))
        below = [Text(self._mask(reason), no_wrap=True, overflow="ellipsis") for reason in reasons]
        return Group(Text(clean(self._mask(self.headline(runs)))), table, *below)

    @staticmethod
    def _cells(run: Progress) -> tuple[str, ...]:
        left = ""
        if run.status is Status.RUNNING and run.remaining_s is not None:
            left = duration(run.remaining_s)
        if run.status not in (Status.PENDING, Status.SKIPPED):
            steps = f"{run.steps}/{run.max_steps}"
        else:
            steps = ""
        return (
            one_line(run.name),
            str(run.status),
            steps,
            _percent(run.correct),
            _percent(run.held_out),
            left,
        )

    def headline(self, runs: list[Progress]) -> str:
        """The line above the table, for example: Campaign logs/campaign_...: 12 done, 2 running, 26
        pending | step 640 of 2,000 | 1 h 05 min left.
        """
        found = Counter(run.status for run in runs)
        counts = {status: found[status] for status in _ORDER}
        words = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        steps = sum(run.steps for run in runs)
        planned = self._plan.max_steps * (len(runs) - counts[Status.SKIPPED])
        line = f"Campaign {self._plan.folder}: {words} | step {steps:,} of {planned:,}"
        times = [run.step_time_s for run in runs if run.step_time_s is not None]
        left = sum(
            run.max_steps - run.steps
            for run in runs
            if run.status in (Status.RUNNING, Status.PENDING)
        )
        if not times or not left:
            return line
        return (
            f"{line} | {duration(left * median(times) / max(1, min(self._workers, len(runs))))}"
            " left"
        )

    def _progress(self, entry: RunEntry) -> Progress:
        """The files of a run are read again only while it is running."""
        known = self._final.get(entry.name)
        if known is not None and known.status is entry.status:
            return known
        progress = Progress(entry.name, entry.status, max_steps=self._plan.max_steps)
        if entry.status not in (Status.PENDING, Status.SKIPPED):
            progress = replace(progress, reason=entry.reason or "")
            # A file may be half written now; the comparison reports one that stays so.
            with contextlib.suppress(RetrainError, OSError):
                progress = read_progress(self._plan, entry)
        if entry.status is not Status.RUNNING:
            self._final[entry.name] = progress
        return progress


def shortened_name(name: str, width: int) -> str:
    """`name` in at most `width` columns (at least 12), cut before the seed, which tells the runs of
    a condition apart.
    """
    width = max(12, width)
    if len(name) <= width:
        return name
    seed = ""
    if "_s" in name:
        seed = name[name.rindex("_s") :]
    return f"{name[: max(1, width - 1 - len(seed))]}…{seed}"


def _first_width(width: int, rows: Sequence[Sequence[str]]) -> int:
    """The columns of a terminal of `width` that the others leave to the first of a table."""
    _, *others = zip(*rows, strict=True)
    return width - sum(max(map(len, column)) + _GAP for column in others)


def _percent(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1%}"

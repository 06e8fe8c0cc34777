"""Progress of a running campaign: a line where a run starts and ends, and now and then between.
`retrain status DIR --watch` is the table.

The numbers come from the runs' own files, so every launcher looks the same.
"""

import contextlib
import sys
import threading
from dataclasses import dataclass, replace
from statistics import median
from types import TracebackType
from typing import Self, TextIO

from retrain.analysis.runs import RECENT, StoredRun
from retrain.campaign.manifest import Manifest, RunEntry, Status
from retrain.campaign.plan import CampaignPlan
from retrain.errors import RetrainError
from retrain.records.disk import reader_may_leave
from retrain.records.redact import Redactor
from retrain.records.run_folder import OUTPUT
from retrain.records.terminal import clean, duration, encodable, one_line

LINES_EVERY_S = 30.0
"""Seconds between two progress lines of a running run."""
_REASON_LENGTH = 400


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
    thread prints progress. A quiet one shows what is said and what ended, and no progress. The
    campaign outlives its reader.
    """

    def __init__(
        self,
        plan: CampaignPlan,
        manifest: Manifest,
        *,
        quiet: bool = False,
        out: TextIO | None = None,
    ) -> None:
        self._plan = plan
        self._manifest = manifest
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

    def __enter__(self) -> Self:
        if not self._quiet:
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

    # -- lines -------------------------------------------------------------------------------------

    def say(self, line: str) -> None:
        text = encodable(clean(self._mask(line)), self._out.encoding or "utf-8")
        with reader_may_leave():
            self._out.write(text + "\n")
            self._out.flush()

    def started(self, name: str) -> None:
        if not self._quiet:
            self.say(f"{self._prefix(name)} started")

    def ended(self, name: str) -> None:
        self._final.pop(name, None)
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

    # -- the second thread -------------------------------------------------------------------------

    def _refresh(self) -> None:
        while not self._closing.wait(LINES_EVERY_S):
            # What cannot be written here, the campaign's own next line meets and reports.
            with contextlib.suppress(OSError):
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

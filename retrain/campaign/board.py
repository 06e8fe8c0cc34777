"""Print the progress of a running campaign: a line when a run starts and when it ends. `retrain
status DIR --watch` is the table.

The numbers come from the runs' own files, so every launcher looks the same.
"""

import contextlib
import sys
from typing import TextIO

from retrain.analysis.runs import StoredRun
from retrain.campaign.manifest import Manifest, Status
from retrain.campaign.plan import CampaignPlan
from retrain.errors import RetrainError
from retrain.records.disk import reader_may_leave
from retrain.records.redact import Redactor
from retrain.records.run_folder import OUTPUT
from retrain.records.terminal import clean, encodable, one_line

_REASON_LENGTH = 400


class Board:
    """Prints lines; a quiet board leaves out the starts of runs. A closed terminal
    does not end the campaign.
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
        total = len(manifest.runs)
        self._prefix = {
            entry.name: f"[{number:>{len(str(total))}}/{total}] {entry.name}"
            for number, entry in enumerate(manifest.runs, start=1)
        }

    def say(self, line: str) -> None:
        text = encodable(clean(self._mask(line)), self._out.encoding or "utf-8")
        with reader_may_leave():
            self._out.write(text + "\n")
            self._out.flush()

    def started(self, name: str) -> None:
        if not self._quiet:
            self.say(f"{self._prefix[name]} started")

    def ended(self, name: str) -> None:
        entry = self._manifest[name]
        stored = StoredRun(self._plan.folder / entry.dir)
        words = f"step 0/{self._plan.max_steps}"
        # The comparison reports a damaged file.
        with contextlib.suppress(RetrainError, OSError):
            words = progress_words(stored, self._plan.max_steps, entry.status)
        line = f"{self._prefix[name]} {entry.status}: {words}"
        if entry.reason:
            line += f" | {one_line(entry.reason, _REASON_LENGTH)} | {stored.path / OUTPUT}"
        self.say(line)


def progress_words(stored: StoredRun, max_steps: int, status: Status) -> str:
    """Say how far a run came, such as "step 50/50, correct so far 45.3%, held-out 61.0%"."""
    words = f"step {stored.steps}/{max_steps}"
    for record in stored.last_metrics(1):
        if record.running_correct_rate is not None:
            words += f", correct so far {record.running_correct_rate:.1%}"
    evaluation = stored.final_evaluation if status is Status.DONE else None
    if evaluation and 1 in evaluation.pass_at:
        words += f", held-out {evaluation.pass_at[1]:.1%}"
    return words

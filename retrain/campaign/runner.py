"""Run a campaign: start its runs, record how they end, squeeze the first adapter, compare the
conditions.

A run that fails does not stop the others.
"""

import os
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from shlex import quote
from signal import Signals

from retrain.analysis.integrity import are_the_same
from retrain.analysis.runs import StoredRun, campaign_runs
from retrain.backends.base import backend_kind
from retrain.campaign.board import Board
from retrain.campaign.evidence import EvidenceRule
from retrain.campaign.launch import (
    InProcess,
    Job,
    Launcher,
    RayLauncher,
    RunOutcome,
    Subprocesses,
    not_started,
    share_devices,
)
from retrain.campaign.manifest import Manifest, Status, open_campaign
from retrain.campaign.plan import (
    CampaignPlan,
    CampaignRun,
    Findings,
    check,
    evaluated_where_possible,
    plan_campaign,
)
from retrain.config import TrainConfig, replaced, resume_differences
from retrain.errors import (
    ConfigurationError,
    EnvironmentFailure,
    Interrupted,
    RetrainError,
    RunFailed,
    UntrainedAdapter,
)
from retrain.records.checkpoint import FINAL
from retrain.records.checkpoint_place import stored_checkpoints
from retrain.records.disk import writing_to
from retrain.records.redact import note_secrets
from retrain.records.run_folder import OUTPUT, RunFolder
from retrain.records.terminal import counted
from retrain.run.interrupts import Interrupts
from retrain.tracking.build import SQUEEZE_RUN, track_squeeze

Say = Callable[[str], None]

_POLL_S = 0.1
TASK = "SLURM_ARRAY_TASK_ID"
"""The variable with the number of the run that a task of an array trains."""


def run_campaign(config: TrainConfig, *, quiet: bool = False) -> Manifest:
    """Train every unfinished run of the campaign, then compare the conditions. `[resume] from`
    continues a campaign.

    Raises ConfigurationError or EnvironmentFailure before the first run, and RunFailed at the end
    if a run failed. After a signal it raises Interrupted, once the running runs have saved.
    """
    note_secrets(config)
    # Refuse a wrong plan before making a folder.
    draft = plan_campaign(config, Path("campaign"))
    checked = check(draft)
    if draft.settings.launcher == "array":
        return _task_of_array(config, checked, quiet=quiet)
    with (
        Interrupts() as interrupts,  # A second signal meets it while the others close.
        closing(_launcher(draft)) as launcher,
        open_campaign(config, checked) as (plan, manifest),
    ):
        resume_hint = f"continue with `{manifest.resume_command}`"
        board = Board(plan, manifest, quiet=quiet)
        with writing_to(plan.folder, resume_hint):
            for line in (*checked.lines, _size(plan)):
                board.say(line)
            squeeze = AutoSqueeze(plan, manifest, board.say)
            execution = _Execution(
                plan, manifest, launcher, board, interrupts, on_done=squeeze.look
            )
            execution.run()
        squeeze.look()
        for line in comparison_lines(plan):
            board.say(line)
        with writing_to(plan.folder, resume_hint):
            manifest.write()
    undone = [manifest[run.name] for run in plan.runs if execution.must_run(run)]
    if undone:
        first = undone[0]
        raise RunFailed(
            f"{len(undone)} of {len(manifest.runs)} runs did not finish. The first is"
            f" {first.name} ({first.status}: {(first.reason or '').rstrip('.')}). See"
            f" {plan.folder / first.dir / OUTPUT}, then {resume_hint}."
        )
    return manifest


def _task_of_array(config: TrainConfig, checked: Findings, *, quiet: bool) -> Manifest:
    """Train the run of this task of an array. Outside of a task, write the plan alone."""
    number = os.environ.get(TASK, "")
    if not number:
        with open_campaign(config, checked) as (plan, manifest):
            board = Board(plan, manifest, quiet=quiet)
            for run in plan.runs:
                _renew(run, manifest)
            manifest.write()
            tasks = (
                f"Start an array of tasks 0 to {len(plan.runs) - 1}; each calls"
                f" `{manifest.resume_command}`."
            )
            for line in (*checked.lines, _size(plan), tasks):
                board.say(line)
            return manifest
    folder = config.folder
    plan = evaluated_where_possible(plan_campaign(config, folder), checked)
    # The file may plan more by now.
    numbered = [run.name for run in campaign_runs(folder)]
    manifest = Manifest.read(folder)
    manifest.resumed_with(plan)
    if number not in map(str, range(len(numbered))):
        raise ConfigurationError(
            f'{TASK} = {number!r} names no run of [campaign] launcher = "array"; set it to one from'
            f" 0 to {len(numbered) - 1}, or unset it."
        )
    run = {run.name: run for run in plan.runs}[numbered[int(number)]]
    if not is_finished(run):
        outcome = InProcess(loads_models=False).start(run, 0).outcome
        if outcome.stopped_by:
            raise Interrupted(outcome.reason, outcome.stopped_by)
        if outcome.status is not Status.DONE:
            raise RunFailed(f"{run.name}: {outcome.reason} See {run.folder / OUTPUT}.")
    return manifest


def _size(plan: CampaignPlan) -> str:
    """Return the line that opens a campaign: how many runs and steps, and how many runs finished
    before.
    """
    done = sum(is_finished(run) for run in plan.runs)
    resumed = f", {done} of them finished before" if done else ""
    return (
        f"Campaign {plan.folder}: {counted(len(plan.conditions), 'condition')} x"
        f" {counted(len(plan.seeds), 'seed')} = {counted(len(plan.runs), 'run')} of"
        f" {counted(plan.max_steps, 'step')}{resumed}. `retrain status {quote(str(plan.folder))}"
        " --watch` shows their progress."
    )


def _launcher(plan: CampaignPlan) -> Launcher:
    if plan.settings.launcher == "ray":
        return RayLauncher(plan)
    if plan.settings.parallel:
        return Subprocesses(share_devices(plan))
    kinds = [backend_kind(run.config.backend.backend) for run in plan.runs]
    return InProcess(loads_models=any(kind.loads_model for kind in kinds))


def is_finished(run: CampaignRun) -> bool:
    """True if the run's own folder says so, and holds the planned run. The folder decides, because
    after a kill the manifest may be older. A run with a damaged summary.json continues from its
    last checkpoint, which writes that file again.
    """
    stored = StoredRun(run.folder)
    try:
        summary = stored.summary
    except RunFailed:
        return False
    return (
        bool(summary)
        and not stored.unfinished
        and stored.steps >= run.config.training.max_steps
        and stored.took(run.config.training.max_steps)
        and not resume_differences(stored.config, run.config)
    )


def _renew(run: CampaignRun, manifest: Manifest) -> bool:
    """Bring the status of an earlier session up to date. Return True if the run is to train."""
    if is_finished(run):
        if manifest[run.name].status is not Status.DONE:
            manifest.ended(run.name, Status.DONE)
        return False
    manifest.try_again(run.name)
    return True


# -- the loop over the runs ------------------------------------------------------------------------


class _Execution:
    """Starts the unfinished runs, and waits until all have ended or a signal asks for a stop."""

    def __init__(
        self,
        plan: CampaignPlan,
        manifest: Manifest,
        launcher: Launcher,
        board: Board,
        interrupts: Interrupts,
        *,
        on_done: Callable[[], None],
    ) -> None:
        self._plan = plan
        self._manifest = manifest
        self._launcher = launcher
        self._board = board
        self._interrupts = interrupts
        self._on_done = on_done
        self._waiting: deque[CampaignRun] = deque()
        self._jobs: dict[int, tuple[CampaignRun, Job]] = {}
        """Running runs by slot."""
        self._retries: Counter[str] = Counter()
        self._told: set[str] = set()
        """Conditions with a first complete pair, which it has looked at."""
        self._stopping = False
        self._rule: EvidenceRule | None = None
        self._not_looked: RetrainError | None = None
        """The error of a look that met a damaged file of an ended run."""

    def run(self) -> None:
        """Run the campaign. Raises Interrupted after a signal, and RunFailed if a look finds a
        damaged file.
        """
        self._queue_unfinished()
        settings, next_start = self._plan.settings, 0.0
        stagger = (
            settings.stagger_seconds if settings.parallel or settings.launcher == "ray" else 0.0
        )
        try:
            while self._waiting or self._jobs:
                self._say_notes()
                if self._interrupts.stopped_by is not None and not self._stopping:
                    self._stop(self._interrupts.stopped_by)
                has_room = len(self._jobs) < self._launcher.workers
                if has_room and time.monotonic() >= next_start and self._start_next():
                    next_start = time.monotonic() + stagger
                running = len(self._jobs)
                for slot, (run, job) in list(self._jobs.items()):
                    outcome = job.poll()
                    if outcome is not None:
                        del self._jobs[slot]
                        self._record(run, outcome)
                if len(self._jobs) == running:
                    time.sleep(_POLL_S)
        finally:
            for _, job in self._jobs.values():
                job.kill()
            # A second signal ends a run where it stands, in this process even while it starts.
            for run in self._plan.runs:
                if self._manifest[run.name].status is Status.RUNNING:
                    self._manifest.ended(run.name, Status.INTERRUPTED, "Stopped at once.")
        self._say_notes()
        number = self._interrupts.stopped_by
        if number is not None:
            again = self._manifest.resume_command
            raise Interrupted(
                f"Interrupted by {Signals(number).name}; continue with `{again}`.", number
            )
        if self._not_looked:
            raise self._not_looked

    def _say_notes(self) -> None:
        while self._manifest.notes:
            self._board.say(self._manifest.notes.pop(0))

    def _start_next(self) -> bool:
        """Start the first waiting run that may start; False if there is none."""
        for run in self._waiting:
            if self._rule is None or self._rule.may_start(run):
                self._waiting.remove(run)
                self._start(run)
                return True
        return False

    def _stop(self, number: int) -> None:
        """Start no more runs, and pass the signal on to the running ones."""
        self._stopping = True
        self._waiting.clear()
        if self._jobs:
            self._board.say("Stopping: running runs save a checkpoint first.")
        for _, job in self._jobs.values():
            job.stop(number)

    def must_run(self, run: CampaignRun) -> bool:
        """True for a run without the status done, unless no remaining look would use it."""
        ended = self._manifest[run.name].status in (Status.DONE, Status.SKIPPED)
        return not ended and (self._rule is None or self._rule.needs(run))

    def _queue_unfinished(self) -> None:
        """Queue the unfinished runs. Finished runs stay as they are; a run that failed or stopped
        in an earlier session is pending again.
        """
        # This raises before the first run if the disk refuses the manifest.
        self._manifest.write()
        if self._plan.settings.stop == "evidence" and len(self._plan.conditions) > 1:
            self._rule = EvidenceRule(
                self._plan, self._manifest, self._launcher.workers, self._board.say
            )
        for run in self._plan.runs:
            entry = self._manifest[run.name]
            # Skip the run: the remaining looks would not use it.
            if (
                self._rule
                and not self._rule.needs(run)
                and entry.status in (Status.FAILED, Status.SKIPPED)
            ):
                continue
            if _renew(run, self._manifest):
                self._waiting.append(run)
        self._look()
        self._manifest.write()

    def _look(self) -> None:
        """Take the due looks, and drop the runs that they make needless."""
        if self._rule is None or self._not_looked:
            return
        try:
            self._rule.look()
        except RetrainError as error:
            # Running runs end first; no look can say which others the campaign needs.
            self._not_looked = error
            self._waiting.clear()
            return
        needless = [run for run in self._waiting if not self._rule.needs(run)]
        for run in needless:
            self._waiting.remove(run)
            self._manifest[run.name].status = Status.SKIPPED
        if needless:
            self._manifest.write_if_possible()

    def _start(self, run: CampaignRun) -> None:
        slot = next(number for number in range(self._launcher.workers) if number not in self._jobs)
        self._manifest.started(run.name)
        self._board.started(run.name)
        try:
            self._jobs[slot] = (run, self._launcher.start(run, slot))
        except OSError as error:
            self._record(run, not_started(run, error))

    def _tell_same_runs(self) -> None:
        """Warn once per condition if the two runs of its first complete pair are identical, since
        then the condition's keys change nothing.
        """
        done = {
            (run.condition, run.seed): run
            for run in self._plan.runs
            if self._manifest[run.name].status is Status.DONE
        }
        for (condition, seed), run in done.items():
            baseline = done.get((self._plan.conditions[0], seed), run)
            if baseline is run or condition in self._told:
                continue
            self._told.add(condition)
            # The comparison at the end names a damaged file; other runs go on meanwhile.
            with suppress(RetrainError):
                if are_the_same([(StoredRun(run.folder), StoredRun(baseline.folder))]):
                    self._board.say(
                        f"{run.name} is the same run as {baseline.name}, byte for byte: what"
                        f" {condition} sets changed nothing here, or both trained on nothing."
                    )

    def _record(self, run: CampaignRun, outcome: RunOutcome) -> None:
        """Record the outcome of a run. The campaign queues a lost run again up to max_retries
        times; any other outcome is final for this session.
        """
        if (
            outcome.lost
            and not self._stopping
            and self._retries[run.name] < self._plan.settings.max_retries
        ):
            self._retries[run.name] += 1
            self._board.say(
                f"{run.name}: {outcome.reason}. Restarting it from its last checkpoint."
            )
            self._waiting.appendleft(run)
            return
        # A kill during the save of a stop is not a failure.
        killed_by_stop = outcome.lost and self._stopping
        self._manifest.ended(
            run.name, Status.INTERRUPTED if killed_by_stop else outcome.status, outcome.reason
        )
        self._board.ended(run.name)
        if outcome.stopped_by is not None:
            self._interrupts.adopt([outcome.stopped_by])
        if outcome.status is Status.DONE:
            self._tell_same_runs()
            self._on_done()
        # In this process a signal ends the run before the loop calls `_stop`.
        if self._interrupts.stopped_by is None:
            self._look()


# -- what follows the runs -------------------------------------------------------------------------


class AutoSqueeze:
    """Analyzes one adapter if the campaign has a `[squeeze]` section. It prints the table, and
    sends it to the manifest and the trackers.

    It takes the adapter of the first run. An adapter that is still zero has no rank to analyze, so
    the next run's adapter follows. After a failure, which it prints, the campaign
    goes on.
    """

    def __init__(self, plan: CampaignPlan, manifest: Manifest, say: Say) -> None:
        self._plan = plan
        self._manifest = manifest
        self._say = say
        wanted = plan.config.is_set("squeeze") and manifest.squeeze is None
        self._runs = [*plan.runs] if wanted else []
        """In the order of the plan, which decides whose adapter it analyzes; not the order in which
        runs finish.
        """

    def look(self) -> None:
        """Call when a run has ended."""
        not_yet = (Status.PENDING, Status.RUNNING)
        while self._runs and (status := self._manifest[self._runs[0].name].status) not in not_yet:
            run = self._runs.pop(0)
            if status is Status.DONE and self._squeeze(run):
                self._runs.clear()

    def _squeeze(self, run: CampaignRun) -> bool:
        """Return True unless the adapter is still zero."""
        self._say(f"LoRA-Squeeze of {run.name}:")
        given = self._plan.config.squeeze.model_dump(exclude_unset=True, exclude={"adapter_path"})
        config = replaced(run.config, {f"squeeze.{name}": value for name, value in given.items()})
        adapter = stored_checkpoints(RunFolder(run.folder)) / FINAL
        try:
            from retrain.squeeze import squeeze_adapter

            squeezed = squeeze_adapter(config, adapter, progress=self._say)
            track_squeeze(
                config,
                RunFolder(self._plan.folder / SQUEEZE_RUN),
                squeezed.analysis.summary(),
                self._say,
            )
        except UntrainedAdapter as error:
            self._say(f"LoRA-Squeeze uses the next run instead: {error}")
            return False
        except (RetrainError, OSError) as error:
            self._say(f"LoRA-Squeeze failed, and the campaign continues: {error}")
            return True
        for line in squeezed.lines():
            self._say(line)
        self._manifest.squeeze = squeezed.to_json()
        self._manifest.write_if_possible()
        return True


def comparison_lines(plan: CampaignPlan) -> list[str]:
    """Compare every condition with the first, as `retrain compare` does. A refused comparison
    gives a sentence with the reason.
    """
    if len(plan.conditions) < 2:
        return []
    from retrain.analysis.compare import compare_campaign
    from retrain.analysis.comparison_text import to_text
    from retrain.analysis.verdict import TestSettings

    try:
        return [
            "",
            *to_text(
                compare_campaign(plan.folder, TestSettings()), shutil.get_terminal_size().columns
            ).splitlines(),
        ]
    except (ConfigurationError, EnvironmentFailure) as error:
        return [f"No comparison: {error}"]

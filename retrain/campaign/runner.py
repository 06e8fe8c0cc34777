"""Running a campaign: start its runs, write down how they end, go on whatever one of them does."""

import shutil
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import closing
from datetime import datetime
from pathlib import Path
from signal import Signals

from retrain.analysis.runs import StoredRun
from retrain.campaign.board import Board
from retrain.campaign.devices import share_devices
from retrain.campaign.launch import OUTPUT, InProcess, Job, Launcher, Outcome, no_output
from retrain.campaign.manifest import Manifest, Status, open_campaign
from retrain.campaign.plan import CampaignRun, Plan, plan_campaign
from retrain.campaign.preflight import check, evaluated_where_possible
from retrain.config import TrainConfig, replaced
from retrain.errors import ConfigurationError, EnvironmentFailure, Interrupted, RetrainError, RunFailed
from retrain.records.checkpoint import FINAL
from retrain.records.disk import writing_to
from retrain.records.printing import counted
from retrain.run.interrupts import Interrupts
from retrain.run.opening import stored_checkpoints
from retrain.tracking import RunFolder
from retrain.tracking.base import SQUEEZE_RUN, track_squeeze

Say = Callable[[str], None]


class AutoSqueeze:
    """Analyses the first run's adapter, once, where the campaign has `[squeeze]`: printed, into the manifest, and to the trackers.

    An adapter that is still zero says nothing, so the next run's is taken. A failure is said and stops nothing.
    """

    def __init__(self, plan: Plan, manifest: Manifest, say: Say) -> None:
        self._plan = plan
        self._manifest = manifest
        self._say = say
        self._due = plan.config.is_set("squeeze") and manifest.squeeze is None
        self._untrained: set[str] = set()
        """Names of the runs that were passed over."""

    def after(self, run: CampaignRun) -> None:
        """`run` is done: the plan's first one is the one that counts, whichever is done first; where that is untrained, the next."""
        for candidate in self._plan.runs:
            if not self._due or (candidate != run and self._manifest[candidate.name].status is not Status.DONE):
                return
            self._squeeze(candidate)

    def at_end(self) -> None:
        """The first trained run that is done, where the plan's first one failed, or was done before an earlier session was cut."""
        for run in self._plan.runs:
            if self._due and self._manifest[run.name].status is Status.DONE:
                self._squeeze(run)

    def _squeeze(self, run: CampaignRun) -> None:
        from retrain.squeeze import squeeze_adapter
        from retrain.squeeze.analysis import Untrained

        if run.name in self._untrained:
            return
        self._due = False
        self._say(f"LoRA-Squeeze of {run.name}:")
        config = _with_squeeze(run, self._plan.config)
        adapter = stored_checkpoints(RunFolder(run.folder)) / FINAL
        try:
            squeezed = squeeze_adapter(config, adapter, progress=self._say)
            track_squeeze(config, RunFolder(self._plan.folder / SQUEEZE_RUN), squeezed.analysis, self._say)
        except Untrained as error:
            self._untrained.add(run.name)
            self._due = True
            self._say(f"LoRA-Squeeze takes the next run: {error}")
            return
        except RetrainError as error:
            self._say(f"LoRA-Squeeze failed, and the campaign goes on: {error}")
            return
        for line in squeezed.lines():
            self._say(line)
        self._manifest.squeeze = squeezed.to_json()
        self._manifest.write_if_possible()


def _with_squeeze(run: CampaignRun, campaign: TrainConfig) -> TrainConfig:
    given = campaign.squeeze.model_dump(exclude_unset=True, exclude={"adapter_path"})
    return replaced(run.config, {f"squeeze.{name}": value for name, value in given.items()})


def comparison_lines(plan: Plan) -> list[str]:
    """Every condition against the first, as `retrain compare` prints it; a sentence where there is nothing to compare."""
    if len(plan.conditions) < 2:
        return []
    from retrain.analysis.compare import compare_campaign
    from retrain.analysis.comparison_text import to_text
    from retrain.analysis.verdict import TestSettings

    try:
        return ["", *to_text(compare_campaign(plan.folder, TestSettings()), shutil.get_terminal_size().columns).splitlines()]
    except (ConfigurationError, EnvironmentFailure) as error:
        return [f"No comparison: {error}"]


_POLL_S = 0.1


def run_campaign(config: TrainConfig, *, quiet: bool = False) -> Manifest:
    """Every run of the campaign that is not finished, then the comparison; the runs of one that `[resume] from` names go on.

    Raises ConfigurationError or EnvironmentFailure before the first run; RunFailed at the end, if a run failed; Interrupted after a
    signal, when the runs that were going on have saved.
    """
    draft = plan_campaign(config, Path("campaign"))  # what is refused is refused before a folder is made
    checked = check(draft)
    with (
        closing(_launcher(draft)) as launcher,
        open_campaign(config, datetime.now()) as (bare, manifest),
        Interrupts() as interrupts,
    ):
        plan = evaluated_where_possible(bare, checked)
        go_on = f"go on with --resume {plan.folder}"
        with writing_to(plan.folder, go_on), Board(plan, manifest, launcher.workers, quiet=quiet) as board:
            for line in (*checked.lines, _opening_line(plan, manifest)):
                board.say(line)
            squeeze = AutoSqueeze(plan, manifest, board.say)
            _Execution(plan, manifest, launcher, board, interrupts, squeeze).run()
        squeeze.at_end()
        for line in comparison_lines(plan):
            board.say(line)
        with writing_to(plan.folder, go_on):
            manifest.write()
    if undone := [entry for entry in manifest.runs if entry.status is not Status.DONE]:
        raise RunFailed(
            f"{len(undone)} of {len(manifest.runs)} runs are not done, the first is {undone[0].name} ({undone[0].status}: "
            f"{(undone[0].reason or '').rstrip('.')}); look at {plan.folder / undone[0].dir / OUTPUT}, then {go_on}."
        )
    return manifest


def _launcher(plan: Plan) -> Launcher:
    if plan.settings.launcher == "ray":
        from retrain.campaign.ray_cluster import RayLauncher

        return RayLauncher(plan)
    if plan.settings.parallel:
        from retrain.campaign.subprocesses import Subprocesses

        return Subprocesses(share_devices(plan))
    return InProcess()


def _opening_line(plan: Plan, manifest: Manifest) -> str:
    done = sum(is_finished(run) for run in plan.runs)
    size = f"{counted(len(plan.conditions), 'condition')} x {counted(len(plan.seeds), 'seed')} = {counted(len(plan.runs), 'run')}"
    resumed = f", {done} of them finished before" if done else ""
    return f"Campaign {manifest.folder}: {size} of {counted(plan.max_steps, 'step')}{resumed}."


def is_finished(run: CampaignRun) -> bool:
    """Whether the run's own folder says so: its manifest may be older than a kill."""
    stored = StoredRun(run.folder)
    return stored.folder.summary.is_file() and not stored.unfinished and stored.steps >= run.config.training.max_steps


class _Execution:
    """The loop over the runs that are not finished."""

    def __init__(
        self, plan: Plan, manifest: Manifest, launcher: Launcher, board: Board, interrupts: Interrupts, squeeze: AutoSqueeze
    ) -> None:
        self._plan = plan
        self._manifest = manifest
        self._launcher = launcher
        self._board = board
        self._interrupts = interrupts
        self._squeeze = squeeze
        self._waiting: deque[CampaignRun] = deque()
        self._jobs: dict[int, tuple[CampaignRun, Job]] = {}
        """By slot."""
        self._retries: Counter[str] = Counter()
        self._stopping = False

    def run(self) -> None:
        self._sort_out()
        last_start = -float("inf")
        try:
            while self._waiting or self._jobs:
                self._stop_if_asked()
                if self._may_start(last_start):
                    self._start(self._waiting.popleft())
                    last_start = time.monotonic()
                if not self._collect():
                    time.sleep(_POLL_S)
        finally:
            for _, job in self._jobs.values():
                job.kill()
        if (number := self._interrupts.stopped_by) is not None:
            raise Interrupted(f"Interrupted by {Signals(number).name}; go on with --resume {self._plan.folder}.", number)

    def _sort_out(self) -> None:
        """What an earlier session finished stays; a run that it began, or failed, is taken up again."""
        for run in self._plan.runs:
            entry = self._manifest[run.name]
            if is_finished(run):
                if entry.status is not Status.DONE:
                    self._manifest.ended(run.name, Status.DONE)
            else:
                entry.status = Status.PENDING
                self._waiting.append(run)
        self._manifest.write()

    def _may_start(self, last_start: float) -> bool:
        free = len(self._jobs) < self._launcher.workers
        settings = self._plan.settings
        stagger = settings.stagger_seconds if settings.parallel or settings.launcher == "ray" else 0.0
        return bool(self._waiting) and free and time.monotonic() - last_start >= stagger

    def _start(self, run: CampaignRun) -> None:
        slot = next(number for number in range(self._launcher.workers) if number not in self._jobs)
        self._manifest.started(run.name)
        self._board.started(run.name)
        try:
            self._jobs[slot] = (run, self._launcher.start(run, slot))
        except OSError as error:
            self._settle(run, no_output(run, error))

    def _collect(self) -> bool:
        """Write down what has ended; whether anything has."""
        ended = [(slot, outcome) for slot, (_, job) in self._jobs.items() if (outcome := job.poll()) is not None]
        for slot, outcome in ended:
            run, _ = self._jobs.pop(slot)
            self._settle(run, outcome)
        return bool(ended)

    def _settle(self, run: CampaignRun, outcome: Outcome) -> None:
        if outcome.lost and not self._stopping and self._retries[run.name] < self._plan.settings.max_retries:
            self._retries[run.name] += 1
            self._board.say(f"{run.name}: {outcome.reason}; it is started again from its last checkpoint.")
            self._waiting.appendleft(run)
            return
        cut = outcome.lost and self._stopping
        self._manifest.ended(run.name, Status.INTERRUPTED if cut else outcome.status, outcome.reason)
        self._board.ended(run.name)
        if outcome.stopped_by is not None:
            self._interrupts.adopt([outcome.stopped_by])
        if outcome.status is Status.DONE:
            self._squeeze.after(run)

    def _stop_if_asked(self) -> None:
        if self._interrupts.stopped_by is None or self._stopping:
            return
        self._stopping = True
        self._waiting.clear()
        if self._jobs:
            self._board.say("Stopping: the runs that are going on save first.")
        for _, job in self._jobs.values():
            job.stop(self._interrupts.stopped_by)

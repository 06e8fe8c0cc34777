"""The state of runs and campaigns: progress, the last metrics, and what to do with a run that
stopped.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, Self

from retrain.analysis.integrity import given_keys, problem_of
from retrain.analysis.planned import CampaignRecord, evidence_line
from retrain.analysis.runs import (
    MANIFEST,
    RECENT,
    StoredRun,
    campaign_runs,
    is_campaign,
    is_run,
    subfolders,
    unreadable_manifest,
)
from retrain.config.stored import campaign_command
from retrain.errors import ConfigurationError, RetrainError, RunFailed
from retrain.records.disk import path_error
from retrain.records.entries import StepRecord
from retrain.records.run_folder import MARKER, Liveness, RunFolder, Writer
from retrain.records.terminal import counted, duration
from retrain.records.untrained import Streak, untrained_line
from retrain.system import Json, read_object

_PATIENCE_S = 600.0
"""A live process stalls if it writes nothing for this long and for _PATIENCE_STEPS step times,
since a model may take minutes to load.
"""
_PATIENCE_STEPS = 10
_SMALL_LOSS = 0.05
_WRITTEN = ["metrics", "evaluation", "sft", "trainer_state", "environment", "lock_owner", "config"]
"""Files of a running run."""


class State(StrEnum):
    PENDING = "pending"
    """A run that a campaign planned, and that has not started."""
    STARTING = "starting"
    """A live process without a step."""
    RUNNING = "running"
    STALLED = "stalled"
    """A live process, or a process on another machine, that has not written for long."""
    DEAD = "dead"
    """Its process ended without releasing the run, by a kill or because the machine went down."""
    STOPPED = "stopped"
    """Interrupted."""
    FAILED = "failed"
    DONE = "done"
    SKIPPED = "skipped"
    """Its campaign no longer needs it."""
    UNREADABLE = "unreadable"


LIVE = frozenset({State.STARTING, State.RUNNING, State.STALLED})


@dataclass(frozen=True)
class RunStatus:
    """The state of one run; an unknown field is None.

    `correct_rate`, `mean_reward` and `loss` belong to the last step, the medians to the last
    RECENT.
    """

    path: Path
    condition: str
    seed: int | None
    state: State
    steps: int = 0
    """Steps completed."""
    max_steps: int | None = None
    correct_rate: float | None = None
    mean_reward: float | None = None
    loss: float | None = None
    held_out: float | None = None
    """pass@1 at the last evaluation of trained weights."""
    tokens_per_s: float | None = None
    """Median."""
    median_step_time_s: float | None = None
    remaining_s: float | None = None
    """Steps left times the median step time, without evaluations; None unless the run is live."""
    idle_s: float | None = None
    """Seconds since it last wrote a file."""
    note: str = ""
    """The reason why it stopped, and the advice."""
    loss_note: str = ""
    """The reason why the last steps trained nothing, or the meaning of a loss near 0 or a missing
    loss; "" for any other.
    """

    @property
    def name(self) -> str:
        return self.path.name

    def to_json(self) -> Json:
        return asdict(self) | {"path": str(self.path), "name": self.name}


@dataclass(frozen=True)
class CampaignStatus:
    path: Path
    runs: Sequence[RunStatus]
    evidence: str = ""
    """A sentence on the looks of a campaign with stop = "evidence"; "" before the first."""
    steps_of_run: int = 0
    """The planned steps of each run; 0 if the manifest does not say."""
    note: str = ""
    """The command that continues it, if runs remain and no process starts them."""

    @classmethod
    def of(cls, folder: Path, now: float) -> Self:
        """Read a campaign and its runs. Raises RunFailed for a manifest without runs."""
        planned, given = campaign_runs(folder), given_keys(folder)
        runs = [run_status(run, now, given) for run in planned]
        try:
            record = CampaignRecord.read(folder)
        except RunFailed:  # The plan is unreadable; `retrain compare` reports it.
            return cls(folder, runs)
        note = "" if record.looks and not record.undecided else _left(folder, runs, given)
        return cls(folder, runs, evidence_line(record), record.max_steps or 0, note)

    @property
    def counts(self) -> dict[str, int]:
        """Map each state to its number of runs."""
        return Counter(str(run.state) for run in self.runs)

    @property
    def steps(self) -> int:
        return sum(run.steps for run in self.runs)

    @property
    def max_steps(self) -> int:
        """The planned steps over all runs without the skipped ones; a run that has not started
        counts like the longest.
        """
        longest = max([self.steps_of_run, *(run.max_steps or 0 for run in self.runs)])
        return sum(run.max_steps or longest for run in self.runs if run.state is not State.SKIPPED)

    @property
    def median_step_time_s(self) -> float | None:
        """The median over the runs."""
        return _median([run.median_step_time_s for run in self.runs])

    @property
    def remaining_s(self) -> float | None:
        """Steps left times the median step time, divided by the number of live runs; None if none
        is live.
        """
        running = sum(run.state in LIVE for run in self.runs)
        step_time = self.median_step_time_s
        if not running or step_time is None:
            return None
        return (self.max_steps - self.steps) * step_time / running

    def to_json(self) -> Json:
        names = ("counts", "steps", "max_steps", "median_step_time_s", "remaining_s")
        return {
            "path": str(self.path),
            "name": self.path.name,
            **{name: getattr(self, name) for name in names},
            "runs": [run.to_json() for run in self.runs],
            "evidence": self.evidence,
            "note": self.note,
        }


def _left(folder: Path, runs: Sequence[RunStatus], given: Mapping[str, Any]) -> str:
    """Say how a campaign goes on if runs remain and its process does not run. No process owns the
    runs of an array, and a pending run may wait in the queue.
    """
    states, writer = {run.state for run in runs}, Writer.of(RunFolder(folder))
    is_live = writer.liveness() is not Liveness.GONE if writer else bool(states & LIVE)
    if is_live or states <= {State.DONE, State.SKIPPED}:
        return ""
    begun = read_object(folder / MANIFEST).get("command") or ""
    again = (
        f"{'' if begun else 'the command that began it and '}`{campaign_command(begun, folder)}`"
    )
    if given.get("campaign", {}).get("launcher") == "array":
        return (
            "Its array has unfinished runs and no running task. Unless tasks wait in the queue,"
            f" submit the array again; each task calls {again}."
        )
    return (
        f"The campaign's process is not running{f' ({writer} is gone)' if writer else ''}, so no"
        f" further run starts; continue with {again}."
    )


@dataclass(frozen=True)
class Overview:
    """The runs and campaigns in and below a folder."""

    folder: Path
    campaigns: Sequence[CampaignStatus]
    runs: Sequence[RunStatus]
    """Outside campaigns."""

    @property
    def all_runs(self) -> list[RunStatus]:
        return [*chain.from_iterable(one.runs for one in self.campaigns), *self.runs]

    @property
    def is_live(self) -> bool:
        return any(run.state in LIVE for run in self.all_runs)

    def to_json(self) -> Json:
        return {
            "campaigns": [item.to_json() for item in self.campaigns],
            "runs": [item.to_json() for item in self.runs],
        }


def overview(folder: Path) -> Overview:
    """Read every run and campaign in and below `folder`, and write nothing. Raises
    ConfigurationError unless it is a folder.
    """
    if not folder.is_dir():
        raise ConfigurationError(
            f"{folder} is not a folder; name one that holds runs, such as logs, or the folder of a"
            " run."
        )
    now = time.time()
    campaigns, runs = [], []
    for path in _found(folder):
        try:
            if damage := manifest_damage(path):
                raise damage
            if is_run(path) or not is_campaign(path):
                runs.append(run_status(StoredRun(path), now))
            else:
                campaigns.append(CampaignStatus.of(path, now))
        except (RunFailed, OSError) as error:
            runs.append(_unreadable(StoredRun(path), error))
    # Without any other row, show it, even if another program wrote it.
    if not (campaigns or runs) and (found := unreadable_manifest(folder)):
        runs.append(_unreadable(StoredRun(folder), found))
    return Overview(folder, campaigns, runs)


def _found(folder: Path) -> Iterator[Path]:
    """Yield the folders of runs and campaigns, ordered by path, without searching inside one."""
    # A checkpoint has a manifest.json too; under `[backend] adapter_path` it lies outside its run,
    # below a marker of its own.
    is_checkpoint = (folder.parent / MARKER).is_file() and not (folder / MARKER).is_file()
    if (
        is_run(folder)
        or _lost_its_config(folder)
        or Writer.of(RunFolder(folder))
        or (is_campaign(folder) and not is_checkpoint)
    ):
        yield folder
        return
    if manifest_damage(folder):
        yield folder
    for child in subfolders(folder):
        try:
            yield from _found(child)
        except PermissionError:  # It belongs to another user; reading it again says so in its row.
            yield child


def manifest_damage(folder: Path) -> RunFailed | None:
    """Return the reason why the manifest of a campaign's folder is unreadable, or None. It ignores
    a manifest.json without a folder `runs` in the same place, since that belongs to another
    program.
    """
    return unreadable_manifest(folder) if (folder / "runs").is_dir() else None


def _lost_its_config(folder: Path) -> bool:
    """Return True for a run's folder that lost its config.toml; a run that did not begin left no
    other file either.
    """
    try:
        # A campaign's worker writes its log before the run begins.
        return not is_run(folder) and RunFolder(folder).holds_run(RunFolder(folder).output)
    except RunFailed:  # Another program wrote the marker.
        return False


def run_status(run: StoredRun, now: float, given: Mapping[str, Any] | None = None) -> RunStatus:
    """Return the state of one run at `now`, in seconds since 1970; `given` are its campaign's keys.
    A run with damaged files, or files of another user, is UNREADABLE; this raises nothing.
    """
    try:
        status = _read(run, now)
        if problem := problem_of(run, given or {}):
            status = replace(status, note=f"It {problem}. {status.note}".strip())
        return status
    except (RetrainError, OSError) as error:
        return _unreadable(run, error)


def _unreadable(run: StoredRun, error: RetrainError | OSError) -> RunStatus:
    error = (path_error(error) if isinstance(error, OSError) else None) or error
    return _bare(run, State.UNREADABLE, str(error).replace("\n", " "))


def _bare(run: StoredRun, state: State, note: str = "") -> RunStatus:
    """Return the status of a run from its plan alone."""
    condition = run.planned.condition if run.planned else ""
    return RunStatus(run.path, condition, None, state, note=note)


def _read(run: StoredRun, now: float) -> RunStatus:
    folder, writer = run.folder, Writer.of(run.folder)
    if run.skipped:
        return _bare(run, State.SKIPPED)
    # A run writes its configuration after loading the model.
    if not folder.config.is_file():
        return _without_config(run, writer)
    recent = run.last_metrics(RECENT)
    last = recent[0] if recent else None
    step_time = _median([record.step_time_s for record in recent])
    idle = max(0.0, now - _last_written(folder, now))
    state = _state(run, writer, idle, step_time)
    max_steps = run.config.training.max_steps
    left = max(0, max_steps - run.steps) * (step_time or 0.0)
    evaluation = None if run.unsound else run.final_evaluation
    return RunStatus(
        path=run.path,
        condition=run.condition,
        seed=run.seed,
        state=state,
        steps=run.steps,
        max_steps=max_steps,
        **{name: getattr(last, name, None) for name in ("correct_rate", "mean_reward", "loss")},
        held_out=evaluation.pass_at.get(1) if evaluation else None,
        tokens_per_s=_median([record.tokens_per_s for record in recent]),
        median_step_time_s=step_time,
        remaining_s=left if state in LIVE and step_time is not None else None,
        idle_s=idle,
        note=" ".join(filter(None, [run.unsound, *_begun(run), _note(run, state, writer, idle)])),
        loss_note=untrained_line(Streak.of(reversed(recent)), run.config)
        or (loss_note(last) if last else ""),
    )


def _last_written(folder: RunFolder, now: float) -> float:
    """Return the time at which a run last wrote a file; `now` if all files are gone, for example
    when the run starts over.
    """
    times = []
    for name in _WRITTEN:
        with suppress(FileNotFoundError):
            times.append(getattr(folder, name).stat().st_mtime)
    return max(times, default=now)


def _without_config(run: StoredRun, writer: Writer | None) -> RunStatus:
    """Return a run that is pending, loads its model, or failed before it began. Raises RunFailed
    for a run that lost its config.toml.
    """
    state, note = State.PENDING, ""
    if writer and writer.liveness() is not Liveness.GONE:
        state = State.STARTING
    elif not writer and _lost_its_config(run.path):
        raise RunFailed(
            f"{run.folder.config.name} is missing; put it back from a copy, or start over"
            " with --overwrite."
        )
    elif run.failed and not writer:
        state, note = State.FAILED, f"{run.unfinished}; it left no configuration."
    elif run.folder.output.is_file():
        note = f"An attempt ended before its first step; see {run.folder.output}."
    return _bare(run, state, note)


def _begun(run: StoredRun) -> Iterator[str]:
    """Say how far the supervised stage came, in a run without another step, and how often it
    began.
    """
    if not run.steps and run.sft_records:
        yield f"{counted(len(run.sft_records), 'supervised step')} taken."
    if run.planned and run.planned.attempts > 1:
        yield f"{run.planned.attempts} attempts."


def _state(run: StoredRun, writer: Writer | None, idle: float, step_time: float | None) -> State:
    if writer:
        if writer.liveness() is Liveness.GONE:
            return State.DEAD
        if idle > max(_PATIENCE_S, _PATIENCE_STEPS * (step_time or 0.0)):
            return State.STALLED
        return State.RUNNING if run.steps else State.STARTING
    if not run.unfinished:
        return State.DONE
    return State.FAILED if run.failed else State.STOPPED


def _note(run: StoredRun, state: State, writer: Writer | None, idle: float) -> str:
    resume = f"; resume it with `{run.folder.resume_command}`"
    if not run.folder.marker.is_file():
        resume = f"; put back its {MARKER} to resume it"
    elif run.planned:  # The campaign resumes it, and says by which command.
        resume = ""
    match state:
        case State.DEAD:
            return f"killed after {counted(run.steps, 'step')} ({writer} is gone){resume}."
        case State.STALLED:
            return (
                f"{writer} has written nothing for {duration(idle)}; check it there, and if it"
                f" hangs, end it{resume}."
            )
        case State.STOPPED | State.FAILED:
            return f"{run.unfinished}{resume}."
        case _:
            return ""


# -- a loss near 0 ---------------------------------------------------------------------------------


def loss_note(record: StepRecord) -> str:
    """Explain a step's loss that is near 0 or missing; return "" for any other loss."""
    if record.loss_is_placeholder:
        return (
            "The backend trains asynchronously, so its loss is a placeholder and says nothing about"
            " learning."
        )
    if record.loss is None or abs(record.loss) >= _SMALL_LOSS:
        return ""
    if not record.grad_norm:
        return (
            "The loss is near 0 without a gradient, so nothing is learned; check max_abs_advantage"
            " and the learning rate."
        )
    return (
        "A loss near 0 is normal here: the advantages of a group cancel, the gradient does not."
        " Watch held-out pass@1."
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None

"""manifest.json: what a campaign planned and how far each run is. Written before the first run and at every change, atomically.

The truth about a run is its own folder: after a kill a run may be further than the manifest says, and never less far.
"""

import contextlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from retrain import __version__
from retrain.campaign.plan import RUNS, CampaignPlan, plan_campaign
from retrain.config import TrainConfig, config_from_mapping, resume_differences
from retrain.config.load import given_values
from retrain.errors import ConfigurationError, EnvironmentFailure, RunFailed
from retrain.records.checkpoint import replace_file
from retrain.records.redact import Redactor
from retrain.records.run_folder import RunFolder, mark
from retrain.records.terminal import clean
from retrain.run.opening import writer_lock

MANIFEST = "manifest.json"
TIMESTAMP = "%Y%m%d_%H%M%S"


class Status(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    """Stopped in good order by a signal; `--resume` goes on with it."""


@dataclass
class RunEntry:
    """One run. Times are ISO 8601 with the offset; absent is null."""

    name: str
    condition: str
    seed: int
    status: Status = Status.PENDING
    dir: str = ""
    """Relative to the campaign's folder, so that the folder can be moved."""
    started: str | None = None
    ended: str | None = None
    reason: str | None = None
    """Why it failed or was interrupted."""


@dataclass
class Manifest:
    folder: Path
    timestamp: str
    """Local time of the start, YYYYMMDD_HHMMSS."""
    retrain_version: str
    config: dict[str, Any]
    """What the file, variables and flags gave."""
    conditions: list[str]
    seeds: list[int]
    max_steps: int
    runs: list[RunEntry]
    squeeze: dict[str, Any] | None = None
    """recommended_rank, rule, threshold, table, ...; null without [squeeze]."""
    _by_name: dict[str, RunEntry] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._by_name = {entry.name: entry for entry in self.runs}

    @classmethod
    def of_plan(cls, plan: CampaignPlan, now: datetime) -> "Manifest":
        runs = [RunEntry(run.name, run.condition, run.seed, dir=f"{RUNS}/{run.name}") for run in plan.runs]
        return cls(
            folder=plan.folder,
            timestamp=now.strftime(TIMESTAMP),
            retrain_version=__version__,
            config=stored_form(plan.config),
            conditions=list(plan.conditions),
            seeds=list(plan.seeds),
            max_steps=plan.max_steps,
            runs=runs,
        )

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Raises RunFailed for a file that cannot be understood."""
        path = folder / MANIFEST
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            runs = [RunEntry(**entry | {"status": Status(entry["status"])}) for entry in values.pop("runs")]
            return cls(folder=folder, runs=runs, **values)
        except (ValueError, TypeError, KeyError) as error:
            raise RunFailed(f"{path} cannot be understood ({error}): the file was changed or another version wrote it.") from error

    def write(self) -> None:
        names = ("timestamp", "retrain_version", "config", "conditions", "seeds", "max_steps", "runs", "squeeze")
        values = {name: getattr(self, name) for name in names} | {"runs": [asdict(entry) for entry in self.runs]}
        masked = Redactor().json(values) | {"config": self.config}  # which is masked as a configuration, and must load again
        replace_file(self.folder / MANIFEST, json.dumps(masked, indent=1) + "\n")

    def __getitem__(self, name: str) -> RunEntry:
        return self._by_name[name]

    def started(self, name: str) -> None:
        entry = self[name]
        entry.status, entry.started, entry.ended, entry.reason = Status.RUNNING, entry.started or _now(), None, None
        self.write_if_possible()

    def ended(self, name: str, status: Status, reason: str = "") -> None:
        entry = self[name]
        entry.status, entry.ended, entry.reason = status, _now(), clean(reason) or None
        self.write_if_possible()

    def write_if_possible(self) -> None:
        """A disk that is full stops no run of the campaign but those that need it; the next change, or the end, writes this one too."""
        with contextlib.suppress(OSError):
            self.write()

    def resumed_with(self, plan: CampaignPlan) -> None:
        """Take over the plan of a resumed campaign, which may have more conditions, seeds or steps.

        Raises ConfigurationError where it lacks a run, or would give a run another training.
        """
        _check_same(config_from_mapping(self.config), plan)
        fresh = Manifest.of_plan(plan, datetime.now())
        self.runs = [self._by_name.get(entry.name, entry) for entry in fresh.runs]
        self._by_name = {entry.name: entry for entry in self.runs}
        self.config, self.conditions, self.seeds, self.max_steps = fresh.config, fresh.conditions, fresh.seeds, fresh.max_steps


def stored_form(config: TrainConfig) -> dict[str, Any]:
    """What was given, as JSON holds it, with credentials masked. What was not follows from the version, and each run stores every key."""
    return given_values(Redactor().config(config))


def _check_same(stored: TrainConfig, plan: CampaignPlan) -> None:
    before = {run.name: run for run in plan_campaign(stored, plan.folder).runs}
    now = {run.name: run for run in plan_campaign(config_from_mapping(stored_form(plan.config)), plan.folder).runs}
    if lost := [name for name in before if name not in now]:
        raise ConfigurationError(
            f"{plan.folder} holds the run {lost[0]}{f' and {len(lost) - 1} more' if len(lost) > 1 else ''}, which the file does not have; "
            "put its condition and seed back (more of both may be added), or start another campaign."
        )
    differences = [problem for name, run in before.items() for problem in resume_differences(run.config, now[name].config)]
    if differences:
        raise ConfigurationError(list(dict.fromkeys(differences)))


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


LOGS = Path("logs")


@contextmanager
def open_campaign(config: TrainConfig, now: datetime) -> Iterator[tuple[CampaignPlan, Manifest]]:
    """The campaign's plan and its manifest, written; one writer a campaign for as long as the context lasts.

    `[resume] from` names a campaign to go on with; `[logging] log_dir`, if it is given, a folder for a new one; else it is
    `logs/campaign_YYYYMMDD_HHMMSS`. Raises ConfigurationError for a folder that may not be used.
    """
    resumed = bool(config.resume.from_)
    folder = Path(config.resume.from_) if resumed else _new_folder(config, now)
    if resumed and not (folder / MANIFEST).is_file():
        raise ConfigurationError(f"--resume {folder} holds no campaign (no {MANIFEST}); name a campaign's folder.")
    plan = plan_campaign(config, folder)
    mark(folder, "campaign")
    with writer_lock(RunFolder(folder)):
        if resumed:
            manifest = Manifest.read(folder)
            manifest.resumed_with(plan)
        else:
            manifest = Manifest.of_plan(plan, now)
        manifest.write()
        yield plan, manifest


def _new_folder(config: TrainConfig, now: datetime) -> Path:
    if not config.is_set("logging.log_dir"):
        return _timestamped(now)
    folder = Path(config.logging.log_dir)
    if (folder / MANIFEST).is_file():
        raise ConfigurationError(
            f"{folder} already holds a campaign: go on with it by --resume {folder}, or choose another [logging] log_dir."
        )
    if RunFolder(folder).holds_run():
        raise ConfigurationError(f"{folder} holds a run; choose another [logging] log_dir for the campaign, or leave it out.")
    return folder


def _timestamped(now: datetime) -> Path:
    """logs/campaign_<local time>, with -2, -3, ... where that is taken; made here, so that of two starters each gets its own."""
    name = f"campaign_{now.strftime(TIMESTAMP)}"
    number = 1
    while True:
        folder = LOGS / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        except OSError as error:
            raise EnvironmentFailure(f"{folder} cannot be made: {error.strerror}; choose another [logging] log_dir.") from error
        else:
            return folder

"""Read and write a campaign's folder and its manifest.json: the plan, and the status of each run.

retrain writes the manifest atomically, before the first run and at every change. The truth about a
run is in its own folder: after a kill a run may be further than the manifest says, never less far.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

from retrain import __version__
from retrain.analysis.planned import (
    ALPHA,
    AnalysisPlan,
    CampaignRecord,
    margin_words,
    planned_evaluation,
)
from retrain.analysis.runs import MANIFEST, campaign_runs, no_campaigns_value
from retrain.campaign.plan import (
    RUNS,
    CampaignPlan,
    Findings,
    evaluated_where_possible,
    plan_campaign,
)
from retrain.config import TrainConfig, config_from_mapping, resume_differences
from retrain.config.load import given_values
from retrain.config.stored import begun_by, campaign_command
from retrain.errors import ConfigurationError, EnvironmentFailure
from retrain.records.disk import replace_file
from retrain.records.redact import Redactor
from retrain.records.run_folder import RunFolder, kind_of, mark, writer_lock
from retrain.records.terminal import clean
from retrain.system import Json, read_object, toml_value

TIMESTAMP = "%Y%m%d_%H%M%S"
_AS_WRITTEN = ConfigDict(extra="forbid")
"""retrain refuses a manifest with an unknown field, since writing the manifest again would lose
that field.
"""


class Status(StrEnum):
    """The status of a run."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    """A signal or `[training] max_hours` stopped it after a save; `--resume` continues it."""
    SKIPPED = "skipped"
    """The campaign no longer needs the run: the evidence had decided its condition, or all
    conditions.
    """


@dataclass
class RunEntry:
    """One run. Times are ISO 8601 with the offset; a missing time is null."""

    __pydantic_config__ = _AS_WRITTEN
    name: str
    condition: str
    seed: int
    status: Status = Status.PENDING
    dir: str = ""
    """The run's folder, relative to the campaign's folder, so that the user can move the campaign.
    """
    started: str | None = None
    ended: str | None = None
    reason: str | None = None
    """The reason of a failure or an interruption."""
    attempts: int = 1
    """Number of attempts: one more for each new attempt after a failure or a completed run."""


@dataclass
class Manifest:
    """The content of manifest.json."""

    __pydantic_config__ = _AS_WRITTEN
    folder: Path
    timestamp: str
    """Local time of the start, YYYYMMDD_HHMMSS."""
    retrain_version: str
    config: Json
    """The keys from file, environment variables and flags, with masked credentials."""
    conditions: list[str]
    seeds: list[int]
    max_steps: int
    runs: list[RunEntry]
    squeeze: Json | None = None
    """recommended_rank, rule, threshold, table, ...; null without [squeeze]."""
    plan: Json | None = None
    """The planned comparison and its hash; a resume keeps it."""
    heldout_sha256: str = ""
    """The hash of the held-out problems."""
    looks: list[Json] = field(default_factory=list)
    """With stop = "evidence": the findings and decisions of each look."""
    command: str = ""
    """The command line without a folder; "" from Python."""
    notes: list[str] = field(default_factory=list, init=False, repr=False)
    """Sentences to print once; the file does not have them."""
    _is_behind: bool = field(default=False, init=False, repr=False)
    _by_name: dict[str, RunEntry] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._by_name = {entry.name: entry for entry in self.runs}

    @classmethod
    def of_plan(cls, plan: CampaignPlan, now: datetime, heldout_sha256: str = "") -> "Manifest":
        """Return a manifest with every run pending."""
        runs = [
            RunEntry(run.name, run.condition, run.seed, dir=f"{RUNS}/{run.name}")
            for run in plan.runs
        ]
        return cls(
            folder=plan.folder,
            timestamp=now.strftime(TIMESTAMP),
            retrain_version=__version__,
            config=stored_form(plan.config),
            conditions=list(plan.conditions),
            seeds=list(plan.seeds),
            max_steps=plan.max_steps,
            runs=runs,
            plan=analysis_plan(plan, heldout_sha256).to_json(),
            heldout_sha256=heldout_sha256,
            command=begun_by(Redactor().config(plan.config)),
        )

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read `folder`/manifest.json. Raises RunFailed for a manifest that no campaign wrote."""
        path = folder / MANIFEST
        CampaignRecord.read(folder)  # This checks the plan and the looks.
        text = json.dumps(read_object(path) | {"folder": str(folder)}, ensure_ascii=False)
        try:
            # A reason may quote half a character, which a model wrote and pydantic refuses.
            return TypeAdapter(cls).validate_json(text.encode(errors="replace"), strict=True)
        except ValidationError as error:
            raise no_campaigns_value(path, error) from error

    def write(self) -> None:
        """Replace manifest.json atomically, credentials masked."""
        names = (
            "timestamp retrain_version config conditions seeds max_steps runs squeeze plan"
            " heldout_sha256 looks command"
        )
        values = {name: getattr(self, name) for name in names.split()} | {
            "runs": [asdict(entry) for entry in self.runs]
        }
        # The configuration has its masks already, in a form that loads again.
        masked = Redactor().json(values) | {"config": self.config}
        replace_file(self.folder / MANIFEST, json.dumps(masked, indent=1) + "\n")

    @property
    def resume_command(self) -> str:
        return campaign_command(self.command, self.folder)

    def __getitem__(self, name: str) -> RunEntry:
        return self._by_name[name]

    def try_again(self, name: str) -> None:
        """Record that a run is pending, and another attempt if it had ended before."""
        entry = self[name]
        entry.attempts += entry.status in (Status.FAILED, Status.DONE)
        entry.status = Status.PENDING

    def started(self, name: str) -> None:
        """Record that a run is running. Its first start time stays."""
        entry = self[name]
        entry.status, entry.started = Status.RUNNING, entry.started or _now()
        entry.ended = entry.reason = None
        self.write_if_possible()

    def ended(self, name: str, status: Status, reason: str = "") -> None:
        """Record how a run ended."""
        entry = self[name]
        entry.status, entry.ended, entry.reason = status, _now(), clean(reason) or None
        self.write_if_possible()

    def write_if_possible(self) -> None:
        """Write the manifest. If that fails, note the reason once until a write succeeds. The next
        change includes this one, and runs that write elsewhere need not stop.
        """
        try:
            self.write()
            self._is_behind = False
        except OSError as error:
            if not self._is_behind:
                self.notes.append(
                    f"{self.folder / MANIFEST} is not writable ({error.strerror}); the runs go"
                    " on, and retrain tries again at the next change."
                )
            self._is_behind = True

    def resumed_with(self, plan: CampaignPlan) -> None:
        """Adopt the plan of a resumed campaign, which may have more conditions, seeds or steps.

        Raises ConfigurationError if the plan lacks a run, or changes a run, the comparison or the
        meaning of earlier looks.
        """
        # Compare both plans in the manifest's form, in which a masked secret equals itself.
        stored = self._stored_plan()
        before = {run.name: run for run in stored.runs}
        now = {
            run.name: run
            for run in plan_campaign(
                config_from_mapping(stored_form(plan.config)), plan.folder
            ).runs
        }
        lost = [name for name in {**before, **self._by_name} if name not in now]
        if lost:
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            raise ConfigurationError(
                f"{plan.folder} holds the run {lost[0]}{more}, which the file no longer plans; "
                "restore its condition and seed (you may add others), or start a new campaign."
            )
        differences = []
        for name, run in before.items():
            differences += resume_differences(run.config, now[name].config, "evaluation")
        if differences:
            raise ConfigurationError(list(dict.fromkeys(differences)))
        self._check_looks(plan)
        self._check_comparison(plan, stored)
        fresh = Manifest.of_plan(plan, datetime.now().astimezone())
        fresh.runs = [self._by_name.get(entry.name, entry) for entry in fresh.runs]
        for name in ("runs", "config", "conditions", "command", "seeds", "max_steps"):
            setattr(self, name, getattr(fresh, name))
        self.__post_init__()

    def _stored_plan(self) -> CampaignPlan:
        """Return the plan of the stored configuration. Raises ConfigurationError, which names the
        manifest, for a configuration that this version refuses.
        """
        try:
            return plan_campaign(config_from_mapping(self.config), self.folder)
        except ConfigurationError as error:
            place = self.folder / MANIFEST
            raise ConfigurationError([f"{place}, {one}" for one in error.problems]) from error

    def _check_comparison(self, plan: CampaignPlan, stored: CampaignPlan) -> None:
        """Raise ConfigurationError for another margin or baseline, or for fewer steps."""
        # A finished run with all weights has no optimizer any more.
        ended = any(
            run.config.model.train == "full" and self[run.name].status == "done"
            for run in stored.runs
        )
        more = ": its finished runs keep only weights" if ended else ", or set more"
        if plan.max_steps < stored.max_steps or (ended and plan.max_steps > stored.max_steps):
            raise ConfigurationError(
                f"[campaign] max_steps = {plan.max_steps}: the plan of {self.folder} has"
                f" {stored.max_steps}. Restore that{more}."
            )
        margin = plan.settings.margin
        planned = self.plan.get("margin") if self.plan else margin
        for key, now, before in (
            ("margin", margin_words(margin), margin_words(planned)),
            ("baseline (the first condition)", plan.conditions[0], stored.conditions[0]),
        ):
            if now != before:
                raise ConfigurationError(
                    f"[campaign] {key} = {now}: the plan of {self.folder} has {before}, which it"
                    " keeps. Restore that. `retrain compare` takes another --margin and --baseline."
                )

    def _check_looks(self, plan: CampaignPlan) -> None:
        """Check a resumed plan. Raises ConfigurationError if its steps, conditions or order of
        seeds differ from those at the time of the looks.
        """
        if plan.settings.stop != "evidence":
            return
        otherwise = (
            'set stop = "seeds", which runs everything and looks at nothing, or start a new'
            " campaign."
        )
        if self.plan and self.plan.get("rule") == "seeds":
            raise ConfigurationError(
                f'[campaign] stop = "evidence" does not fit the plan of {self.folder}, which'
                f" has one test after all of its seeds; {otherwise}"
            )
        # A seed has two looks if the campaign tried its failed run again.
        looked = list(dict.fromkeys(look["seed"] for look in self.looks))
        for key, now, before in (
            ("max_steps", plan.max_steps, self.max_steps),
            ("conditions", list(plan.conditions), self.conditions),
            ("seeds", list(plan.seeds[: len(looked)]), looked),
        ):
            if looked and now != before:
                raise ConfigurationError(
                    f"[campaign] {key} = {toml_value(now)}: {self.folder} had {len(looked)}"
                    f" interim looks with {toml_value(before)}. Restore that, {otherwise}"
                )


def analysis_plan(plan: CampaignPlan, heldout_sha256: str) -> AnalysisPlan:
    """Plan to compare every condition with the first, by held-out accuracy if the runs evaluate."""
    config = plan.runs[0].config
    evaluation = planned_evaluation(config) if config.evaluation.asked_for else ""
    baseline, *others = plan.conditions
    return AnalysisPlan(
        baseline=baseline,
        conditions=tuple(others),
        metric="pass@1" if evaluation else "correct_rate",
        alpha=ALPHA,
        rule=plan.settings.stop,
        seeds=plan.seeds,
        max_steps=plan.max_steps,
        margin=plan.settings.margin,
        leaves_out="failed and collapsed",
        evaluation=evaluation,
        heldout_sha256=heldout_sha256,
    )


def stored_form(config: TrainConfig) -> Json:
    """Return the keys that the user gave, for JSON, with masked credentials. It leaves out
    defaults: each run's config.toml holds every key.
    """
    return given_values(Redactor().config(config))


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


@contextmanager
def open_campaign(
    config: TrainConfig, checked: Findings
) -> Iterator[tuple[CampaignPlan, Manifest]]:
    """Yield the campaign's plan and its written manifest; a lock keeps other writers out of the
    folder until the context ends. `checked` is what `check` found about the plan.

    `[resume] from` names a campaign to continue, `[logging] log_dir` the folder of a new one; the
    default is `logs/campaign_YYYYMMDD_HHMMSS`. Raises ConfigurationError for a folder that the
    campaign may not use.
    """
    resumed = config.resume.from_
    now = datetime.now().astimezone()
    folder = Path(resumed) if resumed else _new_folder(config, now)
    if resumed:
        campaign_runs(folder)  # This refuses another folder before the mark.
    plan = evaluated_where_possible(plan_campaign(config, folder), checked)
    mark(folder, "campaign")
    with writer_lock(RunFolder(folder)):
        if resumed:
            manifest = Manifest.read(folder)
            manifest.resumed_with(plan)
            manifest.heldout_sha256 = checked.heldout_sha256
        elif (folder / MANIFEST).is_file():
            raise ConfigurationError(
                f"{folder} already holds a campaign; continue it with"
                f" `{campaign_command(begun_by(config), folder)}`, or choose another [logging]"
                " log_dir."
            )
        else:
            manifest = Manifest.of_plan(plan, now, checked.heldout_sha256)
        manifest.write()
        yield plan, manifest


def _new_folder(config: TrainConfig, now: datetime) -> Path:
    """Return `[logging] log_dir`, or a new folder logs/campaign_<local time>, with -2, -3, ... if
    that exists.
    """
    if config.is_set("logging.log_dir"):
        folder = Path(config.logging.log_dir)
        kind = kind_of(folder)
        if kind not in ("", "campaign"):
            raise ConfigurationError(
                f"{folder} is a folder of the kind {kind}; choose another [logging] log_dir for the"
                " campaign, or leave the key out."
            )
        return folder
    name, number = f"campaign_{now.strftime(TIMESTAMP)}", 1
    while True:
        folder = Path("logs", name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        except OSError as error:
            raise EnvironmentFailure(
                f"{folder} is not a usable folder ({error.strerror}); choose another [logging]"
                " log_dir."
            ) from error
        else:
            return folder

"""Everything that a report shows, read from a folder; nothing here draws or knows HTML."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrain.analysis.arms import differing_keys
from retrain.analysis.compare import Comparison, check_sizes, compare_runs
from retrain.analysis.measures import choose_metric
from retrain.analysis.runs import MANIFEST, StoredRun, campaign_runs, find_runs, is_campaign, is_run
from retrain.analysis.status import RunStatus, run_status
from retrain.analysis.verdict import TestSettings
from retrain.errors import ConfigurationError, RetrainError
from retrain.inspect.credit import StepCredit, read_step, stored_steps
from retrain.parsing import is_path_text, read_object
from retrain.report.curves import ConditionCurves, curves_by_condition
from retrain.report.samples import SampledRun, sampled_runs

_MOST_TOKEN_RUNS = 3


@dataclass(frozen=True)
class ReportRequest:
    """What was asked for."""

    folder: Path
    baseline: str | None = None
    """A condition; the first by default."""
    metric: str | None = None
    test: TestSettings = field(default_factory=TestSettings)
    against: Sequence[str] = ()
    """Transforms to show beside a run's own in the token viewer."""
    sampled_steps: int = 4
    """Steps of a run whose completions are shown."""


@dataclass(frozen=True)
class SqueezeCurve:
    """The variance that each rank of an adapter keeps, over its layers."""

    adapter: str
    ranks: Sequence[int]
    mean: Sequence[float]
    lowest: Sequence[float]
    highest: Sequence[float]
    threshold: float
    rule: str
    recommended: int

    @classmethod
    def from_json(cls, adapter: str, squeeze: Mapping[str, Any]) -> "SqueezeCurve":
        """From what a campaign's manifest holds, and Analysis.to_json gives."""
        table = squeeze["table"]
        return cls(
            adapter=adapter,
            ranks=[row["rank"] for row in table],
            mean=[row["mean"] for row in table],
            lowest=[row["min"] for row in table],
            highest=[row["max"] for row in table],
            threshold=squeeze["threshold"],
            rule=squeeze["rule"],
            recommended=squeeze["recommended_rank"],
        )


@dataclass(frozen=True)
class InspectedRun:
    label: str
    name: str
    credit: StepCredit


@dataclass(frozen=True)
class ReportData:
    folder: Path
    kind: str
    """run, campaign or runs."""
    statuses: Sequence[RunStatus]
    arms: Sequence[ConditionCurves]
    """The runs that have begun, by condition."""
    seeds: int
    """Different ones, of the runs that have not begun too."""
    comparison: Comparison | None
    squeeze: SqueezeCurve | None
    samples: Sequence[SampledRun]
    tokens: Sequence[InspectedRun]
    config: str
    """config.toml of a single run, "" otherwise."""
    notes: Sequence[str]
    """What could not be shown, and why."""

    @property
    def single(self) -> bool:
        return self.kind == "run"


def read_report_data(request: ReportRequest) -> ReportData:
    """Raises ConfigurationError for a folder without runs and for a baseline or metric that is not there."""
    folder = request.folder
    kind = "run" if is_run(folder) else "campaign" if is_campaign(folder) else "runs"
    planned = campaign_runs(folder) if kind == "campaign" else find_runs(folder)
    begun = [run for run in planned if is_run(run.path)]
    now, notes = time.time(), list[str]()
    arms = curves_by_condition(zip(_labels(begun), begun, strict=True))
    if kind == "runs":
        notes += _mixed(arms)
    return ReportData(
        folder=folder,
        kind=kind,
        statuses=[run_status(run, now) for run in planned],
        arms=arms,
        seeds=len({run.seed for run in planned}),
        comparison=_comparison(planned, arms, request, notes),
        squeeze=_squeeze(folder, begun, notes),
        samples=sampled_runs(arms, request.sampled_steps),
        tokens=_tokens(arms, request.against, notes),
        config=begun[0].folder.config.read_text(encoding="utf-8") if kind == "run" else "",
        notes=notes,
    )


def _labels(runs: Sequence[StoredRun]) -> list[str]:
    """The condition of each run, with the campaign's name before it where the runs are of several."""
    campaigns = [run.path.parent.parent.name if run.planned else "" for run in runs]
    several = len(set(campaigns)) > 1
    return [
        f"{campaign}: {run.condition}" if several and campaign else run.condition for run, campaign in zip(runs, campaigns, strict=True)
    ]


def _mixed(arms: Sequence[ConditionCurves]) -> Iterator[str]:
    """A sentence for each condition whose runs are not repetitions of one configuration, as a campaign's are."""
    for arm in arms:
        keys = differing_keys([(arm.runs[0], run) for run in arm.runs[1:]])
        if keys:
            yield f"The runs of {arm.label} differ in {', '.join(keys)}: their mean and band mix different configurations."


# -- the comparison ------------------------------------------------------------------------------------------------------


def _comparison(runs: Sequence[StoredRun], arms: Sequence[ConditionCurves], request: ReportRequest, notes: list[str]) -> Comparison | None:
    """None, with a note, where there is nothing that may be compared; what the user named and got wrong is an error."""
    conditions = list(dict.fromkeys(run.condition for run in runs))
    if request.baseline is not None and request.baseline not in conditions:
        raise ConfigurationError(f"--baseline {request.baseline} is no condition of {request.folder}; they are {', '.join(conditions)}.")
    check_sizes(request.test, choose_metric(request.metric, [run for arm in arms for run in arm.runs]))
    if len(conditions) < 2:
        return None
    if len(arms) > len(conditions) or any(": " in arm.label for arm in arms):
        notes.append("The runs are of several campaigns, which are not compared with each other; make a report of each.")
        return None
    baseline = request.baseline or conditions[0]
    base = [run for run in runs if run.condition == baseline]
    try:
        return compare_runs([run for run in runs if run.condition != baseline], base, request.test, request.metric)
    except ConfigurationError as error:
        if request.metric is not None or request.baseline is not None:
            raise
        notes.append(f"No comparison: {error}")
        return None


# -- what not every run has ----------------------------------------------------------------------------------------------


def _squeeze(folder: Path, runs: Sequence[StoredRun], notes: list[str]) -> SqueezeCurve | None:
    """From the campaign's manifest, which holds that of its first run, else of the first adapter that a run finished."""
    if is_campaign(folder):
        squeeze = read_object(folder / MANIFEST).get("squeeze")
        if isinstance(squeeze, dict) and squeeze.get("table"):
            return SqueezeCurve.from_json(runs[0].name if runs else "", squeeze)
    for run in runs:
        adapter = _final_adapter(run)
        if adapter is not None:
            return _analysed(run, adapter, notes)
    return None


def _final_adapter(run: StoredRun) -> Path | None:
    if not run.folder.summary.is_file():
        return None
    named = run.summary.get("adapter")
    adapter = run.path / named if named and is_path_text(named) else None
    return adapter if adapter and (adapter / "adapter_config.json").is_file() else None


def _analysed(run: StoredRun, adapter: Path, notes: list[str]) -> SqueezeCurve | None:
    from retrain.squeeze import analyze_adapter

    settings = run.config.squeeze
    try:
        analysis = analyze_adapter(adapter, min_variance_retention=settings.min_variance_retention, rule=settings.rule)
    except RetrainError as error:
        notes.append(f"No curve of the adapter's rank: {error}")
        return None
    return SqueezeCurve.from_json(run.name, analysis.to_json())


def _tokens(arms: Sequence[ConditionCurves], against: Sequence[str], notes: list[str]) -> list[InspectedRun]:
    """The last step with tokens of the first run of each arm that stored some."""
    found: list[InspectedRun] = []
    for arm in arms:
        run = next((run for run in arm.runs if stored_steps(run.folder)), None)
        if run is None or len(found) == _MOST_TOKEN_RUNS:
            continue
        try:
            found.append(InspectedRun(arm.label, run.name, read_step(run, against=against)))
        except ConfigurationError:
            raise
        except RetrainError as error:
            notes.append(f"No tokens of {run.name}: {error}")
    if against and not found:
        raise ConfigurationError(
            f"--against needs a run with tokens, and {', '.join(arm.label for arm in arms)} stored none; train with --tokens-every 1."
        )
    return found

"""Read what a report shows from a folder: the metrics by step, the comparison, the costs and the
completions. `figures` draws them, and `page` writes the HTML.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

import numpy as np
from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from retrain.analysis.arms import differing_keys
from retrain.analysis.compare import Comparison, compare_campaign, compare_runs
from retrain.analysis.measures import choose_metric
from retrain.analysis.planned import CampaignRecord, evidence_line
from retrain.analysis.runs import (
    MANIFEST,
    StoredRun,
    campaign_runs,
    find_runs,
    is_campaign,
    is_run,
    no_campaigns_value,
    read_metrics,
)
from retrain.analysis.statistics import Floats
from retrain.analysis.status import RunStatus, State, manifest_damage, run_status
from retrain.analysis.verdict import TestSettings
from retrain.errors import ConfigurationError, RetrainError
from retrain.inspect.credit import NoJudgedCompletion, StepCredit, read_step, stored_steps
from retrain.plugins import ForeignCode
from retrain.records.entries import EvaluationRecord, GenerationRecord
from retrain.records.evaluation import Evaluation
from retrain.records.jsonl import read_jsonl
from retrain.records.terminal import clean
from retrain.system import grouped, read_object

# -- curves ----------------------------------------------------------------------------------------


HELD_OUT = "held-out"
"""The name of held-out pass@1 among the fields of a run's metrics."""
_FIELDS = (
    *("batch_size", "group_size", "correct_rate", "sepa_lambda", "informative_fraction"),
    *("completion_tokens_mean", "entropy_mean", "plan_entropy_mean", "surprisal_mean"),
    *("plan_surprisal_mean", "tokens_per_s", "step_time_s", "time_sample_s", "time_learn_s"),
)
_SMOOTHED_PART = 12
_MAX_WINDOW = 25


@dataclass(frozen=True)
class Curves:
    """One run's metrics by step; a null in the file is NaN."""

    steps: Floats
    """[S] steps completed, increasing from 1."""
    values: Mapping[str, Floats]
    """Field -> [S] values."""

    @classmethod
    def of(cls, run: StoredRun) -> "Curves":
        values = read_metrics(run.folder.metrics, ("step", *_FIELDS))
        return cls(values.pop("step") + 1, values)

    def known(self, name: str) -> Floats:
        """Return the values that the run recorded."""
        return self.values[name][~np.isnan(self.values[name])]

    def last_accuracy(self, window: int) -> float | None:
        """Return the mean of the last `window` known accuracies; None if there are none."""
        known = self.known("correct_rate")[-window:]
        return float(known.mean()) if len(known) else None

    def median(self, name: str) -> float | None:
        known = self.known(name)
        return float(np.median(known)) if len(known) else None


@dataclass(frozen=True)
class HeldOutPoint:
    step: int
    """Completed steps at the time of the evaluation; below 0 in the supervised stage."""
    accuracy: float
    """pass@1"""
    interval: tuple[float, float]
    """95% interval over the problems."""


def held_out_points(run: StoredRun) -> list[HeldOutPoint]:
    """Return the evaluations of a run with a judged answer, ordered by step."""
    run.check()
    begins = {run.folder.sft_evaluation: -len(run.sft_records), run.folder.evaluation: 0}
    evaluations = [
        Evaluation(begin + step, list(problems))
        for file, begin in begins.items()
        for step, problems in groupby(EvaluationRecord.read(file), key=lambda record: record.step)
    ]
    return [
        HeldOutPoint(item.step, item.pass_at[1], item.interval)
        for item in evaluations
        if 1 in item.pass_at
    ]


@dataclass(frozen=True)
class Band:
    """The mean and standard deviation over runs at each of S steps."""

    steps: Floats
    """[S]"""
    mean: Floats
    """[S]"""
    sd: Floats | None
    """[S] standard deviation between runs with ddof = 1; None for a single run."""


@dataclass(frozen=True)
class ConditionCurves:
    """The runs of one condition and their curves."""

    label: str
    runs: Sequence[StoredRun]
    curves: Sequence[Curves]
    held_out: Sequence[Sequence[HeldOutPoint]]
    """[runs] evaluations of each run."""

    def band(self, name: str, window: int = 1) -> Band | None:
        """Average a field over the runs at each step, each run smoothed over `window` steps first;
        None if no run has it.

        Leaves out steps at which fewer than half of the started runs have a value. Otherwise the
        curve of an unfinished campaign would end in the noise of its fastest run.
        """
        import pandas as pd  # It starts a thread, and most commands need none of it.

        if name == HELD_OUT:
            found = [{p.step: p.accuracy for p in points} for points in self.held_out if points]
            curves = [pd.Series(points, dtype=float) for points in found]
        else:
            curves = [
                pd.Series(smoothed(one.values[name], window), one.steps)
                for one in self.curves
                if len(one.steps)
            ]
        if not curves:
            return None
        table = pd.concat(curves, axis=1).sort_index()
        # A run without any value has not begun, so the curve does not wait for it.
        begun = max(1, table.notna().any().sum())
        table = table[table.count(axis=1) * 2 >= begun]
        if table.empty:
            return None
        sd = table.std(axis=1).fillna(0.0).to_numpy() if len(curves) > 1 else None
        return Band(table.index.to_numpy(float), table.mean(axis=1).to_numpy(), sd)

    @cached_property
    def longest(self) -> int:
        return max((len(curves.steps) for curves in self.curves), default=0)


def window_for(steps: int) -> int:
    """Return the steps of the running mean, since the rate of a single step, over about a hundred
    completions, jumps by several points.
    """
    return max(1, min(_MAX_WINDOW, steps // _SMOOTHED_PART))


def smoothed(values: Floats, window: int) -> Floats:
    """Average the known values among the last `window`, [S] -> [S]; NaN stays NaN."""
    import pandas as pd

    known = pd.Series(values)
    return known.rolling(window, min_periods=1).mean().where(known.notna()).to_numpy()


def curves_by_condition(labeled: Iterable[tuple[str, StoredRun]]) -> list[ConditionCurves]:
    """Return the curves of (label, run) pairs, one ConditionCurves per label in order of first
    appearance.
    """
    return [
        ConditionCurves(
            label, runs, [Curves.of(run) for run in runs], [held_out_points(run) for run in runs]
        )
        for label, runs in grouped(labeled).items()
    ]


# -- the whole report ------------------------------------------------------------------------------


_MAX_TOKEN_RUNS = 3
_MAX_SAMPLED_RUNS = 6
_SAMPLED_STEPS = 4
"""Steps of a run that show their completions."""


@dataclass(frozen=True)
class ReportRequest:
    """The options of `retrain report`."""

    folder: Path
    baseline: str | None = None
    """The condition to compare the others with; the first one if it is None."""
    metric: str | None = None
    against: Sequence[str] = ()
    """Transforms that the token viewer shows in addition to the run's own."""
    trust: bool = False
    """True allows `against` to load the plugins that a run names."""


class _Rank(BaseModel):
    rank: int = Field(ge=1)
    mean: FiniteFloat
    min: FiniteFloat
    max: FiniteFloat


class SqueezeCurve(BaseModel):
    """The variance that an adapter keeps at each rank, in the form of Analysis.to_json, which a
    campaign's manifest stores.
    """

    table: list[_Rank]
    threshold: FiniteFloat
    rule: str
    recommended_rank: int = Field(ge=1)


@dataclass(frozen=True)
class InspectedRun:
    label: str
    name: str
    credit: StepCredit


@dataclass(frozen=True)
class SampledStep:
    step: int
    sampled: int | None
    """Number of completions that the step sampled; None in runs of older versions."""
    samples: Sequence[GenerationRecord]
    """The completions that the run stored."""


@dataclass(frozen=True)
class SampledRun:
    label: str
    name: str
    steps: Sequence[SampledStep]


@dataclass(frozen=True)
class ReportData:
    folder: Path
    kind: str
    """"run", "campaign" or "runs"."""
    statuses: Sequence[RunStatus]
    arms: Sequence[ConditionCurves]
    """The runs that have started, by condition."""
    seeds: int
    """Number of different seeds, including runs that have not started."""
    comparison: Comparison | None
    squeeze: SqueezeCurve | None
    samples: Sequence[SampledRun]
    tokens: Sequence[InspectedRun]
    config: str
    """config.toml of a single run; "" otherwise."""
    notes: Sequence[str]
    """One sentence for each part that the report could not show."""

    @property
    def single(self) -> bool:
        return self.kind == "run"


def read_report_data(request: ReportRequest) -> ReportData:
    """Read the folder. Raises ConfigurationError if the folder has no runs, or lacks the requested
    baseline or metric.
    """
    folder = request.folder
    kind = "run" if is_run(folder) else "campaign" if is_campaign(folder) else "runs"
    planned = campaign_runs(folder) if kind == "campaign" else find_runs(folder)
    notes = list[str]()
    statuses = [run_status(run, time.time()) for run in planned]
    if kind == "runs":
        planned = _readable(planned, statuses)
    begun = [run for run in planned if is_run(run.path)]
    if kind == "campaign":
        notes += filter(None, [evidence_line(CampaignRecord.read(folder))])
    # The names of several campaigns precede their conditions.
    several = len({run.path.parent.parent.name if run.planned else "" for run in begun}) > 1
    arms = curves_by_condition((_label(run, several), run) for run in begun)
    if kind == "runs":
        notes += [*_mixed(arms), *_damaged_campaigns(begun)]
    return ReportData(
        folder=folder,
        kind=kind,
        statuses=statuses,
        arms=arms,
        seeds=len({run.seed for run in planned}),
        comparison=_comparison(planned, request, notes, several=several),
        squeeze=_squeeze(folder) if kind == "campaign" else None,
        samples=list(_sampled_runs(arms)),
        tokens=_tokens(arms, request, notes),
        config=begun[0].folder.config.read_text(encoding="utf-8") if kind == "run" else "",
        notes=notes,
    )


def _readable(runs: list[StoredRun], statuses: Iterable[RunStatus]) -> list[StoredRun]:
    """Leave out the runs that have only a status, unless there are no others."""
    lost = {status.path for status in statuses if status.state is State.UNREADABLE}
    return [run for run in runs if run.path not in lost] or runs


def _label(run: StoredRun, several: bool) -> str:
    # Matplotlib's warnings print a label as it is.
    label = clean(run.condition) or "?"
    return f"{run.path.parent.parent.name}: {label}" if several and run.planned else label


def _mixed(arms: Sequence[ConditionCurves]) -> Iterator[str]:
    """Yield a sentence for each condition with runs that differ in more than their seeds."""
    for arm in arms:
        keys = differing_keys([(arm.runs[0], run) for run in arm.runs[1:]])
        if keys:
            yield (
                f"The runs of {arm.label} differ in {', '.join(keys)}: their mean and band mix"
                " different configurations."
            )


def _damaged_campaigns(runs: Sequence[StoredRun]) -> Iterator[str]:
    for folder in dict.fromkeys(run.path.parent.parent for run in runs):
        if error := manifest_damage(folder):
            yield str(error)


def _comparison(
    runs: Sequence[StoredRun], request: ReportRequest, notes: list[str], *, several: bool
) -> Comparison | None:
    """Compare the conditions; return None, with a note, if the folder allows no comparison. A wrong
    --baseline or --metric is an error. `several`: the runs belong to several campaigns.
    """
    if request.metric:
        choose_metric(request.metric, runs)
    conditions = list(dict.fromkeys(run.condition for run in runs))
    baseline = request.baseline or conditions[0]
    if baseline not in conditions:
        raise ConfigurationError(
            f"--baseline {baseline} is not a condition of {request.folder}; its conditions are"
            f" {', '.join(conditions)}."
        )
    if len(conditions) < 2:
        return None
    if several:
        notes.append(
            "The runs belong to several campaigns, and a report compares the runs of one; make a"
            " report of each."
        )
        return None
    try:
        if is_campaign(request.folder):
            return compare_campaign(
                request.folder, TestSettings(), request.baseline, request.metric
            )
        base = [run for run in runs if run.condition == baseline]
        others = [run for run in runs if run.condition != baseline]
        return compare_runs(others, base, TestSettings(), request.metric)
    # A page is useful without a comparison, unless the user asked for one.
    except ConfigurationError as error:
        if request.metric or request.baseline:
            raise
        notes.append(f"No comparison: {error}")
        return None


# -- what only some runs have ----------------------------------------------------------------------


def _squeeze(folder: Path) -> SqueezeCurve | None:
    """Return the curve of the campaign's first adapter if the campaign has squeezed it."""
    stored = read_object(folder / MANIFEST).get("squeeze")
    if not stored:
        return None
    try:
        return SqueezeCurve.model_validate(stored, strict=True)
    except ValidationError as error:
        raise no_campaigns_value(folder / MANIFEST, error, "squeeze") from error


def _tokens(
    arms: Sequence[ConditionCurves], request: ReportRequest, notes: list[str]
) -> list[InspectedRun]:
    """Return the last stored step of the first run of each condition that stored tokens."""
    found: list[InspectedRun] = []
    against = request.against
    for arm in arms:
        run = next((run for run in arm.runs if stored_steps(run.folder)), None)
        if run is None or len(found) == _MAX_TOKEN_RUNS:
            continue
        try:
            try:
                credit = read_step(run, against=against, trust=request.trust)
            except ForeignCode as error:
                notes.append(f"Without {' and '.join(against)}: {error}")
                # The run's own credit needs no code of the run.
                credit = read_step(run)
            found.append(InspectedRun(arm.label, run.name, credit))
        # Raise for a wrong --against; any other error leaves the tokens of one run out.
        except RetrainError as error:
            if isinstance(error, ConfigurationError) and not isinstance(error, NoJudgedCompletion):
                raise
            notes.append(f"No tokens of {run.name}: {error}")
    if against and not found:
        raise ConfigurationError(
            f"--against needs a run with tokens, and {', '.join(arm.label for arm in arms)} stored"
            " none; train with --tokens-every 1."
        )
    return found


def _sampled_runs(arms: Sequence[ConditionCurves]) -> Iterator[SampledRun]:
    """Yield the first run with completions of each condition; in a campaign these share a seed and
    therefore their prompts.
    """
    for arm in arms[:_MAX_SAMPLED_RUNS]:
        for run, curves in zip(arm.runs, arm.curves, strict=True):
            if steps := list(_sampled_steps(run, curves)):
                yield SampledRun(arm.label, run.name, steps)
                break


def _sampled_steps(run: StoredRun, curves: Curves) -> Iterator[SampledStep]:
    """Yield some steps, evenly spaced between the first and the last step with completions."""
    path = run.folder.generations
    by_step = grouped((line["step"], line) for line in read_jsonl(path))
    steps = sorted(by_step)
    places = np.linspace(0, len(steps) - 1, min(_SAMPLED_STEPS, len(steps))).round().astype(int)
    sizes = curves.values["batch_size"] * curves.values["group_size"]
    sampled = dict(zip(curves.steps - 1, sizes, strict=True))
    for step in (steps[place] for place in places):
        size = sampled.get(step, np.nan)
        yield SampledStep(
            step,
            None if np.isnan(size) else int(size),
            [GenerationRecord.from_json(line, path) for line in by_step[step]],
        )

"""Read everything that a report shows from a folder. This is the metrics of every run by step,
their mean and standard deviation within a condition, and the rest. `figures` draws them, and
`page` writes the HTML.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, groupby
from pathlib import Path
from typing import Any

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
from retrain.analysis.selection import PairOfLabels, check_sizes
from retrain.analysis.statistics import Floats
from retrain.analysis.status import RunStatus, manifest_damage, run_status
from retrain.analysis.verdict import TestSettings
from retrain.config.schema import Squeeze
from retrain.errors import ConfigurationError, RetrainError
from retrain.inspect.credit import NoJudgedCompletion, StepCredit, read_step, stored_steps
from retrain.plugins import ForeignCode
from retrain.records.entries import EvaluationRecord, GenerationRecord
from retrain.records.evaluation import Evaluation
from retrain.records.jsonl import read_jsonl
from retrain.records.terminal import clean
from retrain.system import is_path_text, read_object

# -- curves ----------------------------------------------------------------------------------------


PHASES = ("time_sample_s", "time_reward_s", "time_credit_s", "time_learn_s")
FIELDS = (
    *(
        "correct_rate",
        "mean_reward",
        "sepa_lambda",
        "completion_tokens_mean",
        "max_token_hit_rate",
        "informative_fraction",
    ),
    *("entropy_mean", "plan_entropy_mean", "surprisal_mean", "plan_surprisal_mean"),
    *("tokens_per_s", "step_time_s", *PHASES),
)
_SMOOTHED_PART = 12
_MAX_WINDOW = 25


@dataclass(frozen=True)
class Curves:
    """One run's metrics by step; a null in the file is NaN."""

    steps: Floats
    """[S] counted from 0, increasing."""
    values: Mapping[str, Floats]
    """Field -> [S] values."""

    @classmethod
    def of(cls, run: StoredRun) -> "Curves":
        table = read_metrics(run.folder.metrics, ("step", *FIELDS))
        return cls(table["step"].to_numpy(), {name: table[name].to_numpy() for name in FIELDS})

    def last_accuracy(self, window: int) -> float | None:
        """Return the mean of the last `window` known accuracies; None if there are none."""
        known = self._known("correct_rate")[-window:]
        if len(known):
            return float(known.mean())
        return None

    def median(self, name: str) -> float | None:
        known = self._known(name)
        if len(known):
            return float(np.median(known))
        return None

    def _known(self, name: str) -> Floats:
        return self.values[name][~np.isnan(self.values[name])]


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
        if file.is_file()
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

    def has(self, name: str) -> bool:
        return any(not np.isnan(curves.values[name]).all() for curves in self.curves)

    def band(self, name: str, window: int = 1) -> Band | None:
        """Average a field over the runs at each step, each run smoothed over `window` steps first;
        None if no run has it.

        Leaves out steps at which fewer than half of the started runs have a value. Otherwise the
        curve of an unfinished campaign would end in the noise of its fastest run.
        """
        begun = [curves for curves in self.curves if len(curves.steps)]
        return _band([(curves.steps, smoothed(curves.values[name], window)) for curves in begun])

    def held_out_band(self) -> Band | None:
        """Average pass@1 over the runs at each evaluation; None if there are none."""
        evaluated = [points for points in self.held_out if points]
        return _band(
            [
                (np.array([p.step for p in points], float), np.array([p.accuracy for p in points]))
                for points in evaluated
            ]
        )

    @cached_property
    def longest(self) -> int:
        return max((len(curves.steps) for curves in self.curves), default=0)


def _band(curves: Sequence[tuple[Floats, Floats]]) -> Band | None:
    """Average curves (steps [S_i], values [S_i]), aligned by step number."""
    if not curves:
        return None
    steps = np.unique(np.concatenate([own for own, _ in curves]))
    table = np.full((len(curves), len(steps)), np.nan)
    for row, (own, values) in zip(table, curves, strict=True):
        row[np.searchsorted(steps, own)] = values
    known = ~np.isnan(table)
    counts = known.sum(axis=0)
    # A run without any value has not begun, so the curve does not wait for it.
    enough = counts * 2 >= max(1, known.any(axis=1).sum())
    steps, table, known, counts = steps[enough], table[:, enough], known[:, enough], counts[enough]
    if not len(steps) or not counts.any():
        return None
    mean = np.where(known, table, 0.0).sum(axis=0) / counts
    if len(curves) == 1:
        return Band(steps, mean, None)
    squares = np.where(known, (table - mean) ** 2, 0.0).sum(axis=0)
    return Band(steps, mean, np.sqrt(squares / np.maximum(counts - 1, 1)))


def window_for(steps: int) -> int:
    """Return the steps of the running mean, since the rate of a single step, over about a hundred
    completions, jumps by several points.
    """
    return max(1, min(_MAX_WINDOW, steps // _SMOOTHED_PART))


def smoothed(values: Floats, window: int) -> Floats:
    """Average the known values among the last `window`, [S] -> [S]; NaN stays NaN."""
    known = ~np.isnan(values)
    if window == 1 or not known.any():
        return values
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    with np.errstate(invalid="ignore"):
        means = (sums[ends] - sums[starts]) / (counts[ends] - counts[starts])
    return np.where(known, means, np.nan)


def curves_by_condition(labelled: Iterable[tuple[str, StoredRun]]) -> list[ConditionCurves]:
    """Return the curves of (label, run) pairs, one ConditionCurves per label in order of first
    appearance.
    """
    by_label: dict[str, list[StoredRun]] = {}
    for label, run in labelled:
        by_label.setdefault(label, []).append(run)
    return [
        ConditionCurves(
            label, runs, [Curves.of(run) for run in runs], [held_out_points(run) for run in runs]
        )
        for label, runs in by_label.items()
    ]


# -- the whole report ------------------------------------------------------------------------------


_MAX_TOKEN_RUNS = 3
_MAX_SAMPLED_RUNS = 6
_MAX_CHARACTERS = 4000
"""Maximum number of characters of a completion's text."""


@dataclass(frozen=True)
class ReportRequest:
    """The options of `retrain report`."""

    folder: Path
    baseline: str | None = None
    """The condition to compare the others with; the first one if it is None."""
    metric: str | None = None
    test: TestSettings = field(default_factory=TestSettings)
    against: Sequence[str] = ()
    """Transforms that the token viewer shows in addition to the run's own."""
    sampled_steps: int = 4
    """Number of steps per run that show their completions."""
    trust: bool = False
    """True allows `against` to load the plugins that a run names."""
    control: bool = False
    """True makes the campaign's random-reward condition the baseline."""
    pairs: Sequence[PairOfLabels] = ()
    """The contrasts to test; empty for every condition against the baseline."""


@dataclass(frozen=True)
class SqueezeCurve:
    """The variance that an adapter keeps at each rank: mean, lowest and highest over its layers."""

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
        """Read the curve from the form of Analysis.to_json, which a campaign's manifest stores.
        Raises ValidationError for anything else.
        """
        found = _StoredSqueeze.model_validate(squeeze, strict=True)
        return cls(
            adapter=adapter,
            ranks=[row.rank for row in found.table],
            mean=[row.mean for row in found.table],
            lowest=[row.min for row in found.table],
            highest=[row.max for row in found.table],
            threshold=found.threshold,
            rule=found.rule,
            recommended=found.recommended_rank,
        )


class _StoredRank(BaseModel):
    rank: int = Field(ge=1)
    mean: FiniteFloat
    min: FiniteFloat
    max: FiniteFloat


class _StoredSqueeze(BaseModel):
    table: list[_StoredRank]
    threshold: FiniteFloat
    rule: str
    recommended_rank: int = Field(ge=1)


@dataclass(frozen=True)
class InspectedRun:
    label: str
    name: str
    credit: StepCredit


@dataclass(frozen=True)
class Sample:
    record: GenerationRecord

    @property
    def prompt(self) -> str:
        return _cut(self.record.prompt)

    @property
    def completion(self) -> str:
        return _cut(self.record.completion)


def _cut(text: str) -> str:
    if len(text) <= _MAX_CHARACTERS:
        return text
    return f"{text[:_MAX_CHARACTERS]} ... ({len(text) - _MAX_CHARACTERS:,} more characters)"


@dataclass(frozen=True)
class SampledStep:
    step: int
    samples: Sequence[Sample]

    @property
    def right(self) -> int:
        return sum(sample.record.outcome == "right" for sample in self.samples)


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
    begun = [run for run in planned if is_run(run.path)]
    now, notes = time.time(), list[str]()
    if kind == "campaign":
        notes += filter(None, [evidence_line(CampaignRecord.read(folder))])
    campaigns = [run.path.parent.parent.name if run.planned else "" for run in begun]
    # The name of its campaign then precedes a condition.
    several = len(set(campaigns)) > 1
    # Matplotlib's warnings print a label as it is.
    conditions = [clean(run.condition) or "?" for run in begun]
    labels = [
        f"{name}: {label}" if several and name else label
        for label, name in zip(conditions, campaigns, strict=True)
    ]
    arms = curves_by_condition(zip(labels, begun, strict=True))
    if kind == "runs":
        notes += [*_mixed(arms), *_damaged_campaigns(begun)]
    return ReportData(
        folder=folder,
        kind=kind,
        statuses=[run_status(run, now) for run in planned],
        arms=arms,
        seeds=len({run.seed for run in planned}),
        comparison=_comparison(planned, arms, request, notes),
        squeeze=_squeeze(folder, begun, notes),
        samples=sampled_runs(arms, request.sampled_steps),
        tokens=_tokens(arms, request, notes),
        config=begun[0].folder.config.read_text(encoding="utf-8") if kind == "run" else "",
        notes=notes,
    )


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


# -- the comparison --------------------------------------------------------------------------------


def _comparison(
    runs: Sequence[StoredRun],
    arms: Sequence[ConditionCurves],
    request: ReportRequest,
    notes: list[str],
) -> Comparison | None:
    """Compare the conditions; return None, with a note, if the folder allows no comparison. A wrong
    --baseline or --metric is an error.
    """
    conditions = list(dict.fromkeys(run.condition for run in runs))
    if request.baseline is not None and request.baseline not in conditions:
        raise ConfigurationError(
            f"--baseline {request.baseline} is not a condition of {request.folder}; its conditions"
            f" are {', '.join(conditions)}."
        )
    check_sizes(
        request.test,
        choose_metric(request.metric, list(chain.from_iterable(arm.runs for arm in arms))),
    )
    if (request.pairs or request.control) and not is_campaign(request.folder):
        flag = "--contrast" if request.pairs else "--control"
        raise ConfigurationError(
            f"{flag} takes a campaign, and {request.folder} is none; name a campaign's folder."
        )
    if len(conditions) < 2:
        return None
    if len(arms) > len(conditions) or any(": " in arm.label for arm in arms):
        notes.append(
            "The runs belong to several campaigns, which are not compared with each other; make a"
            " report of each."
        )
        return None
    baseline = request.baseline or conditions[0]
    base = [run for run in runs if run.condition == baseline]
    try:
        if is_campaign(request.folder):
            return compare_campaign(
                request.folder,
                request.test,
                request.baseline,
                request.metric,
                control=request.control,
                pairs=request.pairs,
            )
        return compare_runs(
            [run for run in runs if run.condition != baseline], base, request.test, request.metric
        )
    # A page is useful without a comparison, unless the user asked for one.
    except ConfigurationError as error:
        if request.metric or request.baseline or request.pairs or request.control:
            raise
        notes.append(f"No comparison: {error}")
        return None


# -- what only some runs have ----------------------------------------------------------------------


def _squeeze(folder: Path, runs: Sequence[StoredRun], notes: list[str]) -> SqueezeCurve | None:
    """Return the squeeze curve from a campaign's manifest, which describes its first run. Without
    it, return the curve of the first final adapter of a run that sets a key of [squeeze].
    """
    if is_campaign(folder):
        squeeze = read_object(folder / MANIFEST).get("squeeze")
        if isinstance(squeeze, dict) and squeeze.get("table"):
            try:
                return SqueezeCurve.from_json(runs[0].name if runs else "", squeeze)
            except ValidationError as error:
                raise no_campaigns_value(folder / MANIFEST, error, "squeeze") from error
    for run in runs:
        named, settings = run.summary.get("adapter"), run.config.squeeze
        # An analysis takes seconds of SVDs, so a run without a key of [squeeze] has none.
        if (
            settings == Squeeze()
            or not named
            or not is_path_text(named)
            or not (run.path / named / "adapter_config.json").is_file()
        ):
            continue
        from retrain.squeeze import analyze_adapter

        try:
            analysis = analyze_adapter(
                run.path / named,
                min_variance_retention=settings.min_variance_retention,
                rule=settings.rule,
            )
        except RetrainError as error:
            notes.append(f"No curve of the adapter's rank: {error}")
            return None
        return SqueezeCurve.from_json(run.name, analysis.to_json())
    return None


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
        except NoJudgedCompletion as error:
            notes.append(f"No tokens of {run.name}: {error}")
        # A wrong --against; any other error leaves the tokens of one run out.
        except ConfigurationError:
            raise
        except RetrainError as error:
            notes.append(f"No tokens of {run.name}: {error}")
    if against and not found:
        raise ConfigurationError(
            f"--against needs a run with tokens, and {', '.join(arm.label for arm in arms)} stored"
            " none; train with --tokens-every 1."
        )
    return found


# -- completions, from generations.jsonl -----------------------------------------------------------


def sampled_runs(arms: Sequence[ConditionCurves], steps_per_run: int) -> list[SampledRun]:
    """Return the first run with completions of each condition; in a campaign these share a seed and
    therefore their prompts.
    """
    found = []
    for arm in arms[:_MAX_SAMPLED_RUNS]:
        run = next((run for run in arm.runs if run.folder.generations.is_file()), None)
        if run and (steps := sampled_steps(run, steps_per_run)):
            found.append(SampledRun(arm.label, run.name, steps))
    return found


def sampled_steps(run: StoredRun, count: int) -> list[SampledStep]:
    """Choose `count` steps, evenly spaced between the first and the last step with completions."""
    steps = sorted({line["step"] for line in read_jsonl(run.folder.generations)})
    wanted = {
        steps[index]
        for index in np.linspace(0, len(steps) - 1, min(count, len(steps))).round().astype(int)
    }
    by_step: dict[int, list[Sample]] = {step: [] for step in sorted(wanted)}
    for line in read_jsonl(run.folder.generations):
        if line["step"] in by_step:
            by_step[line["step"]].append(
                Sample(GenerationRecord.from_json(line, run.folder.generations))
            )
    return [SampledStep(step, samples) for step, samples in by_step.items()]

"""Read the plan of a comparison, which a campaign's manifest holds from before its first run, and
the looks so far.

The plan has a hash, so that an edit shows. A comparison that differs from the plan is exploratory:
its p is the p of a planned one.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from retrain.analysis.arms import evaluation_words
from retrain.analysis.integrity import absent_words, given_keys
from retrain.analysis.measures import Metric, direction_words
from retrain.analysis.runs import MANIFEST, StoredRun, no_campaigns_value, seeds_words
from retrain.config import TrainConfig
from retrain.records.entries import Direction
from retrain.records.terminal import counted
from retrain.system import Json, read_object

if TYPE_CHECKING:
    from retrain.analysis.budget import Budget
    from retrain.analysis.verdict import TestSettings

ALPHA = 0.05
PairOfLabels = tuple[str, str]
"""(candidate, baseline)"""


@dataclass(frozen=True)
class AnalysisPlan:
    """The analysis of a campaign, fixed before its first run."""

    baseline: str
    conditions: tuple[str, ...]
    """The other conditions, each against the baseline."""
    metric: str
    alpha: Annotated[float, Field(gt=0, lt=1)]
    rule: Literal["seeds", "evidence"]
    """The exact test once after all seeds, or the e-process after every seed."""
    seeds: tuple[int, ...]
    """The seeds, at most these and in this order."""
    max_steps: int
    better: Direction = "higher"
    """The direction of the metric that is an improvement."""
    margin: Annotated[float | None, Field(gt=0)] = None
    """Differences below this are equivalent; None plans no verdict of equivalence."""
    leaves_out: Literal["failed", "failed and collapsed"] = "failed"
    """The runs that have no pair. Plans of 0.9 lack this field, leave out failed runs, and set no
    limit to their number.
    """
    evaluation: str = ""
    """The sampling and the number of held-out problems, in words; "" without an evaluation, and in
    plans of 0.10 and older."""
    heldout_sha256: str = ""
    """The hash of the held-out problems; "" if unknown."""

    def to_json(self) -> Json:
        """Return the plan with `sha256`, the hash of the rest."""
        content = asdict(self)
        return content | {"sha256": _sha256(content)}


def _sha256(plan: Mapping[str, Any]) -> str:
    """Return the hash of a plan in its stored form, so that plans of versions with fewer fields
    keep their hash.
    """
    content = {name: value for name, value in plan.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class InterimAnalysis:
    """One look at the evidence, after a seed, and its decisions."""

    seed: int
    evidence: Mapping[str, float]
    """Condition -> evidence over the family, for those still running; 1 / alpha decides
    (e_process.adjust)."""
    decided: Mapping[str, str]
    """Condition -> its verdict, for the conditions decided at this look; they run no more."""
    missing: Sequence[str] = ()
    """Conditions absent from the look because a run of their pair had failed or stopped. A later
    look at the seed may take them.
    """


@dataclass(frozen=True)
class CampaignRecord:
    """The plan and the looks in a campaign's manifest; reading them checks their types."""

    plan: AnalysisPlan | None = None
    """The plan; None in manifests of versions that recorded none."""
    looks: list[InterimAnalysis] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    """The seeds of the campaign as it is now."""
    max_steps: int | None = None
    heldout_sha256: str = ""
    """The hash of the held-out problems when the campaign was last started."""
    edited: bool = False
    """True if somebody edited the plan after it got its hash."""
    sha256: str = ""
    """The hash of the plan."""
    removed: bool = False
    """True if the plan is absent although the version that wrote the manifest recorded one."""
    grid: Sequence[str] = ()
    """The keys that [campaign.grid] varies."""

    @classmethod
    def read(cls, folder: Path) -> "CampaignRecord":
        """Read the record of a campaign. Raises RunFailed for a damaged manifest."""
        path = folder / MANIFEST
        content = read_object(path)
        own = ("plan", "looks", "seeds", "max_steps", "heldout_sha256")
        given = {name: content[name] for name in own if name in content}
        try:
            stored = _STORED.validate_json(json.dumps(given), strict=True)
        except ValidationError as error:
            raise no_campaigns_value(path, error) from error
        sha256 = _sha256(content["plan"]) if stored.plan else ""
        return replace(
            stored,
            edited=stored.plan is not None and content["plan"].get("sha256") != sha256,
            sha256=sha256,
            # Every version that writes "looks" writes a plan too.
            removed=stored.plan is None and "looks" in content,
            grid=[*(given_keys(folder).get("campaign", {}).get("grid") or {})],
        )

    @property
    def judges_losses(self) -> bool:
        """False for the plan of an older version, which leaves out only failed runs."""
        return not (self.plan and self.plan.leaves_out == "failed")

    @property
    def looked(self) -> tuple[int, ...]:
        """The seeds of the looks, in the order of their first looks."""
        return tuple(dict.fromkeys(look.seed for look in self.looks))

    @property
    def undecided(self) -> list[str]:
        """The plan's conditions without a verdict, the baseline left out."""
        planned = self.plan.conditions if self.plan else ()
        return [condition for condition in planned if self.decided_at(condition) is None]

    def decided_at(self, condition: str) -> int | None:
        """Return the number of looks after which the condition had a verdict; None while it has
        none.
        """
        at = (number for number, look in enumerate(self.looks, 1) if condition in look.decided)
        return next(at, None)

    def looks_of(self, condition: str) -> dict[int, int]:
        """Map each seed to the number of the look, from 0, at which the e-process of a condition
        took its pair.
        """
        first: dict[int, int] = {}
        for number, look in enumerate(self.looks[: self.decided_at(condition)]):
            if condition not in look.missing:
                first.setdefault(look.seed, number)
        return first

    def was_looked_at(self, condition: str, seed: int) -> bool:
        """True if a look took the run of this condition and seed."""
        is_base = self.plan is not None and condition == self.plan.baseline
        others = self.plan.conditions if self.plan and is_base else (condition,)
        return any(seed in self.looks_of(other) for other in others)


_STORED = TypeAdapter(CampaignRecord)


def planned_evaluation(config: TrainConfig) -> str:
    """Return the sampling and the number of held-out problems of a run, in words."""
    evaluation = config.evaluation
    problems = " and ".join(
        f"{part.max_examples or 'all'} problems{f' of {source}' * bool(source)}"
        for source, part in zip(evaluation.sources, evaluation.parts, strict=True)
    )
    return f"{evaluation_words(evaluation, config.training)}, {problems}"


Seeds = dict[str, list[int]]
"""Condition -> seeds."""


def absent_runs(
    record: CampaignRecord, runs: Iterable[StoredRun], not_counted: Collection[Path]
) -> tuple[Seeds, Seeds, Seeds]:
    """Return the planned runs that the comparison lacks: unlisted or changed, failed, to come.

    Without a plan there are none. `runs` are the runs of the manifest, and
    `not_counted` the folders of the changed runs.
    """
    found = {(run.condition, run.seed): run for run in runs if run.path not in not_counted}
    bent, failed, to_come = absent = Seeds(), Seeds(), Seeds()
    if (plan := record.plan) is None:
        return absent
    for condition, seed in product((plan.baseline, *plan.conditions), plan.seeds):
        run = found.get((condition, seed))
        # A campaign skips a run only where evidence decided without it.
        if run is None or (
            run.skipped and (plan.rule == "seeds" or record.was_looked_at(condition, seed))
        ):
            kind = bent
        elif run.failed:
            kind = failed
        elif run.unfinished and not run.skipped:
            kind = to_come
        else:
            continue
        kind.setdefault(condition, []).append(seed)
    return absent


@dataclass(frozen=True)
class Request:
    """The comparison that the user asked for."""

    baseline: str
    test: "TestSettings"
    metric: str | None = None
    """The name of the metric; None selects held-out pass@1 if the runs have it."""
    pairs: Sequence[PairOfLabels] = ()
    """The family of contrasts; empty for every condition against the baseline."""
    record: CampaignRecord = CampaignRecord()
    absent: Sequence[Mapping[str, Sequence[int]]] = ({}, {}, {})
    """As `absent_runs` returns them."""
    not_listed: Sequence[str] = ()
    """Names of runs in the campaign's folder that the manifest does not list."""
    budget: "Budget | None" = None
    """The budget at which to compare runs; None compares them at their end."""

    def by_task(self, metric: Metric) -> bool:
        """True if the comparison also takes the held-out answers of the runs' ends by task."""
        return metric.k == 1 and not self.budget


def deviations(
    request: Request,
    pairs: Sequence[PairOfLabels],
    metric: Metric,
    runs: Collection[StoredRun],
) -> Iterator[str]:
    """Yield the ways in which a comparison differs from the plan, such as "metric (auc, planned
    pass@1)".
    """
    record, plan, bent = request.record, request.record.plan, request.absent[0]
    if request.budget:
        yield f"where runs are compared (at {request.budget}, planned at their end)"
        return
    if plan is None:
        return
    if record.edited:
        yield "the plan itself, which was edited after it was hashed"
    for name, now, planned in _settings(request, plan, metric, runs):
        if now != planned:
            yield f"{name} ({now}, planned {planned})"
    looked, due = record.looked, plan.seeds[: len(record.looked)]
    if looked != due:
        shown, planned = (", ".join(map(str, seeds)) for seeds in (looked, due))
        yield f"its looks (at seeds {shown}, planned {planned})"
    if (margin := request.test.margin) != plan.margin:
        yield f"margin ({margin_words(margin)}, {margin_words(plan.margin)} planned)"
    # The lines above report another baseline, which changes the family by itself.
    contrasts = {(condition, plan.baseline) for condition in plan.conditions}
    if request.baseline == plan.baseline and set(pairs) != contrasts:
        yield f"the family of comparisons ({len(pairs)}, planned {len(contrasts)})"
    if bent:
        yield f"its runs (planned and not counted: {absent_words(bent)})"
    if request.not_listed:
        yield (
            f"its manifest (which does not list {', '.join(request.not_listed)}, though the"
            f" campaign's folder holds {'it' if len(request.not_listed) == 1 else 'them'})"
        )


def _settings(
    request: Request, plan: AnalysisPlan, metric: Metric, runs: Collection[StoredRun]
) -> Iterator[tuple[str, object, object]]:
    """Yield (name, value now, planned value) of each."""
    record, better = request.record, request.test.direction(metric.better)
    yield "baseline", request.baseline, plan.baseline
    yield "metric", metric.name, plan.metric
    yield "direction", direction_words(better), direction_words(plan.better)
    yield "alpha", f"{request.test.alpha:g}", f"{plan.alpha:g}"
    yield "max_steps", record.max_steps, plan.max_steps
    # A run may go on after its campaign, and then evaluates again.
    longest = max([plan.max_steps, *(run.steps for run in runs)])
    yield "the steps of the longest run", longest, plan.max_steps
    if plan.heldout_sha256:
        yield "held-out problems", record.heldout_sha256[:8], plan.heldout_sha256[:8]
    for own in {planned_evaluation(run.config) for run in runs if run.condition == plan.baseline}:
        if plan.evaluation:
            yield "evaluation", own, plan.evaluation


def margin_words(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


def planned_line(request: Request, differing: Sequence[str]) -> str:
    """Say whether a comparison follows the plan or is exploratory, and why. The sentence also names
    added and absent seeds. "" without a recorded plan.
    """
    record, plan = request.record, request.record.plan
    if record.removed:
        return (
            "Exploratory: the manifest holds no plan, which every campaign writes before its first"
            " run."
        )
    if plan is None:
        return ""
    if differing:
        stopped = (
            " The campaign stopped when its evidence decided, so that an exact test's p is too"
            " small."
        )
        return (
            f"Exploratory: differs from the plan ({record.sha256[:8]}) in"
            f" {'; '.join(differing)}.{stopped * bool(record.looks)}"
        )
    looked = plan.rule == "evidence"
    when = "looked at after every seed" if looked else "one test"
    margin = "" if plan.margin is None else f", equivalent within {plan.margin:g}"
    what = (
        f"{'held-out ' * plan.metric.startswith('pass@')}{plan.metric},"
        f" {direction_words(plan.better)}, alpha {plan.alpha:g}{margin},"
        f" {counted(len(plan.seeds), 'seed')}, {when}"
    )
    lines = [f"Preregistered (plan {record.sha256[:8]}): {what}."]
    _, failed, to_come = request.absent
    if to_come:
        lines.append(f"Still to come: {absent_words(to_come)}.")
    if failed:
        lines.append(f"Failed, so without a pair: {absent_words(failed)}.")
    added = [seed for seed in record.seeds if seed not in plan.seeds]
    if added:
        lines.append(f"Added after the plan: {seeds_words(added)}.")
        exact = (
            "If results were seen before, the exact test is no longer exact: its p is too small."
        )
        lines.append("The evidence stays valid." if looked else exact)
    return " ".join(lines)


def not_looked_at(record: CampaignRecord, pairs: Mapping[str, Collection[int]]) -> Iterator[str]:
    """Yield a sentence for each condition that now has a pair which a look lacked; `pairs` are its
    finished seeds.
    """
    for condition, seeds in pairs.items():
        waiting = sorted({*record.looked} & {*seeds} - {*record.looks_of(condition)})
        if waiting and record.decided_at(condition) is None:
            yield (
                f"The looks went without {seeds_words(waiting)} of {condition}, whose runs are"
                " done; they are not counted until the campaign is resumed and looks at them."
            )


def evidence_line(record: CampaignRecord) -> str:
    """Return the newest evidence for each condition and the decisions so far; "" before the first
    look.
    """
    if record.plan is None or not record.looks:
        return ""
    newest: dict[str, float] = {}
    decided: dict[str, str] = {}
    for look in record.looks:
        newest |= look.evidence
        decided |= look.decided
    parts = [
        f"{name} {value:.3g}{f' ({decided[name]})' if name in decided else ''}"
        for name, value in newest.items()
    ]
    seeds = counted(len(record.looked), "seed")
    return f"Evidence after {seeds}, of {1 / record.plan.alpha:g} needed: {', '.join(parts)}."

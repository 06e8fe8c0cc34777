"""Compare conditions with a baseline: the runs of a campaign, or runs given by folder.

The unit is the run. A contrast is the list of differences between two runs of one seed; `verdict`
draws the conclusion.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from retrain.analysis import statistics
from retrain.analysis.arms import (
    Arm,
    RunsByCondition,
    arm_of,
    check_one_condition,
    check_same_problems,
    control_label,
    evaluated_alike,
    evaluated_as,
    group_by_condition,
    judged_by,
)
from retrain.analysis.integrity import (
    absent_line,
    are_the_same,
    as_planned,
    campaigns_of,
    not_listed,
    problems_of,
)
from retrain.analysis.likeness import Shared
from retrain.analysis.measures import Metric, choose_metric
from retrain.analysis.notes import comparison_notes
from retrain.analysis.pairs import Losses, Pairing, Pairs, WideInterval, pair_up
from retrain.analysis.planned import (
    Absences,
    CampaignRecord,
    Look,
    deviations,
    not_looked_at,
    planned_line,
)
from retrain.analysis.robust import Robust, second_line, with_collapsed_failed
from retrain.analysis.runs import MANIFEST, StoredRun, campaign_runs
from retrain.analysis.tasks import TaskAggregate, TaskContrast, aggregate_tasks, contrast_tasks
from retrain.analysis.two_way import TwoWay
from retrain.analysis.verdict import Conclusion, TestSettings, Verdict, conclude
from retrain.errors import ConfigurationError
from retrain.records.terminal import counted

_SHOWN = 3
"""Names of left-out runs in the sentence of an error."""
_CLAIMS = (Verdict.IMPROVEMENT, Verdict.WORSE)
PairOfLabels = tuple[str, str]
"""(candidate, baseline)"""


@dataclass(frozen=True)
class ArmSummary:
    label: str
    runs: int
    """The runs that finished and have the metric."""
    failed: int
    mean: float | None
    sd: float | None
    """The standard deviation over the runs, ddof = 1."""
    unjudged: int
    """Held-out answers that could not be judged, of `answered`."""
    answered: int
    tokens: float | None
    """The tokens sampled in training, mean per run; None if no run recorded them."""
    hours: float | None
    """The hours that a run took, mean per run."""
    tasks: TaskAggregate | None
    """None unless the held-out problems come from several tasks."""


@dataclass(frozen=True)
class Contrast:
    """One condition against another. Differences are candidate - baseline, in the metric's
    units.
    """

    condition: str
    baseline: str
    differences: Mapping[int, float]
    """Seed -> difference."""
    conclusion: Conclusion
    at_worst: Conclusion | None
    """The conclusion with failed runs at the worst value; None unless runs of the two arms failed
    and `conclusion` leaves them out."""
    wide: WideInterval | None
    """The interval for new seeds and new problems; None without held-out problems."""
    parts: TwoWay | None
    """Where the spread of the differences comes from; None without held-out problems."""
    pairing: Pairing | None
    losses: Losses | None
    tasks: TaskContrast | None
    """None unless the held-out problems come from several tasks."""
    shared: Shared
    robust: Robust | None
    """The verdict's second line; None without a verdict, and for a metric that has no worst end at
    0."""
    same_runs: int
    """Pairs whose two runs are one: equal in every number but for what the clock measured."""


@dataclass(frozen=True)
class Comparison:
    metric: Metric
    judge: str
    """The reward that decides the metric, the same in all arms; "" for a metric that does not
    depend on a reward."""
    evaluated: str
    """How held-out answers were sampled; "" for a training metric."""
    problems: int
    """Held-out problems; 0 for a training metric."""
    test: TestSettings
    baseline: str
    arms: Sequence[ArmSummary]
    """The baseline first."""
    contrasts: Sequence[Contrast]
    to_come: int
    """Runs of a campaign that have not ended."""
    left_out: Sequence[str]
    notes: Sequence[str]
    planned: str = ""
    """Whether it is as planned before the first run, in a sentence; "" where no plan was
    recorded."""
    looks: Sequence[Look] = ()
    """The looks of the campaign; empty unless the comparison is as planned."""

    @property
    def seeds_to_conclude(self) -> int:
        """Fewest pairs with which any contrast of the family can be significant."""
        return self.test.seeds_to_conclude(len(self.contrasts))

    @property
    def one_baseline(self) -> bool:
        return all(contrast.baseline == self.baseline for contrast in self.contrasts)


def compare_campaign(
    folder: Path,
    test: TestSettings,
    baseline: str | None = None,
    metric: str | None = None,
    *,
    control: bool = False,
    pairs: Sequence[PairOfLabels] = (),
    record: CampaignRecord | None = None,
) -> Comparison:
    """Every condition of a campaign against `baseline`, by default its first; `control` takes the
    one trained on random rewards.

    `pairs` names the contrasts of the family instead. `record` is the plan and the looks, by
    default those of the manifest.
    """
    runs, record = campaign_runs(folder), record or CampaignRecord.read(folder)
    grouped, unlisted = (
        group_by_condition(runs, problems_of(folder, runs)),
        not_listed(folder, runs),
    )
    grouped.left_out += [
        f"{name} is not listed in {MANIFEST}, so it is not counted." for name in unlisted
    ]
    labels = list(grouped.conditions)
    for label in (label for pair in pairs for label in pair):
        if label not in grouped.conditions:
            raise ConfigurationError(
                f"--contrast names {label}, which is no condition of {folder}; they are"
                f" {', '.join(labels)}."
            )
    if len({frozenset(pair) for pair in pairs}) < len(pairs):
        again = next(
            pair
            for place, pair in enumerate(pairs)
            if {*pair} in [{*other} for other in pairs[:place]]
        )
        raise ConfigurationError(
            f"--contrast {':'.join(again)} compares two conditions for the second time; name each"
            " pair once."
        )
    if len(labels) == 1:
        raise ConfigurationError(
            f"{folder} has one condition, {labels[0]}, and a comparison takes two or more."
        )
    if control:
        baseline = control_label(grouped.conditions, folder)
    elif pairs and baseline is None:
        baseline = pairs[0][1]
    elif baseline is None and labels:
        baseline = labels[0]
    if baseline not in grouped.conditions:
        raise ConfigurationError(
            f"--baseline {baseline} is no condition of {folder}; the conditions are"
            f" {', '.join(labels)}."
        )
    if record.plan and test.margin is None and metric in (None, record.plan.metric):
        test = replace(test, margin=record.plan.margin)
    absences = Absences.of(record, runs, grouped.not_counted, unlisted)
    return _compare(grouped, baseline, test, metric, pairs, record, absences)


def compare_runs(
    candidates: Sequence[StoredRun],
    baselines: Sequence[StoredRun],
    test: TestSettings,
    metric: str | None = None,
) -> Comparison:
    """The conditions of `candidates` against the one condition of `baselines`, paired by seed."""
    both = {run.path.resolve() for run in candidates} & {run.path.resolve() for run in baselines}
    if both:
        raise ConfigurationError(f"{min(both)} is on both sides of --baseline; name it once.")
    campaigns = campaigns_of([*candidates, *baselines])
    grouped, base = (
        group_by_condition(*as_planned(side, campaigns)) for side in (candidates, baselines)
    )
    if len(base.conditions) != 1:
        raise ConfigurationError(
            f"the runs after --baseline have {len(base.conditions)} conditions"
            f" ({', '.join(base.conditions)}); give the runs of one."
        )
    ((label, runs),) = base.conditions.items()
    failed = base.failed.get(label, set())
    if label in grouped.conditions:
        label = f"{label} (baseline)"
    both_sides = RunsByCondition(
        {label: runs, **grouped.conditions},
        {label: failed, **grouped.failed},
        [*base.left_out, *grouped.left_out],
        base.to_come + grouped.to_come,
    )
    return replace(
        _compare(both_sides, label, test, metric),
        planned=absent_line([*candidates, *baselines], campaigns),
    )


def _compare(
    grouped: RunsByCondition,
    baseline: str,
    test: TestSettings,
    metric_name: str | None,
    pairs: Sequence[PairOfLabels] = (),
    record: CampaignRecord | None = None,
    absences: Absences | None = None,
) -> Comparison:
    metric = choose_metric(metric_name, grouped.runs)
    check_sizes(test, metric)
    if metric.k is not None:
        check_same_problems(grouped.runs)
    left_out, notes = list(grouped.left_out), list[str]()
    asked = metric_name is not None
    reference = next(iter(grouped.conditions[baseline].values()), None)
    for label, runs in grouped.conditions.items():
        check_one_condition(label, runs)
    alike = _measured_alike(
        grouped.conditions, reference, metric, left_out, notes if asked else left_out, insist=asked
    )
    labels = (
        dict.fromkeys((baseline, *(label for pair in pairs for label in pair)))
        if pairs
        else dict.fromkeys((baseline, *alike))
    )
    arms = {
        label: arm_of(label, alike[label], metric, left_out, grouped.failed.get(label, ()))
        for label in labels
    }
    wanted = pairs or [(label, baseline) for label in arms if label != baseline]
    worst = worst_value(arms.values(), metric, test) if test.failed == "worst" else None
    family = [
        pair
        for ours, theirs in wanted
        if (pair := pair_up(arms[ours], arms[theirs], metric, worst)).differences
    ]
    differing = (
        list(
            deviations(
                record, baseline=baseline, pairs=wanted, metric=metric, test=test, absences=absences
            )
        )
        if record
        else []
    )
    if record and record.looks and not differing:
        test = replace(test, correction="evidence", looks=len(record.looks))
        notes += not_looked_at(
            record, {pair.candidate.label: [*pair.differences] for pair in family}
        )
        family = [
            seen
            for pair in family
            if (seen := pair.at_looks(record.looks_of(pair.candidate.label))).differences
        ]
    if not family:
        raise ConfigurationError(_no_pair(list(arms.values()), left_out, grouped, alike, metric))
    return Comparison(
        metric=metric,
        judge=metric.judge(reference) if reference else "",
        evaluated=evaluated_as(reference) if reference and metric.k is not None else "",
        problems=(
            max((len(run.answers.ids) for run in grouped.runs if run.answers), default=0)
            if metric.k is not None
            else 0
        ),
        test=test,
        baseline=baseline,
        arms=[_summary(arm, metric, 1 - test.alpha) for arm in arms.values()],
        contrasts=_contrasts(
            family, metric, test, worst_value(arms.values(), metric, test), record
        ),
        to_come=grouped.to_come,
        left_out=left_out,
        notes=[
            *notes,
            *comparison_notes(grouped, arms, baseline, family, metric, test, asked=asked),
        ],
        planned=planned_line(record, differing, absences) if record else "",
        looks=record.looks if record and test.rule == "evidence" else (),
    )


def _measured_alike(
    conditions: Mapping[str, Mapping[int, StoredRun]],
    reference: StoredRun | None,
    metric: Metric,
    left_out: list[str],
    otherwise: list[str],
    *,
    insist: bool,
) -> dict[str, dict[int, StoredRun]]:
    """The runs that the reference's reward judged and, for a held-out metric, that were evaluated
    as it was.
    """
    if reference is None:
        return {label: dict(runs) for label, runs in conditions.items()}
    judge = metric.judge(reference)
    alike = {
        label: judged_by(label, runs, metric, judge, left_out) for label, runs in conditions.items()
    }
    if metric.k is None:
        return alike
    way = evaluated_as(reference)
    return {
        label: evaluated_alike(label, runs, way, otherwise, insist=insist)
        for label, runs in alike.items()
    }


def worst_value(arms: Iterable[Arm], metric: Metric, test: TestSettings) -> float | None:
    """The value given to a failed run: the worst end of a rate (0 or 1), else the worst value of
    any run. None for a metric without a direction.
    """
    better = "lower" if test.lower_is_better else metric.better
    if better is None:
        return None
    if metric.is_rate:
        return 0.0 if better == "higher" else 1.0
    values = [value for arm in arms for value in arm.values.values()]
    if not values:
        return None
    return min(values) if better == "higher" else max(values)


def check_sizes(test: TestSettings, metric: Metric) -> None:
    """Raises ConfigurationError for a level, margin or effect outside its range, and for a worst
    value of a metric without a direction.
    """
    for name, value, example in (("alpha", test.alpha, 0.05), ("power", test.power, 0.8)):
        if not 0 < value < 1:
            raise ConfigurationError(f"--{name} {value:g} is not between 0 and 1; use {example}.")
    for name, size in (("margin", test.margin), ("effect", test.effect)):
        if size is not None and not 0 < size < float("inf"):
            raise ConfigurationError(
                f"--{name} {size:g} is not above 0; give the size of a difference, such as 0.02."
            )
        if size is not None and metric.is_rate and size >= 1:
            raise ConfigurationError(
                f"--{name} {size:g} is not a possible difference in {metric.name}, which lies"
                " between 0 and 1; two points are 0.02."
            )
    if test.lower_is_better and (metric.k is not None or metric.name in ("correct_rate", "auc")):
        raise ConfigurationError(
            f"--lower-is-better is not for {metric.name}, a rate of right answers: more is better;"
            " leave it out."
        )
    if test.failed == "worst" and metric.better is None and not test.lower_is_better:
        raise ConfigurationError(
            f"--failed worst needs a metric with a better and a worse end, and {metric.name} has"
            " none; leave it out."
        )


def _no_pair(
    arms: Sequence[Arm],
    left_out: Sequence[str],
    grouped: RunsByCondition,
    alike: Mapping[str, Mapping[int, StoredRun]],
    metric: Metric,
) -> str:
    found = "; ".join(f"{arm.label}: {', '.join(map(str, arm.values)) or 'none'}" for arm in arms)
    more = f" And {counted(len(left_out) - _SHOWN, 'more run')}." if len(left_out) > _SHOWN else ""
    because = f" Left out: {' '.join(left_out[:_SHOWN])}{more}" if left_out else ""
    advice = ""
    if any(
        len(alike[label]) < len(runs) for label, runs in grouped.conditions.items()
    ):  # measured in different ways
        advice = " Train all arms with the same [evaluation] section."
        if metric.k is None:
            advice = (
                " Compare held-out accuracy instead: --metric pass@1, after [evaluation] at_end ="
                " true."
            )
    return (
        "there is no pair to compare: no usable run shares its seed with a usable run of the"
        f" baseline (seeds of {found}).{because}{advice}"
    )


def _summary(arm: Arm, metric: Metric, confidence: float) -> ArmSummary:
    values = list(arm.values.values())
    return ArmSummary(
        label=arm.label,
        runs=len(values),
        failed=len(arm.failed),
        mean=statistics.mean(values) if values else None,
        sd=statistics.sample_sd(values) if len(values) > 1 else None,
        unjudged=arm.unjudged if metric.k is not None else 0,
        answered=arm.answered if metric.k is not None else 0,
        tokens=_per_run(arm, "tokens"),
        hours=None if (seconds := _per_run(arm, "seconds")) is None else seconds / 3600,
        tasks=aggregate_tasks(arm.runs, confidence) if metric.k == 1 else None,
    )


def _per_run(arm: Arm, name: str) -> float | None:
    """The mean of a number of summary.json; None if no run has it."""
    found = [
        value
        for run in arm.runs.values()
        if isinstance(value := run.summary.get(name), int | float)
    ]
    return float(np.mean(found)) if found else None


def _contrasts(
    family: Sequence[Pairs],
    metric: Metric,
    test: TestSettings,
    worst: float | None,
    record: CampaignRecord | None,
) -> list[Contrast]:
    """One contrast per candidate; the p values are adjusted over all of them."""
    conclusions = conclude(
        [pairs.paired(test.alpha, len(family)) for pairs in family], test, metric.better
    )
    at_worst: Sequence[Conclusion | None] = [None] * len(family)
    if worst is not None and test.failed == "exclude" and any(pairs.losses() for pairs in family):
        at_worst = _concluded_at_worst(
            [(pairs.candidate, pairs.baseline) for pairs in family], metric, test, worst, record
        )
    robust: Sequence[Robust | None] = [None] * len(family)
    if worst == 0 and any(conclusion.verdict in _CLAIMS for conclusion in conclusions):
        fallen = [
            (with_collapsed_failed(pairs.candidate), with_collapsed_failed(pairs.baseline))
            for pairs in family
        ]
        again = _concluded_at_worst(fallen, metric, test, worst, record)
        robust = [
            second_line(*arms, now, one.verdict) if one.verdict in _CLAIMS else None
            for arms, now, one in zip(fallen, again, conclusions, strict=True)
        ]
    return [
        Contrast(
            condition=pairs.candidate.label,
            baseline=pairs.baseline.label,
            differences=pairs.differences,
            conclusion=conclusion,
            at_worst=with_failed if pairs.losses() else None,
            wide=pairs.wide_interval(1 - test.alpha),
            parts=pairs.two_way(),
            pairing=pairs.pairing(),
            losses=pairs.losses(),
            tasks=(
                contrast_tasks(pairs.runs, 1 - test.alpha)
                if metric.k == 1 and len(pairs.runs) > 1
                else None
            ),
            shared=Shared.of(pairs.runs),
            robust=second,
            same_runs=are_the_same(pairs.runs),
        )
        for pairs, conclusion, with_failed, second in zip(
            family, conclusions, at_worst, robust, strict=True
        )
    ]


def _concluded_at_worst(
    arms: Sequence[tuple[Arm, Arm]],
    metric: Metric,
    test: TestSettings,
    worst: float,
    record: CampaignRecord | None,
) -> list[Conclusion]:
    """The conclusions of a family (candidate, baseline) whose failed runs have the worst value."""
    family = [pair_up(candidate, baseline, metric, worst) for candidate, baseline in arms]
    if record and test.rule == "evidence":
        family = [pairs.at_looks(record.first_looks(pairs.candidate.label)) for pairs in family]
    paired = [pairs.paired(test.alpha, len(family)) for pairs in family]
    return conclude(paired, replace(test, failed="worst"), metric.better)

"""Select the runs of a comparison: the runs with the same evaluation and judge, in arms and in
pairs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from retrain.analysis.arms import (
    Arm,
    RunsByCondition,
    arm_of,
    check_one_condition,
    check_same_problems,
    evaluated_alike,
    evaluated_as,
    judged_by,
)
from retrain.analysis.budget import Budget, at_budget
from retrain.analysis.measures import Metric, choose_metric
from retrain.analysis.pairs import Pairs, pair_up
from retrain.analysis.planned import Absences, CampaignRecord, deviations, not_looked_at
from retrain.analysis.runs import RunsBySeed, StoredRun
from retrain.analysis.verdict import TestSettings
from retrain.errors import ConfigurationError
from retrain.records.terminal import counted

_SHOWN = 3
"""Maximum number of left-out runs in the sentence of an error."""
PairOfLabels = tuple[str, str]
"""(candidate, baseline)"""


@dataclass(frozen=True)
class Request:
    """The comparison that the user asked for."""

    baseline: str
    test: TestSettings
    metric: str | None = None
    """The name of the metric; None selects held-out pass@1 if the runs have it."""
    pairs: Sequence[PairOfLabels] = ()
    """The family of contrasts; empty for every condition against the baseline."""
    record: CampaignRecord | None = None
    absences: Absences | None = None
    budget: Budget | None = None
    """The budget at which to compare runs; None compares them at their end."""


@dataclass(frozen=True)
class Selection:
    """The arms and pairs of a comparison, and the runs that it leaves out."""

    metric: Metric
    test: TestSettings
    """The settings with the rule that the campaign's looks ask for."""
    reference: StoredRun | None
    """The baseline's first run; the other runs need the same evaluation and judge."""
    arms: Mapping[str, Arm]
    """Label -> arm, the baseline first."""
    family: Sequence[Pairs]
    """One or more pairs of arms, each with a difference."""
    differing: Sequence[str]
    """The differences from the campaign's plan."""
    left_out: Sequence[str]
    notes: Sequence[str]


def select(grouped: RunsByCondition, request: Request) -> Selection:
    """Select runs and pairs. Raises ConfigurationError for runs that do not compare, and without a
    pair.
    """
    test = request.test
    grouped, metric = _where_asked(grouped, request)
    _check_comparable(grouped, metric, test)
    reference = next(iter(grouped.conditions[request.baseline].values()), None)
    # A metric that the user named compares runs despite other sampling; the notes say so.
    asked = request.metric is not None
    alike, apart, otherwise = _measured_alike(grouped, reference, metric, insist=asked)
    named = list(chain.from_iterable(request.pairs)) or alike
    arms = _arms(grouped, alike, dict.fromkeys((request.baseline, *named)), metric)
    wanted = request.pairs or [(label, request.baseline) for label in [*arms][1:]]
    record, differing = request.record, _deviations(request, wanted, metric, grouped.runs)
    looked = record is not None and bool(record.looks) and not differing
    # A look bets on what is there: what later runs say of an earlier one must not change it.
    if not looked:
        arms = _without_collapsed(arms, request, metric)
    notes = otherwise if asked else []
    left_out = [*grouped.left_out, *apart, *([] if asked else otherwise)]
    left_out += chain.from_iterable(arm.left_out for arm in arms.values())
    family = _with_differences(arms, wanted, metric, record)
    if record and looked:
        family, test, unseen = _at_looks(family, record, len(wanted), test)
        notes += unseen
    if not family:
        apart_too = sum(map(len, alike.values())) < len(grouped.runs)
        raise _no_pair(arms.values(), left_out, metric, some_apart=apart_too)
    return Selection(metric, test, reference, arms, family, differing, left_out, notes)


def _arms(
    grouped: RunsByCondition,
    alike: Mapping[str, RunsBySeed],
    labels: Iterable[str],
    metric: Metric,
) -> dict[str, Arm]:
    return {
        label: arm_of(label, alike[label], metric, grouped.failed.get(label, ()))
        for label in labels
    }


def _where_asked(grouped: RunsByCondition, request: Request) -> tuple[RunsByCondition, Metric]:
    """Return the runs and the metric, at the request's budget if it has one."""
    metric = choose_metric(request.metric, grouped.runs)
    if request.budget:
        return at_budget(grouped, request.budget, metric)
    return grouped, metric


def _at_looks(
    family: Sequence[Pairs], record: CampaignRecord, planned: int, test: TestSettings
) -> tuple[list[Pairs], TestSettings, Sequence[str]]:
    """Return the contrasts with their pairs in the planned order of the looks, and the settings of
    the e-process over the `planned` contrasts. The third part holds the notes on seeds that no look
    has seen.
    """
    seeds = {pairs.candidate.label: [*pairs.differences] for pairs in family}
    looked = [pairs.at_looks(record.looks_of(pairs.candidate.label)) for pairs in family]
    seen = [pairs for pairs in looked if pairs.differences]
    absent = planned - len(seen)
    test = replace(test, rule="evidence", looks=len(record.looks), absent=absent)
    return seen, test, list(not_looked_at(record, seeds))


def _check_comparable(grouped: RunsByCondition, metric: Metric, test: TestSettings) -> None:
    check_sizes(test, metric)
    if metric.k is not None:
        check_same_problems(grouped.runs)
    for label, runs in grouped.conditions.items():
        check_one_condition(label, runs)


def _with_differences(
    arms: Mapping[str, Arm],
    wanted: Sequence[PairOfLabels],
    metric: Metric,
    record: CampaignRecord | None,
) -> list[Pairs]:
    """Return the contrasts that have a difference."""
    family = [pair_up(arms[ours], arms[theirs], metric) for ours, theirs in wanted]
    judged = _has_rule_of_losses(record)
    return [replace(pairs, judges_losses=judged) for pairs in family if pairs.differences]


def _has_rule_of_losses(record: CampaignRecord | None) -> bool:
    """True unless the version that stored the plan left out failed runs alone, and any number of
    them.
    """
    return record is None or record.plan is None or record.plan.leaves_out != "failed"


def _without_collapsed(arms: dict[str, Arm], request: Request, metric: Metric) -> dict[str, Arm]:
    """Return the arms without runs that fell towards 0, for a rate whose higher values are
    better.
    """
    higher = request.test.direction(metric.better) == "higher"
    if not (metric.is_rate and higher and _has_rule_of_losses(request.record)):
        return arms
    return {label: arm.without_collapsed() for label, arm in arms.items()}


def _deviations(
    request: Request, wanted: Sequence[PairOfLabels], metric: Metric, runs: Sequence[StoredRun]
) -> list[str]:
    if request.record is None:
        return []
    if request.budget:
        return [f"where runs are compared (at {request.budget}, planned at their end)"]
    found = deviations(
        request.record,
        baseline=request.baseline,
        pairs=wanted,
        metric=metric,
        test=request.test,
        runs=runs,
        absences=request.absences,
    )
    return list(found)


def _measured_alike(
    grouped: RunsByCondition, reference: StoredRun | None, metric: Metric, *, insist: bool
) -> tuple[Mapping[str, RunsBySeed], list[str], list[str]]:
    """Return the runs with the judge of the reference and, for a held-out metric, with its
    evaluation. The other two parts are the sentences on runs with another judge or another
    evaluation.
    """
    if reference is None:
        return grouped.conditions, [], []
    alike, apart, otherwise = dict(grouped.conditions), list[str](), list[str]()
    judge, way = metric.judge(reference), evaluated_as(reference)
    for label, runs in grouped.conditions.items():
        alike[label], sentences = judged_by(label, runs, metric, judge)
        apart += sentences
        if metric.k is not None:
            alike[label], sentences = evaluated_alike(label, alike[label], way, insist=insist)
            otherwise += sentences
    return alike, apart, otherwise


def check_levels(alpha: float, power: float) -> None:
    """Raise ConfigurationError for a level or a power that is not a probability."""
    for name, value, example in (("alpha", alpha, 0.05), ("power", power, 0.8)):
        if not 0 < value < 1:
            raise ConfigurationError(f"--{name} {value:g} is not between 0 and 1; use {example}.")


def check_sizes(test: TestSettings, metric: Metric) -> None:
    """Raise ConfigurationError for a level, margin or effect outside its range."""
    check_levels(test.alpha, test.power)
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


def _no_pair(
    arms: Iterable[Arm], left_out: Sequence[str], metric: Metric, *, some_apart: bool
) -> ConfigurationError:
    """`some_apart`: some runs have another evaluation or judge than the baseline's first run."""
    found = "; ".join(f"{arm.label}: {', '.join(map(str, arm.values)) or 'none'}" for arm in arms)
    because = f" Left out: {' '.join(left_out[:_SHOWN])}" if left_out else ""
    if len(left_out) > _SHOWN:
        because += f" And {counted(len(left_out) - _SHOWN, 'more run')}."
    advice = ""
    if some_apart:
        advice = " Train all arms with the same [evaluation] section."
        if metric.k is None:
            advice = (
                " Compare held-out accuracy instead: --metric pass@1, after [evaluation] at_end ="
                " true."
            )
    return ConfigurationError(
        "there is no pair to compare: no usable run shares its seed with a usable run of the"
        f" baseline (seeds of {found}).{because}{advice}"
    )

"""Select the runs of a comparison: the runs with the same evaluation and judge, in arms and in
pairs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from retrain.analysis.arms import (
    Arm,
    Overlap,
    RunsByCondition,
    arm_of,
    check_one_condition,
    check_same_problems,
    evaluated_as,
    unlike,
)
from retrain.analysis.budget import Budget, at_budget
from retrain.analysis.integrity import are_the_same
from retrain.analysis.measures import Metric, choose_metric
from retrain.analysis.pairs import (
    Pairs,
    TaskAggregate,
    TaskContrast,
    aggregate_tasks,
    contrast_tasks,
    pair_up,
)
from retrain.analysis.planned import (
    CampaignRecord,
    Look,
    Request,
    deviations,
    not_looked_at,
    planned_line,
)
from retrain.analysis.power import seeds_to_conclude
from retrain.analysis.runs import RunsBySeed, StoredRun
from retrain.analysis.verdict import Conclusion, TestSettings, conclude
from retrain.errors import ConfigurationError
from retrain.records.terminal import counted

_SHOWN = 3
"""Maximum number of left-out runs in the sentence of an error."""


@dataclass(frozen=True, kw_only=True)
class Contrast(Pairs):
    """A contrast with its conclusion."""

    conclusion: Conclusion
    tasks: TaskContrast | None
    """The contrast by task; None unless the held-out problems come from several tasks."""

    @cached_property
    def shared(self) -> Overlap:
        return Overlap.of(self.runs)

    @cached_property
    def same_runs(self) -> int:
        """The pairs whose two runs are one, with equal numbers apart from the times."""
        return are_the_same(self.runs)


@dataclass(frozen=True)
class Comparison:
    metric: Metric
    judge: str
    """The reward that decides the metric, the same in all arms; "" for a metric that does not
    depend on a reward."""
    evaluated: str
    """The sampling of held-out answers in words; "" for a training metric."""
    test: TestSettings
    """The settings with the rule that the campaign's looks ask for."""
    baseline: str
    arms: Sequence[Arm]
    """The baseline first."""
    tasks: Mapping[str, TaskAggregate]
    """Label -> the scores by task, if the held-out problems come from several tasks."""
    contrasts: Sequence[Contrast]
    to_come: int
    """Runs of a campaign that have not ended."""
    left_out: Sequence[str]
    notes: Sequence[str]
    planned: str
    """A sentence that calls the comparison planned before the first run, or exploratory; ""
    without a plan."""
    looks: Sequence[Look]
    """The looks of the campaign; empty unless the comparison follows the plan."""
    budget: Budget | None
    """The budget at which to compare runs; None compares them at their end."""
    grid: Sequence[str]
    """The keys that [campaign.grid] varies, whose conditions get a rank."""

    @property
    def problems(self) -> int:
        """Held-out problems on which some pair has a difference; 0 for a training metric."""
        return max(contrast.problems for contrast in self.contrasts)

    @property
    def family(self) -> int:
        """The number of comparisons in the adjustment of p."""
        return len(self.contrasts) + self.test.absent

    @property
    def seeds_to_conclude(self) -> int:
        """Fewest pairs with which any contrast of the family can be significant."""
        return seeds_to_conclude(self.test.of_family(self.family))

    @property
    def one_baseline(self) -> bool:
        return all(contrast.baseline == self.baseline for contrast in self.contrasts)


def select(grouped: RunsByCondition, request: Request) -> Comparison:
    """Select runs and pairs, and compare them. Raises ConfigurationError for runs that do not
    compare, and without a pair.
    """
    test, record = request.test, request.record
    metric = choose_metric(request.metric, grouped.runs)
    if request.budget:
        grouped, metric = at_budget(grouped, request.budget, metric)
    _check_comparable(grouped, metric, test)
    reference = next(iter(grouped.conditions[request.baseline].values()), None)
    # A metric that the user named compares runs despite other sampling; the notes say so.
    asked = request.metric is not None
    alike, apart, otherwise = _measured_alike(grouped, reference, metric, insist=asked)
    named = list(chain.from_iterable(request.pairs)) or alike
    arms = {
        label: arm_of(label, alike[label], metric, grouped.failed.get(label, ()))
        for label in dict.fromkeys((request.baseline, *named))
    }
    wanted = request.pairs or [(label, request.baseline) for label in [*arms][1:]]
    differing = [*deviations(request, wanted, metric, grouped.runs)]
    looked = record is not None and bool(record.looks) and not differing
    judges_losses = not (record and record.plan and record.plan.leaves_out == "failed")
    # A look bets on what is there: what later runs say of an earlier one must not change it.
    falls = metric.is_rate and test.direction(metric.better) == "higher"
    if falls and judges_losses and not looked:
        arms = {label: arm.without_collapsed() for label, arm in arms.items()}
    left_out = [*grouped.left_out, *apart, *([] if asked else otherwise)]
    left_out += chain.from_iterable(arm.left_out for arm in arms.values())
    paired = [pair_up(arms[ours], arms[theirs], test.alpha) for ours, theirs in wanted]
    family = [replace(pairs, judges_losses=judges_losses) for pairs in paired if pairs.differences]
    notes = otherwise if asked else []
    if record and looked:
        family, test, unseen = _at_looks(family, record, len(wanted), test)
        notes += unseen
    if not family:
        apart_too = sum(map(len, alike.values())) < len(grouped.runs)
        raise _no_pair(arms.values(), left_out, metric, some_apart=apart_too)
    by_task = metric.k == 1 and not request.budget
    return Comparison(
        metric=metric,
        judge=metric.judge(reference) if reference else "",
        evaluated=evaluated_as(reference) if reference and metric.k else "",
        test=test,
        baseline=request.baseline,
        arms=[*arms.values()],
        tasks=_tasks(arms, 1 - test.alpha) if by_task else {},
        contrasts=_contrasts(family, metric, test, by_task=by_task),
        to_come=grouped.to_come,
        left_out=left_out,
        notes=notes,
        planned=planned_line(record, differing, request.absences) if record else "",
        looks=record.looks if record and test.rule == "evidence" else (),
        budget=request.budget,
        grid=record.grid if record else (),
    )


def _tasks(arms: Mapping[str, Arm], confidence: float) -> dict[str, TaskAggregate]:
    found = {label: aggregate_tasks(arm.runs, confidence) for label, arm in arms.items()}
    return {label: tasks for label, tasks in found.items() if tasks}


def _contrasts(
    family: Sequence[Pairs], metric: Metric, test: TestSettings, *, by_task: bool
) -> list[Contrast]:
    """Return one contrast per candidate, with p values adjusted over all of them."""
    paired = [pairs.paired(len(family) + test.absent) for pairs in family]
    return [
        Contrast(
            **vars(pairs),
            conclusion=conclusion,
            tasks=contrast_tasks(pairs.runs, 1 - test.alpha) if by_task else None,
        )
        for pairs, conclusion in zip(family, conclude(paired, test, metric.better), strict=True)
    ]


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
    end = (
        "the difference between them includes the difference in evaluation."
        if insist
        else "they are not compared. Name --metric pass@1 to compare them all the same."
    )
    for label, runs in grouped.conditions.items():
        apart += [
            f"{label}{which} is judged by {other}, and the baseline by {judge}: {metric.name} means"
            " different things in the two, so they are not compared."
            for which, other in unlike(runs, metric.judge, judge)
        ]
        same = {seed: run for seed, run in runs.items() if metric.judge(run) == judge}
        if metric.k:
            otherwise += [
                f"{label}{which} was evaluated at {other}, and the baseline at {way}: {end}"
                for which, other in unlike(same, evaluated_as, way)
            ]
            if not insist:
                same = {seed: run for seed, run in same.items() if evaluated_as(run) == way}
        alike[label] = same
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

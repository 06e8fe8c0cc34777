"""Select the runs of a comparison, which have one evaluation and one judge, pair them, and draw the
conclusions.
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
    InterimAnalysis,
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
        """The pairs of two identical runs, whose numbers are equal apart from the times."""
        return are_the_same(self.runs)


@dataclass(frozen=True)
class Comparison:
    metric: Metric
    test: TestSettings
    """The settings with the rule that the campaign's looks ask for."""
    baseline: str
    arms: Sequence[Arm]
    """The baseline first."""
    tasks: Mapping[str, TaskAggregate]
    """Label -> the scores by task, if the held-out problems come from several tasks."""
    contrasts: Sequence[Contrast]
    budget: Budget | None
    """The budget at which to compare runs; None compares them at their end."""
    grid: Sequence[str]
    """The keys that [campaign.grid] varies, whose conditions get a rank."""
    reference: StoredRun | None = None
    """The baseline's first run; the other runs need the same evaluation and judge."""
    to_come: int = 0
    """Runs of a campaign that have not ended."""
    left_out: Sequence[str] = ()
    notes: Sequence[str] = ()
    planned: str = ""
    """A sentence that calls the comparison planned before the first run, or exploratory; ""
    without a plan."""
    looks: Sequence[InterimAnalysis] = ()
    """The looks of the campaign; empty unless the comparison follows the plan."""

    @property
    def judge(self) -> str:
        """The reward that decides the metric, the same in all arms; "" for a metric that does not
        depend on a reward.
        """
        return self.metric.judge(self.reference) if self.reference else ""

    @property
    def evaluated(self) -> str:
        """The sampling of held-out answers in words; "" for a training metric."""
        return evaluated_as(self.reference) if self.reference and self.metric.k else ""

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
    grouped, metric = _where_asked(grouped, request)
    reference = next(iter(grouped.conditions[request.baseline].values()), None)
    arms, apart, notes = _arms(grouped, request, reference, metric)
    wanted = request.pairs or [(label, request.baseline) for label in [*arms][1:]]
    differing = [*deviations(request, wanted, metric, grouped.runs)]
    looked = bool(record.looks) and not differing
    # A look bets on what is there: what later runs say of an earlier one must not change it.
    if record.judges_losses and not looked and test.direction(metric.better) == "higher":
        arms = {label: arm.without_collapsed() for label, arm in arms.items()}
    own = chain.from_iterable(arm.left_out for arm in arms.values())
    left_out = [*grouped.left_out, *apart, *own]
    found = (pair_up(arms[ours], arms[theirs], test.alpha) for ours, theirs in wanted)
    family = [
        replace(pairs, judges_losses=record.judges_losses) for pairs in found if pairs.differences
    ]
    if looked:
        family, test, unseen = _at_looks(family, record, len(wanted), test)
        notes += unseen
    if not family:
        raise _no_pair(arms.values(), left_out, metric, some_apart=bool(apart))
    return replace(
        _compared([*arms.values()], family, metric, test, request),
        reference=reference,
        to_come=grouped.to_come,
        left_out=left_out,
        notes=notes,
        planned=planned_line(record, differing, request.missing_runs),
        looks=record.looks if looked else (),
    )


def _compared(
    arms: Sequence[Arm],
    family: Sequence[Pairs],
    metric: Metric,
    test: TestSettings,
    request: Request,
) -> Comparison:
    """Return the conclusions, with p values adjusted over all of them, and the scores by task."""
    by_task, confidence = metric.k == 1 and not request.budget, 1 - test.alpha
    tasks = {arm.label: aggregate_tasks(arm.runs, confidence) for arm in arms if by_task}
    paired = [pairs.paired(len(family) + test.absent) for pairs in family]
    contrasts = [
        Contrast(
            **vars(pairs),
            conclusion=conclusion,
            tasks=contrast_tasks(pairs.runs, confidence) if by_task else None,
        )
        for pairs, conclusion in zip(family, conclude(paired, test, metric.better), strict=True)
    ]
    return Comparison(
        metric=metric,
        test=test,
        baseline=request.baseline,
        arms=arms,
        tasks={label: found for label, found in tasks.items() if found},
        contrasts=contrasts,
        budget=request.budget,
        grid=request.record.grid,
    )


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


def _where_asked(grouped: RunsByCondition, request: Request) -> tuple[RunsByCondition, Metric]:
    """Return the runs and the metric, at the request's budget if it has one."""
    metric = choose_metric(request.metric, grouped.runs)
    if request.budget:
        grouped, metric = at_budget(grouped, request.budget, metric)
    check_sizes(request.test, metric)
    if metric.k:
        check_same_problems(grouped.runs)
    for label, runs in grouped.conditions.items():
        check_one_condition(label, runs)
    return grouped, metric


def _arms(
    grouped: RunsByCondition, request: Request, reference: StoredRun | None, metric: Metric
) -> tuple[dict[str, Arm], list[str], list[str]]:
    """Return the arms, the baseline first, the sentences on runs that they leave out, and notes."""
    # A metric that the user named compares runs despite other sampling; the notes say so.
    insist = request.metric is not None
    alike, apart, notes = _measured_alike(grouped, reference, metric, insist=insist)
    named = [*chain.from_iterable(request.pairs)] or alike
    arms = {
        label: arm_of(label, alike[label], metric, grouped.failed.get(label, ()))
        for label in dict.fromkeys((request.baseline, *named))
    }
    return arms, apart, notes


def _measured_alike(
    grouped: RunsByCondition, reference: StoredRun | None, metric: Metric, *, insist: bool
) -> tuple[dict[str, RunsBySeed], list[str], list[str]]:
    """Return the runs with the judge of the reference and, for a held-out metric, with
    its evaluation. The other two parts are the sentences on runs that this leaves out, and notes.
    """
    alike: dict[str, RunsBySeed] = {**grouped.conditions}
    apart, otherwise = list[str](), list[str]()
    end = "the difference between them includes the difference in evaluation."
    if not insist:
        end = "they are not compared. Name --metric pass@1 to compare them all the same."
    for label, runs in grouped.conditions.items() if reference else ():
        assert reference
        judge, way = metric.judge(reference), evaluated_as(reference)
        apart += [
            f"{label}{which} is judged by {other}, and the baseline by {judge}: {metric.name} means"
            " different things in the two, so they are not compared."
            for which, other in unlike(runs, metric.judge, judge)
        ]
        alike[label] = {seed: run for seed, run in runs.items() if metric.judge(run) == judge}
        if metric.k:
            otherwise += [
                f"{label}{which} was evaluated at {other}, and the baseline at {way}: {end}"
                for which, other in unlike(alike[label], evaluated_as, way)
            ]
        if metric.k and not insist:
            alike[label] = {s: run for s, run in alike[label].items() if evaluated_as(run) == way}
    return (alike, apart, otherwise) if insist else (alike, apart + otherwise, [])


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
        "retrain has no pair to compare: no usable run shares its seed with a usable run of the"
        f" baseline (seeds of {found}).{because}{advice}"
    )

"""Compare conditions with a baseline: the runs of a campaign, or runs given by folder. Select runs
with one evaluation and one judge, pair them by seed, and draw the conclusions. The notes on the
whole comparison are one sentence each.

The unit is the run. A contrast is the list of differences between two runs of one seed; `verdict`
draws the conclusion.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, combinations
from pathlib import Path

from retrain.analysis.arms import (
    Arm,
    Overlap,
    RunsByCondition,
    arm_of,
    check_one_condition,
    check_same_problems,
    control_label,
    evaluated_as,
    group_by_condition,
    mixed_code,
    mixed_keys,
    parted,
)
from retrain.analysis.budget import Budget, at_budget
from retrain.analysis.integrity import (
    absent_line,
    are_the_same,
    as_planned,
    campaigns_of,
    not_listed,
    problems_of,
)
from retrain.analysis.measures import SYNONYMS, Metric, choose_metric, trained_on_chance
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
    PairOfLabels,
    Request,
    absent_runs,
    deviations,
    not_looked_at,
    planned_line,
)
from retrain.analysis.runs import MANIFEST, RunsBySeed, StoredRun, campaign_runs
from retrain.analysis.verdict import Conclusion, TestSettings, conclude
from retrain.errors import ConfigurationError
from retrain.records.terminal import counted

# -- runs that compare -----------------------------------------------------------------------------


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
    arms: Sequence[Arm]
    """The baseline first."""
    contrasts: Sequence[Contrast]
    request: Request
    reference: StoredRun | None
    """The baseline's first run; the other runs need the same evaluation and judge."""
    to_come: int
    """Runs of a campaign that have not ended."""
    left_out: Sequence[str]
    planned: str
    """A sentence that calls the comparison planned before the first run, or exploratory; ""
    without a plan."""
    looks: Sequence[InterimAnalysis]
    """The looks of the campaign; empty unless the comparison follows the plan."""
    notes: Sequence[str] = ()

    @property
    def baseline(self) -> str:
        """The label of the first arm."""
        return self.request.baseline

    @cached_property
    def tasks(self) -> Mapping[str, TaskAggregate]:
        """Label -> the scores by task, if the held-out problems come from several tasks."""
        if not self.request.by_task(self.metric):
            return {}
        found = {arm.label: aggregate_tasks(arm.runs, 1 - self.test.alpha) for arm in self.arms}
        return {label: scores for label, scores in found.items() if scores}

    @property
    def judge(self) -> str:
        """The reward that decides the metric, the same in all arms; "" for a metric that does not
        depend on a reward.
        """
        return self.metric.judge(self.reference) if self.reference else ""

    @property
    def evaluated(self) -> str:
        """The sampling of held-out answers; "" for a training metric."""
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
        return self.test.of_family(self.family).fewest

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
    left_out = [*grouped.left_out, *apart]
    left_out += chain.from_iterable(arm.left_out for arm in arms.values())
    family = [
        pairs
        for ours, theirs in wanted
        if (pairs := pair_up(arms[ours], arms[theirs], test.alpha)).differences
    ]
    if looked:
        family, test, unseen = _at_looks(family, record, len(wanted), test)
        notes += unseen
    if not family:
        raise _no_pair(arms.values(), left_out, metric, some_apart=bool(apart))
    compared = Comparison(
        metric,
        test,
        [*arms.values()],
        _concluded(family, metric, test, request),
        request,
        reference=reference,
        to_come=grouped.to_come,
        left_out=left_out,
        planned=planned_line(request, differing),
        looks=record.looks if looked else (),
    )
    return replace(compared, notes=[*notes, *comparison_notes(compared)])


def _concluded(
    family: Sequence[Pairs], metric: Metric, test: TestSettings, request: Request
) -> list[Contrast]:
    """Return the contrasts with their conclusions, whose p values are adjusted over all of them."""
    by_task, size = request.by_task(metric), len(family) + test.absent
    strict = request.record.judges_losses
    paired = [pairs.paired(size, judges_losses=strict) for pairs in family]
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
    apart, notes = list[str](), list[str]()
    end = "the difference between them includes the difference in evaluation."
    if not insist:
        end = "they are not compared. Name --metric pass@1 to compare them all the same."
    if reference is None:
        return alike, apart, notes
    judge, way = metric.judge(reference), evaluated_as(reference)
    for label, runs in grouped.conditions.items():
        alike[label], others = parted(runs, metric.judge, judge)
        apart += [
            f"{label}{which} is judged by {other}, and the baseline by {judge}: {metric.name} means"
            " different things in the two, so they are not compared."
            for which, other in others
        ]
        if metric.k is None:
            continue
        same, others = parted(alike[label], evaluated_as, way)
        notes += [
            f"{label}{which} was evaluated at {other}, and the baseline at {way}: {end}"
            for which, other in others
        ]
        if not insist:
            alike[label] = same
    return (alike, apart, notes) if insist else (alike, apart + notes, [])


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
    advice = " Train all arms with the same [evaluation] section."
    if metric.k is None:
        advice = (
            " Compare held-out accuracy instead: --metric pass@1, after [evaluation] at_end = true."
        )
    return ConfigurationError(
        "retrain has no pair to compare: no usable run shares its seed with a usable run of the"
        f" baseline (seeds of {found}).{because}{advice * some_apart}"
    )


# -- notes -----------------------------------------------------------------------------------------


def comparison_notes(found: Comparison) -> Iterator[str]:
    base, *others = found.arms
    runs = list(chain.from_iterable(arm.runs.values() for arm in found.arms))
    if found.to_come:
        # An e-process stays valid at any number of looks.
        peeking = " Peeking inflates the false-positive rate above alpha."
        peeking *= found.test.rule != "evidence"
        yield f"Still to come: {counted(found.to_come, 'run')}.{peeking}"
    if not found.metric.k and found.request.metric is None:
        yield (
            "No run has a held-out accuracy, so the training correct rate replaces it,"
            " measured while the model learns. [evaluation] at_end = true gives the better number."
        )
    if base.runs and all(map(trained_on_chance, base.runs.values())):
        yield (
            "Every condition trains on random rewards, so no reward explains a difference."
            if all(map(trained_on_chance, runs))
            else f"{base.label} is a control, trained on random rewards: a difference from it is"
            " what an informative reward adds to training as such."
        )
    yield from _unequal_runs(found, runs)
    if found.metric.k:
        yield from _held_out_notes(runs, found.arms)
    yield from _unpaired_notes(found, base, others)


def _unequal_runs(found: Comparison, runs: Sequence[StoredRun]) -> Iterator[str]:
    """Yield sentences on differences in values that should be equal: code, keys, attempts,
    length.
    """
    for arm in found.arms:
        yield from mixed_code(arm.label, arm.runs)
        mixed = [f"{path} ({seeds})" for path, seeds in mixed_keys(arm.runs, fixed=False)]
        if mixed:
            yield f"The runs of {arm.label} differ in {', '.join(mixed)}."
    again = [
        f"{run.name} ({run.planned.attempts} attempts)"
        for run in runs
        if run.planned and run.planned.attempts > 1
    ]
    if again:
        yield f"Begun again after they had failed or ended: {', '.join(again)}."
    ends = sorted({run.steps for run in runs})
    if len(ends) > 1 and found.request.budget:
        yield f"Within {found.request.budget} the runs took {ends[0]} to {ends[-1]} whole steps."
    elif len(ends) > 1:
        yield (
            f"The runs ended at different steps ({ends[0]} to {ends[-1]}), so they were trained for"
            " different lengths."
        )


def _unpaired_notes(found: Comparison, base: Arm, others: Sequence[Arm]) -> Iterator[str]:
    parts = [
        f"{arm.label} ({', '.join(map(str, lonely))})"
        for arm in others
        if (lonely := [seed for seed in arm.values if seed not in base.values])
    ]
    if parts:
        yield (
            "Seeds without a run of the baseline count in the means but in no difference:"
            f" {'; '.join(parts)}."
        )
    compared = {label for one in found.contrasts for label in (one.condition, one.baseline)}
    unpaired = [arm.label for arm in others if arm.label not in compared]
    if unpaired:
        harder = ""
        if found.test.absent:
            harder = (
                " The evidence of the others is over all planned comparisons still, which makes"
                f" {1 / found.test.alpha:g} harder to reach (docs/comparing.md)."
            )
        yield (
            f"No run of {', '.join(unpaired)} has a partner in the baseline, so nothing is"
            f" concluded about it.{harder}"
        )


def _held_out_notes(runs: Sequence[StoredRun], arms: Sequence[Arm]) -> Iterator[str]:
    early = [run for run in runs if run.final_evaluation and run.final_evaluation.step < run.steps]
    if early:
        yield (
            f"{len(early)} of {len(runs)} runs trained on after their last held-out evaluation;"
            " [evaluation] at_end = true adds one after [training] max_steps, though not where"
            " max_hours came first."
        )
    lost = [arm for arm in arms if arm.unjudged]
    if lost:
        counts = ", ".join(f"{arm.unjudged:,} of {arm.answered:,} of {arm.label}" for arm in lost)
        total = counted(sum(arm.unjudged for arm in lost), "held-out answer")
        yield (
            f"{total} could not be judged ({counts}). Differences are over the problems judged in"
            " both runs of a pair, and a verdict holds with all unjudged answers counted against"
            " it."
        )


# -- comparisons -----------------------------------------------------------------------------------


def compare_campaign(
    folder: Path,
    test: TestSettings,
    baseline: str | None = None,
    metric: str | None = None,
    *,
    control: bool = False,
    pairs: Sequence[PairOfLabels] = (),
    record: CampaignRecord | None = None,
    budget: Budget | None = None,
) -> Comparison:
    """Compare every condition of a campaign with `baseline`, by default its first condition. With
    `control` the baseline is the condition trained on random rewards.

    `pairs` names the contrasts of the family instead. `record` holds the plan and the looks, by
    default from the manifest. Raises ConfigurationError for labels that the campaign does not have.
    """
    runs, record = campaign_runs(folder), record or CampaignRecord.read(folder)
    grouped = group_by_condition(runs, problems_of(folder, runs))
    unlisted = not_listed(folder, runs)
    grouped.left_out += [
        f"{name} is not listed in {MANIFEST}, so it is not counted." for name in unlisted
    ]
    _check_contrasts(pairs, grouped, folder)
    if control:
        baseline = control_label(grouped.conditions, folder)
    baseline = _baseline(baseline, pairs, grouped, folder)
    # The planned margin is a size in the planned metric, and means nothing in another.
    metric = SYNONYMS.get(metric or "", metric)
    if record.plan and test.margin is None and metric in (None, record.plan.metric):
        test = replace(test, margin=record.plan.margin)
    absent = absent_runs(record, runs, grouped.not_counted)
    request = Request(baseline, test, metric, pairs, record, absent, unlisted, budget)
    return select(grouped, request)


def _check_contrasts(pairs: Sequence[PairOfLabels], grouped: RunsByCondition, folder: Path) -> None:
    """Raise ConfigurationError for an unknown condition, a pair named twice, and a campaign of one
    condition.
    """
    labels = list(grouped.conditions)
    for label in chain.from_iterable(pairs):
        if label not in labels:
            raise ConfigurationError(
                f"--contrast names {label}, which is not a condition of {folder}; they are"
                f" {', '.join(labels)}."
            )
    for other, pair in combinations(pairs, 2):
        if {*other} == {*pair}:
            raise ConfigurationError(
                f"--contrast {':'.join(pair)} compares two conditions for the second time; name"
                " each pair once."
            )
    if len(labels) == 1:
        raise ConfigurationError(
            f"{folder} has one condition, {labels[0]}, and a comparison takes two or more."
        )


def _baseline(
    given: str | None, pairs: Sequence[PairOfLabels], grouped: RunsByCondition, folder: Path
) -> str:
    """Return the baseline's label: the given one, else the second of the first pair, else the first
    condition. Raises ConfigurationError for an unknown label.
    """
    labels = list(grouped.conditions)
    if given is None:
        given = pairs[0][1] if pairs else next(iter(labels), None)
    if given is None or given not in labels:
        raise ConfigurationError(
            f"--baseline {given} is not a condition of {folder}; the conditions are"
            f" {', '.join(labels)}."
        )
    return given


def compare_runs(
    candidates: Sequence[StoredRun],
    baselines: Sequence[StoredRun],
    test: TestSettings,
    metric: str | None = None,
    budget: Budget | None = None,
) -> Comparison:
    """Compare the conditions of `candidates` with the condition of `baselines`, paired by
    seed.
    """
    ours, theirs = ({run.path.resolve() for run in side} for side in (candidates, baselines))
    if both := ours & theirs:
        raise ConfigurationError(f"{min(both)} is on both sides of --baseline; name it once.")
    campaigns = campaigns_of([*candidates, *baselines])
    grouped, base = (
        group_by_condition(*as_planned(side, campaigns)) for side in (candidates, baselines)
    )
    label, *more = base.conditions
    if more:
        raise ConfigurationError(
            f"the runs after --baseline have {len(base.conditions)} conditions"
            f" ({', '.join(base.conditions)}); give the runs of one."
        )
    runs = base.conditions[label]
    failed = base.failed.get(label, set())
    # One condition against itself, as with two versions of the code: folders tell the arms apart.
    if label in grouped.conditions:
        same, own = [run for run in candidates if run.condition == label], label
        label, name = (side[0].name + " ..." * (len(side) > 1) for side in (baselines, same))
        grouped.conditions[name] = grouped.conditions.pop(own)
        grouped.failed[name] = grouped.failed.pop(own, set())
    both_sides = RunsByCondition(
        {label: runs, **grouped.conditions},
        {label: failed, **grouped.failed},
        [*base.left_out, *grouped.left_out],
        base.to_come + grouped.to_come,
    )
    return replace(
        select(both_sides, Request(label, test, metric, budget=budget)),
        planned=absent_line([*candidates, *baselines], campaigns),
    )

"""Compare conditions with a baseline: the runs of a campaign, or runs given by folder. The notes on
the whole comparison are one sentence each.

The unit is the run. A contrast is the list of differences between two runs of one seed; `verdict`
draws the conclusion.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np

from retrain.analysis import statistics
from retrain.analysis.arms import (
    Arm,
    Overlap,
    RunsByCondition,
    control_label,
    evaluated_as,
    group_by_condition,
    mixed_code,
    mixed_keys,
)
from retrain.analysis.budget import Budget
from retrain.analysis.integrity import (
    absent_line,
    are_the_same,
    as_planned,
    campaigns_of,
    not_listed,
    problems_of,
)
from retrain.analysis.measures import SYNONYMS, Metric, trained_on_chance
from retrain.analysis.pairs import (
    Losses,
    Pairing,
    Pairs,
    TaskAggregate,
    TaskContrast,
    aggregate_tasks,
    contrast_tasks,
)
from retrain.analysis.planned import Absences, CampaignRecord, Look, planned_line
from retrain.analysis.power import seeds_to_conclude
from retrain.analysis.runs import MANIFEST, StoredRun, campaign_runs
from retrain.analysis.selection import PairOfLabels, Request, Selection, select
from retrain.analysis.statistics import Differences, Interval, TwoWay
from retrain.analysis.verdict import Conclusion, TestSettings, conclude
from retrain.errors import ConfigurationError
from retrain.records.terminal import counted

# -- notes -----------------------------------------------------------------------------------------


def comparison_notes(
    grouped: RunsByCondition,
    arms: Mapping[str, Arm],
    baseline: str,
    family: Sequence[Pairs],
    metric: Metric,
    test: TestSettings,
    *,
    asked: bool,
    budget: Budget | None = None,
) -> Iterator[str]:
    base = arms[baseline]
    runs = list(chain.from_iterable(arm.runs.values() for arm in arms.values()))
    if grouped.to_come:
        # An e-process stays valid at any number of looks.
        peeking = ""
        if test.rule != "evidence":
            peeking = " Peeking inflates the false-positive rate above alpha."
        yield f"Still to come: {counted(grouped.to_come, 'run')}.{peeking}"
    if metric.k is None and not asked:
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
    yield from _unequal_runs(arms, runs, budget)
    if metric.k is not None:
        yield from _held_out_notes(runs, arms)
    others = [arm for arm in arms.values() if arm is not base]
    yield from _unpaired_notes(base, others, family, test)


def _unequal_runs(
    arms: Mapping[str, Arm], runs: Sequence[StoredRun], budget: Budget | None
) -> Iterator[str]:
    """Yield sentences on differences in values that should be equal: code, keys, attempts,
    length.
    """
    for arm in arms.values():
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
    if len(ends) > 1 and budget:
        yield f"Within {budget} the runs took {ends[0]} to {ends[-1]} whole steps."
    elif len(ends) > 1:
        yield (
            f"The runs ended at different steps ({ends[0]} to {ends[-1]}), so they were trained for"
            " different lengths."
        )


def _unpaired_notes(
    base: Arm, others: Sequence[Arm], family: Sequence[Pairs], test: TestSettings
) -> Iterator[str]:
    lonely = {arm.label: [seed for seed in arm.values if seed not in base.values] for arm in others}
    parts = [f"{label} ({', '.join(map(str, seeds))})" for label, seeds in lonely.items() if seeds]
    if parts:
        yield (
            "Seeds without a run of the baseline count in the means but in no difference:"
            f" {'; '.join(parts)}."
        )
    compared = {arm.label for pairs in family for arm in (pairs.candidate, pairs.baseline)}
    unpaired = [arm.label for arm in others if arm.label not in compared]
    if unpaired:
        harder = ""
        if test.absent:
            harder = (
                " The evidence of the others is over all planned comparisons still, which makes"
                f" {1 / test.alpha:g} harder to reach (docs/comparing.md)."
            )
        yield (
            f"No run of {', '.join(unpaired)} has a partner in the baseline, so nothing is"
            f" concluded about it.{harder}"
        )


def _held_out_notes(runs: Sequence[StoredRun], arms: Mapping[str, Arm]) -> Iterator[str]:
    early = [run for run in runs if run.final_evaluation and run.final_evaluation.step < run.steps]
    if early:
        yield (
            f"{len(early)} of {len(runs)} runs trained on after their last held-out evaluation;"
            " [evaluation] at_end = true adds one after [training] max_steps, though not where"
            " max_hours came first."
        )
    unjudged = {label: arm.unjudged for label, arm in arms.items() if arm.unjudged}
    if unjudged:
        counts = ", ".join(
            f"{count:,} of {arms[label].answered:,} of {label}" for label, count in unjudged.items()
        )
        yield (
            f"{counted(sum(unjudged.values()), 'held-out answer')} could not be judged ({counts})."
            " Differences are over the problems judged in both runs of a pair, and a verdict holds"
            " with all unjudged answers counted against it."
        )


# -- comparisons -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ArmSummary:
    label: str
    runs: int
    """The runs that finished and have the metric."""
    failed: int
    collapsed: int
    mean: float | None
    sd: float | None
    """The standard deviation over the runs, ddof = 1."""
    unjudged: int
    """Held-out answers that the reward could not judge, of `answered`."""
    answered: int
    tokens: float | None
    """The tokens sampled in training, mean per run; None if no run recorded them."""
    hours: float | None
    """The hours of a run, mean per run."""
    tasks: TaskAggregate | None
    """The scores by task; None unless the held-out problems come from several tasks."""


@dataclass(frozen=True)
class Contrast:
    """One condition against another. Differences are candidate - baseline, in the metric's
    units.
    """

    condition: str
    baseline: str
    differences: Differences
    """Seed -> difference."""
    conclusion: Conclusion
    wide: Interval | None
    """The interval for new seeds and new problems; None without held-out problems."""
    parts: TwoWay | None
    """The sources of the spread of the differences; None without held-out problems."""
    pairing: Pairing | None
    losses: Losses | None
    tasks: TaskContrast | None
    """The contrast by task; None unless the held-out problems come from several tasks."""
    shared: Overlap
    same_runs: int
    """Pairs whose two runs are one, with equal numbers apart from the times."""


@dataclass(frozen=True)
class Comparison:
    metric: Metric
    judge: str
    """The reward that decides the metric, the same in all arms; "" for a metric that does not
    depend on a reward."""
    evaluated: str
    """The sampling of held-out answers in words; "" for a training metric."""
    problems: int
    """Held-out problems on which some pair has a difference; 0 for a training metric."""
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
    """A sentence that calls the comparison planned before the first run, or exploratory; ""
    without a plan."""
    looks: Sequence[Look] = ()
    """The looks of the campaign; empty unless the comparison follows the plan."""
    budget: Budget | None = None
    """The budget at which to compare runs; None compares them at their end."""
    grid: Sequence[str] = ()
    """The keys that [campaign.grid] varies, whose conditions get a rank."""

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
    absences = Absences.of(record, runs, grouped.not_counted, unlisted)
    request = Request(baseline, test, metric, pairs, record, absences, budget)
    return _compared(grouped, request)


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
    for place, pair in enumerate(pairs):
        if {*pair} in [{*other} for other in pairs[:place]]:
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
    # One condition against itself, as with two versions of the code: folders tell the arms apart.
    if label in grouped.conditions:
        same, own = [run for run in candidates if run.condition == label], label
        label, theirs = (side[0].name + " ..." * (len(side) > 1) for side in (baselines, same))
        grouped.conditions[theirs] = grouped.conditions.pop(own)
        grouped.failed[theirs] = grouped.failed.pop(own, set())
    both_sides = RunsByCondition(
        {label: runs, **grouped.conditions},
        {label: failed, **grouped.failed},
        [*base.left_out, *grouped.left_out],
        base.to_come + grouped.to_come,
    )
    return replace(
        _compared(both_sides, Request(label, test, metric, budget=budget)),
        planned=absent_line([*candidates, *baselines], campaigns),
    )


def _compared(grouped: RunsByCondition, request: Request) -> Comparison:
    selection = select(grouped, request)
    metric, test, arms = selection.metric, selection.test, selection.arms
    held_out, reference, record = metric.k is not None, selection.reference, request.record
    notes = comparison_notes(
        grouped,
        arms,
        request.baseline,
        selection.family,
        metric,
        test,
        asked=request.metric is not None,
        budget=request.budget,
    )
    return Comparison(
        metric=metric,
        judge=metric.judge(reference) if reference else "",
        evaluated=evaluated_as(reference) if reference and held_out else "",
        problems=max(pairs.problems for pairs in selection.family),
        test=test,
        baseline=request.baseline,
        arms=[_summary(arm, metric, 1 - test.alpha, request.budget) for arm in arms.values()],
        contrasts=_contrasts(selection, by_task=request.budget is None),
        to_come=grouped.to_come,
        left_out=selection.left_out,
        notes=[*selection.notes, *notes],
        planned=planned_line(record, selection.differing, request.absences) if record else "",
        looks=record.looks if record and test.rule == "evidence" else (),
        budget=request.budget,
        grid=record.grid if record else (),
    )


def _summary(arm: Arm, metric: Metric, confidence: float, budget: Budget | None) -> ArmSummary:
    values, seconds = list(arm.values.values()), _per_run(arm, "seconds")
    return ArmSummary(
        label=arm.label,
        runs=len(values),
        failed=len(arm.failed),
        collapsed=len(arm.collapsed),
        mean=statistics.mean(values) if values else None,
        sd=statistics.sample_sd(values) if len(values) > 1 else None,
        unjudged=arm.unjudged if metric.k is not None else 0,
        answered=arm.answered if metric.k is not None else 0,
        tokens=_per_run(arm, "tokens"),
        hours=None if seconds is None else seconds / 3600,
        tasks=aggregate_tasks(arm.runs, confidence) if metric.k == 1 and not budget else None,
    )


def _per_run(arm: Arm, name: str) -> float | None:
    """Return the mean of a number of summary.json; None if no run has it."""
    values = [run.summary.get(name) for run in arm.runs.values()]
    found = [value for value in values if isinstance(value, int | float)]
    if found:
        return float(np.mean(found))
    return None


def _contrasts(selection: Selection, *, by_task: bool) -> list[Contrast]:
    """Return one contrast per candidate, with p values adjusted over all of them."""
    family, metric, test = selection.family, selection.metric, selection.test
    size = len(family) + test.absent
    paired = [pairs.paired(test.alpha, size) for pairs in family]
    return [
        _contrast(pairs, conclusion, metric, test, by_task=by_task)
        for pairs, conclusion in zip(family, conclude(paired, test, metric.better), strict=True)
    ]


def _contrast(
    pairs: Pairs,
    conclusion: Conclusion,
    metric: Metric,
    test: TestSettings,
    *,
    by_task: bool,
) -> Contrast:
    confidence = 1 - test.alpha
    by_task = by_task and metric.k == 1 and len(pairs.runs) > 1
    return Contrast(
        condition=pairs.candidate.label,
        baseline=pairs.baseline.label,
        differences=pairs.differences,
        conclusion=conclusion,
        wide=pairs.wide_interval(confidence),
        parts=pairs.two_way(),
        pairing=pairs.pairing(),
        losses=pairs.losses(),
        tasks=contrast_tasks(pairs.runs, confidence) if by_task else None,
        shared=Overlap.of(pairs.runs),
        same_runs=are_the_same(pairs.runs),
    )

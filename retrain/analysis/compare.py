"""Compare conditions with a baseline: the runs of a campaign, or runs given by folder. The notes on
the whole comparison are one sentence each.

The unit is the run. A contrast is the list of differences between two runs of one seed; `verdict`
draws the conclusion.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from retrain.analysis.arms import (
    Arm,
    RunsByCondition,
    control_label,
    group_by_condition,
    mixed_code,
    mixed_keys,
)
from retrain.analysis.budget import Budget
from retrain.analysis.integrity import (
    absent_line,
    as_planned,
    campaigns_of,
    not_listed,
    problems_of,
)
from retrain.analysis.measures import SYNONYMS, trained_on_chance
from retrain.analysis.planned import CampaignRecord, MissingRuns, PairOfLabels, Request
from retrain.analysis.runs import MANIFEST, StoredRun, campaign_runs
from retrain.analysis.selection import Comparison, select
from retrain.analysis.verdict import TestSettings
from retrain.errors import ConfigurationError
from retrain.records.terminal import counted

# -- notes -----------------------------------------------------------------------------------------


def comparison_notes(found: Comparison, grouped: RunsByCondition, *, asked: bool) -> Iterator[str]:
    base, *others = found.arms
    runs = list(chain.from_iterable(arm.runs.values() for arm in found.arms))
    if grouped.to_come:
        # An e-process stays valid at any number of looks.
        peeking = ""
        if found.test.rule != "evidence":
            peeking = " Peeking inflates the false-positive rate above alpha."
        yield f"Still to come: {counted(grouped.to_come, 'run')}.{peeking}"
    if not found.metric.k and not asked:
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
    if len(ends) > 1 and found.budget:
        yield f"Within {found.budget} the runs took {ends[0]} to {ends[-1]} whole steps."
    elif len(ends) > 1:
        yield (
            f"The runs ended at different steps ({ends[0]} to {ends[-1]}), so they were trained for"
            " different lengths."
        )


def _unpaired_notes(found: Comparison, base: Arm, others: Sequence[Arm]) -> Iterator[str]:
    lonely = {arm.label: [seed for seed in arm.values if seed not in base.values] for arm in others}
    parts = [f"{label} ({', '.join(map(str, seeds))})" for label, seeds in lonely.items() if seeds]
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
    missing_runs = MissingRuns.of(record, runs, grouped.not_counted, unlisted)
    request = Request(baseline, test, metric, pairs, record, missing_runs, budget)
    return _with_notes(grouped, request)


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
        _with_notes(both_sides, Request(label, test, metric, budget=budget)),
        planned=absent_line([*candidates, *baselines], campaigns),
    )


def _with_notes(grouped: RunsByCondition, request: Request) -> Comparison:
    found = select(grouped, request)
    notes = comparison_notes(found, grouped, asked=request.metric is not None)
    return replace(found, notes=[*found.notes, *notes])

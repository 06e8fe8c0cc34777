"""Notes on a comparison as a whole, one sentence each."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from retrain.analysis.arms import Arm, RunsByCondition, mixed_keys
from retrain.analysis.likeness import mixed_code
from retrain.analysis.measures import Metric, trained_on_chance
from retrain.analysis.pairs import Pairs
from retrain.analysis.runs import StoredRun
from retrain.analysis.verdict import TestSettings
from retrain.records.terminal import counted


def comparison_notes(
    grouped: RunsByCondition,
    arms: Mapping[str, Arm],
    baseline: str,
    family: Sequence[Pairs],
    metric: Metric,
    test: TestSettings,
    *,
    asked: bool,
) -> Iterator[str]:
    base = arms[baseline]
    runs = list(chain.from_iterable(arm.runs.values() for arm in arms.values()))
    yield from (run.damage for run in runs if run.damage)
    if grouped.to_come:
        peeking = ""
        if test.rule != "evidence":
            peeking = " Peeking inflates the false-positive rate above alpha."
        yield f"Still to come: {counted(grouped.to_come, 'run')}.{peeking}"
    if metric.k is None and not asked:
        yield (
            "No run has a held-out accuracy, so the training correct rate stands in for it: it is"
            " measured on training problems while the model learns; [evaluation] at_end = true"
            " gives the better number."
        )
    if base.runs and all(map(trained_on_chance, base.runs.values())):
        yield (
            f"{base.label} is a control, trained on random rewards: a difference from it is what an"
            " informative reward adds to training as such."
        )
    yield from _unequal_runs(arms, runs)
    if metric.k is not None:
        yield from _held_out_notes(runs, arms)
    yield from _unpaired_notes(base, [arm for arm in arms.values() if arm is not base], family)


def _unequal_runs(arms: Mapping[str, Arm], runs: Sequence[StoredRun]) -> Iterator[str]:
    """How the runs differ in what should be equal: code, keys, attempts, length."""
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
        yield f"Tried again after a failure: {', '.join(again)}."
    ends = sorted({run.steps for run in runs})
    if len(ends) > 1:
        yield (
            f"The runs ended at different steps ({ends[0]} to {ends[-1]}), so they were trained for"
            " different lengths."
        )


def _unpaired_notes(base: Arm, others: Sequence[Arm], family: Sequence[Pairs]) -> Iterator[str]:
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
        yield (
            f"No run of {', '.join(unpaired)} has a partner in the baseline, so nothing is"
            " concluded about it."
        )


def _held_out_notes(runs: Sequence[StoredRun], arms: Mapping[str, Arm]) -> Iterator[str]:
    early = [run for run in runs if run.final_evaluation and run.final_evaluation.step < run.steps]
    if early:
        yield (
            f"{len(early)} of {len(runs)} runs trained on after their last held-out evaluation;"
            " [evaluation] at_end = true adds one."
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

"""Comparing conditions with a baseline, seed by seed: the runs of a campaign, or runs that are named.

The unit is the run: a contrast is the list of differences between runs of one seed. `verdict` says what follows from them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from retrain.analysis import statistics
from retrain.analysis.arms import (
    Arm,
    RunsByCondition,
    Shared,
    check_same_problems,
    control_label,
    differing_keys,
    group_by_condition,
    judged_by,
    measured,
)
from retrain.analysis.measures import Metric, choose_metric, trained_on_chance
from retrain.analysis.runs import StoredRun, campaign_runs
from retrain.analysis.tasks import TaskAggregate, TaskContrast, aggregate_tasks, contrast_tasks, problem_interval
from retrain.analysis.verdict import Conclusion, TestSettings, conclude
from retrain.errors import ConfigurationError


@dataclass(frozen=True)
class ArmSummary:
    label: str
    runs: int
    mean: float | None
    sd: float | None
    """Between runs, ddof = 1."""
    tasks: TaskAggregate | None
    """Where the held-out problems are of several tasks."""


@dataclass(frozen=True)
class Contrast:
    """One condition against the baseline. Differences are candidate - baseline, in the metric's units."""

    condition: str
    differences: Mapping[int, float]
    """By seed."""
    conclusion: Conclusion
    problem_interval: tuple[float, float] | None
    """With seeds, held-out problems and samples drawn anew, where there are held-out problems."""
    tasks: TaskContrast | None
    """Where the held-out problems are of several tasks."""
    shared: Shared
    differing_keys: Sequence[str]


@dataclass(frozen=True)
class Comparison:
    metric: Metric
    judge: str
    """The reward that decides the metric, the same in all arms; "" for a metric that no reward decides."""
    test: TestSettings
    baseline: str
    arms: Sequence[ArmSummary]
    """The baseline first."""
    contrasts: Sequence[Contrast]
    left_out: Sequence[str]
    notes: Sequence[str]

    @property
    def seeds_to_conclude(self) -> int:
        """Pairs that the whole family needs before any verdict but inconclusive is possible."""
        return statistics.seeds_to_reach(self.test.alpha, len(self.contrasts))


def compare_campaign(
    folder: Path, test: TestSettings, baseline: str | None = None, metric: str | None = None, *, control: bool = False
) -> Comparison:
    """Every condition of a campaign against one of them: the first unless `baseline` names it or `control` takes the random-reward one."""
    found = group_by_condition(campaign_runs(folder))
    labels = list(found.conditions)
    if control:
        baseline = control_label(found.conditions, folder)
    elif baseline is None and labels:
        baseline = labels[0]
    if baseline not in found.conditions:
        raise ConfigurationError(f"--baseline {baseline} is no condition of {folder}; the conditions are {', '.join(labels)}.")
    return _compare(found, baseline, found.conditions[baseline], test, metric)


def compare_runs(
    candidates: Sequence[StoredRun], baselines: Sequence[StoredRun], test: TestSettings, metric: str | None = None
) -> Comparison:
    """The conditions of some runs against the one condition of others, paired by seed."""
    both = {run.path.resolve() for run in candidates} & {run.path.resolve() for run in baselines}
    if both:
        raise ConfigurationError(f"{min(both)} is on both sides of --baseline; name it once.")
    found, base = group_by_condition(candidates), group_by_condition(baselines)
    if len(base.conditions) != 1:
        raise ConfigurationError(
            f"the runs of --baseline are of {len(base.conditions)} conditions ({', '.join(base.conditions)}); name one's."
        )
    ((label, runs),) = base.conditions.items()
    if label in found.conditions:
        label = f"{label} (baseline)"
    left_out = [*base.left_out, *found.left_out]
    both_sides = RunsByCondition({label: runs, **found.conditions}, left_out, base.to_come + found.to_come)
    return _compare(both_sides, label, runs, test, metric)


def _compare(
    found: RunsByCondition, baseline: str, base_runs: Mapping[int, StoredRun], test: TestSettings, metric_name: str | None
) -> Comparison:
    metric = choose_metric(metric_name, found.runs)
    check_sizes(test, metric)
    if metric.k is not None:
        check_same_problems(found.runs)
    left_out = list(found.left_out)
    judge = next((metric.judge(run) for run in base_runs.values()), "")
    alike = found.conditions
    if base_runs:
        alike = {label: judged_by(label, runs, metric, judge, left_out) for label, runs in alike.items()}
    base, *others = [measured(label, alike[label], metric, left_out) for label in dict.fromkeys((baseline, *alike))]
    paired = [arm for arm in others if any(seed in base.values for seed in arm.values)]
    if not paired:
        judged_apart = any(len(alike[label]) < len(runs) for label, runs in found.conditions.items())
        raise ConfigurationError(_no_pair(base, others, left_out) + (_one_judge(metric) if judged_apart else ""))
    return Comparison(
        metric=metric,
        judge=judge,
        test=test,
        baseline=baseline,
        arms=[_summary(arm, metric, 1 - test.alpha) for arm in (base, *others)],
        contrasts=_family(base, paired, metric, test),
        left_out=left_out,
        notes=[*_interim(found), *_notes(base, others, metric, asked=metric_name is not None)],
    )


def check_sizes(test: TestSettings, metric: Metric) -> None:
    """Raises ConfigurationError for a level, margin or effect outside its range."""
    for name, value, example in (("alpha", test.alpha, 0.05), ("power", test.power, 0.8)):
        if not 0 < value < 1:
            raise ConfigurationError(f"--{name} {value:g} is not between 0 and 1; use {example}.")
    for name, size in (("margin", test.margin), ("effect", test.effect)):
        if size is not None and not 0 < size < float("inf"):
            raise ConfigurationError(f"--{name} {size:g} is not above 0; give the size of a difference, such as 0.02.")
        if size is not None and metric.is_rate and size >= 1:
            raise ConfigurationError(
                f"--{name} {size:g} is no difference of {metric.name}, which lies between 0 and 1; two points are 0.02."
            )


def _one_judge(metric: Metric) -> str:
    """What to do where arms are judged by different rewards."""
    if metric.k is not None:
        return " Train all arms with one [evaluation] reward."
    return " Compare held-out accuracy instead: --metric pass@1, after [evaluation] at_end = true."


def _no_pair(base: Arm, others: Sequence[Arm], left_out: Sequence[str]) -> str:
    seeds = {arm.label: ", ".join(map(str, arm.values)) or "none" for arm in (base, *others)}
    has = "; ".join(f"{label}: {values}" for label, values in seeds.items())
    because = f" Left out: {' '.join(left_out)}" if left_out else ""
    return f"there is no pair to compare: no run that counts shares its seed with one of the baseline (seeds of {has}).{because}"


def _summary(arm: Arm, metric: Metric, confidence: float) -> ArmSummary:
    values = list(arm.values.values())
    return ArmSummary(
        label=arm.label,
        runs=len(values),
        mean=statistics.mean(values) if values else None,
        sd=statistics.sample_sd(values) if len(values) > 1 else None,
        tasks=aggregate_tasks(arm.runs, confidence) if metric.k == 1 else None,
    )


def _family(base: Arm, others: Sequence[Arm], metric: Metric, test: TestSettings) -> list[Contrast]:
    """One contrast an arm, its p values adjusted over all of them."""
    differences = [statistics.paired_differences(arm.values, base.values) for arm in others]
    conclusions = conclude([list(by_seed.values()) for by_seed in differences], test)
    return [
        _contrast(base, arm, by_seed, conclusion, metric, test)
        for arm, by_seed, conclusion in zip(others, differences, conclusions, strict=True)
    ]


def _contrast(
    base: Arm, arm: Arm, differences: Mapping[int, float], conclusion: Conclusion, metric: Metric, test: TestSettings
) -> Contrast:
    pairs = [(arm.runs[seed], base.runs[seed]) for seed in differences]
    problems = metric.k == 1 and len(pairs) > 1
    return Contrast(
        condition=arm.label,
        differences=differences,
        conclusion=conclusion,
        problem_interval=problem_interval(pairs, 1 - test.alpha) if problems else None,
        tasks=contrast_tasks(pairs, 1 - test.alpha) if problems else None,
        shared=Shared.of(pairs),
        differing_keys=differing_keys(pairs),
    )


def _interim(found: RunsByCondition) -> Iterator[str]:
    if found.to_come:
        runs = "1 run is" if found.to_come == 1 else f"{found.to_come} runs are"
        yield f"{runs} still to come: who looks again and again and stops at a verdict finds one by luck more often than alpha says."


def _notes(base: Arm, others: Sequence[Arm], metric: Metric, *, asked: bool) -> Iterator[str]:
    """What a reader must know before believing the numbers."""
    runs = [run for arm in (base, *others) for run in arm.runs.values()]
    if metric.k is None and not asked:
        yield (
            "No run has a held-out accuracy, so the training correct rate stands in for it: it is measured on the problems that "
            "were trained on, while learning; [evaluation] at_end = true gives the better number."
        )
    if base.runs and all(map(trained_on_chance, base.runs.values())):
        yield (
            f"{base.label} is a control, trained on random rewards: a difference from it is what a reward that knows the answers adds to "
            "training as such."
        )
    ends = sorted({run.steps for run in runs})
    if len(ends) > 1:
        yield f"The runs ended at different steps ({ends[0]} to {ends[-1]}): the comparison is of unequal training."
    if metric.k is not None:
        yield from _held_out_notes(runs)
    lonely = [f"{arm.label} ({', '.join(map(str, seeds))})" for arm in others if (seeds := [s for s in arm.values if s not in base.values])]
    if lonely:
        yield f"Seeds without a run of the baseline are in the means and in no difference: {'; '.join(lonely)}."
    unpaired = [arm.label for arm in others if not any(seed in base.values for seed in arm.values)]
    if unpaired:
        yield f"No run of {', '.join(unpaired)} has a partner in the baseline, so nothing is concluded about it."


def _held_out_notes(runs: Sequence[StoredRun]) -> Iterator[str]:
    early = [run for run in runs if run.final_evaluation and run.final_evaluation.step < run.steps]
    if early:
        yield f"{len(early)} of {len(runs)} runs trained on after their last held-out evaluation; [evaluation] at_end = true adds one."
    unjudged = sum(item.could_not_judge for run in runs if run.final_evaluation for item in run.final_evaluation.problems)
    if unjudged:
        yield f"{unjudged} held-out answers could not be judged and count neither as right nor as wrong."

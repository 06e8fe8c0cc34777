"""Compare conditions with a baseline: the runs of a campaign, or runs given by folder.

The unit is the run. A contrast is the list of differences between two runs of one seed; `verdict` draws the conclusion.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from retrain.analysis import statistics
from retrain.analysis.arms import (
    Arm,
    RunsByCondition,
    Shared,
    arm_of,
    check_same_problems,
    control_label,
    differing_keys,
    group_by_condition,
    judged_by,
)
from retrain.analysis.measures import Metric, choose_metric, trained_on_chance
from retrain.analysis.runs import StoredRun, campaign_runs
from retrain.analysis.tasks import TaskAggregate, TaskContrast, aggregate_tasks, contrast_tasks, problem_interval
from retrain.analysis.verdict import Conclusion, TestSettings, conclude
from retrain.errors import ConfigurationError
from retrain.records.printing import counted


@dataclass(frozen=True)
class ArmSummary:
    label: str
    runs: int
    mean: float | None
    sd: float | None
    """Over the runs, ddof = 1."""
    tasks: TaskAggregate | None
    """None unless the held-out problems come from several tasks."""


@dataclass(frozen=True)
class Contrast:
    """One condition against the baseline. Differences are candidate - baseline, in the metric's units."""

    condition: str
    differences: Mapping[int, float]
    """By seed."""
    conclusion: Conclusion
    problem_interval: tuple[float, float] | None
    """For new seeds, held-out problems and samples; None without held-out problems."""
    tasks: TaskContrast | None
    """None unless the held-out problems come from several tasks."""
    shared: Shared
    differing_keys: Sequence[str]


@dataclass(frozen=True)
class Comparison:
    metric: Metric
    judge: str
    """The reward that decides the metric, the same in all arms; "" for a metric that does not depend on a reward."""
    test: TestSettings
    baseline: str
    arms: Sequence[ArmSummary]
    """The baseline first."""
    contrasts: Sequence[Contrast]
    left_out: Sequence[str]
    notes: Sequence[str]

    @property
    def seeds_to_conclude(self) -> int:
        """Fewest pairs with which any contrast of the family can be significant."""
        return statistics.seeds_to_reach(self.test.alpha, len(self.contrasts))


def compare_campaign(
    folder: Path, test: TestSettings, baseline: str | None = None, metric: str | None = None, *, control: bool = False
) -> Comparison:
    """Every condition of a campaign against `baseline`, by default its first; `control` takes the one trained on random rewards."""
    grouped = group_by_condition(campaign_runs(folder))
    labels = list(grouped.conditions)
    if control:
        baseline = control_label(grouped.conditions, folder)
    elif baseline is None and labels:
        baseline = labels[0]
    if baseline not in grouped.conditions:
        raise ConfigurationError(f"--baseline {baseline} is no condition of {folder}; the conditions are {', '.join(labels)}.")
    return _compare(grouped, baseline, test, metric)


def compare_runs(
    candidates: Sequence[StoredRun], baselines: Sequence[StoredRun], test: TestSettings, metric: str | None = None
) -> Comparison:
    """The conditions of `candidates` against the one condition of `baselines`, paired by seed."""
    both = {run.path.resolve() for run in candidates} & {run.path.resolve() for run in baselines}
    if both:
        raise ConfigurationError(f"{min(both)} is on both sides of --baseline; name it once.")
    grouped, base = group_by_condition(candidates), group_by_condition(baselines)
    if len(base.conditions) != 1:
        raise ConfigurationError(
            f"the runs after --baseline have {len(base.conditions)} conditions ({', '.join(base.conditions)}); give the runs of one."
        )
    ((label, runs),) = base.conditions.items()
    if label in grouped.conditions:
        label = f"{label} (baseline)"
    left_out = [*base.left_out, *grouped.left_out]
    both_sides = RunsByCondition({label: runs, **grouped.conditions}, left_out, base.to_come + grouped.to_come)
    return _compare(both_sides, label, test, metric)


def _compare(grouped: RunsByCondition, baseline: str, test: TestSettings, metric_name: str | None) -> Comparison:
    metric = choose_metric(metric_name, grouped.runs)
    check_sizes(test, metric)
    if metric.k is not None:
        check_same_problems(grouped.runs)
    left_out = list(grouped.left_out)
    base_runs = grouped.conditions[baseline]
    judge = next((metric.judge(run) for run in base_runs.values()), "")
    alike = grouped.conditions
    if base_runs:
        alike = {label: judged_by(label, runs, metric, judge, left_out) for label, runs in alike.items()}
    base, *others = [arm_of(label, alike[label], metric, left_out) for label in dict.fromkeys((baseline, *alike))]
    paired = [arm for arm in others if any(seed in base.values for seed in arm.values)]
    if not paired:
        advice = ""
        if any(len(alike[label]) < len(runs) for label, runs in grouped.conditions.items()):  # judged by different rewards
            held_out = "Compare held-out accuracy instead: --metric pass@1, after [evaluation] at_end = true."
            advice = f" {held_out}" if metric.k is None else " Train all arms with the same [evaluation] reward."
        raise ConfigurationError(_no_pair(base, others, left_out) + advice)
    return Comparison(
        metric=metric,
        judge=judge,
        test=test,
        baseline=baseline,
        arms=[_summary(arm, metric, 1 - test.alpha) for arm in (base, *others)],
        contrasts=_family(base, paired, metric, test),
        left_out=left_out,
        notes=list(_notes(grouped, base, others, metric, asked=metric_name is not None)),
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
                f"--{name} {size:g} is not a possible difference in {metric.name}, which lies between 0 and 1; two points are 0.02."
            )


def _no_pair(base: Arm, others: Sequence[Arm], left_out: Sequence[str]) -> str:
    seeds = {arm.label: ", ".join(map(str, arm.values)) or "none" for arm in (base, *others)}
    found = "; ".join(f"{label}: {values}" for label, values in seeds.items())
    because = f" Left out: {' '.join(left_out)}" if left_out else ""
    return f"there is no pair to compare: no usable run shares its seed with a usable run of the baseline (seeds of {found}).{because}"


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
    """One contrast per arm; the p values are adjusted over all of them."""
    by_arm = [statistics.paired_differences(arm.values, base.values) for arm in others]
    conclusions = conclude([list(differences.values()) for differences in by_arm], test)
    contrasts = []
    for arm, differences, conclusion in zip(others, by_arm, conclusions, strict=True):
        pairs = [(arm.runs[seed], base.runs[seed]) for seed in differences]
        resampled = metric.k == 1 and len(pairs) > 1
        contrasts.append(
            Contrast(
                condition=arm.label,
                differences=differences,
                conclusion=conclusion,
                problem_interval=problem_interval(pairs, 1 - test.alpha) if resampled else None,
                tasks=contrast_tasks(pairs, 1 - test.alpha) if resampled else None,
                shared=Shared.of(pairs),
                differing_keys=differing_keys(pairs),
            )
        )
    return contrasts


# -- what a reader must know before believing the numbers ----------------------------------------------------------------


def _notes(grouped: RunsByCondition, base: Arm, others: Sequence[Arm], metric: Metric, *, asked: bool) -> Iterator[str]:
    if grouped.to_come:
        yield f"Still to come: {counted(grouped.to_come, 'run')}. Peeking inflates the false-positive rate above alpha."
    runs = [run for arm in (base, *others) for run in arm.runs.values()]
    if metric.k is None and not asked:
        yield (
            "No run has a held-out accuracy, so the training correct rate stands in for it: it is measured on training problems "
            "while the model learns; [evaluation] at_end = true gives the better number."
        )
    if base.runs and all(map(trained_on_chance, base.runs.values())):
        yield (
            f"{base.label} is a control, trained on random rewards: a difference from it is what an informative reward adds to "
            "training as such."
        )
    ends = sorted({run.steps for run in runs})
    if len(ends) > 1:
        yield f"The runs ended at different steps ({ends[0]} to {ends[-1]}), so they were trained for different lengths."
    if metric.k is not None:
        yield from _held_out_notes(runs)
    lonely = [f"{arm.label} ({', '.join(map(str, seeds))})" for arm in others if (seeds := [s for s in arm.values if s not in base.values])]
    if lonely:
        yield f"Seeds without a run of the baseline count in the means but in no difference: {'; '.join(lonely)}."
    unpaired = [arm.label for arm in others if not any(seed in base.values for seed in arm.values)]
    if unpaired:
        yield f"No run of {', '.join(unpaired)} has a partner in the baseline, so nothing is concluded about it."


def _held_out_notes(runs: Sequence[StoredRun]) -> Iterator[str]:
    early = [run for run in runs if run.final_evaluation and run.final_evaluation.step < run.steps]
    if early:
        yield f"{len(early)} of {len(runs)} runs trained on after their last held-out evaluation; [evaluation] at_end = true adds one."
    unjudged = sum(item.could_not_judge for run in runs if run.final_evaluation for item in run.final_evaluation.problems)
    if unjudged:
        yield f"{counted(unjudged, 'held-out answer')} could not be judged: counted neither as right nor as wrong."

"""The arms of a comparison: the finished runs of each condition, one per seed, and what the two runs of a pair have in common."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from retrain.analysis.measures import Metric, trained_on_chance
from retrain.analysis.runs import StoredRun
from retrain.config import TrainConfig
from retrain.config.keys import all_keys
from retrain.errors import ConfigurationError

_PROMPT_KEYS = ("training.batch_size", "training.max_examples", "model.model")


@dataclass(frozen=True)
class Arm:
    """The runs of one condition that have the metric, by seed."""

    label: str
    values: Mapping[int, float]
    """Seed -> the metric."""
    runs: Mapping[int, StoredRun]


@dataclass
class RunsByCondition:
    """Finished runs by condition and seed, conditions in the order of their first run, and a sentence for each run left out."""

    conditions: dict[str, dict[int, StoredRun]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    to_come: int = 0
    """Runs of a campaign that have not ended."""

    @property
    def runs(self) -> list[StoredRun]:
        return [run for by_seed in self.conditions.values() for run in by_seed.values()]


def group_by_condition(runs: Iterable[StoredRun]) -> RunsByCondition:
    """Raises ConfigurationError for two finished runs with the same condition and seed: a pair has one run of each arm."""
    grouped = RunsByCondition()
    for run in runs:
        by_seed = grouped.conditions.setdefault(run.condition, {})
        if run.unfinished:
            grouped.to_come += run.planned is not None and not run.failed
            grouped.left_out.append(f"{run.name} {run.unfinished}.")
        elif run.seed in by_seed:
            raise ConfigurationError(
                f"{by_seed[run.seed].path} and {run.path} are both {run.condition} with seed {run.seed}; name only one of them."
            )
        else:
            by_seed[run.seed] = run
    return grouped


def arm_of(label: str, runs: Mapping[int, StoredRun], metric: Metric, left_out: list[str]) -> Arm:
    """The runs that have the metric; each run without it adds a sentence to `left_out`."""
    values = {}
    for seed, run in runs.items():
        value = metric.of(run)
        if value is not None:
            values[seed] = value
        else:
            left_out.append(f"{run.name} has no {metric.name}.")
    return Arm(label, values, {seed: runs[seed] for seed in values})


def judged_by(label: str, runs: Mapping[int, StoredRun], metric: Metric, judge: str, left_out: list[str]) -> dict[int, StoredRun]:
    """The runs whose metric `judge` decides. The others are left out, with a sentence for each of their judges."""
    seeds_by_judge: dict[str, list[int]] = {}
    for seed, run in runs.items():
        seeds_by_judge.setdefault(metric.judge(run), []).append(seed)
    alike = seeds_by_judge.pop(judge, [])
    for other, seeds in seeds_by_judge.items():
        which = "" if len(seeds) == len(runs) else f" (seed{'' if len(seeds) == 1 else 's'} {', '.join(map(str, seeds))})"
        left_out.append(
            f"{label}{which} is judged by {other}, and the baseline by {judge}: {metric.name} means different things in the two, "
            "so they are not compared."
        )
    return {seed: runs[seed] for seed in alike}


def control_label(conditions: Mapping[str, Mapping[int, StoredRun]], place: Path) -> str:
    """The condition trained on random rewards. Raises ConfigurationError unless there is exactly one."""
    labels = [label for label, runs in conditions.items() if runs and all(map(trained_on_chance, runs.values()))]
    if len(labels) != 1:
        found = f"{len(labels)} ({', '.join(labels)})" if labels else "none"
        raise ConfigurationError(
            f'--control needs one condition with [reward] type = "random", and {place} has {found}; name the baseline with --baseline.'
        )
    return labels[0]


# -- what a pair has in common -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shared:
    """How many of the pairs saw the same prompts, and how many also drew the same sampling noise."""

    pairs: int
    prompts: int
    noise: int

    @classmethod
    def of(cls, pairs: Sequence[tuple[StoredRun, StoredRun]]) -> "Shared":
        prompts = [_same_prompts(one.config, other.config) for one, other in pairs]
        noise = [same and one.has_counter_noise and other.has_counter_noise for same, (one, other) in zip(prompts, pairs, strict=True)]
        return cls(len(pairs), sum(prompts), sum(noise))


def _same_prompts(one: TrainConfig, other: TrainConfig) -> bool:
    """For runs of one seed: the same data in batches of the same size, which back pressure would vary."""
    same_data = one.data == other.data and one.environment == other.environment
    fixed_batches = not (one.backpressure.enabled or other.backpressure.enabled)
    return same_data and fixed_batches and all(one.value(key) == other.value(key) for key in _PROMPT_KEYS)


def differing_keys(pairs: Sequence[tuple[StoredRun, StoredRun]]) -> list[str]:
    """The keys that change the training and differ between the runs of some pair."""
    keys = [key.path for key in all_keys() if not key.traits.own_to_a_run]
    return [key for key in keys if any(one.config.value(key) != other.config.value(key) for one, other in pairs)]


def check_same_problems(runs: Sequence[StoredRun]) -> None:
    """Raises ConfigurationError if two runs answered different held-out problems at their last evaluation."""
    asked = [(run, frozenset(item.example_id for item in run.final_evaluation.problems)) for run in runs if run.final_evaluation]
    for run, problems in asked[1:]:
        first, expected = asked[0]
        if problems != expected:
            raise ConfigurationError(
                f"{first.path} and {run.path} were evaluated on different held-out problems ({len(expected)} and {len(problems)}, "
                f"{len(expected & problems)} shared), so their accuracies cannot be compared; use --metric correct_rate, "
                "or give the runs the same [evaluation] section."
            )

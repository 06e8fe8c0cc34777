"""The arms of a comparison: the finished runs of each condition, one for each seed, and what the runs of a pair have in common."""

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
    label: str
    values: Mapping[int, float]
    """Seed -> the metric, for the runs that have it."""
    runs: Mapping[int, StoredRun]


@dataclass
class RunsByCondition:
    """Runs by condition, in the order in which the conditions came, and one sentence for each run that was left out."""

    conditions: dict[str, dict[int, StoredRun]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    to_come: int = 0
    """Runs of a campaign that are planned or going on."""

    @property
    def runs(self) -> list[StoredRun]:
        return [run for by_seed in self.conditions.values() for run in by_seed.values()]


def group_by_condition(runs: Iterable[StoredRun]) -> RunsByCondition:
    """Raises ConfigurationError for two finished runs of one condition and seed, since a pair needs one of each."""
    found = RunsByCondition()
    for run in runs:
        by_seed = found.conditions.setdefault(run.condition, {})
        if run.unfinished:
            found.to_come += run.planned is not None and not run.failed
            found.left_out.append(f"{run.name} {run.unfinished}.")
        elif run.seed in by_seed:
            raise ConfigurationError(
                f"{by_seed[run.seed].path} and {run.path} are two runs of {run.condition} with seed {run.seed}; name one of them."
            )
        else:
            by_seed[run.seed] = run
    return found


def measured(label: str, runs: Mapping[int, StoredRun], metric: Metric, left_out: list[str]) -> Arm:
    """An arm with the metric of each run; a run without it is left out and said."""
    values = {}
    for seed, run in runs.items():
        value = metric.of(run)
        if value is not None:
            values[seed] = value
        else:
            left_out.append(f"{run.name} has no {metric.name}.")
    return Arm(label, values, {seed: runs[seed] for seed in values})


def judged_by(label: str, runs: Mapping[int, StoredRun], metric: Metric, judge: str, left_out: list[str]) -> dict[int, StoredRun]:
    """The runs in which `judge` decides the metric; the others are left out, in a sentence for each judge that they had instead."""
    others: dict[str, list[int]] = {}
    for seed, run in runs.items():
        if metric.judge(run) != judge:
            others.setdefault(metric.judge(run), []).append(seed)
    for found, seeds in others.items():
        which = "" if len(seeds) == len(runs) else f" (seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))})"
        left_out.append(
            f"{label}{which} is judged by {found}, and the baseline by {judge}: {metric.name} does not mean the same in both, "
            "so they are not compared."
        )
    return {seed: run for seed, run in runs.items() if metric.judge(run) == judge}


def control_label(conditions: Mapping[str, Mapping[int, StoredRun]], place: Path) -> str:
    """The condition that was trained on random rewards. Raises ConfigurationError unless there is exactly one."""
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
    """Given one seed: the same data in batches of one size. Back pressure changes the size as the machine pleases."""
    fixed = not (one.backpressure.enabled or other.backpressure.enabled)
    same = one.data == other.data and one.environment == other.environment
    return fixed and same and all(one.value(key) == other.value(key) for key in _PROMPT_KEYS)


def differing_keys(pairs: Sequence[tuple[StoredRun, StoredRun]]) -> list[str]:
    """The keys in which the runs of some pair differ, beside seeds, paths and what does not change the training."""
    keys = [key.path for key in all_keys() if not key.traits.own_to_a_run]
    return [key for key in keys if any(one.config.value(key) != other.config.value(key) for one, other in pairs)]


def check_same_problems(runs: Sequence[StoredRun]) -> None:
    """Raises ConfigurationError where two runs were not asked the same held-out problems at their last evaluation."""
    asked = [(run, frozenset(item.example_id for item in run.final_evaluation.problems)) for run in runs if run.final_evaluation]
    for run, problems in asked[1:]:
        first, expected = asked[0]
        if problems != expected:
            raise ConfigurationError(
                f"{first.path} and {run.path} were evaluated on different held-out problems ({len(expected)} and {len(problems)}, "
                f"{len(expected & problems)} of them shared), so their accuracies do not compare; use --metric correct_rate, "
                "or run them with one [evaluation] section."
            )

"""Sort runs into the arms of a comparison: the finished runs of each condition, one per seed, and
the runs without a result. The module also finds the differences between the two runs of a pair:
prompts, noise, configuration keys, and the recorded environments (environment.json).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, starmap
from pathlib import Path
from typing import Any

import numpy as np

from retrain.analysis import statistics
from retrain.analysis.held_out import Answers
from retrain.analysis.integrity import repeated_numbers
from retrain.analysis.measures import Metric, trained_on_chance
from retrain.analysis.runs import Pair, RunsBySeed, StoredRun, seed_ranges, seeds_words, table_of
from retrain.config.keys import all_keys
from retrain.config.names import source_task
from retrain.config.schema import Evaluation, Training
from retrain.errors import ConfigurationError
from retrain.system import Json, grouped

# -- are two runs alike ----------------------------------------------------------------------------


_PROMPT_KEYS = ("training.batch_size", "training.max_examples", "model.model")
_RECORDED = {
    "retrain": "retrain",
    "python": "Python",
    "platform": "platform",
    "cpu": "processor",
    "instructions": "instructions of the processor",
    "threads": "threads",
    "device": "device",
    "device_name": "device",
    "git": "code revision",
    "data_sha256": "training data",
    "traces_sha256": "traces",
    "heldout_sha256": "held-out problems",
    "model_sha256": "files of the model",
    "engine": "engine",
    "backend": "backend",
}
"""Entries of environment.json that results can depend on, and their names."""
_NEWER = frozenset({"instructions", "heldout_sha256", "traces_sha256"})
"""Entries that older versions do not record, or that a run without [sft] lacks. Their absence is
not a difference.
"""


@dataclass(frozen=True)
class Overlap:
    """Data and noise that the two runs of a pair share. It counts the pairs with the same prompts
    and the pairs that also drew the same sampling noise, and names the other differences.
    """

    pairs: int
    prompts: int
    noise: int
    samplers: Sequence[str]
    """Samplers that chose the prompts of some run by its rewards."""
    unrecorded: int
    """Pairs with a run that did not record its data, so the prompts are unknown."""
    differing_keys: Sequence[str]
    """Keys that change the training and differ between the runs of some pair."""
    environment: Sequence[str]
    """Differences between the recorded environments of some pair, in words."""

    @property
    def is_same(self) -> bool:
        """True if no key and no recorded value differs: an A/A comparison."""
        return self.prompts == self.pairs > 0 and not self.differing_keys and not self.environment

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> "Overlap":
        same = [pair for pair in pairs if _same_prompts(*pair)]
        samplers = {run.config.data.sampler for run in chain.from_iterable(pairs)}
        differing = chain.from_iterable(starmap(differing_environment, pairs))
        return cls(
            pairs=len(pairs),
            prompts=len(same),
            noise=sum(all(run.has_counter_noise for run in pair) for pair in same),
            samplers=sorted(samplers - {"shuffle"}),
            unrecorded=sum(not all(map(_data, pair)) for pair in pairs),
            differing_keys=differing_keys(pairs),
            environment=[*dict.fromkeys(differing)],
        )


def _data(run: StoredRun) -> Any:
    """Return the hash of the training data that a run recorded: ids, prompts and references in the
    source's order.
    """
    return run.environment.get("data_sha256")


def _same_prompts(one: StoredRun, other: StoredRun) -> bool:
    """True if two runs of one seed saw the same prompts. They need the same recorded data, in the
    shuffle's order, in batches of the same size, which back pressure would vary.
    """
    ours, theirs = one.config, other.config
    return (
        ours.data.sampler == theirs.data.sampler == "shuffle"
        and bool(_data(one))
        and _data(one) == _data(other)
        and ours.environment == theirs.environment
        and not (ours.backpressure.enabled or theirs.backpressure.enabled)
        and all(ours.value(key) == theirs.value(key) for key in _PROMPT_KEYS)
    )


def differing_keys(pairs: Sequence[Pair]) -> list[str]:
    """Return the keys that change the training and differ between the runs of some pair."""
    keys = [key.path for key in all_keys() if not key.traits.own_to_a_run]
    return [
        key
        for key in keys
        if any(one.config.value(key) != other.config.value(key) for one, other in pairs)
    ]


def mixed_values(values: Mapping[int, Any]) -> str:
    """Return the seeds that differ in value, such as "seeds 1 to 4 and 5 to 8"; "" if all values
    are equal.
    """
    groups = grouped((repr(values[seed]), seed) for seed in sorted(values))
    if len(groups) < 2:
        return ""
    return f"seeds {' and '.join(map(seed_ranges, groups.values()))}"


def mixed_code(label: str, runs: RunsBySeed) -> Iterator[str]:
    """Yield a sentence for each part of the code, and one for the model, that differs between the
    runs of one arm. The values come from environment.json.
    """
    found = {
        "started from different files of the model": {
            seed: sha256
            for seed, run in runs.items()
            if (sha256 := run.environment.get("model_sha256"))
        },
        "ran on different revisions of retrain": {
            seed: run.code.get("revision") for seed, run in runs.items()
        },
    }
    plugins = {seed: table_of(run.code, "plugins") for seed, run in runs.items()}
    for name in sorted({*chain.from_iterable(plugins.values())}):
        found[f"ran with different files of the plugin {name}"] = {
            seed: own.get(name) for seed, own in plugins.items()
        }
    for words, values in found.items():
        if seeds := mixed_values(values):
            yield f"{label} {words}: {seeds} differ."


def differing_environment(
    one: StoredRun, other: StoredRun, steps: range | None = None
) -> Iterator[str]:
    """Yield each difference between two recorded environments, such as "torch (2.12.0, 2.13.0)". It
    covers the sessions that took `steps`, by default all.
    """
    steps = steps or range(max(one.steps, other.steps, 1))
    began = {step for step, _ in (*one.resumes, *other.resumes) if step in steps}
    # A resumed run may go on in another environment.
    found = (_differing_at(one, other, step) for step in sorted({steps.start, *began}))
    yield from dict.fromkeys(chain.from_iterable(found))


def _differing_at(one: StoredRun, other: StoredRun, step: int) -> Iterator[str]:
    both = ours, theirs = one.environment_at(step), other.environment_at(step)
    for name, shown in _unequal(ours, theirs, _RECORDED).items():
        if name in _NEWER and ours and theirs and not (name in ours and name in theirs):
            continue
        # Two hashes side by side, or two tables, tell a reader nothing: the name alone is given.
        is_long = name.endswith("sha256") or any(isinstance(own.get(name), dict) for own in both)
        yield _RECORDED[name] if is_long else shown
    code, others = table_of(ours, "code"), table_of(theirs, "code")
    yield from _unequal(code, others, {"revision": "retrain's revision"}).values()
    for name in _unequal(*(table_of(own, "plugins") for own in (code, others))):
        # If only one configuration names it, the keys differ, not the code.
        if len({f'"{name}"' in run.config.model_dump_json() for run in (one, other)}) == 1:
            yield f"the plugin {name}"
    yield from _unequal(*(table_of(own, "packages") for own in both)).values()


def _unequal(ours: Json, theirs: Json, names: Mapping[str, str] | None = None) -> dict[str, str]:
    """Map each name whose two values differ to a phrase with both values. The default is all
    names.
    """
    found = {}
    for name in names or sorted({*ours, *theirs}):
        values = ours.get(name), theirs.get(name)
        if values[0] != values[1]:
            shown = ", ".join("not recorded" if each is None else str(each) for each in values)
            found[name] = f"{names[name] if names else name} ({shown})"
    return found


# -- arms ------------------------------------------------------------------------------------------


_COLLAPSED = 0.5


def recorded_numbers(runs: Iterable[StoredRun], name: str) -> list[float]:
    """Return a number of summary.json, of each run that has it."""
    return [value for run in runs if isinstance(value := run.summary.get(name), int | float)]


@dataclass(frozen=True)
class Arm:
    """The runs of one condition that have the metric, by seed."""

    label: str
    metric: Metric
    values: Mapping[int, float]
    """Seed -> the metric."""
    runs: RunsBySeed
    failed: frozenset[int] = frozenset()
    """Seeds whose runs failed."""
    left_out: tuple[str, ...] = ()
    """A sentence for each run without the metric, and for each collapsed run."""
    collapsed: frozenset[int] = frozenset()
    """Seeds whose runs have no pair because they collapsed."""

    @property
    def lost(self) -> frozenset[int]:
        """Seeds whose runs failed or collapsed, which have no pair."""
        return self.failed | self.collapsed

    @property
    def loses_too_many(self) -> bool:
        """True if more than a quarter of the runs failed or collapsed."""
        return 4 * len(self.lost) > len(self.lost) + len(self.values)

    def without_collapsed(self) -> "Arm":
        """Leave out the runs whose rate is below `_COLLAPSED` of the median of the arm, from three
        runs on.
        """
        if len(self.values) < 3 or not self.metric.is_rate:
            return self
        bar = _COLLAPSED * float(np.median([*self.values.values()]))
        fallen = {seed for seed, value in self.values.items() if value < bar}
        words = (
            f"{self.runs[seed].name} collapsed (below half of the median of {self.label}), so its"
            " pair is left out."
            for seed in sorted(fallen)
        )
        return replace(
            self,
            values={seed: value for seed, value in self.values.items() if seed not in fallen},
            runs={seed: run for seed, run in self.runs.items() if seed not in fallen},
            left_out=(*self.left_out, *words),
            collapsed=frozenset(fallen),
        )

    @property
    def mean(self) -> float | None:
        return statistics.mean([*self.values.values()]) if self.values else None

    @property
    def sd(self) -> float | None:
        """The standard deviation over the runs, ddof = 1."""
        return statistics.sample_sd([*self.values.values()]) if len(self.values) > 1 else None

    def per_run(self, name: str) -> float | None:
        """Return the mean of a number of summary.json; None if no run has it."""
        known = recorded_numbers(self.runs.values(), name)
        return float(np.mean(known)) if known else None

    @property
    def hours(self) -> float | None:
        """The hours of a run, mean per run."""
        seconds = self.per_run("seconds")
        return seconds and seconds / 3600

    @property
    def _answers(self) -> list[Answers]:
        return [run.answers for run in self.runs.values() if self.metric.k and run.answers]

    @property
    def unjudged(self) -> int:
        """The number of held-out answers that the reward could not judge; 0 for a training
        metric.
        """
        return sum(int(found.unjudged.sum()) for found in self._answers)

    @property
    def answered(self) -> int:
        """The number of held-out answers, judged or not."""
        return self.unjudged + sum(int(found.judged.sum()) for found in self._answers)


@dataclass
class RunsByCondition:
    """Finished runs by condition and seed, with conditions in the order of their first run, and a
    sentence for each other run.
    """

    conditions: dict[str, dict[int, StoredRun]] = field(default_factory=dict)
    failed: dict[str, set[int]] = field(default_factory=dict)
    """Condition -> seeds whose runs failed."""
    left_out: list[str] = field(default_factory=list)
    to_come: int = 0
    """Runs of a campaign that have not ended."""
    not_counted: set[Path] = field(default_factory=set)
    """Folders of runs that differ from the plan of their campaign."""

    @property
    def runs(self) -> list[StoredRun]:
        return list(chain.from_iterable(by_seed.values() for by_seed in self.conditions.values()))


def group_by_condition(
    runs: Iterable[StoredRun], problems: Mapping[Path, str] | None = None
) -> RunsByCondition:
    """Sort runs by condition and seed. `problems` says why some do not count (folder -> predicate).

    Raises ConfigurationError for two finished runs of one condition and seed: a pair has one run of
    each.
    """
    grouped = RunsByCondition()
    for run in runs:
        # Add the condition first: a condition without a run that counts is still an arm.
        by_seed = grouped.conditions.setdefault(run.condition, {})
        if run.skipped:
            continue
        if problems and run.path in problems:
            grouped.not_counted.add(run.path)
            grouped.left_out.append(f"{run.name} {problems[run.path]}, so it is not counted.")
            continue
        if run.unfinished:
            grouped.to_come += run.planned is not None and not run.failed
            grouped.left_out.append(f"{run.name} {run.unfinished}.")
            if run.failed:
                grouped.failed.setdefault(run.condition, set()).add(run.seed)
            continue
        run.check()
        if run.seed in by_seed:
            raise ConfigurationError(
                f"{by_seed[run.seed].path} and {run.path} are both {run.condition} with seed"
                f" {run.seed}; name only one."
            )
        by_seed[run.seed] = run
    # Copies show only among all runs.
    for same in repeated_numbers(grouped.runs):
        names = " and ".join(run.name for run in same)
        grouped.left_out.append(
            f"{names} hold the same numbers in every step, which two seeds do not give: copies, so"
            " none is counted."
        )
        for run in same:
            grouped.not_counted.add(run.path)
            del grouped.conditions[run.condition][run.seed]
    return grouped


def arm_of(
    label: str,
    runs: RunsBySeed,
    metric: Metric,
    failed: Iterable[int] = (),
) -> Arm:
    """Return the runs that have the metric."""
    values = {seed: value for seed, run in runs.items() if (value := metric.of(run)) is not None}
    return Arm(
        label,
        metric,
        values,
        {seed: runs[seed] for seed in values},
        frozenset(failed) - set(values),
        tuple(f"{runs[seed].name} has no {metric.name}." for seed in runs if seed not in values),
    )


def control_label(conditions: Mapping[str, RunsBySeed], place: Path) -> str:
    """Return the condition trained on random rewards. Raises ConfigurationError unless there is
    exactly one.
    """
    labels = [
        label
        for label, runs in conditions.items()
        if runs and all(map(trained_on_chance, runs.values()))
    ]
    if len(labels) != 1:
        found = f"{len(labels)} ({', '.join(labels)})" if labels else "none"
        raise ConfigurationError(
            f'--control needs one condition with [reward] type = "random", and {place} has {found};'
            " name the baseline with --baseline."
        )
    return labels[0]


# -- runs that were measured alike -----------------------------------------------------------------


def parted(
    runs: RunsBySeed, words: Callable[[StoredRun], str], expected: str
) -> tuple[RunsBySeed, list[tuple[str, str]]]:
    """Split the runs by `words`: first the runs that match `expected`, then the seeds ("" for all)
    and the description of each other group.
    """
    groups = grouped((words(run), seed) for seed, run in runs.items())
    alike = {seed: runs[seed] for seed in groups.pop(expected, ())}
    return alike, [
        ("" if len(seeds) == len(runs) else f" ({seeds_words(seeds)})", other)
        for other, seeds in groups.items()
    ]


def evaluated_as(run: StoredRun) -> str:
    """Return the sampling of a run's held-out answers in words. Runs with the same sampling get the
    same words.
    """
    return evaluation_words(run.config.evaluation, run.config.training)


def evaluation_words(evaluation: Evaluation, training: Training) -> str:
    """Describe the sampling of held-out answers, such as "temperature 1, 4 samples, at most 1,024
    tokens". It describes tasks that differ one by one, each after its name.
    """
    parts = {
        source_task(source): _words_of(part, training)
        for source, part in zip(evaluation.sources, evaluation.parts, strict=True)
    }
    if len(set(parts.values())) == 1:
        return next(iter(parts.values()))
    return "; ".join(f"{task}: {words}" for task, words in parts.items())


def _words_of(evaluation: Evaluation, training: Training) -> str:
    way = evaluation.over(training)
    temperature, tokens = way.temperature, way.max_tokens
    kept = []  # The keys that truncate the sampled distribution.
    for name, off in {"top_k": 0.0, "top_p": 1.0, "min_p": 0.0}.items():
        value = getattr(way, name)
        if temperature and value != off:
            kept.append(f"{name} {value:g}")
    samples = f"{evaluation.samples} sample{'' if evaluation.samples == 1 else 's'}"
    return ", ".join([f"temperature {temperature:g}", *kept, samples, f"at most {tokens:,} tokens"])


def check_one_condition(label: str, runs: RunsBySeed) -> None:
    """Raise ConfigurationError if the runs of an arm trained with different values of a key that no
    resume may change.
    """
    different = [f"{path} differs between {seeds}" for path, seeds in mixed_keys(runs, fixed=True)]
    if different:
        raise ConfigurationError(
            f"{label} is not one condition: {'; '.join(different)}; give the runs of one condition."
        )


def mixed_keys(runs: RunsBySeed, *, fixed: bool) -> Iterator[tuple[str, str]]:
    """Yield each key that changes the training and differs within an arm, with the seeds. `fixed`
    selects the keys that may not change at a resume.
    """
    for key in all_keys():
        # Evaluation and length have sentences of their own (evaluated_alike, comparison_notes).
        apart = key.section == "evaluation" or key.path == "training.max_steps"
        if key.traits.own_to_a_run or key.traits.may_change_at_resume == fixed or apart:
            continue
        seeds = mixed_values({seed: run.config.value(key.path) for seed, run in runs.items()})
        if seeds:
            yield key.path, seeds


def check_same_problems(runs: Iterable[StoredRun]) -> None:
    """Raise ConfigurationError if two runs answered different held-out problems at their last
    evaluation: other ids, or other texts or references under the same ids.
    """
    asked = [(run, run.answers.ids) for run in runs if run.answers]
    # Folders of 0.9 have no fingerprint, so compare the others with a folder that has it.
    asked.sort(key=lambda each: not each[0].heldout_sha256)
    for run, problems in asked[1:]:
        first, expected = asked[0]
        how = ""
        if problems != expected:
            shared = len({*expected} & {*problems})
            how = f"{len(expected)} and {len(problems)}, {shared} shared"
        elif run.heldout_sha256 not in (None, first.heldout_sha256):
            how = "the same ids with other texts or references"
        if how:
            raise ConfigurationError(
                f"{first.path} and {run.path} were evaluated on different held-out problems"
                f" ({how}), so their accuracies cannot be compared; use --metric correct_rate, or"
                " give the runs the same [evaluation] source and files."
            )

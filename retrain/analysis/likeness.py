"""Compares the two runs of a pair: prompts, noise, configuration keys, and the recorded
environments (environment.json).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from retrain.analysis.runs import StoredRun, seeds_words
from retrain.config.keys import all_keys

Pair = tuple[StoredRun, StoredRun]

_PROMPT_KEYS = ("training.batch_size", "training.max_examples", "model.model")
_RECORDED = {
    "retrain": "retrain",
    "python": "Python",
    "platform": "platform",
    "cpu": "processor",
    "threads": "threads",
    "device": "device",
    "device_name": "device",
    "git": "code revision",
    "data_sha256": "training data",
    "engine": "engine",
    "backend": "backend",
}
"""Entries of environment.json on which results can depend, and what to call them."""


@dataclass(frozen=True)
class Shared:
    """How many of the pairs saw the same prompts, how many also drew the same sampling noise, and
    what else differed.
    """

    pairs: int
    prompts: int
    noise: int
    samplers: tuple[str, ...]
    """Samplers that chose the prompts of some run by what its rewards showed."""
    unrecorded: int
    """Pairs of which a run did not record its data, so that nobody knows."""
    differing_keys: tuple[str, ...]
    """Keys that change the training and differ between the runs of some pair."""
    environment: tuple[str, ...]
    """What differs between the recorded environments of some pair, in words."""

    @property
    def is_same(self) -> bool:
        """True if no key and nothing recorded differs: an A/A comparison."""
        return self.prompts == self.pairs > 0 and not self.differing_keys and not self.environment

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> "Shared":
        prompts = [_same_prompts(one, other) for one, other in pairs]
        noise = [
            same and one.has_counter_noise and other.has_counter_noise
            for same, (one, other) in zip(prompts, pairs, strict=True)
        ]
        return cls(
            pairs=len(pairs),
            prompts=sum(prompts),
            noise=sum(noise),
            samplers=tuple(sorted({chosen_prompts(run) for pair in pairs for run in pair} - {""})),
            unrecorded=sum(not (_data(one) and _data(other)) for one, other in pairs),
            differing_keys=tuple(differing_keys(pairs)),
            environment=tuple(
                dict.fromkeys(
                    chain.from_iterable(differing_environment(one, other) for one, other in pairs)
                )
            ),
        )


def _data(run: StoredRun) -> Any:
    """The hash of the training data that a run recorded: ids, prompts and references in the
    source's order.
    """
    return run.environment.get("data_sha256")


def _same_prompts(one: StoredRun, other: StoredRun) -> bool:
    """True if two runs of one seed saw the same prompts: the same recorded data in batches of the
    same size, which back pressure would vary, and in the shuffle's order.
    """
    if chosen_prompts(one) or chosen_prompts(other):
        return False
    if not _data(one) or _data(one) != _data(other):
        return False
    fixed_batches = not (one.config.backpressure.enabled or other.config.backpressure.enabled)
    same_environment = one.config.environment == other.config.environment
    return (
        same_environment
        and fixed_batches
        and all(one.config.value(key) == other.config.value(key) for key in _PROMPT_KEYS)
    )


def chosen_prompts(run: StoredRun) -> str:
    """The sampler that chose the prompts by their rewards; "" for the shuffle."""
    sampler = run.config.data.sampler
    return "" if sampler == "shuffle" else sampler


def differing_keys(pairs: Sequence[Pair]) -> list[str]:
    """The keys that change the training and differ between the runs of some pair."""
    keys = [key.path for key in all_keys() if not key.traits.own_to_a_run]
    return [
        key
        for key in keys
        if any(one.config.value(key) != other.config.value(key) for one, other in pairs)
    ]


def mixed_values(runs: Mapping[int, StoredRun], value: Callable[[StoredRun], Any]) -> str:
    """The seeds that differ in a value, such as "seeds 1 to 4 and 5 to 8"; "" if all are alike."""
    groups: dict[str, list[int]] = {}
    for seed in sorted(runs):
        groups.setdefault(repr(value(runs[seed])), []).append(seed)
    if len(groups) < 2:
        return ""
    return (
        f"seeds {' and '.join(seeds_words(seeds).partition(' ')[2] for seeds in groups.values())}"
    )


def mixed_code(label: str, runs: Mapping[int, StoredRun]) -> Iterator[str]:
    """A sentence for each part of the code, as environment.json records it, in which the runs of
    one arm differ.
    """
    seeds = mixed_values(runs, lambda run: run.code.revision)
    if seeds:
        yield f"{label} ran on different revisions of retrain: {seeds} differ."
    for name in sorted(set(chain.from_iterable(run.code.plugins for run in runs.values()))):
        if seeds := mixed_values(runs, lambda run, name=name: run.code.plugins.get(name)):  # type: ignore[misc]
            yield f"{label} ran with different files of the plugin {name}: {seeds} differ."


def differing_environment(one: StoredRun, other: StoredRun) -> Iterator[str]:
    """Yield each difference between two recorded environments in words such as "torch (2.12.0,
    2.13.0)".
    """
    ours, theirs = one.environment, other.environment
    for name, words in _RECORDED.items():
        if ours.get(name) != theirs.get(name):
            is_short = name != "data_sha256" and not any(
                isinstance(recorded.get(name), dict) for recorded in (ours, theirs)
            )
            yield (
                f"{words} ({_shown(ours.get(name))}, {_shown(theirs.get(name))})"
                if is_short
                else words
            )
    if one.code.revision != other.code.revision:
        yield f"retrain's revision ({_shown(one.code.revision)}, {_shown(other.code.revision)})"
    for name in sorted({*one.code.plugins, *other.code.plugins}):
        if one.code.plugins.get(name) != other.code.plugins.get(name):
            yield f"the plugin {name}"
    ours, theirs = _packages(ours), _packages(theirs)
    for name in sorted({*ours, *theirs}):
        if ours.get(name) != theirs.get(name):
            yield f"{name} ({_shown(ours.get(name))}, {_shown(theirs.get(name))})"


def _packages(environment: dict[str, Any]) -> dict[str, Any]:
    packages = environment.get("packages")
    return packages if isinstance(packages, dict) else {}


def _shown(value: Any) -> str:
    if value is None:
        return "not recorded"
    return str(value)

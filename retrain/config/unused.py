"""Sentences about keys that were set and have no effect, over a whole file."""

from collections.abc import Collection, Iterator

from retrain.config.effects import reason_unused
from retrain.config.keys import all_keys
from retrain.config.load import arms
from retrain.config.names import builtin_names
from retrain.config.schema import BACKEND_OPTIONS, TrainConfig
from retrain.system import toml_value

MAX_DEFAULTS_NAMED = 8
"""Keys at their default up to which each unused one has a sentence."""


def unused_keys(config: TrainConfig) -> list[str]:
    """One sentence for each key that was set and has no effect: in this run, or in no run of the
    campaign.

    Of keys that are written at their default, more than MAX_DEFAULTS_NAMED share one sentence,
    since a file may hold every key.
    """
    if not any(condition.sets_keys for condition in config.conditions):
        return [sentence for _, sentence in _unused(config)]
    conditions = config.conditions
    found = [
        list(_unused(arm, condition.sets))
        for arm, condition in zip(arms(config), conditions, strict=True)
    ]
    # A grid without conditions makes them of the file's own algorithm, so the file is read.
    read: tuple[str, ...] = ()
    if config.campaign is not None and not config.campaign.conditions:
        read = ("algorithm.advantage_mode", "algorithm.transform_mode")
    everywhere = [
        sentence
        for path, sentence in found[0]
        if path not in read and all(any(sentence == other for _, other in arm) for arm in found)
    ]
    return everywhere + [
        f'Condition "{condition.label}": {sentence}'
        for condition, arm in zip(conditions, found, strict=True)
        for path, sentence in arm
        if path in condition.sets and sentence not in everywhere
    ]


def _unused(config: TrainConfig, apart: Collection[str] = ()) -> Iterator[tuple[str, str]]:
    """Yield the path of each unused key and a sentence about it; the paths `apart` have one of
    their own even at their default.
    """
    at_default: list[tuple[str, str]] = []
    for key in all_keys():
        reason = reason_unused(config, key)
        if reason:
            value = config.value(key.path)
            sentence = f"[{key.section}] {key.name} = {toml_value(value)} is unused here: {reason}."
            if value == key.default and key.path not in apart:
                at_default.append((key.path, sentence))
            else:
                yield key.path, sentence
    yield from _unused_options(config)
    if len(at_default) <= MAX_DEFAULTS_NAMED:
        yield from at_default
    else:
        first = at_default[0][1].replace(" is unused here: ", ": ")
        yield (
            "",
            (
                f"{len(at_default)} keys that are written at their default are unused here; the"
                f" first is {first}"
            ),
        )


def _unused_options(config: TrainConfig) -> Iterator[tuple[str, str]]:
    if config.kind == "squeeze" or config.backend.backend not in builtin_names("backend"):
        return
    owners = {
        name: owner for owner, model in BACKEND_OPTIONS.items() for name in model.model_fields
    }
    for name, value in config.backend.options.items():
        owner, backend = owners[name], config.backend.backend
        shown = f"[backend.options] {name} = {toml_value(value)} is unused here"
        if backend != owner:
            yield (
                "backend.options",
                f'{shown}: it is an option of {owner}, and backend is "{backend}".',
            )
        elif name.startswith("zmq_") and config.backend.prime_rl.transport == "filesystem":
            yield "backend.options", f'{shown}: transport is "filesystem".'

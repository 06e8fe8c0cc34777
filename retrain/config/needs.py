"""Needs and offers: a key says what it needs to act, and a backend or an engine what it lacks.

A key names its needs in its trait `needs`, such as "teacher". If the part lacks a need, retrain
refuses a value other than the default. If the part decides about a need by itself, the key has no
effect. A value that a part cannot follow is a problem of that part. Loading, the start of a run,
`explain` and `retrain backends` ask here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from retrain.config.keys import Key, all_keys
from retrain.config.moving import moves_learner
from retrain.config.names import builtin_names, canonical_uncertainty, part_class
from retrain.system import listed, toml_value

if TYPE_CHECKING:
    from retrain.config.schema import TrainConfig

Outcome = Literal["used", "unused", "refused"]
"""For "unused" the start prints a sentence; for "refused" it exits with code 2."""
Problems = Iterator[tuple[str, str]]
"""(key, why the part cannot follow its value and what to do), the second without a full stop."""
_PLUGIN_KEYS = {
    "loss": "loss.mode",
    "correction": "loss.correction",
    "aggregation": "loss.aggregation",
}
_OWN_NAMES = ("backend.backend", "inference.engine")


@dataclass(frozen=True)
class Part:
    """A backend or an engine, as the keys of a configuration see it."""

    kind: Literal["backend", "engine"]
    name: str
    declared: Any
    """Its capabilities."""

    @property
    def facts(self) -> Any:
        """Return the class of a built-in part; of a plugin the base class, which lacks nothing."""
        return part_class(self.kind, self.name)

    @cached_property
    def lacks(self) -> dict[str, str]:
        """Map each need that it lacks to the reason, and to what the user can do."""
        implied = _backend_lacks if self.kind == "backend" else _engine_lacks
        return {**implied(self), **self.facts.lacks}

    def outcome(self, key: Key, config: "TrainConfig") -> tuple[Outcome, str]:
        """Return what becomes of a key at another value than its default, and why."""
        outcomes: tuple[tuple[Outcome, Mapping[str, str]], ...] = (
            ("refused", self.lacks),
            ("unused", self.facts.decides(config)),
        )
        found = (
            (outcome, reasons[word])
            for outcome, reasons in outcomes
            for word in key.traits.needs.split()
            if word in reasons
        )
        return next(found, ("used", ""))

    def problems(self, config: "TrainConfig") -> Problems:
        """Yield each key that it refuses at its value, and why."""
        refused = set()
        for key in all_keys():
            lacking = [word for word in key.traits.needs.split() if word in self.lacks]
            if lacking:
                refused.add(key.path)
                if config.is_set(key.path) and config.value(key.path) != key.default:
                    yield key.path, self.lacks[lacking[0]]
        implied = _backend_problems if self.kind == "backend" else _engine_problems
        for path, because in (*implied(self, config), *self.facts.problems(config)):
            if path not in refused:
                yield path, because


def _backend_lacks(part: Part) -> dict[str, str]:
    declared, sampler = part.declared, part.declared.sampler
    return _missing(
        {
            "entropy_bonus": (declared.entropy, "its learner has no entropies; leave it at 0"),
            "kept_sets": (sampler is None or sampler.kept_set, _NO_KEPT_SETS),
            "loss": (declared.losses, "its trainer has its own loss settings; leave it out here"),
            "shards": (
                part.facts.in_process,
                "it holds the model in its own way; leave it false",
            ),
            "start": (
                declared.scores_reference,
                'its learner cannot score by the weights of the start; leave it "base"',
            ),
            "supervision": (
                declared.supervises,
                "it takes no supervised steps; leave [sft] out",
            ),
            "teacher": (
                declared.scores_reference,
                'its learner cannot score tokens as a teacher; leave it empty, or use "local"',
            ),
            "token_advantages": (
                declared.per_token_advantages,
                "it takes one advantage per completion; leave it at 0",
            ),
        }
    )


def _engine_lacks(part: Part) -> dict[str, str]:
    return _missing(
        {
            "all_weights": (
                part.declared.in_process,
                'its servers load adapters; leave it "lora", or use engine = "pytorch"',
            ),
            "kept_sets": (part.declared.kept_set, _NO_KEPT_SETS),
            "shards": (
                part.facts.supports_split,
                "only the pytorch engine samples from a sharded model; leave it false",
            ),
        }
    )


_NO_KEPT_SETS = (
    "the loss is over the kept tokens, and it does not report their number; leave it off, or"
    ' use engine = "pytorch"'
)


def _missing(offers: dict[str, tuple[Any, str]]) -> dict[str, str]:
    return {word: because for word, (offered, because) in offers.items() if not offered}


def _backend_problems(part: Part, config: "TrainConfig") -> Problems:
    declared, loss = part.declared, config.loss
    here = declared.losses or builtin_names("loss")  # refused by any name where it has none
    if loss.mode in builtin_names("loss") and loss.mode not in here:
        losses = listed(map(toml_value, declared.losses), "or")
        yield "loss.mode", f"it does not train with this loss; use {losses}"
    if declared.loss_reduction == "mean":
        if loss.aggregation != "token_mean":
            yield "loss.aggregation", 'it divides by the tokens of the batch; use "token_mean"'
        if config.algorithm.surprisal_mask_denominator == "kept":
            yield (
                "algorithm.surprisal_mask_denominator",
                'it divides by all sampled tokens; use "all"',
            )
    for kind, path in _PLUGIN_KEYS.items():
        said = kind == "aggregation" and declared.loss_reduction == "mean"
        if not (declared.own_loss or said) and config.value(path) not in builtin_names(kind):
            yield path, "it takes no plugin here; use a built-in name"
    if not declared.moves_settings and moves_learner(config):
        yield (
            "schedule.points",
            'its learner keeps the settings of its start; schedule other keys, or use "local"',
        )
    if not part.facts.in_process and not (declared.sampler and declared.sampler.entropy):
        yield from _entropies_asked_for(config)


def _engine_problems(part: Part, config: "TrainConfig") -> Problems:
    declared = part.declared
    reasons = {
        "it cannot load a new adapter, so it would always sample from the untrained model": (
            declared.in_process or declared.adapter_reload
        ),
        "it returns text without token ids, and encoding it again may give other tokens": (
            declared.token_ids_out
        ),
        "it returns no log-probs, and the loss needs them for its ratio": (
            declared.logprobs != "none"
        ),
    }
    missing = [because for because, offered in reasons.items() if not offered]
    if missing:
        yield "inference.engine", "; ".join([*missing, "use another engine"])
    if not declared.entropy:
        yield from _entropies_asked_for(config)
    raw = declared.logprobs == "raw" and config.training.temperature != 1
    if raw and config.algorithm.teacher:
        yield (
            "algorithm.teacher",
            "its log-probs are those at temperature 1; leave it empty, or set temperature = 1",
        )
    if not part.facts.supports_split and len(config.backend.device_list) > 1:
        yield (
            "backend.devices",
            "only the pytorch engine samples on a device of its own; use one device",
        )


def _entropies_asked_for(config: "TrainConfig") -> Problems:
    """Problems of a sampler that records no entropies. A transform's parameters may override
    [algorithm] uncertainty_kind.
    """
    path, kind = "algorithm.uncertainty_kind", config.algorithm.uncertainty_kind
    if "uncertainty_kind" in config.algorithm.transform_params:
        path, kind = "algorithm.transform_params", config.algorithm.uncertainty
    if canonical_uncertainty(kind) == "shannon_entropy":
        because = (
            "it returns log-probs only, without entropies; use surprisal or predictive_variance, or"
            ' backend = "local" with engine = "pytorch"'
        )
        yield path, because


def built_in(kind: Literal["backend", "engine"], name: str) -> Part:
    """Return the built-in part of this name."""
    return Part(kind, name, part_class(kind, name).capabilities)


def parts_of(config: "TrainConfig", backend: Any = None, engine: Any = None) -> Iterator[Part]:
    """Yield the backend, and the engine where the backend leaves sampling to one. For a plugin, the
    caller must give the declared capabilities.
    """
    names: dict[Literal["backend", "engine"], tuple[str, Any]] = {
        "backend": (config.backend.backend, backend)
    }
    if part_class("backend", config.backend.backend).in_process:
        names["engine"] = (config.inference.engine, engine)
    for kind, (name, declared) in names.items():
        if declared is not None:
            yield Part(kind, name, declared)
        elif name in builtin_names(kind):
            yield built_in(kind, name)


def refusals(
    config: "TrainConfig", backend: Any = None, engine: Any = None
) -> Iterator[tuple[str, str]]:
    """Yield (key, sentence without its full stop) for each reason for which the backend or the
    engine refuses a key at its value.
    """
    for part in parts_of(config, backend, engine):
        for path, because in dict.fromkeys(part.problems(config)):
            if config.reads(path):
                section, _, name = path.partition(".")
                owner = "" if path in _OWN_NAMES else f' with {part.kind} = "{part.name}"'
                value = toml_value(config.value(path))
                yield path, f"[{section}] {name} = {value}{owner}: {because}"

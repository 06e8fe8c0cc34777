"""Declarations of engines and backends: their capabilities, and the problems and notes that follow
for a configuration.

This module builds neither an engine nor a backend. A plugin declares its capabilities in its class,
so this module imports the plugin. A table lists the built-in classes, so this module loads no model
library. Versions come from the metadata of the installed packages.
"""

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Literal

from retrain.backends.base import BACKENDS, Backend, BackendCapabilities, backend_kind
from retrain.backends.losses import LOSSES
from retrain.backends.own_loss import OwnFunction, own_functions
from retrain.config.keys import all_keys
from retrain.config.names import table
from retrain.config.needs import Outcome, built_in, refusals
from retrain.errors import ConfigurationError
from retrain.inference_engine.base import (
    ENGINES,
    EngineCapabilities,
    InferenceEngine,
    engine_kind,
)
from retrain.install import install_hint
from retrain.plugins import KINDS, load_plugin, refuse_unknown_params
from retrain.system import toml_value

if TYPE_CHECKING:
    from retrain.config import TrainConfig


def engine_class(config: "TrainConfig") -> type[InferenceEngine]:
    """Return the class that `[inference] engine` names.

    Raises ConfigurationError for a plugin that does not load or declares nothing.
    """
    if config.inference.engine in ENGINES:
        return engine_kind(config.inference.engine)
    found: type[InferenceEngine] = load_plugin("engine", config.inference.engine, config)
    _check_declaration(
        found, EngineCapabilities, f'[inference] engine = "{config.inference.engine}"'
    )
    return found


def backend_class(config: "TrainConfig") -> type[Backend]:
    """Return the class that `[backend] backend` names."""
    if config.backend.backend in BACKENDS:
        return backend_kind(config.backend.backend)
    found: type[Backend] = load_plugin("backend", config.backend.backend, config)
    _check_declaration(
        found, BackendCapabilities, f'[backend] backend = "{config.backend.backend}"'
    )
    return found


def _check_declaration(found: type, wanted: type, where: str) -> None:
    if not isinstance(getattr(found, "capabilities", None), wanted):
        raise ConfigurationError(
            f"{where} declares no capabilities; give the class an attribute capabilities ="
            f" {wanted.__name__}(...)."
        )


def declared_engine(config: "TrainConfig") -> EngineCapabilities | None:
    """Return the sampler of a backend that brings its own; None if a plugin does not say."""
    if not backend_kind(config.backend.backend).in_process:
        return declared_backend(config).sampler
    return engine_class(config).capabilities


def declared_backend(config: "TrainConfig") -> BackendCapabilities:
    """Return the capabilities of `[backend] backend`, built in or a plugin."""
    found = backend_class(config).capabilities
    in_process = backend_kind(config.backend.backend).in_process
    ahead = in_process and len(config.backend.device_list) > 1
    if ahead:
        return replace(found, samples_ahead=True)
    return found


def incapable(config: "TrainConfig") -> list[str]:
    """Return one sentence for each thing that the configuration asks for and its engine or backend
    cannot do.
    """
    backend, engine = declared_backend(config), declared_engine(config)
    problems = [f"{sentence}." for _, sentence in refusals(config, backend, engine)]
    problems += per_token_refusals(config, backend)
    try:
        problems += _loss_problems(config, backend)
    except ConfigurationError as error:
        problems += error.problems
    return [*problems, *_missing_address(config)]


def per_token_refusals(config: "TrainConfig", backend: Any) -> list[str]:
    """Return one sentence for each condition that gives the tokens of a completion different
    advantages, for a backend that takes only one. A plugin transform or algorithm counts as
    token-varying.
    """
    if backend.per_token_advantages:
        return []
    return [
        f'The condition "{condition.label}" needs per-token advantages, and backend'
        f' "{config.backend.backend}" takes one per completion; use transform_mode = "none".'
        for condition in config.conditions
        if condition.modes[1] != "none"
    ]


def _loss_problems(config: "TrainConfig", backend: BackendCapabilities) -> Iterator[str]:
    """Prove the plugins of [loss] on a small batch, and check the parameters of built-in ones.

    Raises ConfigurationError for a plugin that does not load or lacks a property.
    """
    loss, where = config.loss, f'backend "{config.backend.backend}"'
    names = {kind: config.value(KINDS[kind].path) for kind in ("loss", "correction", "aggregation")}
    own = {kind: name for kind, name in names.items() if name not in table(kind)}
    if own and not backend.own_loss:
        return  # refused by name
    if backend.losses and "loss" not in own:
        yield from _parameter_problems(config)
    learner = backend_kind(config.backend.backend)
    served = learner.served_losses
    here = served is not None and backend.losses and loss.mode not in served
    if (own or here) and importlib.util.find_spec("torch") is None:
        kind, name = next(iter({**own, "loss": loss.mode}.items()))
        yield (
            f'{KINDS[kind].key} = "{name}" needs torch, which this environment lacks; pip'
            " install torch, or use another."
        )
        return
    if not own:
        return
    from retrain.backends.proof import proof_warnings  # torch comes with it

    has = {"entropy": backend.entropy, "reference": learner.has_reference}
    for one in own_functions(config):
        for name, there in has.items():
            if one.declares(f"needs_{name}") and not there:
                yield (
                    f"{one.where} reads tokens.{name}, which {where} does not have; use backend ="
                    ' "local".'
                )
    proof_warnings(config)


def _parameter_problems(config: "TrainConfig") -> Iterator[str]:
    loss = config.loss
    refuse_unknown_params("loss", loss.mode, LOSSES[loss.mode].parameters, config)
    for param, value in loss.params.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            yield f"[loss] params {param} = {toml_value(value)} must be a number above 0."


def loss_notes(config: "TrainConfig") -> list[str]:
    """Return one sentence on each plugin of [loss]: its proved properties and its declarations, or
    its fault.
    """
    functions = own_functions(config)
    if not functions:
        return []
    from retrain.backends.proof import has_wrong_sign, proof_warnings  # torch comes with it

    warnings = proof_warnings(config)
    notes = [warnings.get(one.kind) or f"{one.where} {_loss_words(one)}." for one in functions]
    notes += [
        f"{one.where} makes tokens with a positive advantage less probable: is its sign meant?"
        " retrain minimizes what it returns."
        for one in functions
        if one.kind == "loss" and one.kind not in warnings and has_wrong_sign(one)
    ]
    return notes


def _loss_words(own: OwnFunction) -> str:
    if own.kind != "loss":
        return "is a plugin, tried on a small batch"
    parts = {
        "finite": True,
        "one gradient for all micro-batches": True,
        "none where every advantage is 0": not own.declares("own_term"),
        "a term of its own where the advantage is 0": own.declares("own_term"),
        "reads whole sequences": own.declares("sequence_level"),
        "reads entropies": own.declares("needs_entropy"),
        "reads the base model's log-probs": own.declares("needs_reference"),
    }
    return f"is a plugin, proved on a small batch: {_those_that_hold(parts)}"


def _missing_address(config: "TrainConfig") -> Iterator[str]:
    engine = config.inference.engine
    needed = backend_kind(config.backend.backend).in_process and engine_kind(engine).needs_address
    if needed and not config.inference.urls:
        yield (
            f'[inference] engine = "{engine}" needs the address of its server; set [inference] url,'
            " such as http://127.0.0.1:8000."
        )


def capability_notes(config: "TrainConfig") -> Iterator[str]:
    """Return lines that a run prints about an engine or a backend that does less than the local
    ones, one sentence each.
    """
    backend, engine = declared_backend(config), declared_engine(config)
    yield from loss_notes(config)
    if not backend.synchronous_loss:
        yield (
            f'[backend] backend = "{config.backend.backend}" reports a placeholder for the loss:'
            " read the rewards instead."
        )
    if not backend.exact_resume:
        yield (
            f'[backend] backend = "{config.backend.backend}" does not resume byte for byte: a'
            " resumed run differs from a straight one."
        )
    local = backend_kind(config.backend.backend).in_process
    if local:
        sampler = f'[inference] engine = "{config.inference.engine}"'
    else:
        sampler = f'[backend] backend = "{config.backend.backend}"'
    if engine and engine.noise == "none":
        yield (
            f"{sampler} draws its own random numbers, so runs with one seed share only their"
            " prompts, and a run does not repeat exactly."
        )
    if engine and not engine.token_ids_in:
        yield f"{sampler} takes prompts as text, so each must encode back to its own ids."
    if engine and local and is_raw(engine, config.training.temperature):
        yield (
            f"{sampler} returns log-probs before the temperature, so the learner recomputes"
            f" them at {config.training.temperature:g} in two more forward passes per step."
            " Surprisals and logprob_diff_mean are at temperature 1."
        )


def is_raw(engine: EngineCapabilities, temperature: float) -> bool:
    """Return True if the engine returns log-probs before the temperature, and the temperature is
    not 1.
    """
    return engine.logprobs == "raw" and temperature != 1


def engine_words(engine: EngineCapabilities) -> str:
    """Say in a few words what an engine declares, for `explain`."""
    given = {
        "log-probs of the sampled distribution": engine.logprobs == "sampled",
        "raw log-probs": engine.logprobs == "raw",
        "shared noise": engine.noise == "counter",
        "entropies": engine.entropy,
        "kept sets": engine.kept_set,
        "prefix cache": engine.prefix_cache,
        "n per request": engine.n,
    }
    place = "in this process" if engine.in_process else "external server"
    return _those_that_hold({place: True} | given)


def backend_words(backend: BackendCapabilities) -> str:
    """Say in a few words what a backend declares, for `explain`."""
    given = {
        "per-token advantages": backend.per_token_advantages,
        "synchronous loss": backend.synchronous_loss,
        "exact resume": backend.exact_resume,
        "entropy": backend.entropy,
        f"losses {', '.join(backend.losses)}": bool(backend.losses),
        "your own losses": backend.own_loss,
        "scheduled settings": backend.moves_settings,
        "teachers": backend.scores_reference,
        "samples a step ahead": backend.samples_ahead,
    }
    return _those_that_hold(given)


def _those_that_hold(claims: Mapping[str, bool]) -> str:
    return ", ".join(words for words, holds in claims.items() if holds)


# -- the list of the built-in ones -----------------------------------------------------------------


Kind = Literal["backend", "engine"]


BACKEND_SECTIONS = ("backend", "model", "training", "optimizer", "lora", "loss", "inference")
"""The sections with keys that a backend may refuse or decide about."""
ENGINE_SECTIONS = ("inference",)


@dataclass(frozen=True)
class KeyOutcome:
    """The effect of one key at a value other than its default."""

    key: str
    """As "section.key"."""
    use: Outcome
    because: str


@dataclass(frozen=True)
class Entry:
    """One engine or backend."""

    kind: Kind
    name: str
    what: str
    packages: tuple[str, ...]
    """Distributions that it runs on: here, or for a server where that runs."""
    install: str
    """A command, or a sentence."""
    verified: str
    """Against what its tests run. contract: a stand-in written from the documented API."""

    @property
    def capabilities(self) -> BackendCapabilities | EngineCapabilities:
        part = backend_kind(self.name) if self.kind == "backend" else engine_kind(self.name)
        return part.capabilities

    @property
    def words(self) -> str:
        """Its capabilities in a few words."""
        declared = self.capabilities
        if isinstance(declared, BackendCapabilities):
            return backend_words(declared)
        return engine_words(declared)

    @property
    def installed(self) -> dict[str, str | None]:
        """Its packages in this environment."""
        return {name: _version(name) for name in self.packages}

    @property
    def keys(self) -> list[KeyOutcome]:
        """The outcome of every key of its sections, in the order of the schema."""
        from retrain.config import TrainConfig

        part, defaults = built_in(self.kind, self.name), TrainConfig()
        sections = BACKEND_SECTIONS if self.kind == "backend" else ENGINE_SECTIONS
        keys = (key for key in all_keys() if key.section in sections)
        return [KeyOutcome(key.path, *part.outcome(key, defaults)) for key in keys]

    def to_json(self) -> dict[str, Any]:
        more = {"installed": self.installed, "capabilities": asdict(self.capabilities)}
        return asdict(self) | more | {"keys": [asdict(row) for row in self.keys]}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def catalog() -> Iterator[Entry]:
    """Yield the built-in backends, then the engines."""
    kinds: dict[Kind, dict[str, type[Backend | InferenceEngine]]] = {
        "backend": {name: backend_kind(name) for name in BACKENDS},
        "engine": {name: engine_kind(name) for name in ENGINES},
    }
    for kind, parts in kinds.items():
        for name, part in parts.items():
            about = part.about
            install = about.install or install_hint(about.extra)
            yield Entry(kind, name, about.what, about.packages, install, about.verified)

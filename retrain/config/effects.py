"""One table of effects: what becomes of a key at its value, under each kind of run, backend and
engine.

A row says that keys are used, left to `retrain serve`, unused or refused, and because of what. The
first row of a table that holds for a key is its effect. Traits of keys (`section.Traits`) and the
capabilities that backends and engines declare generate the rows that they imply. Loading, the start
of a run, `explain`, `retrain backends` and the documents all read these rows.
"""

import importlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain, takewhile
from typing import Any, Literal

from retrain.config.judging import judging_rewards
from retrain.config.keys import Key, all_keys
from retrain.config.moving import may_be_positive, moves_learner
from retrain.config.names import (
    builtin_names,
    canonical_uncertainty,
    fixed_aggregation,
    is_data_location,
    part_class,
    replaces_modes,
    table,
    transforms_with,
)
from retrain.config.rules import EVALUATION_SECTIONS, is_read, modes_of, transforms_of
from retrain.config.schema import Backend, TrainConfig
from retrain.config.section import Applicability
from retrain.errors import ConfigurationError
from retrain.system import listed, toml_value

Outcome = Literal["used", "served", "unused", "refused"]
"""served: a setting of the server, which `retrain serve` passes on; a run cannot change it. unused:
said at the start. refused: exit 2."""
Test = Callable[[TrainConfig], bool]

BACKEND_SECTIONS = ("backend", "model", "training", "optimizer", "lora", "loss", "inference")
"""Every key of these has a row for every built-in backend."""
ENGINE_SECTIONS = ("inference",)
"""The same for engines, with the local backend."""


@dataclass(frozen=True)
class Effect:
    """The outcome for some keys, and why."""

    keys: tuple[str, ...]
    """ "section.key", or "section.*"."""
    outcome: Outcome
    because: str = ""
    """Ends the sentence that names the key and its value; for a refused key it also says what to
    do."""
    when: Test | None = None
    """None: always."""
    values: tuple[Any, ...] = ()
    """The row holds for these values alone; empty: for every value, but a refused row lets a key be
    written at its default."""
    but: tuple[str, ...] = ()
    """Keys of a "section.*" that the row is not about."""
    refuses_default: bool = False
    """The default itself does what the row refuses, so it is judged even where it is unset."""

    @cached_property
    def paths(self) -> frozenset[str]:
        """Every key that the row is about, written out."""
        named = set(chain.from_iterable(_keys_of(name) for name in self.keys))
        return frozenset(named.difference(self.but))

    def covers(self, path: str) -> bool:
        return path in self.paths


@cache
def _keys_of(name: str) -> tuple[str, ...]:
    """The keys that "section.*" stands for; any other name stands for itself."""
    section, _, rest = name.partition(".")
    if rest == "*":
        return tuple(key.path for key in all_keys() if key.section == section)
    return (name,)


Rows = tuple[Effect, ...]


class Table(Rows):
    """Rows in their order. Each load asks for every key, so the rows of a key are gathered once."""

    @cached_property
    def _by_key(self) -> dict[str, list[Effect]]:
        found = defaultdict[str, list[Effect]](list)
        for row in self:
            for path in row.paths:
                found[path].append(row)
        return found

    @cached_property
    def may_refuse(self) -> frozenset[str]:
        """The keys that a row refuses, whatever else it asks for."""
        return frozenset[str]().union(*(row.paths for row in self if row.outcome == "refused"))

    def that_hold(self, config: TrainConfig, path: str) -> Iterator[Effect]:
        """The rows about a key that hold for its value, in their order."""
        for row in self._by_key.get(path, ()):
            held = not row.values or config.value(path) in row.values
            if held and (row.when is None or row.when(config)):
                yield row


def used(*keys: str) -> Effect:
    return Effect(keys, "used")


def served(*keys: str, because: str, when: Test | None = None) -> Effect:
    return Effect(keys, "served", because, when)


def unused(*keys: str, because: str, when: Test | None = None, but: tuple[str, ...] = ()) -> Effect:
    return Effect(keys, "unused", because, when, but=but)


def refused(
    *keys: str, because: str, when: Test | None = None, values: tuple[Any, ...] = ()
) -> Effect:
    return Effect(keys, "refused", because, when, values)


# -- kinds of runs, and keys that depend on each other ---------------------------------------------
def squeezes_remote_adapter(config: TrainConfig) -> bool:
    """Return True for a squeeze job whose adapter is stored by a Tinker service."""
    return config.kind == "squeeze" and config.squeeze.adapter_path.startswith("tinker://")


def _no_transform_with(trait: str) -> Test:
    """Build a test that holds if no condition has a transform with this trait, nor a plugin, which
    may use any key.
    """

    def test(config: TrainConfig) -> bool:
        without = {*builtin_names("transform")} - transforms_with(trait)
        return without.issuperset(transforms_of(config))

    return test


def _reads_no_teacher(config: TrainConfig) -> bool:
    """Return True if no condition distils, nor has a plugin, which may read a teacher."""
    advantages = {modes_of(condition)[0] for condition in config.conditions}
    builtin = advantages <= {*builtin_names("advantage")}
    return builtin and _no_transform_with("distils")(config)


def _rewards(config: TrainConfig) -> set[str]:
    """Return the rewards of training and of held-out evaluation, if there is any; "plugin" stands
    for each that is not built in.
    """
    kinds = {*config.reward.types}
    if not _no_evaluation(config):
        kinds.update(kind for kind, _ in judging_rewards(config))
    return {kind if kind in builtin_names("reward") else "plugin" for kind in kinds}


def _no_reward(*names: str) -> Test:
    return lambda config: not _rewards(config) & set(names)


def _no_correction_with(bound: str) -> Test:
    return lambda config: bound not in table("correction").get(config.loss.correction, ())


def _no_tracker_of(*names: str) -> Test:
    return lambda config: (
        {*config.logging.trackers}.isdisjoint(names)
        and not ("wandb" in names and config.logging.wandb_project)
    )


def _no_evaluation(config: TrainConfig) -> bool:
    if config.kind == "squeeze":
        return not config.squeeze.evaluate
    return not config.evaluation.asked_for and (
        config.campaign is None or config.is_set("evaluation.at_end")
    )


def _campaign(config: TrainConfig) -> bool:
    return config.campaign is not None


def _implied_by_names() -> Iterator[Effect]:
    """Rows of the bounds that some corrections read, and of the keys with the trait
    `applies_when`.
    """
    corrections = table("correction").items()
    for bound in sorted({*chain.from_iterable(bounds for _, bounds in corrections)}):
        owners = [name for name, bounds in corrections if bound in bounds]
        because = f"it belongs to correction = {listed(map(toml_value, owners))}"
        yield unused(f"loss.{bound}", because=because, when=_no_correction_with(bound))
    for key in all_keys():
        if key.traits.applies_when:
            condition = Applicability.parse(key.section, key.traits.applies_when)
            yield unused(key.path, because=condition.otherwise, when=condition.fails)


def _campaign_where(test: Callable[[Any], bool]) -> Test:
    return lambda config: config.campaign is not None and test(config.campaign)


def _squeezes(config: TrainConfig) -> bool:
    return config.kind == "squeeze"


def _has_environment(config: TrainConfig) -> bool:
    return bool(config.environment.provider)


SQUEEZE_TRACKING = (
    "logging.trackers",
    "logging.wandb_project",
    "logging.wandb_entity",
    "logging.wandb_group",
    "logging.wandb_tags",
    "logging.log_dir",
)
"""The keys that say where a squeeze job sends its analysis."""

_RUNS: Rows = (
    unused(
        *tuple(f"{section}.*" for section in TrainConfig.model_fields if section != "squeeze"),
        because="a squeeze job without evaluate reads [squeeze] alone",
        when=lambda c: c.kind == "squeeze" and (not c.squeeze.evaluate),
        but=SQUEEZE_TRACKING,
    ),
    unused(
        *tuple(
            f"{section}.*"
            for section in TrainConfig.model_fields
            if section not in EVALUATION_SECTIONS
        ),
        because="a squeeze job does not train",
        when=_squeezes,
        but=SQUEEZE_TRACKING,
    ),
    unused(
        "logging.log_dir",
        because="a squeeze job writes there for trackers alone",
        when=lambda c: c.kind == "squeeze" and _no_tracker_of("wandb", "trackio", "tensorboard")(c),
    ),
    unused(
        "squeeze.adapter_path",
        because="a campaign squeezes the adapter of its own first run",
        when=_campaign,
    ),
    unused(
        "squeeze.compress_to",
        "squeeze.per_layer",
        "squeeze.evaluate",
        because="no output_path is given, so nothing is compressed",
        when=lambda c: c.kind != "run" and (not c.squeeze.output_path),
    ),
    unused(
        "backend.shard_base",
        because="a squeeze job is one process and holds the whole model",
        when=_squeezes,
    ),
    unused(
        "data.*",
        because="the problems come from [environment]",
        when=_has_environment,
        but=("data.chat_template_args",),
    ),
    unused(
        "reward.*",
        because="the rubric of [environment] scores",
        when=_has_environment,
        but=("reward.correct_threshold", "reward.max_failure_rate"),
    ),
    unused(
        "environment.*",
        because="no environment provider is set",
        when=lambda c: not c.environment.provider,
        but=("environment.provider",),
    ),
    unused(
        "environment.id",
        because="the plugin is the environment",
        when=lambda c: c.environment.provider not in builtin_names("environment"),
    ),
    unused(
        "environment.auto_install",
        because="only verifiers environments come from the hub",
        when=lambda c: c.environment.provider != "verifiers",
    ),
    unused(
        "evaluation.source",
        "evaluation.reward",
        because="the evaluation set of [environment] is used, and its rubric scores",
        when=_has_environment,
    ),
    unused(
        "data.path",
        because="this source reads no other file",
        when=lambda c: c.data.source == "lab" or is_data_location(c.data.source),
    ),
    unused(
        "data.difficulty",
        because='it belongs to source = "lab"',
        when=lambda c: c.data.source != "lab" and "lab" not in c.evaluation.sources,
    ),
    unused(
        "data.params",
        because="it belongs to data plugins",
        when=lambda c: c.data.source in builtin_names("data") or is_data_location(c.data.source),
    ),
    unused(
        "data.sampler_params",
        because="the shuffle has no parameters",
        when=lambda c: c.data.sampler == "shuffle",
    ),
    unused(
        "data.prompt_column",
        "data.answer_column",
        because="this source's columns are fixed",
        when=lambda c: c.data.source in ("math", "gsm8k", "lab"),
    ),
    *(
        unused(
            key.path,
            because=f"no {' or '.join(key.traits.parameter_of)} reward is used",
            when=_no_reward(*key.traits.parameter_of),
        )
        for key in all_keys()
        if key.traits.parameter_of
    ),
    unused(
        "reward.deadline_s",
        "reward.workers",
        because="these rewards need no worker",
        when=lambda c: (
            not any(kind == "plugin" or table("reward")[kind].needs_workers for kind in _rewards(c))
        ),
    ),
    unused(
        "algorithm.advantage_mode",
        "algorithm.transform_mode",
        because="the conditions of the campaign say it",
        when=_campaign,
    ),
    unused(
        "algorithm.advantage_mode",
        "algorithm.transform_mode",
        because="algorithm_mode replaces it",
        when=lambda c: replaces_modes(c.algorithm.algorithm_mode),
    ),
    unused(
        "algorithm.params",
        because="no algorithm_mode is set",
        when=lambda c: not any(replaces_modes(x.algorithm_mode) for x in c.conditions),
    ),
    unused(
        "algorithm.reference",
        because="no stage here reads a teacher's log-probs",
        when=_reads_no_teacher,
    ),
    unused(
        "algorithm.reference_coef",
        because="no transform here distils",
        when=_no_transform_with("distils"),
    ),
    unused(
        "algorithm.uncertainty_kind",
        "algorithm.uncertainty_params",
        because="nothing here weighs or masks by uncertainty",
        when=lambda c: (
            not may_be_positive(c, "algorithm.surprisal_mask_rho")
            and _no_transform_with("use_gtpo")(c)
        ),
    ),
    unused(
        "algorithm.uncertainty_kind",
        because="transform_params overrides it",
        when=lambda c: "uncertainty_kind" in c.algorithm.transform_params,
    ),
    unused(
        "algorithm.surprisal_mask_denominator",
        because='aggregation "constant" and "sum" take no mean over tokens',
        when=lambda c: (
            c.loss.aggregation in ("constant", "sum")
            or all(fixed_aggregation(x.algorithm_mode) for x in c.conditions)
        ),
    ),
    unused(
        "gtpo.*", because="no transform here uses GTPO weights", when=_no_transform_with("use_gtpo")
    ),
    unused(
        "hicra.*", because="no transform here uses HICRA", when=_no_transform_with("apply_hicra")
    ),
    unused(
        "sepa.*",
        because="no transform here uses SEPA",
        when=_no_transform_with("uses_sepa_controller"),
    ),
    unused(
        "planning.*",
        because="no transform here needs planning tokens",
        when=_no_transform_with("needs_planning"),
    ),
    unused(
        "evaluation.*",
        because="no evaluation is asked for (every, at_start, at_end)",
        when=_no_evaluation,
        but=("evaluation.every", "evaluation.at_start", "evaluation.at_end"),
    ),
    unused(
        "backpressure.*",
        because="back pressure is not enabled",
        when=lambda c: not c.backpressure.enabled,
        but=("backpressure.enabled",),
    ),
    unused(
        "squeeze.*",
        because="a single run has no adapter_path to squeeze",
        when=lambda c: c.kind == "run",
        but=("squeeze.adapter_path",),
    ),
    unused(
        "logging.wandb_entity",
        "logging.wandb_tags",
        because="no wandb_project is set",
        when=_no_tracker_of("wandb"),
    ),
    unused(
        "logging.wandb_run_name",
        "logging.wandb_group",
        because="neither wandb nor trackio is asked for",
        when=_no_tracker_of("wandb", "trackio"),
    ),
    unused(
        "logging.label", because="the conditions of the campaign have their own", when=_campaign
    ),
    unused("training.seed", because="[campaign] seeds say it", when=_campaign),
    unused(
        "training.max_steps",
        because="[campaign] max_steps says it",
        when=_campaign_where(lambda c: c.max_steps is not None),
    ),
    unused(
        "campaign.max_workers",
        "campaign.stagger_seconds",
        "campaign.max_retries",
        "campaign.workers_per_device",
        because="parallel is false",
        when=_campaign_where(lambda c: not c.parallel and c.launcher == "local"),
    ),
    unused(
        "campaign.margin",
        because="looks give no verdict of equivalence",
        when=_campaign_where(lambda c: c.stop == "evidence"),
    ),
    unused(
        "campaign.parallel",
        because="Ray runs as many as its devices hold",
        when=_campaign_where(lambda c: c.launcher == "ray"),
    ),
    *_implied_by_names(),
)
"""In the order of preference."""
RUNS = Table(_RUNS)


# -- what the capabilities of a backend or an engine imply -----------------------------------------

Reasons = Mapping[str, str]
"""Key -> why one part refuses it, where more is known than its capability says."""
_CUTS = ("training.top_k", "training.top_p", "training.min_p")
_PLUGIN_KEYS = {
    "loss": "loss.mode",
    "correction": "loss.correction",
    "aggregation": "loss.aggregation",
}


def _names_plugin(kind: str) -> Test:
    return lambda config: config.value(_PLUGIN_KEYS[kind]) not in builtin_names(kind)


def _implied_by_backend(name: str, declared: Any, known: Reasons) -> Iterator[Effect]:
    """Rows of `BackendCapabilities`. A local backend leaves sampling to an engine."""

    def row(path: str, because: str, when: Test | None = None, values: Any = ()) -> Effect:
        return refused(path, because=known.get(path, because), when=when, values=values)

    if not part_class("backend", name).in_process:
        yield row("backend.shard_base", "it holds the model in its own way; leave it false")
        yield from _without_entropies(declared.sampler)
        if declared.sampler is not None and not declared.sampler.kept_set:
            yield _no_cuts(known)
    if not declared.losses:
        yield row("loss.mode", "its loss is configured elsewhere; leave it out here")
    elif others := tuple(name for name in builtin_names("loss") if name not in declared.losses):
        yield row(
            "loss.mode",
            "it does not train with this loss; use"
            f" {listed(map(toml_value, declared.losses), 'or')}",
            values=others,
        )
    if declared.loss_reduction == "mean":
        because = 'it divides by the tokens of the batch; use "token_mean"'
        yield Effect(
            ("loss.aggregation",),
            "refused",
            known.get("loss.aggregation", because),
            lambda config: config.loss.aggregation != "token_mean",
            refuses_default=True,
        )
        yield row(
            "algorithm.surprisal_mask_denominator",
            'it divides by all sampled tokens; use "all"',
            values=("kept",),
        )
    if not declared.entropy:
        yield row("loss.entropy_coef", "its learner has no entropies; leave it at 0")
    if not declared.moves_settings:
        yield row(
            "schedule.points",
            "its learner keeps the settings of its start; schedule keys of [algorithm], [gtpo] and"
            ' [hicra] alone, or use "local"',
            moves_learner,
        )
    if not declared.scores_reference:
        yield row(
            "algorithm.reference",
            'its learner cannot score tokens as a teacher; leave it empty, or use "local"',
        )
    if not declared.per_token_advantages:
        yield row(
            "algorithm.surprisal_mask_rho", "it takes one advantage per completion; leave it at 0"
        )
    if not declared.own_loss:
        yield from _no_plugins(declared, row)


def _no_plugins(declared: Any, row: Callable[..., Effect]) -> Iterator[Effect]:
    for kind, path in _PLUGIN_KEYS.items():
        if kind != "loss" or declared.losses:  # else refused by any name
            yield row(path, "it takes no plugin here; use a built-in name", _names_plugin(kind))


def _implied_by_engine(name: str, declared: Any) -> Iterator[Effect]:
    """Rows of `EngineCapabilities`, with a backend that leaves sampling to an engine."""
    lacks = []
    if not (declared.in_process or declared.adapter_reload):
        lacks = ["it cannot load a new adapter, so it would always sample from the untrained model"]
    if not declared.token_ids_out:
        lacks += ["it returns text without token ids, and encoding it again may give other tokens"]
    if declared.logprobs == "none":
        lacks += ["it returns no log-probs, and the loss needs them for its ratio"]
    if lacks:
        because = "; ".join([*lacks, "use another engine"])
        yield Effect(("inference.engine",), "refused", because, refuses_default=True)
    yield from _without_entropies(declared)
    if declared.logprobs == "raw":
        yield refused(
            "algorithm.reference",
            because=(
                "it returns log-probs before the temperature, and a teacher's are after it; leave"
                " it empty, or set [training] temperature = 1"
            ),
            when=lambda config: config.training.temperature != 1,
        )
    if not declared.kept_set:
        yield _no_cuts({})
    if not part_class("engine", name).supports_split:
        yield refused(
            "backend.shard_base",
            because="only the pytorch engine samples from a sharded model; leave it false",
        )
        yield refused(
            "backend.devices",
            because="only the pytorch engine samples on a device of its own; use one device",
            when=lambda config: len(config.backend.device_list) > 1,
        )


def _without_entropies(sampler: Any) -> Iterator[Effect]:
    """Rows of a sampler that records no entropies. A transform's parameters may override
    [algorithm] uncertainty_kind.
    """
    if sampler is not None and sampler.entropy:
        return
    because = (
        "it returns log-probs only, without entropies; use surprisal or predictive_variance, or"
        ' backend = "local" with engine = "pytorch"'
    )
    yield refused(
        "algorithm.uncertainty_kind",
        because=because,
        when=lambda config: "uncertainty_kind" not in config.algorithm.transform_params,
        values=("shannon_entropy",),
    )
    yield refused("algorithm.transform_params", because=because, when=_overrides_with_entropy)


def _overrides_with_entropy(config: TrainConfig) -> bool:
    override = config.algorithm.transform_params.get("uncertainty_kind")
    return isinstance(override, str) and canonical_uncertainty(override) == "shannon_entropy"


def _no_cuts(known: Reasons) -> Effect:
    because = (
        "the loss is over the kept tokens, and it does not report how many were kept; leave it off,"
        ' or use engine = "pytorch"'
    )
    return refused(*_CUTS, because=known.get(_CUTS[0], because))


# -- what the name of a built-in backend or engine tells beyond its capabilities -------------------

_SERVICE_LOSSES = importlib.import_module("retrain.backends.losses").TINKER_LOSSES
"""Losses that a Tinker service computes; the others are computed here."""


_SAMPLING = ("training.seed", "training.max_tokens", "training.temperature")
_LOOP = (
    "training.max_steps",
    "training.batch_size",
    "training.group_size",
    "training.dynamic_sampling",
    "training.max_examples",
    "training.save_every",
    "training.keep_checkpoints",
    "training.max_hours",
)
_RATE = (
    "training.lr",
    "training.lr_schedule",
    "training.lr_horizon",
    "training.lr_warmup_steps",
    "training.weight_decay",
)
_FILES = (
    "backend.backend",
    "backend.adapter_path",
    "model.model",
    "model.revision",
    "model.trust_remote_code",
)
_TINKER_ONLY = ("backend.max_concurrent", "backend.throttle_dir", "model.base_url")
_CORRECTION = (
    "loss.correction_cap",
    "loss.correction_low",
    "loss.correction_high",
)
_MEMORY = ("training.micro_batch_tokens", "training.gradient_checkpointing")


def _sharding_refused(because: str, when: Test) -> Effect:
    return refused("backend.shard_base", because=because, when=when, values=(True,))


def splits_base(backend: Backend, processes: int) -> bool:
    """Return True if `processes` hold the frozen weights in parts. Raises ConfigurationError where
    there is one process alone.
    """
    if backend.shard_base and processes == 1:
        raise ConfigurationError(
            "[backend] shard_base = true splits the frozen weights over the processes of torchrun,"
            " and this run has one process; start the run by torchrun --nproc-per-node N -m"
            " retrain, or leave shard_base false."
        )
    return backend.shard_base


def sharding_note(config: TrainConfig, *, evaluates: bool = False) -> str:
    """A sentence on what [backend] shard_base = true costs a run, or on `retrain eval`, which has
    no use for it; "" where it is false.
    """
    if not config.backend.shard_base or config.kind == "squeeze":
        return ""
    if evaluates:
        return (
            "[backend] shard_base = true is unused here: retrain eval runs in one process, which"
            " holds the whole model."
        )
    return (
        "[backend] shard_base = true: every forward pass, also for each generated token, gathers"
        " all layers from the other processes, so use it only where one GPU cannot hold the model;"
        " the memory that explain predicts is for one process with the whole model."
    )


_LOCAL: Rows = (
    unused(*_TINKER_ONLY, because="it belongs to the tinker backend"),
    _sharding_refused(
        "each run of a [campaign] is one process with the whole model; leave it false, or start"
        " single runs by torchrun",
        _campaign,
    ),
    _sharding_refused(
        "weights in 4 bits cannot be split; set [model] load_in_4bit = false, or leave it false",
        lambda config: config.model.load_in_4bit,
    ),
    _sharding_refused(
        "an [inference] dtype unlike the weights' would hold a whole copy of the model in every"
        ' process; set dtype = "auto"',
        lambda config: config.inference.dtype != "auto",
    ),
    used("backend.*", "model.*", "training.*", "optimizer.*", "lora.*", "loss.*", "inference.*"),
)
"""`backend.options` of another backend is said to be unused option by option."""

_TINKER: Rows = (
    refused(
        "loss.mode",
        because=(
            'a service with [backend.options] loss_reduction = "mean" divides by the weights that'
            " carry the gradient of a loss that is computed here; use"
            f" {listed(_SERVICE_LOSSES, 'or')}"
        ),
        when=lambda config: (
            config.backend.tinker.loss_reduction == "mean"
            and config.loss.mode not in _SERVICE_LOSSES
        ),
    ),
    used(*_FILES, *_TINKER_ONLY, "backend.options", "training.seed", "training.max_tokens", *_LOOP),
    Effect(("training.temperature",), "used", values=(1.0,)),
    Effect(
        ("training.temperature",),
        "refused",
        "Tinker's learner knows log-probs at temperature 1 only, so another policy would be sampled"
        " than is trained; leave it out (remove [training] temperature), or write 1.0",
        refuses_default=True,
    ),
    unused(
        "backend.devices",
        "model.dtype",
        "model.load_in_4bit",
        *_MEMORY,
        because="Tinker holds the model",
    ),
    used(
        *_RATE,
        "optimizer.*",
        "loss.max_grad_norm",
        "training.updates_per_batch",
        "training.minibatches",
        "model.lora_rank",
    ),
    unused("lora.alpha", because="the service chooses the scale of the adapter"),
    refused("lora.dropout", because="Tinker trains without dropout; leave it at 0"),
    refused(
        "lora.target_modules",
        because="Tinker adapts all linear layers of the blocks; leave it empty",
    ),
    refused(
        "lora.init_from",
        because="Tinker starts from its own checkpoints, not from a PEFT folder; leave it empty",
    ),
    refused(
        "lora.use_rslora", because="the service chooses the scale of the adapter; leave it false"
    ),
    used(
        "loss.mode",
        "loss.params",
        "loss.clip_low",
        "loss.clip_high",
        "loss.mask_truncated",
        "loss.aggregation",
    ),
    refused("loss.dual_clip", because="Tinker's ppo has no second clip; leave it at 0"),
    refused("loss.kl_coef", because="Tinker's losses have no KL term; leave it at 0"),
    unused("loss.kl_estimator", because="Tinker's losses have no KL term"),
    refused(
        "loss.old_logprobs",
        "loss.correction",
        because=(
            "Tinker's ratio is against the sampler's log-probs; leave out [loss] correction and"
            " old_logprobs"
        ),
    ),
    unused(*_CORRECTION, because="Tinker corrects no mismatch"),
    Effect(
        ("loss.log_ratio_clamp",),
        "used",
        when=lambda config: config.loss.mode in ("sapo", "gmpo", "dppo"),
    ),
    unused("loss.log_ratio_clamp", because="Tinker computes the ratio"),
    used("inference.mismatch_limit"),
    unused("inference.*", because="Tinker samples by itself"),
)

_TRAINERS_OWN = "the configuration of PRIME-RL's trainer says it"
_TRAINERS_RATIO = (
    "PRIME-RL's ratio is against the sampler's log-probs; leave out [loss] correction and"
    " old_logprobs"
)
_PRIME_RL: Rows = (
    refused(
        "backend.backend",
        because=(
            "all runs of a campaign would feed one trainer; start each run with a trainer of its"
            ' own, or use backend = "local"'
        ),
        when=_campaign,
        values=("prime_rl",),
    ),
    used(*_FILES, "backend.options", *_SAMPLING, *_LOOP, *_CUTS),
    unused(*_TINKER_ONLY, because="it belongs to the tinker backend"),
    used("training.micro_batch_tokens"),
    unused(
        "backend.devices",
        "model.dtype",
        "model.load_in_4bit",
        *_MEMORY,
        because="PRIME-RL's trainer holds the model",
    ),
    unused(
        *_RATE,
        "optimizer.*",
        "loss.max_grad_norm",
        "model.lora_rank",
        "lora.*",
        because=_TRAINERS_OWN,
    ),
    refused(
        "training.updates_per_batch",
        "training.minibatches",
        because="PRIME-RL's trainer makes one update per batch; leave it at 1",
    ),
    unused(
        "loss.params",
        "loss.clip_low",
        "loss.clip_high",
        "loss.dual_clip",
        "loss.log_ratio_clamp",
        "loss.kl_estimator",
        *_CORRECTION,
        because=_TRAINERS_OWN,
    ),
    refused(
        "loss.kl_coef",
        because="the KL term stands in the configuration of PRIME-RL's trainer; leave it at 0",
    ),
    refused("loss.old_logprobs", "loss.correction", because=_TRAINERS_RATIO),
    used("loss.mask_truncated"),
    used(
        "inference.url",
        "inference.served_model",
        "inference.api_key_env",
        "inference.timeout_s",
        "inference.patience_s",
    ),
    unused("inference.mismatch_limit", because="PRIME-RL's trainer reports no log-ratios"),
    unused("inference.*", because="PRIME-RL's own inference server samples"),
)


_BACKENDS: dict[str, tuple[Reasons, Rows]] = {
    "local": ({}, _LOCAL),
    "tinker": (
        {
            "backend.shard_base": (
                "the service holds the model, so there is nothing to shard; leave it false"
            ),
            "loss.mode": (
                "its clip is narrower than the rounding of a service in half precision; use"
                " importance_sampling, ppo, cispo, sapo, gmpo, dppo or a plugin"
            ),
            "loss.entropy_coef": "Tinker's losses have no entropy term; leave it at 0",
            "training.top_k": (
                "Tinker's losses are over the whole vocabulary, so a truncated policy cannot be"
                " trained; leave it off"
            ),
        },
        _TINKER,
    ),
    "prime_rl": (
        {
            "backend.shard_base": (
                "PRIME-RL's trainer holds the model, so there is nothing to shard; leave it false"
            ),
            "loss.mode": (
                "PRIME-RL's trainer has its own loss; leave it out here and set that in the"
                " trainer's configuration"
            ),
            "loss.aggregation": (
                "PRIME-RL's trainer divides by the tokens of the batch, which is token_mean; use"
                " that, or leave it out"
            ),
            "loss.correction": _TRAINERS_RATIO,
            "algorithm.surprisal_mask_denominator": (
                'PRIME-RL\'s trainer divides by all sampled tokens; use "all"'
            ),
            "loss.entropy_coef": "PRIME-RL's trainer has no entropy term; leave it at 0",
        },
        _PRIME_RL,
    ),
}
"""Name -> (what it says of keys that its capabilities refuse, its other rows)."""


# -- engines, with the local backend ---------------------------------------------------------------

_SERVER = (
    "inference.url",
    "inference.served_model",
    "inference.api_key_env",
    "inference.timeout_s",
    "inference.patience_s",
    "inference.adapter_dir",
)
_ROUNDING = ("inference.dtype", "inference.kv_cache_dtype")
"""A server's own setting, which `retrain serve` passes on; in a run it says that the parity gate
must allow for the rounding."""


def _server(engine: str) -> Rows:
    return (
        used("inference.engine", "inference.mismatch_limit", *_SERVER, *_ROUNDING),
        served(
            "inference.attention_kernel",
            "inference.prefix_caching",
            because=(
                f"the running server has its own setting, and `retrain serve {engine} FILE` prints"
                " the command that starts it so"
            ),
            when=lambda config: engine != "max" or bool(config.inference.url),
        ),
        used("inference.attention_kernel", "inference.prefix_caching"),
    )


_ENGINES: dict[str, Rows] = {
    "pytorch": (
        unused(*_SERVER, because='engine "pytorch" samples in this process'),
        used("inference.*"),
    ),
    "vllm": _server("vllm"),
    "sglang": _server("sglang"),
    "mlx": _server("mlx"),
    "max": _server("max"),
    "openai": (
        used("inference.engine", "inference.mismatch_limit", *_SERVER, *_ROUNDING),
        unused(
            "inference.attention_kernel",
            "inference.prefix_caching",
            because="the server has its own setting",
        ),
    ),
}


# -- reading the table -----------------------------------------------------------------------------


def effects_of(kind: Literal["backend", "engine"], name: str, declared: Any = None) -> Table:
    """All rows of a backend or an engine. `declared` are a plugin's capabilities; a built-in part's
    are known.
    """
    if declared is None:
        return _known_effects(kind, name)
    if kind == "backend":
        reasons, rows = _BACKENDS.get(name, ({}, ()))
        return Table((*_implied_by_backend(name, declared, reasons), *rows))
    return Table((*_implied_by_engine(name, declared), *_ENGINES.get(name, ())))


@cache
def _known_effects(kind: Literal["backend", "engine"], name: str) -> Table:
    return effects_of(kind, name, part_class(kind, name).capabilities)


def tables_of(
    config: TrainConfig, backend: Any = None, engine: Any = None
) -> Iterator[tuple[str, Table]]:
    """(where the name stands, the rows) of a configuration's backend and engine. Those of a plugin
    are known only where its declared capabilities are given.
    """
    yield "", RUNS
    name = config.backend.backend
    if backend is not None or name in builtin_names("backend"):
        yield f'backend = "{name}"', effects_of("backend", name, backend)
    sampler = config.inference.engine
    if part_class("backend", name).in_process and (
        engine is not None or sampler in builtin_names("engine")
    ):
        yield f'engine = "{sampler}"', effects_of("engine", sampler, engine)


def effect_of(rows: Table, config: TrainConfig, path: str) -> Effect | None:
    """The row that holds for a key at its value; None where the table says nothing about it."""
    return next(rows.that_hold(config, path), None)


def refusals(
    config: TrainConfig, backend: Any = None, engine: Any = None
) -> Iterator[tuple[str, str]]:
    """(key, sentence without its full stop) of each reason for which a backend, an engine or the
    kind of run refuses a key at its value.
    """
    tables = [*tables_of(config, backend, engine)]
    refusable = frozenset[str]().union(*(rows.may_refuse for _, rows in tables))
    for key in (key for key in all_keys() if key.path in refusable and is_read(config, key.path)):
        value = config.value(key.path)
        given = config.is_set(key.path) and value != key.default
        for owner, rows in tables:
            held = rows.that_hold(config, key.path)
            # The first row that holds is a key's effect, so a row behind another outcome refuses
            # nothing.
            leading = takewhile(lambda row: row.outcome == "refused", held)
            judged = [row for row in leading if given or row.refuses_default or row.values]
            where = f"[{key.section}] {key.name} = {toml_value(value)}"
            itself = not owner or key.path in ("backend.backend", "inference.engine")
            for because in dict.fromkeys(row.because for row in judged):
                yield key.path, f"{where}{'' if itself else f' with {owner}'}: {because}"


def reason_unused(config: TrainConfig, key: Key) -> str:
    """Return why a key that was set has no effect; empty where it has one or was left to its
    default.
    """
    if not config.is_set(key.path) or (
        key.path == "model.base_url" and squeezes_remote_adapter(config)
    ):
        return ""
    found = [effect_of(rows, config, key.path) for _, rows in tables_of(config)]
    return next((row.because for row in found if row and row.outcome in ("served", "unused")), "")


def per_token_refusals(config: TrainConfig, backend: Any) -> list[str]:
    """One sentence for each condition that gives the tokens of a completion different advantages,
    for a backend that takes only one. A plugin transform or algorithm is taken to vary.
    """
    if backend.per_token_advantages:
        return []
    return [
        f'The condition "{condition.label}" needs per-token advantages, and backend'
        f' "{config.backend.backend}" takes one per completion; use transform_mode = "none".'
        for condition in config.conditions
        if modes_of(condition)[1] != "none"
    ]

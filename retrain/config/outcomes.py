"""Keys that are allowed but have no effect: unused in this run, or not supported by its backend or
engine.

The unused ones are data: a row names its keys and says when it holds.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from retrain.config.judging import judging_rewards
from retrain.config.keys import Key, all_keys
from retrain.config.load import arms
from retrain.config.names import (
    builtin_names,
    fixed_aggregation,
    is_data_location,
    table,
    transforms_with,
)
from retrain.config.rules import EVALUATION_SECTIONS, is_read, modes_of
from retrain.config.schema import BACKEND_OPTIONS, TrainConfig
from retrain.config.support import support_of, tables_of
from retrain.parsing import toml_value

Test = Callable[[TrainConfig], bool]

TRUNCATING_KEYS = ("training.top_k", "training.top_p", "training.min_p")


MAX_DEFAULTS_NAMED = 8
"""Keys at their default up to which each unused one has a sentence."""

# -- keys without effect ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Unused:
    """Keys ("section.key", or "section.*") that do nothing while `when` holds."""

    keys: tuple[str, ...]
    when: Test
    because: str
    but: tuple[str, ...] = ()
    """Keys of a "section.*" that keep their effect."""

    def covers(self, key: Key) -> bool:
        return key.path not in self.but and (
            key.path in self.keys or f"{key.section}.*" in self.keys
        )


def unused_keys(config: TrainConfig) -> list[str]:
    """One sentence for each key that was set and has no effect: in this run, or in no run of the
    campaign.

    Of keys that are written at their default, more than MAX_DEFAULTS_NAMED share one sentence,
    since a file may hold every key.
    """
    if not any(condition.sets for condition in config.conditions):
        return [sentence for _, sentence in _unused(config)]
    conditions = config.conditions
    found = [
        list(_unused(arm, condition.sets))
        for arm, condition in zip(arms(config), conditions, strict=True)
    ]
    everywhere = [
        sentence
        for _, sentence in found[0]
        if all(any(sentence == other for _, other in arm) for arm in found)
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
        if reason := _reason_unused(config, key):
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


def _reason_unused(config: TrainConfig, key: Key) -> str:
    """Return why a key that was set has no effect; empty where it has one or was left to its
    default.
    """
    if not config.is_set(key.path) or (
        key.path == "model.base_url" and squeezes_remote_adapter(config)
    ):
        return ""
    reasons = [row.because for row in UNUSED if row.covers(key) and row.when(config)]
    support = [support_of(table, config, key.path) for _, table in tables_of(config)]
    reasons += [row.because for row in support if row and row.use in ("serve", "unused")]
    return next(iter(reasons), "")


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


def squeezes_remote_adapter(config: TrainConfig) -> bool:
    """Return True for a squeeze job whose adapter is stored by a Tinker service."""
    return config.kind == "squeeze" and config.squeeze.adapter_path.startswith("tinker://")


def _no_transform_with(trait: str) -> Test:
    """Build a test that holds if no condition has a transform with this trait, nor a plugin, which
    may use any key.
    """

    def test(config: TrainConfig) -> bool:
        names = transforms_with(trait)
        transforms = [modes_of(condition)[1] for condition in config.conditions]
        return all(
            transform in builtin_names("transform") and transform not in names
            for transform in transforms
        )

    return test


def _rewards(config: TrainConfig) -> set[str]:
    """Return the rewards of training and of held-out evaluation, if there is any; "plugin" stands
    for each that is not built in.
    """
    held_out = set() if _no_evaluation(config) else {kind for kind, _ in judging_rewards(config)}
    return {
        kind if kind in builtin_names("reward") else "plugin"
        for kind in {*config.reward.types, *held_out}
    }


def _no_reward(*names: str) -> Test:
    return lambda config: not _rewards(config) & set(names)


def _no_correction_with(bound: str) -> Test:
    return lambda config: bound not in table("correction").get(config.loss.correction, ())


def _no_tracker_of(*names: str) -> Test:
    return lambda config: (
        not (set(config.logging.trackers) | ({"wandb"} if config.logging.wandb_project else set()))
        & set(names)
    )


def _no_evaluation(config: TrainConfig) -> bool:
    if config.kind == "squeeze":
        return not config.squeeze.evaluate
    return not config.evaluation.asked_for and (
        config.campaign is None or config.is_set("evaluation.at_end")
    )


def _campaign(config: TrainConfig) -> bool:
    return config.campaign is not None


def _campaign_where(test: Callable[[Any], bool]) -> Test:
    return lambda config: config.campaign is not None and test(config.campaign)


SQUEEZE_TRACKING = tuple(
    f"logging.{name}"
    for name in (
        "trackers",
        "wandb_project",
        "wandb_entity",
        "wandb_group",
        "wandb_tags",
        "log_dir",
    )
)
"""Where a squeeze job sends its analysis."""

UNUSED: tuple[Unused, ...] = (
    Unused(
        tuple(f"{section}.*" for section in TrainConfig.model_fields if section != "squeeze"),
        lambda c: c.kind == "squeeze" and not c.squeeze.evaluate,
        "a squeeze job without evaluate reads [squeeze] alone",
        but=SQUEEZE_TRACKING,
    ),
    Unused(
        tuple(
            f"{section}.*"
            for section in TrainConfig.model_fields
            if section not in EVALUATION_SECTIONS
        ),
        lambda c: c.kind == "squeeze",
        "a squeeze job does not train",
        but=SQUEEZE_TRACKING,
    ),
    Unused(
        ("logging.log_dir",),
        lambda c: c.kind == "squeeze" and _no_tracker_of("wandb", "trackio", "tensorboard")(c),
        "a squeeze job writes there for trackers alone",
    ),
    Unused(
        ("squeeze.adapter_path",), _campaign, "a campaign squeezes the adapter of its own first run"
    ),
    Unused(
        ("squeeze.compress_to", "squeeze.per_layer", "squeeze.evaluate"),
        lambda c: c.kind != "run" and not c.squeeze.output_path,
        "no output_path is given, so nothing is compressed",
    ),
    Unused(
        ("backend.shard_base",),
        lambda c: c.kind == "squeeze",
        "a squeeze job is one process and holds the whole model",
    ),
    Unused(
        ("data.*",),
        lambda c: bool(c.environment.provider),
        "the problems come from [environment]",
        but=("data.chat_template_args",),
    ),
    Unused(
        ("reward.*",),
        lambda c: bool(c.environment.provider),
        "the rubric of [environment] scores",
        but=("reward.correct_threshold", "reward.max_failure_rate"),
    ),
    Unused(
        ("environment.*",),
        lambda c: not c.environment.provider,
        "no environment provider is set",
        but=("environment.provider",),
    ),
    Unused(
        ("environment.id",),
        lambda c: c.environment.provider not in builtin_names("environment"),
        "the plugin is the environment",
    ),
    Unused(
        ("environment.auto_install",),
        lambda c: c.environment.provider != "verifiers",
        "only verifiers environments come from the hub",
    ),
    Unused(
        ("evaluation.source", "evaluation.reward"),
        lambda c: bool(c.environment.provider),
        "the evaluation set of [environment] is used, and its rubric scores",
    ),
    Unused(
        ("data.path",),
        lambda c: c.data.source == "lab" or is_data_location(c.data.source),
        "this source reads no other file",
    ),
    Unused(
        ("data.difficulty",),
        lambda c: c.data.source != "lab" and c.evaluation.source != "lab",
        'it belongs to source = "lab"',
    ),
    Unused(
        ("data.params",),
        lambda c: c.data.source in builtin_names("data") or is_data_location(c.data.source),
        "it belongs to data plugins",
    ),
    Unused(
        ("data.sampler_params",),
        lambda c: c.data.sampler == "shuffle",
        "the shuffle has no parameters",
    ),
    Unused(
        ("data.prompt_column", "data.answer_column"),
        lambda c: c.data.source in ("math", "gsm8k", "lab"),
        "this source's columns are fixed",
    ),
    *(
        Unused(
            (key.path,),
            _no_reward(*key.traits.parameter_of),
            f"no {' or '.join(key.traits.parameter_of)} reward is used",
        )
        for key in all_keys()
        if key.traits.parameter_of
    ),
    Unused(
        ("reward.deadline_s", "reward.workers"),
        lambda c: (
            not any(kind == "plugin" or table("reward")[kind].needs_workers for kind in _rewards(c))
        ),
        "these rewards need no worker",
    ),
    Unused(
        ("algorithm.advantage_mode", "algorithm.transform_mode"),
        _campaign,
        "the conditions of the campaign say it",
    ),
    Unused(
        ("algorithm.advantage_mode", "algorithm.transform_mode"),
        lambda c: bool(c.algorithm.algorithm_mode),
        "algorithm_mode replaces it",
    ),
    Unused(
        ("algorithm.params",),
        lambda c: not any(x.algorithm_mode for x in c.conditions),
        "no algorithm_mode is set",
    ),
    Unused(
        ("algorithm.uncertainty_kind", "algorithm.uncertainty_params"),
        lambda c: c.algorithm.surprisal_mask_rho == 0 and _no_transform_with("use_gtpo")(c),
        "nothing here weighs or masks by uncertainty",
    ),
    Unused(
        ("algorithm.uncertainty_kind",),
        lambda c: "uncertainty_kind" in c.algorithm.transform_params,
        "transform_params overrides it",
    ),
    Unused(
        ("algorithm.surprisal_mask_scope", "algorithm.surprisal_mask_denominator"),
        lambda c: c.algorithm.surprisal_mask_rho == 0,
        "surprisal_mask_rho is 0",
    ),
    Unused(
        ("algorithm.surprisal_mask_denominator",),
        lambda c: (
            c.loss.aggregation in ("constant", "sum")
            or all(fixed_aggregation(x.algorithm_mode) for x in c.conditions)
        ),
        'aggregation "constant" and "sum" take no mean over tokens',
    ),
    Unused(("gtpo.*",), _no_transform_with("use_gtpo"), "no transform here uses GTPO weights"),
    Unused(("gtpo.norm", "gtpo.negative"), lambda c: c.gtpo.beta == 0, "beta is 0"),
    Unused(("hicra.*",), _no_transform_with("apply_hicra"), "no transform here uses HICRA"),
    Unused(("sepa.*",), _no_transform_with("uses_sepa_controller"), "no transform here uses SEPA"),
    Unused(
        ("sepa.ema_decay", "sepa.var_threshold", "sepa.warmup"),
        lambda c: c.sepa.schedule == "linear",
        'schedule is "linear"',
    ),
    Unused(
        ("planning.*",),
        _no_transform_with("needs_planning"),
        "no transform here needs planning tokens",
    ),
    Unused(
        ("planning.model", "planning.threshold", "planning.min_similarity"),
        lambda c: c.planning.detector == "regex",
        'detector is "regex"',
    ),
    Unused(
        ("planning.strategic_grams",),
        lambda c: c.planning.detector == "semantic",
        'detector is "semantic"',
    ),
    Unused(
        ("loss.clip_low", "loss.clip_high"),
        lambda c: c.loss.mode == "importance_sampling",
        "importance_sampling does not clip",
    ),
    Unused(
        ("loss.clip_low", "loss.clip_high"), lambda c: c.loss.mode == "sapo", "sapo does not clip"
    ),
    Unused(
        ("loss.clip_low", "loss.clip_high"),
        lambda c: c.loss.mode not in builtin_names("loss"),
        "a plugin has its own [loss] params",
    ),
    Unused(("loss.dual_clip",), lambda c: c.loss.mode != "ppo", 'it belongs to mode = "ppo"'),
    *(
        Unused((f"loss.{key}",), _no_correction_with(key), f"it belongs to correction = {owners}")
        for key, owners in (
            ("correction_cap", '"tis" and "seq_tis"'),
            ("correction_low", '"icepop", "seq_mask" and "geometric"'),
            ("correction_high", '"icepop", "seq_mask" and "geometric"'),
        )
    ),
    Unused(("loss.kl_estimator",), lambda c: c.loss.kl_coef == 0, "kl_coef is 0"),
    Unused(
        ("evaluation.*",),
        _no_evaluation,
        "no evaluation is asked for (every, at_start, at_end)",
        but=("evaluation.every", "evaluation.at_start", "evaluation.at_end"),
    ),
    Unused(
        ("backpressure.*",),
        lambda c: not c.backpressure.enabled,
        "back pressure is not enabled",
        but=("backpressure.enabled",),
    ),
    Unused(
        ("squeeze.*",),
        lambda c: c.kind == "run",
        "a single run has no adapter_path to squeeze",
        but=("squeeze.adapter_path",),
    ),
    Unused(
        ("logging.wandb_entity", "logging.wandb_tags"),
        _no_tracker_of("wandb"),
        "no wandb_project is set",
    ),
    Unused(
        ("logging.wandb_run_name", "logging.wandb_group"),
        _no_tracker_of("wandb", "trackio"),
        "neither wandb nor trackio is asked for",
    ),
    Unused(
        ("logging.generations_per_step",),
        lambda c: c.logging.generations_every == 0,
        "generations_every is 0",
    ),
    Unused(("logging.label",), _campaign, "the conditions of the campaign have their own"),
    Unused(("training.seed",), _campaign, "[campaign] seeds say it"),
    Unused(
        ("training.max_steps",),
        _campaign_where(lambda c: c.max_steps is not None),
        "[campaign] max_steps says it",
    ),
    Unused(
        (
            "campaign.max_workers",
            "campaign.stagger_seconds",
            "campaign.max_retries",
            "campaign.workers_per_device",
        ),
        _campaign_where(lambda c: not c.parallel and c.launcher == "local"),
        "parallel is false",
    ),
    Unused(
        ("campaign.max_seeds",), _campaign_where(lambda c: c.stop == "seeds"), 'stop is "seeds"'
    ),
    Unused(
        ("campaign.margin",),
        _campaign_where(lambda c: c.stop == "evidence"),
        "looks give no verdict of equivalence",
    ),
    Unused(
        ("campaign.parallel",),
        _campaign_where(lambda c: c.launcher == "ray"),
        "Ray runs as many as its devices hold",
    ),
    Unused(
        ("campaign.ray_address",),
        _campaign_where(lambda c: c.launcher != "ray"),
        'launcher is not "ray"',
    ),
)
"""In the order in which reasons are preferred."""


# -- what a backend or its engine cannot do --------------------------------------------------------


def key_refusals(config: TrainConfig) -> list[str]:
    """One sentence for each key that the backend or the engine refuses at its value (`support.py`),
    for one run.
    """
    return [
        f"[{key.section}] {key.name} = {toml_value(config.value(key.path))} with {owner}:"
        f" {row.because}."
        for key in all_keys()
        if config.is_set(key.path) and is_read(config, key.path)
        for owner, table in tables_of(config)
        if (row := support_of(table, config, key.path)) and row.use == "refused"
        if row.refuses_default or config.value(key.path) != key.default
    ]


def per_token_refusals(config: TrainConfig, per_token_advantages: bool) -> list[str]:
    """One sentence for each setting that gives the tokens of a completion different advantages, for
    a backend that takes only one.

    Called when a run starts, with the capability that the backend declares. A plugin transform or
    algorithm is taken to vary.
    """
    if per_token_advantages:
        return []
    backend = (
        f'needs per-token advantages, and backend "{config.backend.backend}" takes one per'
        " completion"
    )
    varying = [condition for condition in config.conditions if modes_of(condition)[1] != "none"]
    sentences = [
        f'The condition "{condition.label}" {backend}; use transform_mode = "none".'
        for condition in varying
    ]
    if config.algorithm.surprisal_mask_rho > 0:
        sentences.append(
            f"[algorithm] surprisal_mask_rho = {config.algorithm.surprisal_mask_rho} {backend};"
            " leave it at 0."
        )
    return sentences


def kept_set_refusals(config: TrainConfig, kept_set: bool) -> list[str]:
    """One sentence for each cut of the sampled distribution, for an engine that does not say which
    tokens were kept.

    Called when a run starts, with the capability that the engine declares.
    """
    if kept_set:
        return []
    cuts = [
        key
        for key in all_keys()
        if key.path in TRUNCATING_KEYS and config.value(key.path) != key.default
    ]
    return [
        f"[training] {key.name} = {toml_value(config.value(key.path))} is trained over the kept"
        " tokens, and engine "
        f'"{config.inference.engine}" does not report how many were kept; leave it at'
        f' {toml_value(key.default)}, or use engine = "pytorch".'
        for key in cuts
    ]

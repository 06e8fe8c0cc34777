"""Set keys without effect: the rows that say when, and the sentences for a whole file.

The class of a backend or an engine says what it decides by itself (`config.needs`).
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from retrain.config.judging import judging_rewards
from retrain.config.keys import Key, all_keys
from retrain.config.load import arms
from retrain.config.names import (
    bracketed,
    builtin_names,
    fixed_aggregation,
    is_data_location,
    replaces_modes,
    table,
    transforms_with,
)
from retrain.config.needs import parts_of
from retrain.config.plan import sources_of
from retrain.config.schema import BACKEND_OPTIONS, TrainConfig
from retrain.config.section import Applicability
from retrain.system import grouped, listed, toml_value

Test = Callable[[TrainConfig], bool]


@dataclass(frozen=True)
class Row:
    """Keys that have no effect in some runs, and why."""

    keys: str
    """Each "section.key" or "section.*", with spaces between."""
    because: str
    """Ends the sentence that names the key and its value."""
    when: Test
    but: str = ""
    """Keys of a "section.*" that the row is not about."""

    def covers(self, path: str) -> bool:
        named = {path, f"{path.partition('.')[0]}.*"}
        return bool(named & set(self.keys.split())) and path not in self.but.split()


def _no_transform_with(trait: str) -> Test:
    """Build a test that holds if no condition has a transform with this trait, nor a plugin, which
    may use any key.
    """

    def test(config: TrainConfig) -> bool:
        without = {*builtin_names("transform")} - transforms_with(trait)
        return without.issuperset(config.transforms)

    return test


def _reads_no_teacher(config: TrainConfig) -> bool:
    """Return True if no condition distils, nor has a plugin, which may read a teacher."""
    builtin = {*builtin_names("advantage")}.issuperset(config.advantages)
    return builtin and _no_transform_with("distils")(config)


def _rewards(config: TrainConfig) -> set[str]:
    """Return the rewards of training and of held-out evaluation, if there is any; "plugin" stands
    for every plugin.
    """
    kinds = {*config.reward.types}
    if not _no_evaluation(config):
        kinds.update(kind for kind, _ in judging_rewards(config))
    return {kind if kind in builtin_names("reward") else "plugin" for kind in kinds}


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


def _campaign_where(test: Callable[[Any], bool]) -> Test:
    return lambda config: config.campaign is not None and test(config.campaign)


def _has_environment(config: TrainConfig) -> bool:
    return bool(config.environment.provider)


_SQUEEZE_TRACKING = tuple(
    f"logging.{name}"
    for name in (
        "trackers", "wandb_project", "wandb_entity", "wandb_group", "wandb_tags", "log_dir"
    )
)  # fmt: skip
"""The keys that say where a squeeze job sends its analysis."""

ROWS = (
    Row(
        "logging.log_dir",
        "a squeeze job writes there for trackers alone",
        lambda c: c.kind == "squeeze" and _no_tracker_of("wandb", "trackio", "tensorboard")(c),
    ),
    Row(
        "squeeze.adapter_path",
        "a campaign squeezes the adapter of its own first run",
        _campaign,
    ),
    Row(
        "squeeze.compress_to squeeze.per_layer squeeze.evaluate",
        "without output_path the job compresses nothing",
        lambda c: c.kind != "run" and (not c.squeeze.output_path),
    ),
    Row(
        "backend.shard_base",
        "a squeeze job is one process and holds the whole model",
        lambda c: c.kind == "squeeze",
    ),
    Row(
        "data.*",
        "the problems come from [environment]",
        _has_environment,
        but="data.chat_template_args",
    ),
    Row(
        "reward.*",
        "the rubric of [environment] scores",
        _has_environment,
        but="reward.correct_threshold reward.max_failure_rate",
    ),
    Row(
        "environment.*",
        "[environment] has no provider",
        lambda c: not c.environment.provider,
        but="environment.provider",
    ),
    Row(
        "environment.id",
        "the plugin is the environment",
        lambda c: c.environment.provider not in builtin_names("environment"),
    ),
    Row(
        "environment.auto_install",
        "only verifiers environments come from the hub",
        lambda c: c.environment.provider != "verifiers",
    ),
    Row(
        "evaluation.source evaluation.reward",
        "[environment] gives the evaluation set, and its rubric scores",
        _has_environment,
    ),
    Row(
        "data.path",
        "this source reads no other file",
        lambda c: c.data.source == "lab" or is_data_location(c.data.source),
    ),
    Row(
        "data.difficulty",
        'it belongs to source = "lab"',
        lambda c: c.data.source != "lab" and "lab" not in c.evaluation.sources,
    ),
    Row(
        "data.params",
        "it belongs to data plugins",
        lambda c: c.data.source in builtin_names("data") or is_data_location(c.data.source),
    ),
    Row(
        "data.sampler_params",
        "the shuffle has no parameters",
        lambda c: c.data.sampler == "shuffle",
    ),
    Row(
        "data.prompt_column data.answer_column",
        "this source has fixed columns",
        lambda c: c.data.source in ("math", "gsm8k", "lab"),
    ),
    Row(
        "reward.deadline_s reward.workers",
        "these rewards need no worker",
        lambda c: (
            not any(kind == "plugin" or table("reward")[kind].needs_workers for kind in _rewards(c))
        ),
    ),
    Row(
        "algorithm.advantage_mode algorithm.transform_mode",
        "the conditions of the campaign set the algorithm",
        _campaign,
    ),
    Row(
        "algorithm.advantage_mode algorithm.transform_mode",
        "algorithm_mode replaces it",
        lambda c: replaces_modes(c.algorithm.algorithm_mode),
    ),
    Row(
        "model.lora_rank lora.*",
        '[model] train = "full" trains no adapter',
        lambda c: c.model.train == "full",
        but="lora.init_from",
    ),
    Row(
        "model.revision",
        "only a model of the hub has revisions",
        lambda c: c.model.model in ("lab", "lab2") or Path(c.model.model).exists(),
    ),
    Row(
        "algorithm.params",
        "[algorithm] has no algorithm_mode",
        lambda c: not any(replaces_modes(x.algorithm_mode) for x in c.conditions),
    ),
    Row(
        "algorithm.teacher",
        "no stage here reads a teacher's log-probs",
        _reads_no_teacher,
    ),
    Row(
        "loss.kl_reference",
        "no KL term is on, and no loss of your own may read it",
        lambda c: not c.reads_reference,
    ),
    Row(
        "algorithm.teacher_coef",
        "no transform here distils",
        _no_transform_with("distils"),
    ),
    Row(
        "algorithm.uncertainty_kind algorithm.uncertainty_params",
        "nothing here weighs or masks by uncertainty",
        lambda c: (
            not c.may_be_positive("algorithm.surprisal_mask_rho")
            and _no_transform_with("use_gtpo")(c)
        ),
    ),
    Row(
        "algorithm.uncertainty_kind",
        "transform_params overrides it",
        lambda c: "uncertainty_kind" in c.algorithm.transform_params,
    ),
    Row(
        "algorithm.surprisal_mask_denominator",
        'aggregation "constant" and "sum" take no mean over tokens',
        lambda c: (
            c.loss.aggregation in ("constant", "sum")
            or all(fixed_aggregation(x.algorithm_mode) for x in c.conditions)
        ),
    ),
    Row(
        "gtpo.*",
        "no transform here uses GTPO weights",
        _no_transform_with("use_gtpo"),
    ),
    Row(
        "hicra.*",
        "no transform here uses HICRA",
        _no_transform_with("apply_hicra"),
    ),
    Row(
        "sepa.*",
        "no transform here uses SEPA",
        _no_transform_with("uses_sepa_controller"),
    ),
    Row(
        "planning.*",
        "no transform here needs planning tokens",
        _no_transform_with("needs_planning"),
    ),
    Row(
        "evaluation.*",
        "evaluation is off (every, at_start, at_end)",
        _no_evaluation,
        but="evaluation.every evaluation.at_start evaluation.at_end",
    ),
    Row(
        "backpressure.*",
        "back pressure is off",
        lambda c: not c.backpressure.enabled,
        but="backpressure.enabled",
    ),
    Row(
        "squeeze.*",
        "a single run has no adapter_path to squeeze",
        lambda c: c.kind == "run",
        but="squeeze.adapter_path",
    ),
    Row(
        "logging.wandb_entity logging.wandb_tags",
        "[logging] has no wandb_project",
        _no_tracker_of("wandb"),
    ),
    Row(
        "logging.wandb_run_name logging.wandb_group",
        "[logging] trackers has neither wandb nor trackio",
        _no_tracker_of("wandb", "trackio"),
    ),
    Row("logging.label", "the conditions of the campaign have their own", _campaign),
    Row("training.seed", "[campaign] seeds applies", _campaign),
    Row(
        "training.max_steps",
        "[campaign] max_steps applies",
        _campaign_where(lambda c: c.max_steps is not None),
    ),
    Row(
        "campaign.max_workers campaign.stagger_seconds campaign.max_retries"
        " campaign.workers_per_device",
        "parallel is false",
        _campaign_where(lambda c: not c.parallel and c.launcher == "local"),
    ),
    Row(
        "campaign.margin",
        "looks give no verdict of equivalence",
        _campaign_where(lambda c: c.stop == "evidence"),
    ),
    Row(
        "campaign.parallel",
        "Ray runs as many as its devices hold",
        _campaign_where(lambda c: c.launcher == "ray"),
    ),
)
"""In the order of preference."""


@cache
def _rows_of(path: str) -> tuple[Row, ...]:
    return tuple(row for row in ROWS if row.covers(path))


def reason_unused(config: TrainConfig, key: Key) -> str:
    """Return why a set key has no effect; "" for an unset key and for a key with an effect."""
    downloads = key.path == "model.base_url" and config.squeeze.is_remote
    if not config.is_set(key.path) or (downloads and config.kind == "squeeze"):
        return ""
    reason = next(_reasons(config, key), "")
    if reason and config.data.mix and key.section in ("data", "environment", "reward"):
        own = [next(_reasons(source.config, key), "") for source in sources_of(config)]
        return reason if all(own) else ""
    return reason


def _reasons(config: TrainConfig, key: Key) -> Iterator[str]:
    if not (config.reads(key.path) or key.path in _SQUEEZE_TRACKING):
        squeeze = config.squeeze
        only = not (squeeze.evaluate and squeeze.output_path)
        what = "without evaluate reads [squeeze] alone" if only else "does not train"
        yield f"a squeeze job {what}"
    yield from (row.because for row in _rows_of(key.path) if row.when(config))
    traits = key.traits
    if traits.parameter_of and _rewards(config).isdisjoint(traits.parameter_of):
        yield f"the run has no {' or '.join(traits.parameter_of)} reward"
    owners = [name for name, bounds in table("correction").items() if key.name in bounds]
    if owners and key.section == "loss" and config.loss.correction not in owners:
        yield f"it belongs to correction = {listed(map(toml_value, owners))}"
    if traits.applies_when:
        condition = Applicability.parse(key.section, traits.applies_when)
        if condition.fails(config):
            yield condition.otherwise
    for part in parts_of(config):
        outcome, because = part.outcome(key, config)
        if outcome == "unused":
            yield because


MAX_DEFAULTS_NAMED = 8
"""Unused keys at their default up to which each has a sentence."""


@dataclass(frozen=True)
class _Unused:
    """A key without effect."""

    path: str
    shown: str
    """The key with its value, as a file has it."""
    because: str


def unused_keys(config: TrainConfig) -> list[str]:
    """Return one sentence for each reason why set keys have no effect, in this run or in all runs
    of the campaign.

    More than MAX_DEFAULTS_NAMED unused keys at their default get no sentence, because a program
    wrote that file.
    """
    if not any(condition.sets_keys for condition in config.conditions):
        return _sentences(_unused(config))
    arms_keys = [
        list(_unused(arm, condition.sets))
        for arm, condition in zip(arms(config), config.conditions, strict=True)
    ]
    # A grid without conditions makes them from the file's own algorithm, so it reads the file.
    read: tuple[str, ...] = ()
    if config.campaign is not None and not config.campaign.conditions:
        read = ("algorithm.advantage_mode", "algorithm.transform_mode")
    everywhere = [key for key in arms_keys[0] if all(key in found for found in arms_keys)]
    said = _sentences(key for key in everywhere if key.path not in read)
    for condition, found in zip(config.conditions, arms_keys, strict=True):
        own = [key for key in found if key.path in condition.sets and key not in everywhere]
        said += [f'Condition "{condition.label}": {sentence}' for sentence in _sentences(own)]
    return said


def _sentences(keys: Iterable[_Unused]) -> list[str]:
    """Return sentences that say why keys have no effect, one for each reason."""
    together = grouped((key.because, key.shown) for key in keys)
    return [
        f"{listed(shown)} {'has' if len(shown) == 1 else 'have'} no effect: {because}."
        for because, shown in together.items()
    ]


def _unused(config: TrainConfig, apart: Collection[str] = ()) -> Iterator[_Unused]:
    """Yield each unused key, the paths `apart` even at their default."""
    at_default: list[_Unused] = []
    for key in all_keys():
        reason = reason_unused(config, key)
        if reason:
            value = config.value(key.path)
            found = _Unused(key.path, f"{bracketed(key.path)} = {toml_value(value)}", reason)
            if value == key.default and key.path not in apart:
                at_default.append(found)
            else:
                yield found
    yield from _unused_options(config)
    if len(at_default) <= MAX_DEFAULTS_NAMED:
        yield from at_default


def _unused_options(config: TrainConfig) -> Iterator[_Unused]:
    backend = config.backend.backend
    if config.kind == "squeeze" or backend not in builtin_names("backend"):
        return
    owners = {
        name: owner for owner, model in BACKEND_OPTIONS.items() for name in model.model_fields
    }
    for name, value in config.backend.options.items():
        because = ""
        if backend != owners[name]:
            because = f'it is an option of {owners[name]}, and backend is "{backend}"'
        elif name.startswith("zmq_") and config.backend.prime_rl.transport == "filesystem":
            because = 'transport is "filesystem"'
        if because:
            yield _Unused(
                "backend.options", f"[backend.options] {name} = {toml_value(value)}", because
            )

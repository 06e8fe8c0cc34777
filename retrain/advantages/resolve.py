"""The stages of the pipeline by their names. Each function finds the built-in or the plugin that a
name means, and gives both the same form.

retrain tries a plugin on a small example when it loads it, to find a wrong shape before the first
step.
"""

import inspect
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from retrain.advantages import transforms as kinds
from retrain.advantages.algorithms import (
    MADE_UP,
    NoTeacher,
    NotInStep,
    StepAdvantageContext,
    UncertaintyContext,
    no_reference,
)
from retrain.advantages.episode import ADVANTAGES, BuiltinAdvantage, checked_groups
from retrain.advantages.step import StepTokens, flatten, made_up_group
from retrain.advantages.transforms import TRANSFORMS, TransformSpec
from retrain.errors import ConfigurationError
from retrain.plugins import (
    Fault,
    Plugin,
    describe,
    load_function,
    probe,
    restore,
    state_of,
    user_code,
)
from retrain.types import Example, Float64Array, Score

if TYPE_CHECKING:
    from retrain.config import TrainConfig

EpisodeStage = Callable[[StepTokens, int], list[list[float]]]
"""(tokens, step) -> [P][G] episode advantages."""
UncertaintyStage = Callable[[StepTokens, int], Float64Array]
"""(tokens, step) -> [n] uncertainty, not yet capped."""


def tried(plugin: Plugin, config: "TrainConfig", trial: Callable[[], str | None]) -> list[str]:
    """Try a plugin of credit on a made-up step; return notes for the start of the run."""
    try:
        return probe(plugin, config, trial)
    except NoTeacher as missing:
        raise ConfigurationError(f"{plugin.where}: {missing}") from missing
    except NotInStep as missing:
        note = (
            f"{plugin.where} reads `{missing.name}`, so retrain could not try it on a small example"
        )
        return [f"{note} before the first step."]


def same_again(give: Callable[[], list[Any]]) -> None:
    """Raise Fault for a plugin whose second call gives other numbers."""
    if give() != give():
        raise Fault(
            "gives other numbers at a second call; a run must repeat byte for byte, so draw"
            " nothing at random and keep no state"
        )


# -- episode advantages ----------------------------------------------------------------------------

_CENTERED = 1e-6
"""Largest mean of a group's advantages that counts as 0, for plugins that compute in float32."""


def episode_stage(
    name: str, config: "TrainConfig", notes: list[str], params: dict[str, Any]
) -> EpisodeStage:
    """Return the advantage that `name` means. Adds notes for the start of the run to `notes`.
    `params` replace the configured parameters; the stage reads them at every call. Raises
    ConfigurationError for an unusable name, parameter or plugin.
    """
    found = load_function("advantage", name, config, ADVANTAGES, params)
    if isinstance(found, Plugin):
        notes += tried(found, config, partial(_try_advantage, found, config))
        return PluginAdvantage(found, config.training.max_tokens)
    stage = partial(_builtin_advantages, found, params)
    try:
        stage(small_step(config), 0)
    except (ValueError, TypeError) as error:
        raise ConfigurationError(
            f'[algorithm.advantage_params] of advantage_mode = "{name}": {describe(error)}.'
        ) from error
    return stage


def _builtin_advantages(
    builtin: BuiltinAdvantage, params: dict[str, Any], tokens: StepTokens, _: int
) -> list[list[float]]:
    if builtin.batch_level:  # mypy does not infer the form from this
        return builtin.function(tokens.rewards, tokens.token_counts, **params)  # type: ignore[return-value]  # of all groups
    assigned: list[list[float]] = []
    for group, rewards in enumerate(tokens.rewards):
        try:
            assigned.append(builtin.function(rewards, **params))  # type: ignore[arg-type]  # the form of one group
        except ValueError as error:
            raise ValueError(f"group {group}: {error}") from error
    return assigned


@dataclass(frozen=True)
class PluginAdvantage:
    """The stage of an advantage plugin, which may keep something between steps."""

    plugin: Plugin
    max_tokens: int

    def __call__(self, tokens: StepTokens, step: int) -> list[list[float]]:
        checked_groups(tokens.rewards)
        plugin, what = self.plugin, f'advantage "{self.plugin.name}"'
        contexts = tokens.contexts(step, plugin.params, self.max_tokens)
        if getattr(plugin.function, "step_level", False):
            whole = StepAdvantageContext(contexts, step, plugin.params)
            rows = listed(plugin(whole.rewards, context=whole), len(contexts), "groups", what)
        else:
            rows = [
                plugin(list(one.rewards), context=one, place=f" on group {one.group}")
                for one in contexts
            ]
        return [
            numbers(row, len(rewards), f"group {group}: {what}").tolist()
            for group, (row, rewards) in enumerate(zip(rows, tokens.rewards, strict=True))
        ]

    def state(self) -> dict[str, Any]:
        """Return what the plugin keeps between steps, through JSON; {} if it has no `state`."""
        return state_of(self.plugin.where, self.plugin.function)

    def load(self, state: dict[str, Any]) -> None:
        """Give the plugin what `state` returned."""
        restore(self.plugin.where, self.plugin.function, state)


def _try_advantage(plugin: Plugin, config: "TrainConfig") -> str | None:
    """Return a warning if a plugin gives a group of equal rewards advantages that do not sum to 0.
    Such a group says nothing about which completion is better. Raise Fault if the plugin's state
    does not survive save and load, or if a function is not deterministic.
    """
    # Try copies, because the trial must not change the state with which the run begins.
    advantages, resumed = (
        PluginAdvantage(
            replace(plugin, function=deepcopy(plugin.function)), config.training.max_tokens
        )
        for _ in range(2)
    )
    small, equal = small_step(config), small_step(config, [[0.0, 0.0, 0.0], [1.0, 1.0]])
    means = [float(np.mean(values)) for values in advantages(equal, 0)]
    if inspect.isroutine(plugin.function):
        same_again(lambda: advantages(small, 0))
    else:
        advantages(small, 0)
        resumed.load(advantages.state())
        if resumed(small, 1) != advantages(small, 1):
            raise Fault("does not restore in load() what state() returned, or keeps nothing there")
    uncentered = [
        f"{mean:.3g} where all rewards are {reward}"
        for reward, mean in enumerate(means)
        if abs(mean) > _CENTERED
    ]
    if not uncentered:
        return None
    return (
        f"{plugin.where} gives equal rewards advantages that do not cancel (mean"
        f" {', '.join(uncentered)}). So it trains groups of equal rewards too, even if all"
        " completions are wrong. Subtract the group's mean unless you want that."
    )


# -- uncertainty -----------------------------------------------------------------------------------


def _shannon_entropy(tokens: StepTokens, _: int) -> Float64Array:
    if tokens.entropies is None:
        raise ValueError(
            'uncertainty_kind = "shannon_entropy" needs the entropy of every token, and this engine'
            " records none; use surprisal or predictive_variance"
        )
    return kinds.shannon_entropy(tokens.entropies)


_UNCERTAINTIES: dict[str, UncertaintyStage] = {
    kinds.SURPRISAL: lambda tokens, _: kinds.surprisal(tokens.logprobs),
    kinds.PREDICTIVE_VARIANCE: lambda tokens, _: kinds.predictive_variance(tokens.logprobs),
    kinds.SHANNON_ENTROPY: _shannon_entropy,
}


def uncertainty_stage(
    name: str, config: "TrainConfig", notes: list[str], params: dict[str, Any]
) -> UncertaintyStage:
    """Return the uncertainty that `name` means, as `episode_stage` does."""
    found = load_function("uncertainty", name, config, _UNCERTAINTIES, params)
    if not isinstance(found, Plugin):
        builtin: UncertaintyStage = found
        return builtin

    def uncertainty(tokens: StepTokens, step: int) -> Float64Array:
        logprobs = tokens.segments.split(tokens.logprobs)
        entropies: Sequence[Float64Array | None] = [None] * len(logprobs)
        if tokens.entropies is not None:
            entropies = tokens.segments.split(tokens.entropies)
        values = []
        for index, (completion, recorded) in enumerate(zip(logprobs, entropies, strict=True)):
            place, row = tokens.place(index), completion.tolist()
            entropy = None if recorded is None else recorded.tolist()
            context = UncertaintyContext(row, entropy, step, *tokens.of_group(index), params)
            given = found(row, context=context, place=f" on {place}")
            values.append(numbers(given, len(row), f'{place}: uncertainty "{name}"'))
        return flatten(values)

    small = small_step(config)
    notes += tried(found, config, lambda: same_again(lambda: uncertainty(small, 0).tolist()))
    return uncertainty


# -- transforms and whole algorithms, which the pipeline itself tries ------------------------------


def transform_of(
    name: str, config: "TrainConfig", params: dict[str, Any]
) -> tuple[TransformSpec, Plugin | None]:
    """Return the stages of the transform that `name` means, and its plugin. A plugin is a function
    of the context, which does all the work, or a factory of the stages, `f()` or `f(params)`.
    """
    plugin = load_function("transform", name, config, TRANSFORMS, params)
    if not isinstance(plugin, Plugin):
        return plugin, None
    if plugin.form.takes_context:
        # Its reads are unknown, so the pipeline computes everything for it.
        return TransformSpec(name, needs_planning=True, uses_sepa_controller=True), plugin
    with user_code(plugin.where, ConfigurationError):
        spec = plugin.call()
        if not isinstance(spec, TransformSpec):
            raise Fault(
                f"returned {type(spec).__name__}, and a factory must return a"
                " retrain.advantages.TransformSpec"
            )
    return spec, plugin


def output_of(plugin: Plugin, form: type, context: Any) -> Any:
    """Return the token advantages that a transform or an algorithm gives for a context. Raises
    Fault if it gives another form.
    """
    output = plugin.call(context, context=context)
    if not isinstance(output, form):
        raise Fault(
            f"returned {type(output).__name__}, it must return a retrain.advantages.{form.__name__}"
        )
    return output.token_advs  # type: ignore[attr-defined]  # both forms have it


# -- the shape of what plugins return --------------------------------------------------------------


def numbers(values: Any, count: int, what: str) -> Float64Array:
    """Return `count` finite numbers. Raises ValueError, whose sentence begins with `what`."""
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{what} gave {type(values).__name__}, it must give a list of {count} numbers"
        ) from error
    if array.shape != (count,):
        raise ValueError(
            f"{what} gave an array of shape {array.shape}, it must give {count} numbers"
        )
    for position in np.flatnonzero(~np.isfinite(array)):
        raise ValueError(
            f"{what} gave {array[position]} at position {position}, it must give finite numbers"
        )
    return array


def listed(rows: Any, count: int, items: str, what: str) -> list[Any]:
    """Return `count` items. Raises ValueError for another number of them, or no list."""
    try:
        found = list(rows)
    except TypeError:
        raise ValueError(
            f"{what} gave {type(rows).__name__}, it must give a list of {count} {items}"
        ) from None
    if len(found) != count:
        raise ValueError(f"{what} has {len(found)} {items}, it must have {count}")
    return found


def token_lists(rows: Any, lengths: Sequence[int], what: str) -> list[Float64Array]:
    """Return one list of numbers for each completion of a group. Raises ValueError for another
    shape.
    """
    given = zip(listed(rows, len(lengths), "completions", what), lengths, strict=True)
    return [
        numbers(row, length, f"{what}, completion {index}")
        for index, (row, length) in enumerate(given)
    ]


def step_tokens(groups: Any, tokens: StepTokens, what: str) -> Float64Array:
    """Flatten token advantages, [P][G][T] -> [n]."""
    counts = tokens.token_counts
    rows = []
    for index, group in enumerate(listed(groups, len(counts), "groups", what)):
        rows += token_lists(group, counts[index], f"{what}, group {index}")
    return flatten(rows)


# -- a small example -------------------------------------------------------------------------------

_REWARDS = [[1.0, 0.0, 0.0], [0.0, 1.0]]
_ENDS = (3, 5, 6, 8)
_LOGPROBS = -np.array([0.1, 2.5, 0.01, 1.0, 0.2, 3.0, 0.5, 0.7, 1.5, 0.3, 0.05, 2.0])


def small_step(config: "TrainConfig", rewards: list[list[float]] = _REWARDS) -> StepTokens:
    """Return a made-up step of five completions with these rewards. A reward is the only part of
    its completion and the reward of its only turn. The step has a teacher if the configuration
    names one.
    """
    parts, groups = len(config.reward.types), []
    rows = iter(np.split(_LOGPROBS.astype(np.float32), _ENDS))
    for slot, own in enumerate(rewards):
        scores = [
            replace(Score.of(one, 0.5), turn_rewards=(one,), parts=(one,) * parts) for one in own
        ]
        example = Example("", "", info=MADE_UP, example_id=f"made-up-{slot}")
        groups.append(made_up_group(example, slot, scores, [next(rows) for _ in own]))
    planning = np.array([0, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0], dtype=np.bool_)
    teacher = no_reference
    if config.algorithm.teacher:
        teacher = partial(np.subtract, 0.7 * _LOGPROBS, 0.1)
    return StepTokens.of(groups, planning, False, teacher)

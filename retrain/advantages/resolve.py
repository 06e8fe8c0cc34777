"""The stages of the pipeline by their names: `resolve` finds the built-in or the plugin that a name
of a kind means, and gives both the same form. ADVANTAGE, UNCERTAINTY, TRANSFORM and ALGORITHM are
the kinds.

A plugin is tried on a small example when it is loaded, so that a wrong shape is found before the
first step.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import numpy as np

from retrain.advantages import transforms as kinds
from retrain.advantages.algorithms import (
    MADE_UP,
    AdvantageContext,
    AlgorithmContext,
    AlgorithmOutput,
    NoTeacher,
    NotInStep,
    Reference,
    StepAdvantageContext,
    UncertaintyContext,
    no_reference,
)
from retrain.advantages.episode import ADVANTAGES, BuiltinAdvantage, checked_groups
from retrain.advantages.step import Segments, StepTokens, flatten
from retrain.advantages.transforms import (
    TRANSFORMS,
    TransformContext,
    TransformOutput,
    TransformSpec,
)
from retrain.config.recipes import RECIPES
from retrain.errors import ConfigurationError, RetrainError, RunFailed
from retrain.plugins import (
    KINDS,
    Call,
    describe,
    inspect_call,
    load_plugin,
    params_of,
    refuse_unknown_params,
    report_probe,
    state_of,
    user_code,
)
from retrain.types import (
    Completion,
    Example,
    FinishReason,
    Float64Array,
    Group,
    Prompt,
    Score,
    Scored,
    Trajectory,
)

if TYPE_CHECKING:
    from retrain.config import TrainConfig

EpisodeStage = Callable[[StepTokens, int], list[list[float]]]
"""(tokens, step) -> [P][G] episode advantages."""
UncertaintyStage = Callable[[StepTokens, int], Float64Array]
"""(tokens, step) -> [n] uncertainty, not yet capped."""
GroupTransform = Callable[[TransformContext], Sequence[Sequence[float]]]
"""(context) -> [G][T] token advantages of one group."""
AlgorithmStage = Callable[[AlgorithmContext], Sequence[Sequence[Sequence[float]]]]
"""(context) -> [P][G][T] token advantages of a step."""


@dataclass(frozen=True)
class TransformStage:
    """A transform, as a spec for the pipeline's own stages or as one function."""

    spec: TransformSpec
    function: GroupTransform | None
    """A plugin of the form f(ctx), which then does all the work; None for a TransformSpec."""
    params: dict[str, Any]


@dataclass(frozen=True)
class PluginCall:
    """A plugin of one kind with its parameters, called in the form that its signature asks for."""

    kind: str
    name: str
    function: Callable[..., Any]
    params: dict[str, Any]
    form: Call
    config: "TrainConfig"

    def __call__(self, plain: Any, context: Callable[[], Any], place: str = "") -> Any:
        """Return what the plugin gives for the plain input, or for the context if it takes that.
        Raises RunFailed naming the `place` if it raises.
        """
        argument = context() if self.form.takes_context else plain
        extra = {}
        if "params" in self.form.keywords:
            extra = {"params": self.params}
        with user_code(f'{self.kind} "{self.name}"{place}', RunFailed):
            return self.function(argument, **extra)


Stage = TypeVar("Stage")


@dataclass(frozen=True)
class StageKind(Generic[Stage]):
    """How the names of one kind become a stage of the pipeline."""

    name: str
    """The kind of plugin (plugins.KINDS)."""
    builtins: Mapping[str, Any]
    of_plugin: Callable[[PluginCall], Stage]
    trial: Callable[[Stage, PluginCall], str | None]
    """Uses a plugin's stage on a small example; returns a note for the start of the run. Raises
    what the plugin raises, and ValueError for an output of another shape."""
    of_builtin: Callable[[str, Any, "TrainConfig", dict[str, Any]], Stage] | None = None
    """(name, built-in object, configuration, parameters) -> the stage; None where the built-in
    objects are the stages, without parameters."""


def resolve(
    kind: StageKind[Stage],
    name: str,
    config: "TrainConfig",
    notes: list[str],
    params: dict[str, Any] | None = None,
) -> Stage:
    """Return the stage that `name` means. Notes for the start of the run are added to `notes`.
    `params` stand in for the configured ones; the stage reads them at every call.
    Raises ConfigurationError for a name, a parameter or a plugin that cannot be used.
    """
    found = load_plugin(kind.name, name, config, kind.builtins)
    if params is None:
        params = params_of(kind.name, config)
    if name in kind.builtins:
        if kind.of_builtin:
            return kind.of_builtin(name, found, config, params)
        refuse_unknown_params(kind.name, name, frozenset(), config)
        return cast(Stage, found)
    form = inspect_call(kind.name, found)
    plugin = PluginCall(kind.name, name, found, params, form, config)
    stage = kind.of_plugin(plugin)
    try:
        with user_code("", _TrialError):
            try:
                note = kind.trial(stage, plugin)
            except RunFailed as failure:  # the plugin's own exception, as a run would name it
                raise failure.__cause__ or failure from None
    except _TrialError as failure:
        cause = failure.__cause__ or failure
        problem = f"fails on a small example ({describe(cause)})"
        note = report_probe(kind.name, name, problem, config)
    except NoTeacher as missing:
        raise ConfigurationError(f'{KINDS[kind.name].key} = "{name}": {missing}') from missing
    except NotInStep as missing:
        note = (
            f'{KINDS[kind.name].key} = "{name}" reads `{missing.name}`, so it could not be tried on'
            " a small example before the first step."
        )
    if note:
        notes.append(note)
    return stage


class _TrialError(RetrainError):
    pass


# -- episode advantages ----------------------------------------------------------------------------

_CENTRED = 1e-6
"""Largest mean of a group's advantages that counts as 0, for plugins that compute in float32."""


def _builtin_advantage(
    name: str, builtin: BuiltinAdvantage, config: "TrainConfig", params: dict[str, Any]
) -> EpisodeStage:
    refuse_unknown_params("advantage", name, builtin.parameters, config)

    def advantages(tokens: StepTokens, step: int) -> list[list[float]]:
        if builtin.batch_level:  # which tells the form to us and not to mypy
            return builtin.function(tokens.rewards, tokens.token_counts, **params)  # type: ignore[return-value]  # of all groups
        assigned: list[list[float]] = []
        for group, rewards in enumerate(tokens.rewards):
            try:
                assigned.append(builtin.function(rewards, **params))  # type: ignore[arg-type]  # the form of one group
            except ValueError as error:
                raise ValueError(f"group {group}: {error}") from error
        return assigned

    try:
        advantages(_SMALL, 0)
    except (ValueError, TypeError) as error:
        raise ConfigurationError(
            f'[algorithm.advantage_params] of advantage_mode = "{name}": {describe(error)}.'
        ) from error
    return advantages


@dataclass(frozen=True)
class PluginAdvantage:
    """The stage of an advantage plugin, which may keep something between steps."""

    plugin: PluginCall

    def __call__(self, tokens: StepTokens, step: int) -> list[list[float]]:
        checked_groups(tokens.rewards)
        what = f'advantage "{self.plugin.name}"'
        contexts = tokens.contexts(step, self.plugin.params, self.plugin.config.training.max_tokens)
        rows: Iterable[Any] = map(self._of_group, contexts)
        if getattr(self.plugin.function, "step_level", False):
            whole = StepAdvantageContext(contexts, step, self.plugin.params)
            rows = _groups_of(self.plugin(whole.rewards, lambda: whole), tokens, what)
        return [
            numbers(row, len(rewards), f"group {group}: {what}").tolist()
            for group, (row, rewards) in enumerate(zip(rows, tokens.rewards, strict=True))
        ]

    def _of_group(self, context: AdvantageContext) -> Any:
        return self.plugin(list(context.rewards), lambda: context, f" on group {context.group}")

    def state(self) -> dict[str, Any]:
        """Return what the plugin keeps between steps, through JSON; {} if it has no `state`."""
        give = getattr(self.plugin.function, "state", dict)
        return state_of(f'advantage "{self.plugin.name}"', give)

    def load(self, state: dict[str, Any]) -> None:
        """Give the plugin what `state` returned."""
        take = getattr(self.plugin.function, "load", None)
        if take is not None and state:
            with user_code(f'advantage "{self.plugin.name}": load()', RunFailed):
                take(state)


def _try_advantage(_: EpisodeStage, plugin: PluginCall) -> str | None:
    """Warn of a plugin's advantages of equal rewards unless they cancel: such a group says nothing
    about which completion is better. Raise ValueError if what it keeps is not restored, or if a
    function does not repeat its numbers.
    """
    # Of copies, because what a plugin keeps must not begin with its trial.
    advantages, resumed = (
        PluginAdvantage(replace(plugin, function=deepcopy(plugin.function))) for _ in range(2)
    )
    small, equal = (
        _small(rewards, plugin.config) for rewards in (_REWARDS, [[0.0, 0.0, 0.0], [1.0, 1.0]])
    )
    means = {
        group[0]: float(np.mean(values))
        for group, values in zip(equal.rewards, advantages(equal, 0), strict=True)
    }
    if inspect.isroutine(plugin.function):
        _same_again(lambda: advantages(small, 0))
    else:
        advantages(small, 0)
        resumed.load(advantages.state())
        if resumed(small, 1) != advantages(small, 1):
            raise ValueError("load() does not restore what state() returned, or nothing does")
    uncentred = [
        f"{mean:.3g} where all rewards are {reward:g}"
        for reward, mean in means.items()
        if abs(mean) > _CENTRED
    ]
    if not uncentred:
        return None
    return (
        f'[algorithm] advantage_mode = "{plugin.name}" gives equal rewards advantages that do not'
        f" cancel (mean {', '.join(uncentred)}): it trains such groups too, also one whose"
        " completions are all wrong; subtract the group's mean unless that is meant."
    )


ADVANTAGE = StageKind[EpisodeStage](
    "advantage", ADVANTAGES, PluginAdvantage, _try_advantage, _builtin_advantage
)


# -- uncertainty -----------------------------------------------------------------------------------


def _shannon_entropy(tokens: StepTokens, step: int) -> Float64Array:
    if tokens.entropies is None:
        raise ValueError(
            'uncertainty_kind = "shannon_entropy" needs the entropy of every token, and this engine'
            " records none; use surprisal or predictive_variance"
        )
    return kinds.shannon_entropy(tokens.entropies)


def _plugin_uncertainty(plugin: PluginCall) -> UncertaintyStage:
    def uncertainty(tokens: StepTokens, step: int) -> Float64Array:
        logprobs = tokens.segments.split(tokens.logprobs)
        entropies: Sequence[Float64Array | None] = [None] * len(logprobs)
        if tokens.entropies is not None:
            entropies = tokens.segments.split(tokens.entropies)
        values = []
        for index, (completion, recorded) in enumerate(zip(logprobs, entropies, strict=True)):
            place, (group, number) = tokens.place(index), tokens.of_group(index)
            context = partial(
                UncertaintyContext,
                completion.tolist(),
                None if recorded is None else recorded.tolist(),
                step,
                group,
                number,
                plugin.params,
            )
            given = plugin(completion.tolist(), context, f" on {place}")
            values.append(numbers(given, len(completion), f'{place}: uncertainty "{plugin.name}"'))
        return flatten(values)

    return uncertainty


def _try_uncertainty(uncertainty: UncertaintyStage, plugin: PluginCall) -> None:
    _same_again(lambda: uncertainty(_SMALL, 0).tolist())


UNCERTAINTY = StageKind[UncertaintyStage](
    "uncertainty",
    {
        kinds.SURPRISAL: lambda tokens, _: kinds.surprisal(tokens.logprobs),
        kinds.PREDICTIVE_VARIANCE: lambda tokens, _: kinds.predictive_variance(tokens.logprobs),
        kinds.SHANNON_ENTROPY: _shannon_entropy,
    },
    _plugin_uncertainty,
    _try_uncertainty,
)


# -- transforms ------------------------------------------------------------------------------------


def _plugin_transform(plugin: PluginCall) -> TransformStage:
    if not plugin.form.takes_context:
        return TransformStage(_made_spec(plugin), None, plugin.params)

    def transform(context: TransformContext) -> Sequence[Sequence[float]]:
        output = plugin(None, lambda: context, f" on group {context.group}")
        if not isinstance(output, TransformOutput):
            raise ValueError(
                f'transform "{plugin.name}" returned {type(output).__name__}, it must return a'
                " retrain.advantages.TransformOutput"
            )
        return output.token_advs

    # What a function of the context reads is not known, so it is given everything.
    spec = TransformSpec(plugin.name, needs_planning=True, uses_sepa_controller=True)
    return TransformStage(spec, transform, plugin.params)


def _made_spec(factory: PluginCall) -> TransformSpec:
    """Return the spec that a factory `f()` or `f(params)` makes."""
    given = []
    if "params" in factory.form.keywords:
        given = [factory.params]
    with user_code(f'[algorithm] transform_mode = "{factory.name}"', ConfigurationError):
        spec = factory.function(*given)
    if not isinstance(spec, TransformSpec):
        raise ConfigurationError(
            f'[algorithm] transform_mode = "{factory.name}" returned {type(spec).__name__}, and a'
            " factory must return a retrain.advantages.TransformSpec."
        )
    return spec


def _try_transform(transform: TransformStage, plugin: PluginCall) -> None:
    _same_again(lambda: [row.tolist() for row in _on_example(transform, plugin)])


def _on_example(transform: TransformStage, plugin: PluginCall) -> list[Float64Array]:
    """Return the numbers that each function of a transform gives of a small example."""
    context = _small_context(transform.params, plugin.config)
    lengths = [len(row) for row in context.logprobs]
    spec = transform.spec
    if transform.function is not None:
        return token_lists(transform.function(context), lengths, "its output")
    found: list[Float64Array] = []
    if spec.entropy_transform is not None:
        rows = zip(context.entropies, context.planning_mask, strict=True)
        given = [spec.entropy_transform(list(row), list(mask), 0.5) for row, mask in rows]
        found += token_lists(given, lengths, "entropy_transform")
    if spec.flat_entropy_transform is not None:
        segments = Segments(lengths)
        planning = flatten(context.planning_mask).astype(np.bool_)
        flat = spec.flat_entropy_transform(flatten(context.entropies), planning, segments, 0.5)
        found.append(numbers(flat, segments.total, "flat_entropy_transform"))
    if spec.post_process is not None:
        uncertainty = [list(row) for row in context.entropies]
        found += token_lists(spec.post_process(uncertainty, context), lengths, "post_process")
    return found


TRANSFORM = StageKind[TransformStage](
    "transform",
    {name: TransformStage(spec, None, {}) for name, spec in TRANSFORMS.items()},
    _plugin_transform,
    _try_transform,
)


# -- whole algorithms ------------------------------------------------------------------------------


def _plugin_algorithm(plugin: PluginCall) -> AlgorithmStage:
    def algorithm(context: AlgorithmContext) -> Sequence[Sequence[Sequence[float]]]:
        output = plugin(context, lambda: context)
        if not isinstance(output, AlgorithmOutput):
            raise ValueError(
                f'algorithm "{plugin.name}" returned {type(output).__name__}, it must return a'
                " retrain.advantages.AlgorithmOutput"
            )
        return output.token_advs

    return algorithm


def _try_algorithm(algorithm: AlgorithmStage, plugin: PluginCall) -> None:
    _same_again(lambda: step_tokens(algorithm(_small_step(plugin)), _SMALL, "its output").tolist())


def _small_step(plugin: PluginCall) -> AlgorithmContext:
    small = _small(_REWARDS, plugin.config)
    return AlgorithmContext(
        rewards=[list(rewards) for rewards in _REWARDS],
        logprobs=_SMALL.nested(_SMALL.logprobs),
        entropies=_SMALL.nested(-_SMALL.logprobs),
        planning_mask=_SMALL.nested_masks(),
        sepa_lambda=0.5,
        step=0,
        gtpo_beta=plugin.config.gtpo.beta,
        hicra_alpha=plugin.config.hicra.alpha,
        params=plugin.params,
        groups=small.contexts(0, plugin.params, plugin.config.training.max_tokens),
        reference=lambda: small.nested_reference,
    )


ALGORITHM = StageKind[AlgorithmStage](
    "algorithm", dict.fromkeys(RECIPES), _plugin_algorithm, _try_algorithm
)
"""The built-in recipes are pairs of names, which the pipeline takes apart before."""


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


def token_lists(rows: Any, lengths: Sequence[int], what: str) -> list[Float64Array]:
    """Return one list of numbers for each completion of a group. Raises ValueError for another
    shape.
    """
    rows = list(rows)
    if len(rows) != len(lengths):
        raise ValueError(f"{what} has {len(rows)} completions, it must have {len(lengths)}")
    return [
        numbers(row, length, f"{what}, completion {index}")
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True))
    ]


def step_tokens(groups: Any, tokens: StepTokens, what: str) -> Float64Array:
    """Flatten token advantages, [P][G][T] -> [n]."""
    given = zip(_groups_of(groups, tokens, what), tokens.token_counts, strict=True)
    rows = []
    for index, (group, counts) in enumerate(given):
        rows += token_lists(group, counts, f"{what}, group {index}")
    return flatten(rows)


def _groups_of(groups: Any, tokens: StepTokens, what: str) -> list[Any]:
    """Return P groups. Raises ValueError for another number of them, or no list."""
    if not isinstance(groups, Sequence | np.ndarray):
        raise ValueError(
            f"{what} gave {type(groups).__name__}, it must give a list of {len(tokens.rewards)}"
            " groups"
        )
    if len(groups) != len(tokens.rewards):
        raise ValueError(f"{what} has {len(groups)} groups, it must have {len(tokens.rewards)}")
    return list(groups)


def _same_again(give: Callable[[], list[Any]]) -> None:
    """Raise ValueError for a plugin that gives other numbers when it is asked again."""
    if give() != give():
        raise ValueError(
            "asked again, it gives other numbers; a run repeats and resumes byte for byte, so draw"
            " none at random and keep nothing between the calls of a function"
        )


# -- small examples --------------------------------------------------------------------------------

_REWARDS = [[1.0, 0.0, 0.0], [0.0, 1.0]]
_LENGTHS = (3, 2, 1, 2, 4)
_LOGPROBS = -np.array([0.1, 2.5, 0.01, 1.0, 0.2, 3.0, 0.5, 0.7, 1.5, 0.3, 0.05, 2.0])
_ENTROPIES = np.array([0.2, 2.0, 0.05, 1.1, 0.4, 2.5, 0.6, 0.8, 1.2, 0.4, 0.1, 1.9])


def _small(rewards: list[list[float]], config: "TrainConfig | None" = None) -> StepTokens:
    """Return a made-up step of five completions with these rewards. A reward is the only part of
    its completion and the reward of its only turn. The step has a teacher if the configuration
    names one.
    """
    parts, teacher = 1, no_reference
    if config is not None:
        parts = len(config.reward.types)
        if config.algorithm.reference:
            teacher = _made_up_teacher
    segments = Segments(_LENGTHS)
    logprobs = iter(segments.split(_LOGPROBS.astype(np.float32)))
    groups = []
    for slot, own in enumerate(rewards):
        members = []
        # `own` stands first and ends first, so that no completion's log-probs are taken and lost.
        for sample, (reward, logprob) in enumerate(zip(own, logprobs, strict=False)):
            ids = np.arange(len(logprob), dtype=np.int32)
            completion = Completion(slot, sample, ids, logprob, None, FinishReason.STOP)
            score = Score.of(reward, 0.5)
            score = replace(score, turn_rewards=(reward,), parts=(reward,) * parts)
            members.append(Scored(Trajectory.of(completion), "", score))
        example = Example("", "", info=MADE_UP, example_id=f"made-up-{slot}")
        groups.append(Group(Prompt(example, "", np.zeros(1, np.int32)), slot, members))
    return StepTokens(
        rewards=rewards,
        segments=segments,
        logprobs=_LOGPROBS,
        entropies=_ENTROPIES,
        planning=np.array([0, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0], dtype=np.bool_),
        in_loss=np.ones(5, dtype=np.bool_),
        sources=groups,
        teacher=teacher,
    )


def _made_up_teacher() -> Float64Array:
    return 0.7 * _LOGPROBS - 0.1


_SMALL = _small(_REWARDS)


def _small_context(params: dict[str, Any], config: "TrainConfig") -> TransformContext:
    reference: Reference = no_reference
    if config.algorithm.reference:
        reference = partial(list, ([-0.2, -1.0, -0.4], [-0.5]))
    return TransformContext(
        rewards=[1.0, 0.0],
        advantages=[0.5, -0.5],
        logprobs=[[-0.1, -2.0, -0.3], [-1.0]],
        entropies=[[0.1, 2.0, 0.3], [1.0]],
        planning_mask=[[0, 1, 0], [0]],
        sepa_lambda=0.5,
        step=0,
        group=0,
        gtpo_beta=0.1,
        hicra_alpha=0.2,
        params=params,
        reference=reference,
    )

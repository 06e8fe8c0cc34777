"""Resolution of the configuration's names to the functions of the pipeline: built-ins and plugins
get the same form.

A plugin is tried on a small example when it is loaded, so that a wrong shape is found before the
first step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from retrain.advantages import uncertainty as kinds
from retrain.advantages.algorithms import (
    RECIPES,
    AdvantageContext,
    AlgorithmContext,
    AlgorithmOutput,
    UncertaintyContext,
)
from retrain.advantages.episode import ADVANTAGES, BuiltinAdvantage, checked_groups
from retrain.advantages.ragged import Float64Array, Segments, flatten
from retrain.advantages.step import StepTokens
from retrain.advantages.transforms import (
    TRANSFORMS,
    TransformContext,
    TransformOutput,
    TransformSpec,
)
from retrain.errors import ConfigurationError, RetrainError, RunFailed
from retrain.plugins import (
    describe,
    inspect_call,
    load_plugin,
    params_of,
    refuse_unknown_params,
    report_probe,
    user_code,
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
class ResolvedTransform:
    spec: TransformSpec
    function: GroupTransform | None
    """A plugin of the form f(ctx), which then does all the work; None for a TransformSpec."""
    params: dict[str, Any]


_CENTRED = 1e-6
"""Largest mean of a group's advantages that counts as 0, for plugins that compute in float32."""


class _ProbeFailed(RetrainError):
    pass


def resolve_advantage(name: str, config: "TrainConfig", notes: list[str]) -> EpisodeStage:
    plugin = load_plugin("advantage", name, config, ADVANTAGES)
    params = params_of("advantage", config)
    if isinstance(plugin, BuiltinAdvantage):
        return _builtin_advantage(name, plugin, params, config)
    call = inspect_call("advantage", plugin)
    extra = {"params": params} if "params" in call.keywords else {}

    def advantages(tokens: StepTokens, step: int) -> list[list[float]]:
        checked_groups(tokens.rewards)
        assigned = []
        for group, (rewards, counts) in enumerate(
            zip(tokens.rewards, tokens.token_counts, strict=True)
        ):
            argument = (
                AdvantageContext(list(rewards), counts, step, group, params)
                if call.takes_context
                else list(rewards)
            )
            with user_code(f'advantage "{name}" on group {group}', RunFailed):
                values = plugin(argument, **extra)
            assigned.append(
                numbers(values, len(rewards), f'group {group}: advantage "{name}"').tolist()
            )
        return assigned

    def trial() -> None:
        advantages(_SMALL, 0)
        notes.extend(filter(None, [_note_on_equal_rewards(name, advantages)]))

    _probe("advantage", name, config, notes, trial)
    return advantages


def _note_on_equal_rewards(name: str, advantages: EpisodeStage) -> str:
    """Name a plugin's advantages of equal rewards unless they cancel: such a group says nothing
    about which completion is better.
    """
    equal = replace(_SMALL, rewards=[[0.0, 0.0, 0.0], [1.0, 1.0]])
    means = {
        group[0]: float(np.mean(values))
        for group, values in zip(equal.rewards, advantages(equal, 0), strict=True)
    }
    uncentred = [
        f"{mean:.3g} where all rewards are {reward:g}"
        for reward, mean in means.items()
        if abs(mean) > _CENTRED
    ]
    if not uncentred:
        return ""
    return (
        f'[algorithm] advantage_mode = "{name}" gives equal rewards advantages that do not cancel'
        f" (mean {', '.join(uncentred)}): it trains such groups too, also one whose completions are"
        " all wrong; subtract the group's mean unless that is meant."
    )


def _builtin_advantage(
    name: str, builtin: BuiltinAdvantage, params: dict[str, Any], config: "TrainConfig"
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


def resolve_uncertainty(name: str, config: "TrainConfig", notes: list[str]) -> UncertaintyStage:
    kind = kinds.canonical_kind(name)
    if kind in kinds.KINDS:
        refuse_unknown_params("uncertainty", kind, frozenset(), config)
        return _BUILTIN_UNCERTAINTIES[kind]
    plugin = load_plugin("uncertainty", name, config, _BUILTIN_UNCERTAINTIES)
    call = inspect_call("uncertainty", plugin)
    params = params_of("uncertainty", config)
    extra = {"params": params} if "params" in call.keywords else {}

    def uncertainty(tokens: StepTokens, step: int) -> Float64Array:
        logprobs = tokens.segments.split(tokens.logprobs)
        entropies = (
            tokens.segments.split(tokens.entropies) if tokens.entropies is not None else None
        )
        values = []
        for index, completion in enumerate(logprobs):
            place = tokens.place(index)
            argument: Any = completion.tolist()
            if call.takes_context:
                recorded = entropies[index].tolist() if entropies is not None else None
                group = int(tokens.group_of[index])
                first = int(np.searchsorted(tokens.group_of, group))
                argument = UncertaintyContext(
                    argument, recorded, step, group, index - first, params
                )
            with user_code(f'uncertainty "{name}" on {place}', RunFailed):
                given = plugin(argument, **extra)
            values.append(numbers(given, len(completion), f'{place}: uncertainty "{name}"'))
        return flatten(values)

    _probe("uncertainty", name, config, notes, lambda: uncertainty(_SMALL, 0))
    return uncertainty


def _shannon_entropy(tokens: StepTokens, step: int) -> Float64Array:
    if tokens.entropies is None:
        raise ValueError(
            'uncertainty_kind = "shannon_entropy" needs the entropy of every token, and this engine'
            " records none; use surprisal or predictive_variance"
        )
    return kinds.shannon_entropy(tokens.entropies)


_BUILTIN_UNCERTAINTIES: dict[str, UncertaintyStage] = {
    kinds.SURPRISAL: lambda tokens, _: kinds.surprisal(tokens.logprobs),
    kinds.PREDICTIVE_VARIANCE: lambda tokens, _: kinds.predictive_variance(tokens.logprobs),
    kinds.SHANNON_ENTROPY: _shannon_entropy,
}


def resolve_transform(name: str, config: "TrainConfig", notes: list[str]) -> ResolvedTransform:
    plugin = load_plugin("transform", name, config, TRANSFORMS)
    params = params_of("transform", config)
    if isinstance(plugin, TransformSpec) and plugin is TRANSFORMS.get(name):
        refuse_unknown_params("transform", name, frozenset(), config)
        return ResolvedTransform(plugin, None, {})
    call = inspect_call("transform", plugin)
    if call.takes_context:
        return _context_transform(
            name,
            plugin,
            {"params": params} if "params" in call.keywords else {},
            params,
            config,
            notes,
        )
    with user_code(f'[algorithm] transform_mode = "{name}"', ConfigurationError):
        spec = plugin(params) if "params" in call.keywords else plugin()
    if not isinstance(spec, TransformSpec):
        raise ConfigurationError(
            f'[algorithm] transform_mode = "{name}" returned {type(spec).__name__}, and a factory'
            " must return a retrain.advantages.TransformSpec."
        )
    _probe("transform", name, config, notes, lambda: _try_spec(spec, params))
    return ResolvedTransform(spec, None, params)


def _context_transform(
    name: str,
    plugin: Callable[..., Any],
    extra: dict[str, Any],
    params: dict[str, Any],
    config: "TrainConfig",
    notes: list[str],
) -> ResolvedTransform:
    def transform(context: TransformContext) -> Sequence[Sequence[float]]:
        with user_code(f'transform "{name}" on group {context.group}', RunFailed):
            output = plugin(context, **extra)
        if not isinstance(output, TransformOutput):
            raise ValueError(
                f'transform "{name}" returned {type(output).__name__}, it must return a'
                " retrain.advantages.TransformOutput"
            )
        return output.token_advs

    context = _small_context(params)
    _probe(
        "transform",
        name,
        config,
        notes,
        lambda: token_lists(
            transform(context), [len(row) for row in context.logprobs], "its output"
        ),
    )
    # What a function of the context reads is not known, so it is given everything.
    return ResolvedTransform(
        TransformSpec(name, needs_planning=True, uses_sepa_controller=True), transform, params
    )


def resolve_algorithm(name: str, config: "TrainConfig", notes: list[str]) -> AlgorithmStage:
    """Load an algorithm plugin. The built-in recipes are pairs of names and never come here."""
    plugin = load_plugin("algorithm", name, config, dict.fromkeys(RECIPES))
    call = inspect_call("algorithm", plugin)
    params = params_of("algorithm", config)
    extra = {"params": params} if "params" in call.keywords else {}

    def algorithm(context: AlgorithmContext) -> Sequence[Sequence[Sequence[float]]]:
        with user_code(f'algorithm "{name}"', RunFailed):
            output = plugin(context, **extra)
        if not isinstance(output, AlgorithmOutput):
            raise ValueError(
                f'algorithm "{name}" returned {type(output).__name__}, it must return a'
                " retrain.advantages.AlgorithmOutput"
            )
        return output.token_advs

    context = AlgorithmContext(
        rewards=_SMALL.rewards,
        logprobs=_SMALL.nested(_SMALL.logprobs),
        entropies=_SMALL.nested(-_SMALL.logprobs),
        planning_mask=_SMALL.nested_masks(),
        sepa_lambda=0.5,
        step=0,
        gtpo_beta=config.gtpo.beta,
        hicra_alpha=config.hicra.alpha,
        params=params,
    )
    _probe(
        "algorithm",
        name,
        config,
        notes,
        lambda: step_tokens(algorithm(context), _SMALL, "its output"),
    )
    return algorithm


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
    groups = list(groups)
    if len(groups) != len(tokens.rewards):
        raise ValueError(f"{what} has {len(groups)} groups, it must have {len(tokens.rewards)}")
    rows = [
        row
        for index, (group, counts) in enumerate(zip(groups, tokens.token_counts, strict=True))
        for row in token_lists(group, counts, f"{what}, group {index}")
    ]
    return flatten(rows)


# -- probes ----------------------------------------------------------------------------------------

_SMALL = StepTokens(
    rewards=[[1.0, 0.0, 0.0], [0.0, 1.0]],
    segments=Segments([3, 2, 1, 2, 4]),
    logprobs=-np.array([0.1, 2.5, 0.01, 1.0, 0.2, 3.0, 0.5, 0.7, 1.5, 0.3, 0.05, 2.0]),
    entropies=np.array([0.2, 2.0, 0.05, 1.1, 0.4, 2.5, 0.6, 0.8, 1.2, 0.4, 0.1, 1.9]),
    planning=np.array([0, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0], dtype=np.bool_),
    in_loss=np.ones(5, dtype=np.bool_),
)


def _small_context(params: dict[str, Any]) -> TransformContext:
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
    )


def _try_spec(spec: TransformSpec, params: dict[str, Any]) -> None:
    context = _small_context(params)
    lengths = [len(row) for row in context.logprobs]
    if spec.entropy_transform is not None:
        rows = zip(context.entropies, context.planning_mask, strict=True)
        token_lists(
            [spec.entropy_transform(list(row), list(mask), 0.5) for row, mask in rows],
            lengths,
            "entropy_transform",
        )
    if spec.flat_entropy_transform is not None:
        segments = Segments(lengths)
        planning = flatten(context.planning_mask).astype(np.bool_)
        numbers(
            spec.flat_entropy_transform(flatten(context.entropies), planning, segments, 0.5),
            segments.total,
            "flat_entropy_transform",
        )
    if spec.post_process is not None:
        token_lists(
            spec.post_process([list(row) for row in context.entropies], replace(context)),
            lengths,
            "post_process",
        )


def _probe(
    kind: str, name: str, config: "TrainConfig", notes: list[str], trial: Callable[[], object]
) -> None:
    try:
        with user_code("", _ProbeFailed):
            try:
                trial()
            except RunFailed as failure:  # the plugin's own exception, as a run would name it
                raise failure.__cause__ or failure from None
    except _ProbeFailed as failure:
        cause = failure.__cause__ or failure
        notes.append(
            report_probe(kind, name, f"fails on a small example ({describe(cause)})", config)
        )

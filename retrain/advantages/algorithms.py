"""Full algorithms: an `algorithm_mode` replaces the pair of advantage_mode and transform_mode.

The built-in ones are recipes, i.e. names for such a pair; a plugin computes the token advantages of the whole step itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from retrain.errors import ConfigurationError

if TYPE_CHECKING:
    from retrain.config import TrainConfig


@dataclass(frozen=True)
class AdvantageContext:
    """One group of G judged completions."""

    rewards: list[float]
    """[G]"""
    token_counts: list[int]
    """[G] action tokens of each completion."""
    step: int
    group: int
    """The group's place in the step."""
    params: dict[str, Any] = field(default_factory=dict)
    """`[algorithm.advantage_params]`"""


@dataclass(frozen=True)
class UncertaintyContext:
    """One completion of T action tokens."""

    logprobs: list[float]
    """[T] of the sampled policy, natural."""
    token_entropies: list[float] | None
    """[T] Shannon entropies in nats; None where the engine records none."""
    step: int
    group: int
    completion: int
    params: dict[str, Any] = field(default_factory=dict)
    """`[algorithm.uncertainty_params]`"""


RECIPES: dict[str, tuple[str, str]] = {
    "grpo_none": ("grpo", "none"),
    "maxrl_none": ("maxrl", "none"),
    "maxrl_gtpo": ("maxrl", "gtpo"),
    "maxrl_gtpo_hicra": ("maxrl", "gtpo_hicra"),
    "maxrl_gtpo_sepa": ("maxrl", "gtpo_sepa"),
    "dr_grpo": ("grpo", "none"),
}
"""The advantage and the transform that a built-in `algorithm_mode` stands for; `dr_grpo` also fixes `[loss] aggregation`."""


@dataclass(frozen=True)
class AlgorithmContext:
    """What an algorithm may read of a step of P groups with G completions each; G and T may differ."""

    rewards: list[list[float]]
    """[P][G]"""
    logprobs: list[list[list[float]]]
    """[P][G][T] of the sampled policy, natural."""
    entropies: list[list[list[float]]]
    """[P][G][T] the configured uncertainty, within [0, 50]."""
    planning_mask: list[list[list[int]]]
    """[P][G][T] 1 inside a planning phrase."""
    sepa_lambda: float
    step: int
    gtpo_beta: float
    hicra_alpha: float
    params: dict[str, Any] = field(default_factory=dict)
    """`[algorithm.params]`"""


@dataclass(frozen=True)
class AlgorithmOutput:
    token_advs: Sequence[Sequence[Sequence[float]]]
    """[P][G][T]"""


def condition_parts(config: "TrainConfig") -> tuple[str, str] | None:
    """(advantage_mode, transform_mode) that the run uses; None for an algorithm plugin, which has neither."""
    algorithm = config.algorithm
    if not algorithm.algorithm_mode:
        return algorithm.advantage_mode, algorithm.transform_mode
    return RECIPES.get(algorithm.algorithm_mode)


def effective_aggregation(config: "TrainConfig") -> str:
    """The loss aggregation that the run uses: `dr_grpo` means "constant", everything else what `[loss] aggregation` says.

    Raises ConfigurationError where the two contradict each other.
    """
    aggregation = config.loss.aggregation
    if config.algorithm.algorithm_mode != "dr_grpo":
        return aggregation
    if aggregation not in ("token_mean", "constant"):  # token_mean is the default, so it may be unset
        raise ConfigurationError(
            f'[loss] aggregation = "{aggregation}" contradicts [algorithm] algorithm_mode = "dr_grpo", which is grpo with aggregation '
            '"constant"; leave aggregation unset, or use algorithm_mode = "grpo_none".'
        )
    return "constant"

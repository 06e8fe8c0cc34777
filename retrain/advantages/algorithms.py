"""Whole algorithms, and what plugins of credit assignment may read.

An `algorithm_mode` replaces the pair of advantage_mode and transform_mode. The built-in ones are
recipes, i.e. names for such a pair; a plugin computes the token advantages of the whole step
itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrain.config.schema import Algorithm, Condition


@dataclass(frozen=True)
class AdvantageContext:
    """One group of G judged completions."""

    rewards: list[float]
    """[G] rewards."""
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
    """[T] natural log-probs of the sampled policy."""
    token_entropies: list[float] | None
    """[T] Shannon entropies in nats; None where the engine records none."""
    step: int
    group: int
    completion: int
    params: dict[str, Any] = field(default_factory=dict)
    """`[algorithm.uncertainty_params]`"""


@dataclass(frozen=True)
class AlgorithmContext:
    """An algorithm's view of a step of P groups with G completions each; G and T may differ."""

    rewards: list[list[float]]
    """[P][G] rewards."""
    logprobs: list[list[list[float]]]
    """[P][G][T] natural log-probs of the sampled policy."""
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
    """[P][G][T] token advantages."""


@dataclass(frozen=True)
class Recipe:
    """The advantage and the transform behind a built-in `algorithm_mode`."""

    advantage: str
    transform: str
    aggregation: str = ""
    """The `[loss] aggregation` that belongs to the algorithm: unset means this value, and any other
    is refused. "" leaves it to the user. """


RECIPES: dict[str, Recipe] = {
    "grpo_none": Recipe("grpo", "none"),
    "maxrl_none": Recipe("maxrl", "none"),
    "maxrl_gtpo": Recipe("maxrl", "gtpo"),
    "maxrl_gtpo_hicra": Recipe("maxrl", "gtpo_hicra"),
    "maxrl_gtpo_sepa": Recipe("maxrl", "gtpo_sepa"),
    "dr_grpo": Recipe("grpo", "none", aggregation="constant"),
}


def recipe_of(modes: "Algorithm | Condition") -> Recipe | None:
    """Return the advantage and the transform in use; None for an algorithm plugin, which has
    neither.
    """
    if modes.algorithm_mode:
        return RECIPES.get(modes.algorithm_mode)
    return Recipe(modes.advantage_mode, modes.transform_mode)

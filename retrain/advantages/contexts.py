"""What advantage and uncertainty plugins may read. Plugins see plain lists."""

from dataclasses import dataclass, field
from typing import Any


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

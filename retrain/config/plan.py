"""The plan of a run: its advantage, transform and judges, and its settings at each step."""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

from retrain.config.judging import Rewards, judging_rewards, training_rewards
from retrain.config.load import replaced
from retrain.config.mixture import changes, points_of, task_of
from retrain.config.moving import Points, scheduled, with_values
from retrain.config.schema import TrainConfig


@dataclass(frozen=True)
class Source:
    """A source of a run's problems."""

    task: str
    """The name of its table in `[[data.mix]]`; "" if the run has one source."""
    weight: Points
    config: TrainConfig
    """The configuration of a run on it alone."""


def sources_of(config: TrainConfig) -> tuple[Source, ...]:
    """Return the sources of `[[data.mix]]`, or the single source of a run without a mixture."""
    if not config.data.mix:
        return (Source("", [[0, 1.0]], config),)
    return tuple(
        Source(task_of(table), points_of(table), replaced(config, changes(table), "[[data.mix]]"))
        for table in config.data.mix
    )


@dataclass(frozen=True)
class Plan:
    """The answers to what several keys of a run's configuration decide together."""

    config: TrainConfig
    advantage: str
    """An algorithm plugin has none: ""."""
    transform: str
    rewards: Rewards
    """The rewards of training."""
    judges: Rewards
    """The rewards that judge held-out answers."""
    evaluations: tuple[TrainConfig, ...]
    """A configuration for each held-out source, with that source's own [evaluation] settings."""

    @classmethod
    def of(cls, config: TrainConfig) -> Self:
        """Resolve the configuration of one condition."""
        advantage, transform = config.algorithm.modes
        own = (config.model_copy(update={"evaluation": part}) for part in config.evaluation.parts)
        rewards, judges = training_rewards(config), judging_rewards(config)
        return cls(config, advantage, transform, rewards, judges, tuple(own))

    @cached_property
    def sources(self) -> tuple[Source, ...]:
        return sources_of(self.config)

    @cached_property
    def judging(self) -> TrainConfig:
        """The configuration whose [reward] is the judges; `config` itself if training has the same
        rewards.
        """
        if self.judges == self.rewards and self.config.reward.combine == "sum":
            return self.config
        types, weights = map(list, zip(*self.judges, strict=True))
        changes = {"reward.type": types, "reward.weights": weights, "reward.combine": "sum"}
        return replaced(self.config, changes)

    def moved(self, step: int) -> dict[str, float]:
        """Return the values of the scheduled keys at a step."""
        return scheduled(self.config, step)

    def at(self, step: int) -> TrainConfig:
        """Return the configuration with the values of a step."""
        return with_values(self.config, self.moved(step))

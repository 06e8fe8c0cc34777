"""The plan of a run: which advantage, transform and judges, and which settings at which step."""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

from retrain.config.judging import Rewards, judging_rewards, training_rewards
from retrain.config.load import replaced
from retrain.config.moving import scheduled, with_values
from retrain.config.schema import TrainConfig


@dataclass(frozen=True)
class Plan:
    """A configuration of one condition, with what follows from several of its keys."""

    config: TrainConfig
    advantage: str
    """"" where an algorithm plugin computes the advantages of tokens itself."""
    transform: str
    rewards: Rewards
    judges: Rewards
    """They judge held-out answers."""
    evaluations: tuple[TrainConfig, ...]
    """One for each held-out source, with the settings of its table in [evaluation]."""

    @classmethod
    def of(cls, config: TrainConfig) -> Self:
        advantage, transform = config.algorithm.modes
        own = (config.model_copy(update={"evaluation": part}) for part in config.evaluation.parts)
        rewards, judges = training_rewards(config), judging_rewards(config)
        return cls(config, advantage, transform, rewards, judges, tuple(own))

    @cached_property
    def judging(self) -> TrainConfig:
        """`config` with the judges as its [reward]; `config` itself where training's judges."""
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

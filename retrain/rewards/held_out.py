"""What judges held-out answers. A random reward cannot: its accuracy would be chance, whatever the model has learned."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from retrain.config import TrainConfig

_VERIFIABLE = {"lab": "match", "gsm8k": "math", "math": "math"}
"""Data source -> the reward that verifies its answers."""
_ANY_SOURCE = "match"


def with_judging_reward(config: "TrainConfig") -> "TrainConfig":
    """The configuration whose `[reward]` judges held-out answers: the run's own, without what is random in it.

    Where nothing else is left, the reward that verifies the answers of the held-out source.
    """
    from retrain.config import replaced

    reward = config.reward
    kept = [(kind, weight) for kind, weight in zip(reward.types, reward.type_weights, strict=True) if kind != "random"]
    if len(kept) == len(reward.types):
        return config
    source = config.evaluation.source or config.data.source
    types, weights = zip(*kept, strict=True) if kept else ((_VERIFIABLE.get(source, _ANY_SOURCE),), (1.0,))
    return replaced(config, {"reward.type": list(types), "reward.weights": list(weights)})


def judging_note(judging: "TrainConfig") -> str:
    """A sentence for the start of the run whose reward was replaced."""
    return f"Held-out answers are judged by {' + '.join(judging.reward.types)}: the random reward says nothing about them."

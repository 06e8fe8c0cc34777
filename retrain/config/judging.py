"""What judges answers, as far as the configuration says it: in training and held out, and in words that are equal where the judges are.

Two accuracies compare only if one reward said what is right in both.
"""

from typing import TYPE_CHECKING

from retrain.config.toml import toml_value

if TYPE_CHECKING:
    from retrain.config.schema import Reward, TrainConfig

_VERIFIABLE = {"lab": "match", "gsm8k": "math", "math": "math"}
"""Data source -> the reward that verifies its answers."""
_ANY_SOURCE = "match"
_PARAMETERS = {
    "match": ("normalize", "after_think"),
    "math": ("after_think",),
    "random": ("random_p",),
    "judge": ("judge_model",),
    "custom": ("custom_module", "custom_function", "params"),
}
_OF_A_PLUGIN = ("params",)


def training_rewards(config: "TrainConfig") -> list[tuple[str, float]]:
    """Name and weight of what judges in training."""
    return list(zip(config.reward.types, config.reward.type_weights, strict=True))


def judging_rewards(config: "TrainConfig") -> list[tuple[str, float]]:
    """Name and weight of what judges held-out answers: `[evaluation] reward`, or the run's own reward without what is random in it.

    Where nothing else is left, the reward that verifies the answers of the held-out source: a random one would give chance, whatever
    the model has learned.
    """
    if config.evaluation.reward:
        return [(config.evaluation.reward, 1.0)]
    kept = [(kind, weight) for kind, weight in training_rewards(config) if kind != "random"]
    source = config.evaluation.source or config.data.source
    return kept or [(_VERIFIABLE.get(source, _ANY_SOURCE), 1.0)]


def with_judging_reward(config: "TrainConfig") -> "TrainConfig":
    """The configuration whose `[reward]` judges held-out answers; `config` itself where that is the run's own."""
    from retrain.config.load import replaced

    judging = judging_rewards(config)
    if judging == training_rewards(config):
        return config
    types, weights = zip(*judging, strict=True)
    return replaced(config, {"reward.type": list(types), "reward.weights": list(weights)})


def judging_note(judging: "TrainConfig") -> str:
    """A sentence for the start of the run whose held-out answers another reward judges."""
    because = "as [evaluation] reward says" if judging.evaluation.reward else "the random reward says nothing about them"
    return f"Held-out answers are judged by {' + '.join(judging.reward.types)}: {because}."


def judge_words(judges: list[tuple[str, float]], reward: "Reward") -> str:
    """Judges with every parameter that decides what is right: match, custom (custom_module = "mine"), 0.9 math + 0.1 match."""
    named = " + ".join(kind if weight == 1 else f"{weight:g} {kind}" for kind, weight in sorted(judges))
    relevant = {name for kind, _ in judges for name in _PARAMETERS.get(kind, _OF_A_PLUGIN)} | {"correct_threshold"}
    fields = type(reward).model_fields
    given = {name: getattr(reward, name) for name in fields if name in relevant}
    parts = [f"{name} = {toml_value(value)}" for name, value in given.items() if value != fields[name].get_default()]
    return f"{named} ({', '.join(parts)})" if parts else named

"""The rewards that judge answers in training and in held-out evaluation.

Two accuracies are comparable only if the same reward decided in both what is right; `judge_words`
is equal exactly if the judges are.
"""

from retrain.config.keys import all_keys
from retrain.config.names import builtin_names, table
from retrain.config.schema import Reward, TrainConfig
from retrain.system import toml_value

Rewards = tuple[tuple[str, float], ...]
"""Name and weight of each."""
_VERIFIABLE = {
    "lab": "match",
    **dict.fromkeys(("gsm8k", "math", "math500", "aime24", "aime25"), "math"),
}
"""Data source -> the reward that verifies its answers."""
_ANY_SOURCE = "match"


def training_rewards(config: TrainConfig) -> Rewards:
    """Return the rewards of training."""
    return tuple(zip(config.reward.types, config.reward.type_weights, strict=True))


def judging_rewards(config: TrainConfig) -> Rewards:
    """Return the rewards that judge held-out answers: `[evaluation] reward`, or each reward of
    training that verifies.

    If none remains, return the reward that verifies the answers of the held-out source. A random
    reward would measure chance, and a majority reward would measure its own agreement.
    """
    if config.evaluation.reward:
        return ((config.evaluation.reward, 1.0),)
    kept = tuple(each for each in training_rewards(config) if verifies(each[0]))
    judges = {
        _VERIFIABLE.get(source or config.data.source, _ANY_SOURCE)
        for source in config.evaluation.sources
    }
    judge = judges.pop() if len(judges) == 1 else "math"  # it compares letters and words too
    return kept or ((judge, 1.0),)


def verifies(kind: str) -> bool:
    """True if a reward says whether an answer is right."""
    builtin = table("reward").get(kind)
    return builtin is None or builtin.verifies


def judging_note(training: TrainConfig, judging: TrainConfig) -> str:
    """Return the start-up line of a run that judges held-out answers by other rewards than its
    training rewards.
    """
    left_out = [kind for kind in training.reward.types if not verifies(kind)]
    because = "there each counts alone, without its group"
    if left_out:
        because = f"the {' + '.join(left_out)} reward says nothing about them"
    if judging.evaluation.reward:
        because = "as [evaluation] reward says"
    return f"The reward of held-out answers is {' + '.join(judging.reward.types)}: {because}."


def judge_words(judges: Rewards, reward: Reward) -> str:
    """Describe the judges with every parameter that decides what is right: match, custom
    (custom_module = "mine"), 0.9 math + 0.1 match.
    """
    named = " + ".join(
        kind if weight == 1 else f"{weight:g} {kind}" for kind, weight in sorted(judges)
    )
    kinds = {kind if kind in builtin_names("reward") else "plugin" for kind, _ in judges}
    deciding = (key for key in all_keys() if not key.traits.may_change_at_resume)
    relevant = [
        key
        for key in deciding
        if kinds & {*key.traits.parameter_of} or key.path == "reward.correct_threshold"
    ]
    given = [(key, getattr(reward, key.name)) for key in relevant]
    parts = [f"{key.name} = {toml_value(value)}" for key, value in given if value != key.default]
    if parts:
        return f"{named} ({', '.join(parts)})"
    return named

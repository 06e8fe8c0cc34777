"""The door for answers: what a reward gives to completions whose verdict is known."""

from collections.abc import Mapping, Sequence
from typing import Any

from retrain.config import TrainConfig, config_from_mapping
from retrain.errors import ConfigurationError
from retrain.rewards.score import ScoreRequest
from retrain.rewards.scoring import build_scorer
from retrain.types import Example, Score


def score_answers(
    reward: Mapping[str, Any] | TrainConfig, pairs: Sequence[tuple[str, str | Example]]
) -> list[float | None]:
    r"""Return the reward of each completion, or None if the reward could not judge it.

    `reward` is the table `[reward]` of a configuration, such as `{"type": "math"}`, or a whole
    configuration. `pairs` holds a completion, such as `r"\boxed{\frac12}"`, and the reference, or
    the example for a function that reads its `info`.

    Raises ConfigurationError for a reward that does not load or that judges whole groups, and
    EnvironmentFailure if the reward cannot work here.
    """
    if not isinstance(reward, TrainConfig):
        reward = config_from_mapping({"reward": dict(reward)})
    return [score.reward for score in judge_answers(reward, pairs)]


def judge_answers(config: TrainConfig, pairs: Sequence[tuple[str, str | Example]]) -> list[Score]:
    """Return the scores behind `score_answers`: a reward, or the reason for a failure to judge."""
    with build_scorer(config) as scorer:
        if scorer.judges_groups:
            raise ConfigurationError(
                f'[reward] type = "{" + ".join(config.reward.types)}" judges the completions of'
                " a prompt together, and retrain judges each alone here; name other rewards,"
                ' such as type = "match".'
            )
        scorer.probe()
        futures = []
        for index, (response, reference) in enumerate(pairs):
            example = reference
            if isinstance(example, str):
                example = Example("", example, example_id=str(index))
            prompt = example.prompt if isinstance(example.prompt, str) else ""
            futures.append(
                scorer.submit(
                    ScoreRequest(response, example.reference, prompt, example, 0, index, 0)
                )
            )
        return [future.result() for future in futures]

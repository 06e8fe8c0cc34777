"""A group of completions, as a sampler draws it."""

from collections.abc import Sequence

import numpy as np

from retrain.types import (
    Completion,
    Example,
    FinishReason,
    Group,
    Outcome,
    Prompt,
    Score,
    Scored,
    Trajectory,
)

UNJUDGED = Score(Outcome.COULD_NOT_JUDGE, None, "the worker died")


def group(rewards: Sequence[float | None], lengths: Sequence[int] | None = None) -> Group:
    """Completions of one token, or of `lengths` tokens; None where the reward could not judge."""
    members = []
    for sample, reward in enumerate(rewards):
        length = lengths[sample] if lengths else 1
        ids, logprobs = np.zeros(length, np.int32), np.zeros(length, np.float32)
        one = Completion(0, sample, ids, logprobs, None, FinishReason.STOP)
        score = UNJUDGED if reward is None else Score.of(reward, 0.5)
        members.append(Scored(Trajectory.of(one), "", score))
    return Group(Prompt(Example("?", "", info={}), "?", np.zeros(1, np.int32)), 0, members)

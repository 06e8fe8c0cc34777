"""KDRL (arXiv 2506.02208): GRPO and on-policy distillation in one advantage, the teacher for wrong ones alone."""

import numpy as np

from retrain.advantages import AdvantageContext, AlgorithmContext, AlgorithmOutput


def kdrl(ctx: AlgorithmContext) -> AlgorithmOutput:
    """[P][G][T] the normalized reward, plus `weight` (log teacher - log policy) where it was wrong."""
    pairs = zip(ctx.groups, ctx.logprobs)
    return AlgorithmOutput([_of_group(group, own, ctx.params["weight"]) for group, own in pairs])


def _of_group(group: AdvantageContext, own: list[list[float]], weight: float) -> list[list[float]]:
    rewards = np.array(group.rewards)
    scaled = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    rows = []
    for advantage, reward, mine, teacher in zip(scaled, rewards, own, group.reference_logprobs):
        pull = weight * (reward <= 0.5) * (np.array(teacher) - np.array(mine))
        rows.append((advantage + pull).tolist())
    return rows

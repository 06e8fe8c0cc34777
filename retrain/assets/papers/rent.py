"""RENT (arXiv 2505.22660): the reward is the model's own confidence, and no answer is judged."""

import numpy as np

from retrain.advantages import AlgorithmContext, AlgorithmOutput


def confident(ctx: AlgorithmContext) -> AlgorithmOutput:
    """GRPO's advantage of minus the mean entropy of a completion."""
    advantages = []
    for group in ctx.entropies:
        rewards = np.array([-np.mean(tokens) for tokens in group])
        scaled = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        advantages.append([[one] * len(tokens) for one, tokens in zip(scaled, group, strict=True)])
    return AlgorithmOutput(advantages)

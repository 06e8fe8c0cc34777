"""Lite PPO's advantage (arXiv 2508.08221): the mean of the group, the standard deviation of the
batch.
"""

from itertools import chain
from statistics import fmean, stdev

from retrain.advantages import AlgorithmContext, AlgorithmOutput


def lite_ppo(ctx: AlgorithmContext) -> AlgorithmOutput:
    """(R - mean of its group) / std of all rewards of the step, the same for every token of a
    completion.
    """
    rewards = list(chain.from_iterable(ctx.rewards))
    scale = stdev(rewards) + 1e-6 if len(rewards) > 1 else 1.0
    return AlgorithmOutput(
        [
            [
                [(reward - fmean(group)) / scale] * len(tokens)
                for reward, tokens in zip(group, completions, strict=True)
            ]
            for group, completions in zip(ctx.rewards, ctx.logprobs, strict=True)
        ]
    )

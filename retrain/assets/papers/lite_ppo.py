"""Lite PPO's advantage (arXiv 2508.08221): the mean of the group, the standard deviation of the
batch.
"""

from itertools import chain
from statistics import fmean, stdev


def lite_ppo(groups: list[list[float]]) -> list[list[float]]:
    """(R - mean of its group) / std of all rewards of the step."""
    rewards = list(chain.from_iterable(groups))
    scale = stdev(rewards) + 1e-6 if len(rewards) > 1 else 1.0
    return [[(reward - fmean(group)) / scale for reward in group] for group in groups]


lite_ppo.step_level = True

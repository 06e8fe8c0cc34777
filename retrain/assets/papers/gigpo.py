"""GiGPO (arXiv 2505.10978): a turn is also compared with the others that began in its state."""

from collections import defaultdict
from statistics import fmean, stdev

from retrain.advantages import AdvantageContext, AlgorithmContext, AlgorithmOutput


def gigpo(ctx: AlgorithmContext) -> AlgorithmOutput:
    """GRPO's advantage of the episode, plus `weight` times each turn's among those in its state."""
    return AlgorithmOutput([_of_group(group, **ctx.params) for group in ctx.groups])


def _of_group(group: AdvantageContext, gamma: float, weight: float) -> list[list[float]]:
    returns, states = {}, defaultdict(list)
    for one, turns in enumerate(group.turn_contexts):
        paid = group.turn_rewards[one] or (0.0,) * (len(turns) - 1) + (group.rewards[one],)
        for turn in range(len(turns)):
            later = (gamma**n * reward for n, reward in enumerate(paid[turn:]))
            returns[one, turn] = sum(later)
            states[tuple(turns[turn])].append(returns[one, turn])
    advantages, scale = [], stdev(group.rewards) + 1e-6
    for one, (reward, turns) in enumerate(zip(group.rewards, group.turn_contexts, strict=True)):
        whole, tokens = (reward - fmean(group.rewards)) / scale, []
        for turn, (start, stop) in enumerate(group.turn_spans[one]):
            relative = returns[one, turn] - fmean(states[tuple(turns[turn])])
            tokens += [whole + weight * relative] * (stop - start)
        advantages.append(tokens)
    return advantages

"""DAPO's advantage (arXiv 2503.14476): overlong completions lose up to 1 of a reward of -1 or 1."""

from statistics import fmean, stdev

from retrain.advantages import AdvantageContext


def overlong(ctx: AdvantageContext) -> list[float]:
    """(R - mean R) / std R, where R is -1 or 1 less a penalty for the tokens in the cache.

    Zero where all answers are right or all wrong: such a prompt is filtered out, and the penalty
    alone must not train it.
    """
    if min(ctx.rewards) == max(ctx.rewards):
        return [0.0] * len(ctx.rewards)
    cache = ctx.params["cache"] * ctx.max_tokens
    free = ctx.max_tokens - cache
    penalties = [min(1.0, max(0.0, (count - free) / cache)) for count in ctx.token_counts]
    shaped = [
        2 * reward - 1 - penalty for reward, penalty in zip(ctx.rewards, penalties, strict=True)
    ]
    mean, std = fmean(shaped), stdev(shaped)
    return [(reward - mean) / (std + 1e-6) for reward in shaped]

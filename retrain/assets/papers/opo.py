"""OPO's advantage (arXiv 2505.23585): the baseline is the mean reward, weighted by lengths."""

from retrain.advantages import AdvantageContext


def length_weighted(ctx: AdvantageContext) -> list[float]:
    """R - sum of |o| R over the sum of |o|, within the prompt."""
    tokens = sum(ctx.token_counts)
    weighted = sum(n * reward for n, reward in zip(ctx.token_counts, ctx.rewards, strict=True))
    return [reward - weighted / tokens for reward in ctx.rewards]

"""Clip-Cov (arXiv 2505.22617): some tokens that would lower the entropy most get no gradient."""

import numpy as np

from retrain.advantages import AlgorithmContext, AlgorithmOutput


def clip_cov(ctx: AlgorithmContext) -> AlgorithmOutput:
    """GRPO's advantage, 0 for a fraction of the tokens, of those with a covariance in bounds."""
    scaled = [(np.array(r) - np.mean(r)) / (np.std(r, ddof=1) + 1e-6) for r in ctx.rewards]
    tokens = [np.array(one) for group in ctx.logprobs for one in group]
    advantages = np.repeat(np.concatenate(scaled), [len(one) for one in tokens])
    logprobs = np.concatenate(tokens)
    covariance = (advantages - advantages.mean()) * (logprobs - logprobs.mean())
    inside = np.flatnonzero((covariance > ctx.params["low"]) & (covariance < ctx.params["high"]))
    count = min(max(int(ctx.params["fraction"] * len(logprobs)), 1), len(inside))
    advantages[inside[np.arange(count) * len(inside) // max(count, 1)]] = 0.0
    rest = iter(advantages.tolist())
    return AlgorithmOutput([[[next(rest) for _ in one] for one in group] for group in ctx.logprobs])

"""PKPO's rewards (arXiv 2505.15201): an unbiased gradient of pass@k from n answers."""

from math import comb


def pass_at_k(rewards: list[float], params: dict[str, int]) -> list[float]:
    """k/n of a right answer; of a wrong one k/n times the chance that k-1 others hold a right
    one.
    """
    n, k = len(rewards), min(params["k"], len(rewards))
    right = sum(reward > 0 for reward in rewards)
    rescued = 1 - comb(n - 1 - right, k - 1) / comb(n - 1, k - 1) if right < n else 1.0
    return [k / n * (1.0 if reward > 0 else rescued) for reward in rewards]

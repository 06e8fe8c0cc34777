"""The analytic advantage of Pass@k Training (arXiv 2508.10751): a group is judged by its subsets of k."""

from math import comb, sqrt


def passk(rewards: list[float], params: dict[str, float]) -> list[float]:
    """[G] the advantage of a completion is the mean one of the subsets of k that hold it."""
    size, k = len(rewards), int(params["k"])
    wrong = sum(reward <= 0.5 for reward in rewards)
    mean = 1 - comb(wrong, k) / comb(size, k)
    if mean in (0.0, 1.0):
        return [0.0] * size
    std = sqrt(mean * (1 - mean))
    lost = comb(wrong - 1, k - 1) / comb(size - 1, k - 1)  # the other members are wrong too
    return [(1 - mean - lost * (reward <= 0.5)) / std for reward in rewards]

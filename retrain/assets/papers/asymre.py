"""AsymRE (arXiv 2506.20520): a baseline below the mean, and no ratio."""

from torch import Tensor

from retrain.backends import ActionTokens


def lowered(rewards: list[float], params: dict[str, float]) -> list[float]:
    """R - (mean R + delta_v): right answers pull more than wrong ones push."""
    baseline = sum(rewards) / len(rewards) + params["delta_v"]
    return [reward - baseline for reward in rewards]


def reinforce(tokens: ActionTokens) -> Tensor:
    """[N] -A log pi, whatever the policy was that sampled."""
    return -tokens.advantages * tokens.new

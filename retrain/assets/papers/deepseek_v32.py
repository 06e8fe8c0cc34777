"""DeepSeek-V3.2's loss (arXiv 2512.02556): PPO's, without the wrong completions that the policy
has already left behind.
"""

import torch
from torch import Tensor

from retrain.backends import ActionTokens
from retrain.backends.local.loss import sequence_means, spread


def masked(tokens: ActionTokens, params: dict[str, float]) -> tuple[Tensor, dict[str, Tensor]]:
    """[N] PPO's terms, 0 where the advantage is negative and the sequence's mean log-ratio is below
    -delta.
    """
    log_ratios = tokens.new - tokens.old
    left = sequence_means(-log_ratios.detach(), tokens.lengths) > params["delta"]
    dropped = spread(left, tokens.lengths) & (tokens.advantages < 0)
    ratios, low, high = log_ratios.exp(), 1 - params["clip"], 1 + params["clip"]
    gains = torch.minimum(ratios * tokens.advantages, ratios.clamp(low, high) * tokens.advantages)
    return -gains * ~dropped, {"dropped": dropped.double()}


masked.sequence_level = True

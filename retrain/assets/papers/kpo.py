"""KPO's loss (arXiv 2602.10609): the ratio of a token is filtered over the tokens before it."""

import torch
from torch import Tensor

from retrain.backends import ActionTokens


def kpo(tokens: ActionTokens, params: dict[str, float]) -> Tensor:
    """[N] PPO's terms, with a Kalman filter's estimate of the log-ratio, sequence by sequence."""
    filtered = []
    for observed in torch.split_with_sizes(tokens.new - tokens.old, list(tokens.lengths)):
        state, variance = torch.zeros_like(observed[0]), params["noise"]
        for log_ratio in observed:
            predicted = variance + params["process"]
            gain = predicted / (predicted + params["noise"])
            state, variance = state + gain * (log_ratio - state), (1 - gain) * predicted
            filtered.append(state)
    ratios, low, high = torch.stack(filtered).exp(), 1 - params["clip"], 1 + params["clip"]
    return -torch.minimum(ratios * tokens.advantages, ratios.clamp(low, high) * tokens.advantages)


kpo.sequence_level = True

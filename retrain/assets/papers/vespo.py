"""VESPO's loss (arXiv 2602.10693): completions count by a smooth function of their own importance
weight.
"""

import torch
from torch import Tensor

from retrain.backends import ActionTokens


def vespo(tokens: ActionTokens, params: dict[str, float]) -> tuple[Tensor, dict[str, Tensor]]:
    """[N] -phi(W) A log pi, where W is the product of a completion's ratios and phi(W) = W^c1
    exp(c2 (1 - W)), detached.
    """
    counts = torch.tensor(tokens.lengths, device=tokens.new.device)
    log_ratios = torch.segment_reduce(
        (tokens.new - tokens.old).detach(), "sum", lengths=counts, initial=0.0
    )
    log_weights = log_ratios.clamp(-20.0, 20.0).repeat_interleave(counts)

    def phi(c1: float, c2: float) -> Tensor:
        return (c1 * log_weights + c2 * (1 - log_weights.exp())).exp()

    right = phi(params["c1_pos"], params["c2_pos"])
    wrong = phi(params["c1_neg"], params["c2_neg"])
    kernel = torch.where(tokens.advantages < 0, wrong, right)
    return -kernel * tokens.advantages * tokens.new, {"phi": kernel}


vespo.sequence_level = True

"""TOPR's loss (arXiv 2503.14286): a right answer counts fully, a wrong one by how probable it still
is.
"""

import torch
from torch import Tensor

from retrain.backends import ActionTokens


def topr(tokens: ActionTokens) -> tuple[Tensor, dict[str, Tensor]]:
    """[N] -w A log pi, where w is 1 for A >= 0 and else min(1, pi(o) / mu(o)) of the whole
    completion.
    """
    counts = torch.tensor(tokens.lengths, device=tokens.new.device)
    log_ratios = torch.segment_reduce(
        (tokens.new - tokens.old).detach(), "sum", lengths=counts, initial=0.0
    )
    taper = log_ratios.clamp(max=0.0).exp().repeat_interleave(counts)
    weight = torch.where(tokens.advantages < 0, taper, 1.0)
    return -weight * tokens.advantages * tokens.new, {"weight": weight}


topr.sequence_level = True

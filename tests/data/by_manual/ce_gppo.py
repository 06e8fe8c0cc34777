"""CE-GPPO (arXiv 2509.20712): PPO whose clipped tokens keep a bounded gradient instead of none."""

import torch

from retrain.backends import ActionTokens


def ce_gppo(
    tokens: ActionTokens, params: dict[str, float]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """[N] PPO's term inside of the clip; outside of it the bound, whose gradient is kept at a scale."""
    ratio = (tokens.new - tokens.old).exp()
    unit = ratio / ratio.detach()  # 1, with the gradient of the log-prob
    high, low = 1 + params["clip_high"], 1 - params["clip_low"]
    up = (ratio > high) & (tokens.advantages > 0)
    down = (ratio < low) & (tokens.advantages < 0)
    weight = torch.where(up, params["beta_up"] * high * unit, ratio)
    weight = torch.where(down, params["beta_down"] * low * unit, weight)
    return -weight * tokens.advantages, {"outside": (up | down).to(ratio.dtype)}

"""The built-in ppo written as a loss of one's own, for benchmarks/loss_hook.py."""

import torch

from retrain.backends import ActionTokens


def ppo(
    tokens: ActionTokens, params: dict[str, float]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    log_ratios = tokens.new - tokens.old
    rho = log_ratios.clamp(-20, 20).exp()
    low, high = 1 - params["clip"], 1 + params["clip"]
    gain = torch.minimum(rho * tokens.advantages, rho.clamp(low, high) * tokens.advantages)
    outside = ((tokens.advantages > 0) & (rho > high)) | ((tokens.advantages < 0) & (rho < low))
    return -gain, {"rho": rho, "clipped": outside | (log_ratios.detach().abs() > 20)}

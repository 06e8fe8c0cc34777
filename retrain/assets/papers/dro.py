"""DRO's loss (arXiv 2405.19107): a square holds the policy near the sampling policy."""

from torch import Tensor

from retrain.backends import ActionTokens


def dro(tokens: ActionTokens, params: dict[str, float]) -> Tensor:
    """[N] -(A log pi - beta / 2 (log rho)^2)."""
    log_ratios = tokens.new - tokens.old
    return params["beta"] / 2 * log_ratios**2 - tokens.advantages * tokens.new


dro.own_term = True

"""Simple Policy Optimization's loss (arXiv 2401.16025): a quadratic penalty instead of a clip."""

from torch import Tensor

from retrain.backends import ActionTokens


def quadratic(tokens: ActionTokens, params: dict[str, float]) -> Tensor:
    """[N] -(rho A - |A| / (2 epsilon) (rho - 1)^2)."""
    ratios = (tokens.new - tokens.old).exp()
    penalties = tokens.advantages.abs() / (2 * params["epsilon"]) * (ratios - 1) ** 2
    return penalties - ratios * tokens.advantages

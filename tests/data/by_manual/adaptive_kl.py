"""The adaptive KL coefficient (arXiv 1909.08593): it follows a target of the divergence from the base."""

from collections.abc import Mapping
from typing import Any

import torch

from retrain.backends import ActionTokens
from retrain.run.control import Control


def watched(tokens: ActionTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """[N] the plain policy term; it reports the k3 estimate of KL(policy || base)."""
    terms = -(tokens.new - tokens.old).exp() * tokens.advantages
    behind = (tokens.reference - tokens.new).detach()
    return terms, {"kl": behind.exp() - 1 - behind}


watched.needs_reference = True


class AdaptiveKl(Control):
    """A coefficient that rises by up to a fifth of `rate` where the divergence is above its target."""

    keys = ("loss.kl_coef",)

    def __init__(self, params: Mapping[str, Any]) -> None:
        super().__init__(params)
        self.target, self.rate = params["target"], params["rate"]
        self.coefficient = params["start"]

    def values(self, step: int) -> dict[str, float]:
        return {"loss.kl_coef": self.coefficient}

    def observe(self, record: Mapping[str, Any]) -> None:
        kl = (record["loss_metrics"] or {}).get("kl")
        if kl is not None:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.coefficient *= 1 + self.rate * error

    def state(self) -> dict[str, Any]:
        return {"coefficient": self.coefficient}

    def load(self, state: dict[str, Any]) -> None:
        self.coefficient = state["coefficient"]

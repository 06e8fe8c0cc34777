"""Losses that the service does not have, computed here: sapo, gmpo, dppo and custom losses. torch
comes with this module.

The SDK's `forward_backward_custom` asks for a forward pass and hands the log-probs to a function of
ours. It sends the gradient of the answer back as the weights of a cross-entropy. So an update takes
one more forward pass, and waits for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from retrain.backends.local.loss import clip_counts, policy_terms
from retrain.backends.losses import ActionTokens
from retrain.backends.own_loss import OwnFunction, Terms
from retrain.backends.rows import Update
from retrain.backends.tinker.datums import ShiftedRow

if TYPE_CHECKING:
    from retrain.config.schema import Loss


@dataclass
class LossCall:
    """The loss function of one update. The SDK calls it with datums and the [positions] log-probs
    of each, with gradient. It returns the scalar to minimize, and no numbers of its own.

    Raises FloatingPointError, with the name of a tensor that is not finite, before the SDK sends
    anything.
    """

    settings: "Loss"
    own: OwnFunction | None
    rows: Sequence[ShiftedRow]
    weights: Sequence[float]
    """The weight of each row's tokens."""
    result: Update = field(default_factory=Update)
    """The update of the last call, without its gradient norm."""

    def __call__(
        self,
        data: Sequence[Any],  # noqa: ARG002 - the SDK's form
        logprobs: Sequence[Tensor],
    ) -> tuple[Tensor, dict[str, float]]:
        rows = [row.row for row in self.rows]
        lengths = [row.num_actions for row in rows]
        places = zip(logprobs, self.rows, strict=True)
        new = torch.cat([values[torch.from_numpy(row.predictors)] for values, row in places])
        old, advantages = (
            torch.from_numpy(np.concatenate([getattr(row, name) for row in rows]))
            for name in ("logprobs", "advantages")
        )
        weights = torch.tensor(self.weights).repeat_interleave(torch.tensor(lengths))
        tokens = ActionTokens(new, old, old, advantages, weights, lengths)
        terms = (
            self.own(tokens) if self.own else Terms(policy_terms(tokens, self.settings), None, {})
        )
        loss: Tensor = (terms.values * weights).sum()
        # The SDK takes this gradient itself; check it here before retrain sends anything.
        gradient = torch.cat(torch.autograd.grad(loss, logprobs, retain_graph=True))
        parts = {"log-probs": new, "loss": loss, "gradient of the loss": gradient}
        for name, values in parts.items():
            if not torch.isfinite(values).all():
                raise FloatingPointError(name)
        clipped = clippable = 0.0
        if terms.clipped is not None or not self.own:
            clipped, clippable = clip_counts(tokens, self.settings, terms.clipped).tolist()
        metrics = {
            name: (float(value.sum()), value.numel()) for name, value in terms.metrics.items()
        }
        self.result = Update(loss.item(), np.nan, clipped, clippable, metrics)
        return loss, {}

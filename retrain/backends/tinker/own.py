"""Losses that the service does not have, computed here: sapo, gmpo, dppo and custom losses. torch
comes with this module.

The SDK's `forward_backward_custom` asks for a forward pass and hands the log-probs to a function of
ours. It sends the gradient of the answer back as the weights of a cross-entropy. So an update takes
one more forward pass, and waits for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from retrain.backends.local.loss import clip_counts, policy_terms
from retrain.backends.losses import ActionTokens
from retrain.backends.own_loss import OwnFunction, Terms
from retrain.backends.tinker.datums import ShiftedRow
from retrain.errors import RetrainError
from retrain.types import Row

if TYPE_CHECKING:
    from retrain.config.schema import Loss


class NonfiniteError(RetrainError):
    """A tensor of an update, which the message names, is not finite; retrain has sent nothing."""


@dataclass
class LossCall:
    """The loss function of one update. The SDK calls it with datums and the [positions] log-probs
    of each, with gradient. Its results are the scalar to minimize, and numbers to report.
    """

    settings: "Loss"
    own: OwnFunction | None
    rows: Sequence[tuple[ShiftedRow, Row, float]]
    """(shifted, row, weight of its tokens) of each datum."""
    loss: float = float("nan")
    clip: tuple[float, float] = (0.0, 0.0)
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    """(sum, number) of the values of each metric."""

    def __call__(
        self,
        data: Sequence[Any],  # noqa: ARG002 - the SDK's form
        logprobs: Sequence[Tensor],
    ) -> tuple[Tensor, dict[str, float]]:
        rows = [row for _, row, _ in self.rows]
        new = torch.cat(
            [
                values[torch.from_numpy(shifted.predictors)]
                for values, (shifted, *_) in zip(logprobs, self.rows, strict=True)
            ]
        )
        old = _flat([row.logprobs for row in rows])
        weights = _flat(
            [np.full(row.num_actions, weight, np.float32) for _, row, weight in self.rows]
        )
        tokens = ActionTokens(
            new,
            old,
            old,
            _flat([row.advantages for row in rows]),
            weights,
            lengths=tuple(row.num_actions for row in rows),
        )
        if self.own:
            terms = self.own(tokens)
        else:
            terms = Terms(policy_terms(tokens, self.settings), None, {})
        loss: Tensor = (terms.values * weights).sum()
        # The SDK takes this gradient itself; check it here before retrain sends anything.
        gradients = torch.autograd.grad(loss, list(logprobs), retain_graph=True)
        _refuse_nonfinite({"log-probs": [new], "loss": [loss], "gradient of the loss": gradients})
        self.loss = loss.item()
        if terms.clipped is not None or not self.own:
            clipped, clippable = clip_counts(tokens, self.settings, terms.clipped).tolist()
            self.clip = (clipped, clippable)
        self.metrics = {
            name: (float(value.sum()), float(value.numel()))
            for name, value in terms.metrics.items()
        }
        return loss, {}


def _refuse_nonfinite(parts: Mapping[str, Sequence[Tensor]]) -> None:
    for name, tensors in parts.items():
        if not all(torch.isfinite(tensor).all() for tensor in tensors):
            raise NonfiniteError(name)


def _flat(arrays: Sequence[Any]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays))

"""Rows as the service reads them, shifted by one with one value per position, and the loss of a
step from the log-probs it returns.

Position i of a datum's input predicts position i of its targets, which is the next token of the
row. Log-probs and advantages have values where a position predicts an action, and 0 everywhere
else. The prompt and an environment's tokens therefore have no term in the loss. Shape letters: N
positions of a row, T action tokens. In the loss N are action tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from retrain.backends.rows import Update, needed_tokens, shift
from retrain.errors import RunFailed
from retrain.types import Float32Array, Row

if TYPE_CHECKING:
    from tinker import types

    from retrain.config.schema import Loss


@dataclass(frozen=True)
class ShiftedRow:
    """A row with at least one action."""

    row: Row
    number: int = 0
    """The row's place in the step."""

    @cached_property
    def predictors(self) -> npt.NDArray[np.int64]:
        """[T] positions whose targets are the actions."""
        return shift(self.row).predictors

    def __len__(self) -> int:
        return needed_tokens(self.row)

    def datum(self, **values: npt.ArrayLike) -> "types.Datum":
        """Make a datum with each of `values` [T] at the positions that predict the actions, and 0
        elsewhere. A forward pass alone needs no weight but 0.
        """
        from tinker import types

        tokens, placed = self.row.token_ids, {name: np.zeros(len(self), "f4") for name in values}
        for name, value in values.items():
            placed[name][self.predictors] = value
        inputs: dict[str, Any] = placed | {"target_tokens": tokens[1 : len(self) + 1].astype("i8")}
        return types.Datum(
            model_input=types.ModelInput.from_ints(tokens[: len(self)].tolist()),
            loss_fn_inputs={
                name: types.TensorData.from_numpy(value) for name, value in inputs.items()
            },
        )


def action_logprobs(
    rows: Sequence[ShiftedRow], outputs: Sequence[Any], asked: str
) -> list[Float32Array]:
    """Return [T] of each row: the learner's log-probs in `loss_fn_outputs`. Raises RunFailed, which
    says what retrain `asked` them for, if the service returned none.
    """
    if not all("logprobs" in output for output in outputs):
        raise RunFailed(f"Tinker returned no log-probs for {asked}.")
    return [
        np.asarray(output["logprobs"].to_numpy(), np.float32)[row.predictors]
        for row, output in zip(rows, outputs, strict=True)
    ]


# -- the loss --------------------------------------------------------------------------------------
#
# importance_sampling: -rho A, ppo: -min(rho A, clip(rho, 1 - low, 1 + high) A), cispo: -clip(rho,
# low, high) A log pi, with rho = exp(log pi - log pi of the sampler). The service sums them over
# all tokens of all rows, and reports at most the sum.

Values = npt.NDArray[np.float64]


def ratio_bounds(loss: "Loss") -> tuple[float, float] | None:
    """Return lowest and highest ratio, as the service takes them; None without a clip."""
    low, high = loss.clips
    return {"ppo": (1 - low, 1 + high), "cispo": (low, high)}.get(loss.mode)


def policy_terms(
    new: Values, old: Values, advantages: Values, loss: "Loss"
) -> tuple[Values, npt.NDArray[np.bool_]]:
    """Return [N] per-token loss, and [N] True if the clip removed the token's gradient, or in cispo
    bounded its weight.
    """
    ratio = np.exp(new - old)
    bounded: Values = np.clip(ratio, *(ratio_bounds(loss) or (0, np.inf)))
    if loss.mode == "cispo":
        return -bounded * advantages * new, bounded != ratio
    lower = bounded * advantages < ratio * advantages
    return -np.where(lower, bounded, ratio) * advantages, lower


def loss_of(
    rows: Sequence[ShiftedRow],
    weights: Sequence[float],
    logprobs: Sequence[Float32Array],
    loss: "Loss | None",
) -> Update:
    """Return the loss and the clip of an update from the service's log-probs [T] of each row; the
    cross-entropy without `loss`.
    """
    own = [row.row for row in rows]
    new, old, advantages = (
        np.concatenate(values, dtype=np.float64)
        for values in (logprobs, [row.logprobs for row in own], [row.advantages for row in own])
    )
    weight = np.repeat(weights, [len(one) for one in logprobs])
    if loss is None:
        return Update(-float((new * weight).sum()))
    terms, clipped = policy_terms(new, old, advantages, loss)
    counted = (advantages != 0) & (weight != 0)
    total, taken = float((terms * weight).sum()), float((clipped & counted).sum())
    return Update(total, clipped=taken, clippable=float(counted.sum()))

"""Rows as the service reads them, shifted by one with one value per position, and the loss of a
step from the log-probs it returns.

Position i of `inputs` predicts position i of `targets`, which is the next token of the row.
Log-probs and advantages have values where a position predicts an action, and 0 everywhere else. The
prompt and an environment's tokens therefore have no term in the loss. Shape letters: N positions of
a row, T action tokens. In the loss N are action tokens.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from retrain.backends.rows import needed_tokens, shift
from retrain.types import Float32Array, Int32Array, Row

if TYPE_CHECKING:
    from tinker import types

    from retrain.config.schema import Loss


@dataclass(frozen=True)
class ShiftedRow:
    """A row with at least one action."""

    inputs: Int32Array
    """[N] all tokens before the last action."""
    targets: Int32Array
    """[N] the token after each of them; the last one is the last action."""
    predictors: npt.NDArray[np.int64]
    """[T] positions whose targets are the actions."""

    @classmethod
    def of(cls, row: Row) -> "ShiftedRow":
        last = needed_tokens(row)
        return cls(row.token_ids[:last], row.token_ids[1 : last + 1], shift(row).predictors)

    def __len__(self) -> int:
        return len(self.inputs)

    def at_actions(self, values: Float32Array) -> Float32Array:
        """Return [N] with `values` [T] at the positions that predict the actions, 0 elsewhere."""
        placed = np.zeros(len(self), np.float32)
        placed[self.predictors] = values
        return placed


def policy_datum(
    row: ShiftedRow, logprobs: Float32Array, advantages: Float32Array
) -> "types.Datum":
    """Make a datum for the losses that read a ratio. `logprobs` and `advantages` are [T]."""
    return _datum(row, logprobs=row.at_actions(logprobs), advantages=row.at_actions(advantages))


def scoring_datum(row: ShiftedRow, weights: Float32Array | None = None) -> "types.Datum":
    """Make a datum for cross-entropy with `weights` [T] of the actions; without, no position
    counts, as in a forward pass alone.
    """
    placed = np.zeros(len(row), np.float32) if weights is None else row.at_actions(weights)
    return _datum(row, weights=placed)


def _datum(row: ShiftedRow, **inputs: Float32Array) -> "types.Datum":
    from tinker import types

    values: dict[str, Any] = {
        name: types.TensorData.from_numpy(value) for name, value in inputs.items()
    }
    values["target_tokens"] = types.TensorData.from_numpy(row.targets.astype(np.int64))
    return types.Datum(
        model_input=types.ModelInput.from_ints(row.inputs.tolist()), loss_fn_inputs=values
    )


def action_logprobs(row: ShiftedRow, output: Any) -> Float32Array | None:
    """Return [T] the learner's log-probs in one item of `loss_fn_outputs`; None if the service
    returned none.
    """
    if "logprobs" not in output:
        return None
    found: Float32Array = np.asarray(output["logprobs"].to_numpy(), np.float32)[row.predictors]
    return found


# -- the loss --------------------------------------------------------------------------------------
#
# importance_sampling: -rho A, ppo: -min(rho A, clip(rho, 1 - low, 1 + high) A), cispo: -clip(rho,
# low, high) A log pi, with rho = exp(log pi - log pi of the sampler). The service sums them over
# all tokens of all rows, and reports at most the sum.

Values = npt.NDArray[np.float64]


def ratio_bounds(loss: "Loss") -> tuple[float, float] | None:
    """Return lowest and highest ratio, as the service takes them; None without a clip."""
    low, high = loss.clips
    if loss.mode == "importance_sampling":
        return None
    if loss.mode == "ppo":
        return (1 - low, 1 + high)
    return (low, high)


def policy_terms(new: Values, old: Values, advantages: Values, loss: "Loss") -> Values:
    """Return [N] per-token loss."""
    ratio, bounds = np.exp(new - old), ratio_bounds(loss)
    if bounds is None:
        return -ratio * advantages
    clipped: Values = np.clip(ratio, bounds[0], bounds[1])
    if loss.mode == "cispo":
        return -clipped * advantages * new
    return -np.minimum(ratio * advantages, clipped * advantages)


def clipped_tokens(
    new: Values, old: Values, advantages: Values, loss: "Loss"
) -> npt.NDArray[np.bool_]:
    """Return [N], True if the clip removed the token's gradient, or in cispo bounded its weight."""
    ratio, bounds = np.exp(new - old), ratio_bounds(loss)
    if bounds is None:
        return np.zeros(len(ratio), bool)
    above, below = ratio > bounds[1], ratio < bounds[0]
    if loss.mode == "cispo":
        return above | below
    return ((advantages > 0) & above) | ((advantages < 0) & below)

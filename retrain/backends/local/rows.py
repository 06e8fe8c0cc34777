"""Where a row's actions lie, and which position predicts them: the one place where the shift by one happens.

A causal model reads token i and predicts token i + 1. Every backend takes its indices from here.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from retrain.types import Int32Array, Row

if TYPE_CHECKING:
    from retrain.config.schema import Loss


class Shifted(NamedTuple):
    """The actions of one row, shifted: the state at `predictors[t]` predicts `targets[t]`."""

    predictors: npt.NDArray[np.int64]
    """[T] positions in the row's token_ids, each one before its action."""
    targets: Int32Array
    """[T] the action tokens."""


def shift(row: Row) -> Shifted:
    """Predictors and targets of the action tokens, in order; the sampled EOS is the last target, and nothing follows it."""
    positions = np.fromiter(row.action_positions(), dtype=np.int64, count=row.num_actions)
    return Shifted(positions - 1, row.token_ids[positions])


def needed_tokens(row: Row) -> int:
    """Tokens that a forward pass over the row must read: all up to the last predictor. The last action is only a target."""
    return row.spans[-1][1] - 1 if row.num_actions else 0


def is_trained(row: Row, loss: "Loss") -> bool:
    """Whether the loss has a term for the row: a policy term, or one of KL or entropy, which rows without an advantage have too."""
    if not row.num_actions or (loss.mask_truncated and row.truncated):
        return False
    return row.num_counted > 0 or loss.kl_coef > 0 or loss.entropy_coef > 0


def check_rows(rows: Sequence[Row]) -> None:
    """Raise ValueError naming the row whose spans, log-probs, advantages or kept counts do not fit its tokens."""
    for index, row in enumerate(rows):
        edge = 1
        for start, stop in row.spans:
            if not edge <= start <= stop <= len(row.token_ids):
                raise ValueError(f"row {index}: span ({start}, {stop}) must lie in order within [{edge}, {len(row.token_ids)}]")
            edge = stop
        if not len(row.logprobs) == len(row.advantages) == row.num_actions:
            raise ValueError(
                f"row {index}: {row.num_actions} action tokens, but {len(row.logprobs)} log-probs and {len(row.advantages)} advantages"
            )
        if row.kept is not None and (len(row.kept) != row.num_actions or (row.kept < 1).any()):
            raise ValueError(f"row {index}: {row.num_actions} action tokens need as many kept counts of 1 or more, not {row.kept.tolist()}")

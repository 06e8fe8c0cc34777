"""Rows into micro-batches under a token budget: right-padded ids, and flat indices of the positions that predict actions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from retrain.backends.rows import needed_tokens, shift
from retrain.noise import Stream, uniform
from retrain.types import Float32Array, Row


@dataclass(frozen=True)
class LearnerRow:
    """A row with actions and what the learner adds to it; arrays are [T] over its action tokens."""

    number: int
    """The row's place in the step: the coordinate of its dropout masks."""
    row: Row
    sampler: Float32Array
    old: Float32Array
    reference: Float32Array | None = None

    @property
    def tokens(self) -> int:
        """Tokens that the forward pass reads."""
        return needed_tokens(self.row)


@dataclass(frozen=True)
class MicroBatch:
    """B rows padded on the right to L tokens; N action tokens over all of them."""

    rows: Sequence[LearnerRow]
    token_ids: Tensor
    """[B, L] int64. The padding's value is never read: attention is causal, and no padded position predicts an action."""
    predictors: Tensor
    """[N] int64 into the flattened [B * L] positions, row by row."""
    targets: Tensor
    """[N] int64"""
    lengths: tuple[int, ...]
    """Action tokens of each row."""

    def flat(self, arrays: Sequence[Float32Array]) -> Tensor:
        """[N] float32 on the device from one array a row."""
        return torch.from_numpy(np.concatenate(arrays)).to(self.token_ids.device)


def split_rows(rows: Sequence[LearnerRow], budget: int) -> Iterator[list[LearnerRow]]:
    """Rows sorted by length, longest first, cut so that rows * longest stays within `budget` tokens; a longer row stands alone.

    Sorting keeps the padding small and makes the largest micro-batch the first, so that memory fails early or not at all.
    """
    part: list[LearnerRow] = []
    for row in sorted(rows, key=lambda row: -row.tokens):
        if part and part[0].tokens * (len(part) + 1) > budget:
            yield part
            part = []
        part.append(row)
    if part:
        yield part


def build(rows: Sequence[LearnerRow], device: torch.device) -> MicroBatch:
    longest = max(row.tokens for row in rows)
    token_ids = np.zeros((len(rows), longest), np.int64)
    predictors, targets = [], []
    for index, row in enumerate(rows):
        token_ids[index, : row.tokens] = row.row.token_ids[: row.tokens]
        shifted = shift(row.row)
        predictors.append(shifted.predictors + index * longest)
        targets.append(shifted.targets.astype(np.int64))
    return MicroBatch(
        rows,
        torch.from_numpy(token_ids).to(device),
        torch.from_numpy(np.concatenate(predictors)).to(device),
        torch.from_numpy(np.concatenate(targets)).to(device),
        tuple(row.row.num_actions for row in rows),
    )


def minibatch_split(rows: Sequence[LearnerRow], count: int, seed: int, step: int, turn: int) -> list[list[LearnerRow]]:
    """`count` parts of nearly equal size for pass number `turn`, drawn row by row from the counter noise; empty ones are left out.

    Rows are drawn one by one, not by group: the parts stay equal in size whatever the groups, and each sees nearly every prompt.
    """
    if count == 1:
        return [list(rows)]
    numbers = np.array([row.number for row in rows])
    order = np.argsort(uniform(seed, Stream.MINIBATCH, step, turn, 0, numbers), kind="stable")
    return [[rows[index] for index in sorted(part)] for part in np.array_split(order, count) if len(part)]

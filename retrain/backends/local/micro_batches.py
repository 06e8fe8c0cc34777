"""Rows into micro-batches under a token budget: token ids, and the positions that predict actions.

Shape letters: N tokens of a micro-batch, A action tokens over all of its rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from retrain.backends.rows import needed_tokens, shift
from retrain.distributed import World
from retrain.model.attention import FusedAttention
from retrain.model.packing import PackedAttention, Segment
from retrain.system import grouped
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

    @property
    def prompt_tokens(self) -> int:
        """Tokens before the first action."""
        return self.row.spans[0][0]

    @property
    def prompt(self) -> bytes:
        return self.row.token_ids[: self.prompt_tokens].tobytes()


@dataclass(frozen=True)
class MicroBatch:
    """Rows as one forward pass: packed into one sequence, or padded on the right if the model
    cannot take packed rows.
    """

    rows: Sequence[LearnerRow]
    token_ids: Tensor
    """[1, N] int64, or [rows, longest] with padding. The value of the padding has no effect, since
    attention is causal and the loss ignores its predictions.
    """
    positions: Tensor | None
    """Like token_ids: each token's place in its own row. None: 0 .. longest - 1 in every row."""
    attention: PackedAttention | None
    """None: the model's own."""
    predictors: Tensor
    """[A] int64 into the flattened tokens, row by row. The last token of a shared prompt predicts
    every row's first action."""
    targets: Tensor
    """[A] int64"""
    lengths: tuple[int, ...]
    """Action tokens of each row."""

    def flat(self, arrays: Sequence[Float32Array]) -> Tensor:
        """Return [A] float32 on the device, from one array per row."""
        return torch.from_numpy(np.concatenate(arrays)).to(self.token_ids.device)

    def states(self, hidden: Tensor) -> Tensor:
        """Return [A, H] the hidden states that predict the actions."""
        return hidden.flatten(0, 1).index_select(0, self.predictors)

    def kept(self) -> Tensor | None:
        """Return [A] int64 on the device: the number of tokens from which the sampler drew each
        action. The result is None if it drew every action from the whole vocabulary.
        """
        counts = [row.row.kept for row in self.rows]
        if all(count is None for count in counts):
            return None
        everything = np.iinfo(np.int64).max
        known = [
            np.full(length, everything) if own is None else own
            for own, length in zip(counts, self.lengths, strict=True)
        ]
        return torch.from_numpy(np.concatenate(known).astype(np.int64)).to(self.token_ids.device)


def share_rows(rows: Sequence[LearnerRow], world: World) -> list[LearnerRow]:
    """Return the rows of this process: the rows of a prompt stay together, and all processes get
    about equally many tokens.
    """
    if world.size == 1:
        return list(rows)
    prompts = grouped((row.prompt, row) for row in rows)
    loads = [0] * world.size
    mine: list[LearnerRow] = []
    for group in sorted(prompts.values(), key=lambda group: -sum(row.tokens for row in group)):
        rank = loads.index(min(loads))
        loads[rank] += sum(row.tokens for row in group)
        if rank == world.rank:
            mine += group
    return mine


def split_rows(
    rows: Sequence[LearnerRow], budget: int, *, share: bool
) -> Iterator[list[LearnerRow]]:
    """Split rows into parts of at most `budget` packed tokens; a longer row stands alone. With
    `share` equal prompts count once per part.

    The longest rows come first, so that memory fails early or not at all, and the rows of a prompt
    stay together.
    """
    longest: dict[bytes | int, int] = {}
    for row in rows:
        key = row.prompt if share else row.number
        longest[key] = max(longest.get(key, 0), row.tokens)
    rank = {key: place for place, key in enumerate(sorted(longest, key=lambda key: -longest[key]))}
    part: list[LearnerRow] = []
    prompts: set[bytes] = set()
    used = 0
    for row in sorted(
        rows, key=lambda row: (rank[row.prompt if share else row.number], -row.tokens)
    ):
        shared = row.prompt_tokens if share and row.prompt in prompts else 0
        if part and used + row.tokens - shared > budget:
            yield part
            part, prompts, used, shared = [], set(), 0, 0
        part.append(row)
        prompts.add(row.prompt)
        used += row.tokens - shared
    if part:
        yield part


def pack(
    rows: Sequence[LearnerRow],
    device: torch.device,
    kernel: FusedAttention,
    budget: int,
    *,
    share: bool,
) -> MicroBatch:
    """Pack the rows into one sequence; `share` packs equal prompts once."""
    segments: list[Segment] = []
    prompts: dict[bytes, Segment] = {}
    ids, predictors = [], []

    def append(tokens: npt.NDArray[np.int32], start: int = 0, length: int = 0) -> Segment:
        segment = Segment(segments[-1].stop if segments else 0, len(tokens), start, length)
        segments.append(segment)
        ids.append(tokens)
        return segment

    for row in rows:
        tokens, wanted = row.row.token_ids[: row.tokens], shift(row.row).predictors
        if not share:
            predictors.append(wanted + append(tokens).start)
            continue
        # The row's tokens lie in two places: its prompt's, which other rows share, and its own.
        if row.prompt not in prompts:
            prompts[row.prompt] = append(tokens[: row.prompt_tokens])
        start, length = prompts[row.prompt].start, prompts[row.prompt].length
        own = append(tokens[row.prompt_tokens :], start, length)
        predictors.append(wanted + np.where(wanted < length, start, own.start - length))
    positions = [segment.prompt_length + np.arange(segment.length) for segment in segments]
    return _micro_batch(
        rows,
        np.concatenate(ids)[None].astype(np.int64),
        torch.from_numpy(np.concatenate(positions)[None]).to(device),
        PackedAttention(segments, budget, kernel, device),
        predictors,
        device,
    )


def pad(rows: Sequence[LearnerRow], device: torch.device) -> MicroBatch:
    """Pad the rows, for a model whose attention is its own business."""
    longest = max(row.tokens for row in rows)
    token_ids = np.zeros((len(rows), longest), np.int64)
    predictors = []
    for index, row in enumerate(rows):
        token_ids[index, : row.tokens] = row.row.token_ids[: row.tokens]
        predictors.append(shift(row.row).predictors + index * longest)
    return _micro_batch(rows, token_ids, None, None, predictors, device)


def _micro_batch(
    rows: Sequence[LearnerRow],
    token_ids: npt.NDArray[np.int64],
    positions: Tensor | None,
    attention: PackedAttention | None,
    predictors: Sequence[npt.NDArray[np.int64]],
    device: torch.device,
) -> MicroBatch:
    targets = np.concatenate([shift(row.row).targets for row in rows]).astype(np.int64)
    ids, indices, targeted = (
        torch.from_numpy(array).to(device)
        for array in (token_ids, np.concatenate(predictors), targets)
    )
    lengths = tuple(row.row.num_actions for row in rows)
    return MicroBatch(rows, ids, positions, attention, indices, targeted, lengths)

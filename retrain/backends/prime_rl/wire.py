"""A step's rows in the wire format of PRIME-RL's trainer: msgpack arrays whose entries stand in the
order of its fields.

The format has no names and no version, so the order is all there is. The layout is the one of
PRIME-RL v0.9.0 (24 August 2026) with `sampling_mask`, which later versions append (#3431), read up
to commit 0f59b24: a decoder ignores what it does not know at the end and fills in what is missing,
so one layout serves v0.9.0 and what came after it. Nothing here imports torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from retrain.types import Int32Array, Row

ENVIRONMENT = "retrain"
"""Name under which the trainer groups its metrics; the format has one per token. "all" is reserved
there."""


@dataclass(frozen=True)
class Sample:
    """One row as the trainer reads it: streams of length [P + T], in which value i belongs to token
    i itself.
    """

    token_ids: Int32Array
    mask: npt.NDArray[np.bool_]
    """True at the actions."""
    logprobs: npt.NDArray[np.float32]
    """The sampler's, at the sampling temperature; 0 outside the actions, where nobody reads
    them."""
    advantages: npt.NDArray[np.float32]
    """0 outside the actions."""
    kept: Sequence[Int32Array] | None = None
    """[T] arrays: the token ids that each action was drawn from; None where it was the whole
    vocabulary."""

    @classmethod
    def of(cls, row: Row) -> "Sample":
        length = len(row.token_ids)
        mask, logprobs, advantages = (
            np.zeros(length, np.bool_),
            np.zeros(length, np.float32),
            np.zeros(length, np.float32),
        )
        actions = list(row.action_positions())
        mask[actions], logprobs[actions], advantages[actions] = True, row.logprobs, row.advantages
        return cls(row.token_ids, mask, logprobs, advantages, row.kept_ids)

    def masked(self) -> "Sample":
        """Return the same tokens without an action: a pass over it changes nothing."""
        zeros = np.zeros(len(self), np.float32)
        return replace(
            self, mask=np.zeros(len(self), np.bool_), logprobs=zeros, advantages=zeros, kept=None
        )

    def __len__(self) -> int:
        return len(self.token_ids)


def share_out(samples: Sequence[Sample], ranks: int, most_tokens: int) -> list[list[list[Sample]]]:
    """[ranks][micro-batches][samples]: every rank gets the same number of micro-batches, as the
    trainer's collectives require.

    A micro-batch holds up to `most_tokens` tokens, or one sample that is longer; 0 gives each
    sample its own. Where the number does not divide, a sample without actions fills up.
    """
    packs: list[list[Sample]] = []
    for sample in sorted(samples, key=len, reverse=True):  # first fit decreasing
        fitting = (pack for pack in packs if _tokens(pack) + len(sample) <= most_tokens)
        pack = next(fitting, None)
        if pack is None:
            packs.append([sample])
        else:
            pack.append(sample)
    each = -(-len(packs) // ranks)
    shares: list[list[list[Sample]]] = [[] for _ in range(ranks)]
    for pack in sorted(packs, key=_tokens, reverse=True):
        open_shares = [share for share in shares if len(share) < each]
        min(open_shares, key=lambda share: sum(map(_tokens, share))).append(pack)
    filler = [min(samples, key=len).masked()]
    return [share + [filler] * (each - len(share)) for share in shares]


def _tokens(pack: Sequence[Sample]) -> int:
    return sum(map(len, pack))


def encode(micro_batches: Sequence[Sequence[Sample]], temperature: float) -> bytes:
    """Return the batch that one data rank of the trainer receives for one step."""
    import msgspec

    return msgspec.msgpack.encode([_micro_batch(pack, temperature) for pack in micro_batches])


def _micro_batch(pack: Sequence[Sample], temperature: float) -> list[Any]:
    """Return entries 1 to 17 in the trainer's order.

    The temperature stands at every token: the trainer divides the logits at position i by entry i,
    and those predict token i + 1, so the first action is scored with the entry of the last context
    token.
    """
    lengths = [len(sample) for sample in pack]
    tokens = sum(lengths)
    return [
        _joined([sample.token_ids for sample in pack]),  # input_ids
        _joined([sample.mask for sample in pack]),  # loss_mask
        _joined([sample.advantages for sample in pack]),  # advantages
        _joined([sample.logprobs for sample in pack]),  # inference_logprobs
        _joined([np.arange(length) for length in lengths]),  # position_ids, from 0 in each sample
        lengths,  # sequence_lengths: how the loss splits the stream
        [temperature] * tokens,  # temperatures
        [ENVIRONMENT] * tokens,  # env_names
        lengths,  # seq_lens: how attention splits it
        None,  # ref_logprobs
        None,  # routed_experts
        None,  # mm_kwargs, later mm_refs
        None,  # mm_token_type_ids
        None,  # rl_weights: 1 at every action
        None,  # ce_weights
        None,  # ref_kl_weights
        _sampling_mask(pack),  # sampling_mask
    ]


def _joined(parts: Sequence[npt.NDArray[Any]]) -> list[Any]:
    values: list[Any] = np.concatenate(parts).tolist()
    return values


def _sampling_mask(pack: Sequence[Sample]) -> list[bytes] | None:
    """[ids, counts] as int32 bytes: how many ids each position kept, 0 for the whole vocabulary,
    and the ids one after another.
    """
    if all(sample.kept is None for sample in pack):
        return None
    counts: list[Int32Array] = []
    ids: list[Int32Array] = []
    for sample in pack:
        count = np.zeros(len(sample), np.int32)
        if sample.kept is not None:
            count[sample.mask] = [len(kept) for kept in sample.kept]
            ids += sample.kept
        counts.append(count)
    return [
        np.concatenate([np.zeros(0, np.int32), *ids]).astype("<i4").tobytes(),
        np.concatenate(counts).astype("<i4").tobytes(),
    ]


def trained_samples(rows: Sequence[Row]) -> Iterator[Sample]:
    """Return the rows with a term in the loss, or one row without actions if there is none: the
    trainer waits for every step's batch.
    """
    trained = [row for row in rows if row.trained]
    yield from (Sample.of(row) for row in trained)
    if not trained:
        empty = np.zeros(2, np.float32)
        yield Sample(np.ones(2, np.int32), np.zeros(2, np.bool_), empty, empty)

"""The tokens that a truncated policy keeps: one definition, for the sampler that draws and the
learner that scores.

With z = logits / temperature, tokens have an order: by falling z, and for equal z by rising id.
Three cuts each keep a prefix of that order, and the shortest prefix counts:

- top_k keeps the first k tokens;
- top_p keeps the shortest prefix whose probability, renormalized over the tokens that top_k left,
  reaches top_p (the order of transformers and vLLM as well);
- min_p keeps the tokens whose probability is at least min_p times the largest, which have
  z >= max z + ln(min_p).

A kept set is therefore one number, the count of its tokens. The learner needs only this count, and
keeps as many of its own largest z. Let e be the largest difference between learner and sampler in z
at a position. The log-sum-exp of the m largest z moves by at most e. It is the maximum, over all
sets of m tokens, of functions that move by at most e. A truncated log-prob therefore moves by at
most 2 e, like a log-softmax over the whole vocabulary. A token that enters the set by rounding
equals the replaced token to within 2 e. A stored threshold on z would instead let a token enter or
leave with its whole probability. Shape letters: R rows, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BY_PRODUCT = {"cuda"}
"""Devices whose `cumsum` of floats raises under `torch.use_deterministic_algorithms`. This setting
holds for the whole process while a learner on another device takes a step.
"""
_WIDEST, _BLOCK = 1024, 256
_FIRST_LOOK = 128
_GROWTH = 16
"""Factor between two searches. Most kept sets are small, so the search begins with the 128 largest
z, then takes 16 times as many if necessary.
"""


class TruncationSettings(NamedTuple):
    """top_k, top_p and min_p of R rows."""

    top_k: Tensor
    """[R] int64 tokens; 0 is off."""
    top_p: Tensor
    """[R] float64 in (0, 1]; 1 is off."""
    min_p: Tensor
    """[R] float64 in [0, 1); 0 is off."""

    def __call__(self, rows: Tensor | slice) -> "TruncationSettings":
        return TruncationSettings(self.top_k[rows], self.top_p[rows], self.min_p[rows])

    def most(self, vocabulary: int) -> Tensor:
        """Return [R] tokens that top_k leaves."""
        return torch.where(self.top_k > 0, self.top_k.clamp(max=vocabulary), vocabulary)


@dataclass(frozen=True)
class KeptSets:
    """The kept tokens of R rows."""

    counts: Tensor
    """[R] int64, 1 to V."""
    last: Tensor
    """[R] z of the last token kept."""
    tied: Tensor
    """[R] bool: the next token has the same z, and drops out for its higher id."""

    @classmethod
    def of_counts(cls, z: Tensor, counts: Tensor) -> "KeptSets":
        """Return the `counts` [R] largest of each row of `z` [R, V]."""
        sets = cls._of_everything(z)
        seen = 0
        for size in _looks(z.shape[1]):
            rows = ((counts > seen) & (counts <= size)).nonzero()[:, 0]
            if len(rows):
                sets._set(rows, counts[rows], _largest(z, rows, size + 1))
            seen = size
        return sets

    @classmethod
    def of_cuts(cls, z: Tensor, total: Tensor, cuts: TruncationSettings) -> "KeptSets":
        """Apply `cuts` to each row of `z` [R, V], whose maximum is 0; rows are independent.

        Probabilities are float32 exponentials summed in float64, over `total` [R] where top_k
        leaves everything.
        """
        sets = cls._of_everything(z)
        rows = ((cuts.top_k > 0) | (cuts.top_p < 1) | (cuts.min_p > 0)).nonzero()[:, 0]
        for size in _looks(z.shape[1]):
            if not len(rows):
                break
            # Take one value more than the search needs: the next value may tie with the last kept
            # value.
            largest = _largest(z, rows, size + 1)
            counts, found = _prefixes(largest[:, :size], z.shape[1], cuts(rows), total[rows])
            sets._set(rows[found], counts[found], largest[found])
            rows = rows[~found]
        return sets

    def beyond(self, z: Tensor) -> Tensor:
        """Return [R, V] bool, True for dropped tokens, from the same `z` [R, V] as the sets."""
        last = self.last[:, None]
        beyond = z < last
        rows = self.tied.nonzero()[:, 0]
        if len(rows):
            equal = z[rows] == last[rows]
            places = self.counts[rows] - (z[rows] > last[rows]).sum(-1)
            beyond[rows] |= equal & (equal.cumsum(-1, dtype=torch.int32) > places[:, None])
        return beyond

    @classmethod
    def _of_everything(cls, z: Tensor) -> "KeptSets":
        rows, vocabulary = z.shape
        return cls(
            torch.full((rows,), vocabulary, dtype=torch.int64, device=z.device),
            torch.full((rows,), -torch.inf, dtype=z.dtype, device=z.device),
            torch.zeros(rows, dtype=torch.bool, device=z.device),
        )

    def _set(self, rows: Tensor, counts: Tensor, largest: Tensor) -> None:
        """Set the sets of `rows`. `largest` holds their values in falling order, one more than
        `counts` unless there are no more.
        """
        self.counts[rows] = counts
        self.last[rows], self.tied[rows] = _edge(largest, counts)


class FixedKeptSets(KeptSets):
    """Kept sets by operations whose shapes do not depend on values, so that the host waits for none
    of them.
    """

    @classmethod
    def of_cuts(cls, z: Tensor, total: Tensor, cuts: TruncationSettings) -> "FixedKeptSets":
        """Order the whole vocabulary, whatever the cuts are."""
        largest = z.sort(dim=-1, descending=True, stable=True).values
        counts, _ = _prefixes(largest, z.shape[1], cuts, total)
        return cls(counts, *_edge(largest, counts))

    def beyond(self, z: Tensor) -> Tensor:
        last = self.last[:, None]
        above, equal = z > last, z == last
        places = self.counts[:, None] - above.sum(-1, keepdim=True)
        return ~above & ~(equal & (equal.cumsum(-1, dtype=torch.int32) <= places))


def _edge(largest: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return `last` and `tied` [R] of kept sets, from values [R, size] in falling order."""
    last = largest.gather(-1, counts[:, None] - 1)
    after = largest.gather(-1, counts[:, None].clamp(max=largest.shape[1] - 1))
    return last[:, 0], (after == last)[:, 0] & (counts < largest.shape[1])


def _largest(z: Tensor, rows: Tensor, size: int) -> Tensor:
    """Return [rows, size or V] values in falling order."""
    part = z if len(rows) == len(z) else z[rows]
    return part.topk(min(size, z.shape[1])).values


def _prefixes(
    largest: Tensor, vocabulary: int, cuts: TruncationSettings, total: Tensor
) -> tuple[Tensor, Tensor]:
    """Lengths of the kept prefixes [R], and whether the `largest` [R, size] values suffice to know
    them.
    """
    size, top_k, top_p = largest.shape[1], cuts.most(vocabulary), cuts.top_p
    mass = running_sums(largest.exp().double())
    # top_p is a share of what top_k leaves, whose weight may lie past the values looked at.
    of_top_k = mass.gather(-1, top_k.clamp(max=size)[:, None] - 1)[:, 0]
    target = top_p * torch.where(top_k <= size, of_top_k, total)
    above = (largest.double() >= cuts.min_p.log()[:, None]).sum(-1)
    beyond = vocabulary + 1  # stands for a prefix that ends farther on
    lengths = torch.stack(
        [
            top_k,
            torch.where(top_p < 1, (mass < target[:, None]).sum(-1) + 1, beyond),
            torch.where(above < size, above, beyond),
        ]
    )
    shortest = lengths.amin(0).clamp(1, vocabulary)
    target_known = (top_k <= size) | (top_k == vocabulary) | (top_p == 1)
    return shortest, (shortest <= size) & target_known


def _looks(vocabulary: int) -> Iterator[int]:
    size = _FIRST_LOOK
    while size < vocabulary:
        yield size
        size *= _GROWTH
    yield vocabulary


def keep_only(z: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
    """Return `z` [R, V] with dropped tokens set to -inf. Kept: `targets` [R] and the counts - 1
    largest others.

    The sampled token belongs to its set. Under another rounding or another policy it may come after
    the first `counts` [R] tokens; it then takes the last place. Changes `z`.
    """
    targets = targets.unsqueeze(-1)
    own = z.gather(-1, targets)
    z.scatter_(-1, targets, torch.inf)
    z.masked_fill_(KeptSets.of_counts(z, counts.clamp(max=z.shape[1])).beyond(z), -torch.inf)
    return z.scatter_(-1, targets, own)


def running_sums(x: Tensor) -> Tensor:
    """Return [r, n] sums of x [r, n] >= 0 up to each place, never falling."""
    if x.device.type not in BY_PRODUCT:
        return x.cumsum(-1)
    count = x.shape[-1]
    # A triangle of the whole width would be its square in size: sums within blocks, then over them.
    if count <= _WIDEST:
        triangle = torch.ones(count, count, dtype=x.dtype, device=x.device).triu_()
        return (x @ triangle).cummax(-1).values
    inner = running_sums(F.pad(x, (0, -count % _BLOCK)).view(-1, _BLOCK)).view(len(x), -1, _BLOCK)
    before = F.pad(running_sums(inner[:, :, -1]), (1, -1))
    return (inner + before[:, :, None]).flatten(1)[:, :count].cummax(-1).values

"""Rows as one packed sequence, and the attention that keeps them apart.

The layers of a model see N tokens without padding; only the attention knows which row a token belongs to. A prompt that rows have
in common is packed once. That is exact: its states depend on nothing after it, and its gradient is the sum over the rows that read
it (prefix grouping, arXiv 2506.05433).
Shape letters: N packed tokens, B segments of one attention call, T queries and L keys of a segment, Hq and Hk heads, D head size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from retrain.inference_engine.attention import Kernel


@dataclass(frozen=True)
class Segment:
    """Consecutive packed tokens: a whole row, a prompt, or what follows a prompt."""

    start: int
    """The first one's place in the packed sequence."""
    length: int
    prompt_start: int = 0
    prompt_length: int = 0
    """The packed prompt that these tokens continue."""

    @property
    def stop(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class _Call:
    """B segments whose queries run together: T queries each, which are the last of L keys."""

    queries: Tensor
    """[B * T] packed tokens. Padding stands on the right, repeats packed token 0, and its output is thrown away."""
    keys: Tensor
    """[B * L]"""
    rows: int


class PackedAttention:
    """The `AttentionBatch` of a packed sequence. What a call gathers is gathered again for its backward, not kept."""

    def __init__(self, segments: Sequence[Segment], budget: int, kernel: Kernel, device: torch.device) -> None:
        """`budget` bounds the keys that one call gathers, padding included; a longer segment has a call of its own."""
        self._kernel = kernel
        self._calls: list[_Call] = []
        outputs = np.empty(sum(segment.length for segment in segments), np.int64)
        done = 0
        for part in _together([segment for segment in segments if segment.length], budget):
            width = part[0].length
            for index, segment in enumerate(part):
                outputs[segment.start : segment.stop] = done + index * width + np.arange(segment.length)
            done += len(part) * width
            self._calls.append(_call(part, width, device))
        self._outputs = torch.from_numpy(outputs).to(device)

    def attention(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None, softcap: float | None) -> Tensor:
        """[1, Hq, N, D] over [1, Hk, N, D]."""

        def run(call: _Call, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            q, k, v = _rows(query, call.queries, call.rows), _rows(key, call.keys, call.rows), _rows(value, call.keys, call.rows)
            return self._kernel.causal(q, k, v, scaling, window, softcap).transpose(1, 2).flatten(0, 1)

        packed = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]  # [N, H, D]
        outputs: list[Tensor] = [checkpoint(run, call, *packed, use_reentrant=False, preserve_rng_state=False) for call in self._calls]
        return torch.cat(outputs).index_select(0, self._outputs).transpose(0, 1).unsqueeze(0)


def _rows(packed: Tensor, index: Tensor, rows: int) -> Tensor:
    """[N, H, D] to [rows, H, length, D]."""
    return packed.index_select(0, index).view(rows, -1, *packed.shape[1:]).transpose(1, 2)


def _together(segments: Sequence[Segment], budget: int) -> Iterator[list[Segment]]:
    """Segments of one call, the longest first: prompts of one length before them, keys within the budget, at most half padding."""
    part: list[Segment] = []
    for segment in sorted(segments, key=lambda segment: (segment.prompt_length, -segment.length)):
        if part:
            longest = part[0]
            keys = (len(part) + 1) * (longest.prompt_length + longest.length)
            if segment.prompt_length != longest.prompt_length or keys > budget or 2 * segment.length < longest.length:
                yield part
                part = []
        part.append(segment)
    if part:
        yield part


def _call(part: Sequence[Segment], width: int, device: torch.device) -> _Call:
    before = part[0].prompt_length
    queries = np.zeros((len(part), width), np.int64)
    keys = np.zeros((len(part), before + width), np.int64)
    for index, segment in enumerate(part):
        queries[index, : segment.length] = np.arange(segment.start, segment.stop)
        keys[index, :before] = np.arange(segment.prompt_start, segment.prompt_start + before)
    keys[:, before:] = queries
    return _Call(torch.from_numpy(queries.ravel()).to(device), torch.from_numpy(keys.ravel()).to(device), len(part))

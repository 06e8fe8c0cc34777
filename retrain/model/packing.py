"""Rows as one packed sequence, and the attention that keeps them apart.

The layers of a model see N tokens without padding; only the attention knows which row a token
belongs to. A prompt that rows have in common is packed once. That is exact: its states depend on
nothing after it, and its gradient is the sum over the rows that read it (prefix grouping, arXiv
2506.05433). Shape letters: N packed tokens, B segments of one attention call, T queries and L keys
of a segment, Hq and Hk heads, D head size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from retrain.model.attention import Kernel, prefers_products
from retrain.model.prefix_attention import Block, attend
from retrain.model.varlen import Spans

_MAX_TOKENS_AS_PRODUCTS = 512
"""Tokens of a segment. Of a longer one the fused kernel skips the scores that causality hides,
nearly half of them, and is faster."""


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
    """[B * T] packed tokens. Padding stands on the right, repeats packed token 0, and its output is
    thrown away."""
    keys: Tensor
    """[B * L]"""
    rows: int


class PackedAttention:
    """The `AttentionBatch` of a packed sequence."""

    def __init__(
        self, segments: Sequence[Segment], budget: int, kernel: Kernel, device: torch.device
    ) -> None:
        """`budget` bounds the keys of the segments that run together, padding included; a longer
        segment runs alone.
        """
        self._segments = [segment for segment in segments if segment.length]
        self._longest = max(segment.prompt_length + segment.length for segment in self._segments)
        self._short = max(segment.length for segment in self._segments) <= _MAX_TOKENS_AS_PRODUCTS
        self._budget, self._kernel, self._device = budget, kernel, device

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """[1, Hq, N, D] over [1, Hk, N, D]."""
        if window is not None and window >= self._longest:
            window = None
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [N, H, D]
        kernel = self._kernel.packed_kernel(query, softcap)
        if kernel:
            # Nothing is gathered again in the backward pass: the kernel keeps its output and one
            # number per query and head.
            spans, seen = self._spans
            if seen is not None:
                k, v = k.index_select(0, seen), v.index_select(0, seen)
            output = kernel(q, k, v, spans, scaling, window)
        elif window is None and softcap is None and self._short and prefers_products(query):
            output = attend(q, k, v, *self._blocks, scaling)
        else:
            # Gather again in the backward pass instead of keeping the gathered tensors.
            def run(call: _Call, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                q, k, v = (
                    _rows(query, call.queries, call.rows),
                    _rows(key, call.keys, call.rows),
                    _rows(value, call.keys, call.rows),
                )
                return (
                    self._kernel.causal(q, k, v, scaling, window, softcap)
                    .transpose(1, 2)
                    .flatten(0, 1)
                )

            calls, order = self._calls
            outputs: list[Tensor] = [
                checkpoint(run, call, q, k, v, use_reentrant=False, preserve_rng_state=False)
                for call in calls
            ]
            output = torch.cat(outputs).index_select(0, order)
        return output.transpose(0, 1).unsqueeze(0)

    @cached_property
    def _spans(self) -> tuple[Spans, Tensor | None]:
        """The segments as sequences, and the packed tokens [Nk] of their keys; None where these are
        all tokens as they lie.
        """
        keys = [
            np.r_[
                each.prompt_start : each.prompt_start + each.prompt_length, each.start : each.stop
            ]
            for each in self._segments
        ]
        spans = Spans.of(
            [segment.length for segment in self._segments],
            [len(seen) for seen in keys],
            self._device,
        )
        shares = any(segment.prompt_length for segment in self._segments)
        return spans, torch.from_numpy(np.concatenate(keys)).to(self._device) if shares else None

    @cached_property
    def _calls(self) -> tuple[list[_Call], Tensor]:
        parts = list(_together(self._segments, self._budget, lambda segment: segment.prompt_length))
        calls: list[_Call] = []
        for part in parts:
            queries = _queries(part)
            before = [
                np.arange(segment.prompt_start, segment.prompt_start + segment.prompt_length)
                for segment in part
            ]
            keys = np.concatenate([np.stack(before), queries], axis=1)
            calls.append(
                _Call(self._placed(queries.ravel()), self._placed(keys.ravel()), len(part))
            )
        return calls, self._order(parts)

    @cached_property
    def _blocks(self) -> tuple[list[Block], Tensor]:
        parts = list(
            _together(
                self._segments,
                self._budget,
                lambda segment: (segment.prompt_length, segment.prompt_start),
            )
        )
        blocks: list[Block] = []
        for part in parts:
            padding = np.flatnonzero(
                np.arange(part[0].length) >= np.array([segment.length for segment in part])[:, None]
            )
            prompt = slice(part[0].prompt_start, part[0].prompt_start + part[0].prompt_length)
            blocks.append(
                Block(
                    len(part), self._placed(_queries(part).ravel()), self._placed(padding), prompt
                )
            )
        return blocks, self._order(parts)

    def _order(self, parts: Sequence[Sequence[Segment]]) -> Tensor:
        """[N] where the packed tokens stand among those of all parts, padding included."""
        order = np.empty(sum(segment.length for segment in self._segments), np.int64)
        done = 0
        for part in parts:
            width = part[0].length
            for segment in part:
                order[segment.start : segment.stop] = done + np.arange(segment.length)
                done += width
        return self._placed(order)

    def _placed(self, index: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(index).to(self._device)


def _rows(packed: Tensor, index: Tensor, rows: int) -> Tensor:
    """[N, H, D] to [rows, H, length, D]."""
    return packed.index_select(0, index).view(rows, -1, *packed.shape[1:]).transpose(1, 2)


def _together(
    segments: Sequence[Segment], budget: int, prompt: Callable[[Segment], Any]
) -> Iterator[list[Segment]]:
    """Group the segments that run together, the longest first: `prompt` alike, keys within the
    budget, at most half padding.
    """
    part: list[Segment] = []
    for segment in sorted(segments, key=lambda segment: (prompt(segment), -segment.length)):
        if part:
            longest = part[0]
            keys = (len(part) + 1) * (longest.prompt_length + longest.length)
            if (
                prompt(segment) != prompt(longest)
                or keys > budget
                or 2 * segment.length < longest.length
            ):
                yield part
                part = []
        part.append(segment)
    if part:
        yield part


def _queries(part: Sequence[Segment]) -> npt.NDArray[np.int64]:
    """[B, T] packed tokens, padded with packed token 0."""
    queries = np.zeros((len(part), part[0].length), np.int64)
    for index, segment in enumerate(part):
        queries[index, : segment.length] = np.arange(segment.start, segment.stop)
    return queries

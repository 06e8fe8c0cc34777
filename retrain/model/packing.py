"""Rows as one packed sequence, and the attention that keeps them apart.

The layers of a model see N tokens without padding; only the attention knows which row a token
belongs to. Rows with a common prompt share one packed copy of it. Sharing is exact, because the
prompt's states do not depend on later tokens. Its gradient is the sum over the rows that read it
(prefix grouping, arXiv 2506.05433).

On a CPU short rows attend by matrix products, which is faster than the fused kernel, forward and
backward. Rows that continue one prompt score its keys in one product, and in the backward pass that
product's transpose sums the prompt's gradient over them. The attention computes scores for a
bounded number of queries at a time. The backward pass computes them again from the saved
log-sum-exp (arXiv 2205.14135). Memory is therefore linear in the tokens.

Shape letters: N packed tokens, B segments of one attention call, Hq and Hk heads, G = Hq / Hk, D
head size. A segment has L keys and T queries, t of them in one product.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from retrain.model.attention import FusedAttention, prefers_products
from retrain.model.varlen import Spans

# -- attention as matrix products ------------------------------------------------------------------


_SCORES = 1 << 22
"""Scores [Hq, B, t, L] made together: 16 MiB."""
_MIN_QUERIES = 16


@dataclass(frozen=True)
class Block:
    """B segments that continue one prompt, each padded on the right to T tokens."""

    rows: int
    tokens: Tensor
    """[B * T] packed tokens; padding repeats any."""
    padding: Tensor
    """Indices of the padding among the B * T places."""
    prompt: slice
    """The packed tokens of the prompt; empty where there is none."""

    def gather(self, packed: Tensor) -> Tensor:
        """Return [Hk, B, G, T, D] from [N, Hk, G, D], zero where there is padding."""
        rows = packed.index_select(0, self.tokens).index_fill_(0, self.padding, 0.0)
        return rows.view(self.rows, -1, *packed.shape[1:]).permute(2, 0, 3, 1, 4).contiguous()

    def turns(self, heads: int) -> Iterator[slice]:
        """Yield the T queries, as many together as the scores' memory allows."""
        width = len(self.tokens) // self.rows
        keys = self.prompt.stop - self.prompt.start + width
        step = max(_MIN_QUERIES, _SCORES // (heads * self.rows * keys))
        for start in range(0, width, step):
            yield slice(start, min(start + step, width))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Sequence[Block],
    order: Tensor,
    scaling: float,
) -> Tensor:
    """Return [N, Hq, D] of queries [N, Hq, D] over keys and values [N, Hk, D]; every packed token
    is in one block.

    `order` [N]: where the packed tokens stand among the blocks' tokens, one block after the other.
    """
    grouped = query.reshape(len(query), key.shape[1], -1, query.shape[2])
    apply: Any = _Attend.apply  # torch has no annotation for it
    output: Tensor = apply(grouped, key.unsqueeze(2), value.unsqueeze(2), blocks, order, scaling)
    return output.flatten(1, 2)


class _Attend(torch.autograd.Function):
    """Output [N, Hk, G, D] of queries [N, Hk, G, D], keys and values [N, Hk, 1, D]."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        blocks: Sequence[Block],
        order: Tensor,
        scaling: float,
    ) -> Tensor:
        outputs, normalizers = [], []
        for block in blocks:
            queries, sources = block.gather(query).mul_(scaling), _sources(block, key, value)
            output = torch.empty_like(queries)
            normalizer = queries.new_empty(*queries.shape[:-1], 1)
            for turn in block.turns(query.shape[1] * query.shape[2]):
                output[:, :, :, turn], normalizer[:, :, :, turn] = _output(
                    _turn(queries, turn), [source.until(turn) for source in sources]
                )
            outputs.append(_flat(output))
            normalizers.append(normalizer)
        packed = torch.cat(outputs).index_select(0, order)
        ctx.save_for_backward(query, key, value, packed, *normalizers)
        ctx.blocks, ctx.order, ctx.scaling = blocks, order, scaling
        return packed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, *normalizers = ctx.saved_tensors
        # The softmax's gradient is w (dw - sum(w dw)), and that sum is sum(grad * output) (arXiv
        # 2205.14135).
        dot = (grad * output).sum(-1, keepdim=True)
        grad_tokens, prompt_grads = [], []
        for block, normalizer in zip(ctx.blocks, normalizers, strict=True):
            queries = block.gather(query).mul_(ctx.scaling)
            own, *prompt = sources = _sources(block, key, value, gradients=True)
            grad_queries = torch.zeros_like(queries)
            per_query = queries, block.gather(grad), normalizer, block.gather(dot)
            for turn in block.turns(query.shape[1] * query.shape[2]):
                seen = [source.until(turn) for source in sources]
                parts = [_turn(tensor, turn) for tensor in per_query]
                grad_queries[:, :, :, turn] = _gradients(seen, *parts)
            grad_tokens.append(
                [_flat(grad_queries.mul_(ctx.scaling)), *own.flat_gradients(block.rows)]
            )
            prompt_grads += [(block.prompt, each.grad_keys, each.grad_values) for each in prompt]
        grad_query, grad_key, grad_value = (
            torch.cat(parts).index_select(0, ctx.order) for parts in zip(*grad_tokens, strict=True)
        )
        # A prompt's keys and values serve its own tokens and all rows that continue it.
        for tokens, *grads in prompt_grads:
            for total, more in zip((grad_key, grad_value), grads, strict=True):
                total[tokens, :, 0] += more.transpose(0, 1)
        return grad_query, grad_key, grad_value, None, None, None


@dataclass(frozen=True)
class _Source:
    """Keys that the queries of a block see: their own (b = Hk * B), or the prompt's for all
    segments together (b = Hk).
    """

    keys: Tensor
    """[b, L, D]"""
    values: Tensor
    grad_keys: Tensor
    """[b, L, D] gradients; each turn adds to them."""
    grad_values: Tensor
    own: bool

    def flat_gradients(self, rows: int) -> list[Tensor]:
        """Return the gradients of a block's own keys and values, as `_flat` gives them."""
        heads, size = len(self.keys) // rows, self.keys.shape[-1]
        grads = self.grad_keys, self.grad_values
        return [_flat(grad.view(heads, rows, 1, -1, size)) for grad in grads]

    def until(self, turn: slice) -> "_Source":
        """Return the part that the queries of a turn see."""
        if not self.own:
            return self
        tensors = self.keys, self.values, self.grad_keys, self.grad_values
        keys, values, grad_keys, grad_values = (tensor[:, : turn.stop] for tensor in tensors)
        return _Source(keys, values, grad_keys, grad_values, own=True)

    def scores(self, queries: Tensor) -> Tensor:
        """Return [b, n, L] of queries [Hk, B, G, t, D], which are the last t of their own L."""
        scores = torch.bmm(_grouped(queries, self.keys), self.keys.transpose(1, 2))
        if self.own:
            count = queries.shape[3]
            later = torch.full((count, count), float("-inf"), device=scores.device).triu_(1)
            scores.view(-1, count, scores.shape[2])[:, :, -count:].add_(later)
        return scores


def _sources(block: Block, key: Tensor, value: Tensor, *, gradients: bool = False) -> list[_Source]:
    """Gather the segments' own keys and values, and the prompt's if there is one, from packed ones
    [N, Hk, 1, D].
    """
    own = [block.gather(packed).flatten(0, 1).squeeze(1) for packed in (key, value)]
    prompt = [packed[block.prompt, :, 0].transpose(0, 1).contiguous() for packed in (key, value)]
    sources = []
    for keys, values in (own, prompt):
        grad_keys, grad_values = keys, values
        if gradients:
            grad_keys, grad_values = torch.zeros_like(keys), torch.zeros_like(values)
        sources.append(_Source(keys, values, grad_keys, grad_values, own=keys is own[0]))
    if prompt[0].shape[1]:
        return sources
    return sources[:1]


def _output(queries: Tensor, sources: Sequence[_Source]) -> tuple[Tensor, Tensor]:
    """Return attention of queries [Hk, B, G, t, D] and the log-sum-exp of their scores, [Hk, B, G,
    t, 1].
    """
    scores = [source.scores(queries) for source in sources]
    like = (*queries.shape[:-1], 1)
    largest = reduce(torch.maximum, (each.amax(-1).view(like) for each in scores))
    for each in scores:
        each.sub_(_grouped(largest, each)).exp_()
    total = reduce(torch.add, (each.sum(-1).view(like) for each in scores))
    parts = (
        torch.bmm(each, source.values).view_as(queries)
        for each, source in zip(scores, sources, strict=True)
    )
    return reduce(Tensor.add_, parts).div_(total), largest.add_(total.log_())


def _gradients(
    sources: Sequence[_Source],
    queries: Tensor,
    grad_output: Tensor,
    normalizer: Tensor,
    dots: Tensor,
) -> Tensor:
    """Return the gradient of the queries [Hk, B, G, t, D]; adds to the gradients of the sources.
    `dots` [.., 1] = sum(grad_output * output).
    """
    grad_queries = torch.zeros_like(queries)
    for source in sources:
        rows, grad_rows = _grouped(queries, source.keys), _grouped(grad_output, source.keys)
        weights = source.scores(queries)
        weights.sub_(_grouped(normalizer, weights)).exp_()
        source.grad_values.baddbmm_(weights.transpose(1, 2), grad_rows)
        grad_scores = (
            torch.bmm(grad_rows, source.values.transpose(1, 2))
            .sub_(_grouped(dots, weights))
            .mul_(weights)
        )
        _grouped(grad_queries, source.keys).baddbmm_(grad_scores, source.keys)
        source.grad_keys.baddbmm_(grad_scores.transpose(1, 2), rows)
    return grad_queries


def _turn(tensor: Tensor, turn: slice) -> Tensor:
    """Return [Hk, B, G, t, ..] of [Hk, B, G, T, ..]."""
    return tensor[:, :, :, turn].contiguous()


def _grouped(tensor: Tensor, like: Tensor) -> Tensor:
    """Return [b, n, ..] of [Hk, B, G, t, ..], with the b of `like`."""
    return tensor.view(len(like), -1, tensor.shape[-1])


def _flat(tensor: Tensor) -> Tensor:
    """Return [B * T, Hk, G, D] of [Hk, B, G, T, D]."""
    return tensor.permute(1, 3, 0, 2, 4).reshape(
        -1, tensor.shape[0], tensor.shape[2], tensor.shape[4]
    )


# -- packed rows -----------------------------------------------------------------------------------


_MAX_TOKENS_AS_PRODUCTS = 512
"""Tokens of a segment. For longer ones the fused kernel is faster: it skips the scores that
causality hides, nearly half of them."""


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

    @property
    def prompt(self) -> slice:
        """The packed tokens of the prompt."""
        return slice(self.prompt_start, self.prompt_start + self.prompt_length)


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
        self, segments: Sequence[Segment], budget: int, kernel: FusedAttention, device: torch.device
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
        """Return [1, Hq, N, D] over [1, Hk, N, D]."""
        if window is not None and window >= self._longest:
            window = None
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [N, H, D]
        kernel = self._kernel.packed_kernel(query, softcap)
        if kernel:
            # The backward pass gathers nothing again: the kernel keeps its output and one number
            # per query and head.
            spans, seen = self._spans
            if seen is not None:
                k, v = k.index_select(0, seen), v.index_select(0, seen)
            output = kernel(q, k, v, spans, scaling, window)
        elif window is None and softcap is None and self._short and prefers_products(query):
            output = attend(q, k, v, *self._blocks, scaling)
        else:
            # Gather again in the backward pass instead of keeping the gathered tensors.
            def run(call: _Call, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                q = _rows(query, call.queries, call.rows)
                k, v = (_rows(packed, call.keys, call.rows) for packed in (key, value))
                output = self._kernel.causal(q, k, v, scaling, window, softcap)
                return output.transpose(1, 2).flatten(0, 1)

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
        keys = [np.r_[each.prompt, each.start : each.stop] for each in self._segments]
        lengths = [segment.length for segment in self._segments]
        spans = Spans.of(lengths, list(map(len, keys)), self._device)
        if any(segment.prompt_length for segment in self._segments):
            return spans, self._placed(np.concatenate(keys))
        return spans, None

    @cached_property
    def _calls(self) -> tuple[list[_Call], Tensor]:
        parts = list(_together(self._segments, self._budget, lambda segment: segment.prompt_length))
        calls: list[_Call] = []
        for part in parts:
            queries = _queries(part)
            before = np.stack([np.r_[segment.prompt] for segment in part])
            keys = np.concatenate([before, queries], axis=1)
            calls.append(
                _Call(self._placed(queries.ravel()), self._placed(keys.ravel()), len(part))
            )
        return calls, self._order(parts)

    @cached_property
    def _blocks(self) -> tuple[list[Block], Tensor]:
        def prompt(segment: Segment) -> tuple[int, int]:
            return segment.prompt_length, segment.prompt_start

        parts = list(_together(self._segments, self._budget, prompt))
        blocks: list[Block] = []
        for part in parts:
            lengths = np.array([segment.length for segment in part])
            padding = np.flatnonzero(np.arange(part[0].length) >= lengths[:, None])
            tokens = self._placed(_queries(part).ravel())
            blocks.append(Block(len(part), tokens, self._placed(padding), part[0].prompt))
        return blocks, self._order(parts)

    def _order(self, parts: Sequence[Sequence[Segment]]) -> Tensor:
        """Return [N] the places of the packed tokens among the parts' tokens, padding included."""
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
    """Gather [N, H, D] into [rows, H, length, D]."""
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
    """Return [B, T] packed tokens, padded with packed token 0."""
    queries = np.zeros((len(part), part[0].length), np.int64)
    for index, segment in enumerate(part):
        queries[index, : segment.length] = np.arange(segment.start, segment.stop)
    return queries

"""Causal attention of packed rows as matrix products: for short rows on a CPU faster than the fused
kernel, forward and backward.

Rows that continue one prompt score its keys in one product, and in the backward pass that product's
transpose sums the prompt's gradient over them. Scores are made for a bounded number of queries at a
time, and again in the backward pass from the saved log-sum-exp (arXiv 2205.14135), so that memory
is linear in the tokens. Shape letters: N packed tokens, Hq and Hk heads, G = Hq / Hk, D head size;
B segments of T tokens, t of them queries; L keys.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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
        """[Hk, B, G, T, D] from [N, Hk, G, D], zero where there is padding."""
        rows = packed.index_select(0, self.tokens).index_fill_(0, self.padding, 0.0)
        return rows.view(self.rows, -1, *packed.shape[1:]).permute(2, 0, 3, 1, 4).contiguous()

    def turns(self, heads: int) -> Iterator[slice]:
        """The T queries, as many together as the scores' memory allows."""
        width = len(self.tokens) // self.rows
        step = max(
            _MIN_QUERIES,
            _SCORES // (heads * self.rows * (self.prompt.stop - self.prompt.start + width)),
        )
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
    """[N, Hq, D] of queries [N, Hq, D] over keys and values [N, Hk, D]; every packed token is in
    one block.

    `order` [N]: where the packed tokens stand among the blocks' tokens, one block after the other.
    """
    grouped = query.reshape(len(query), key.shape[1], -1, query.shape[2])
    apply: Any = _Attend.apply  # which torch does not annotate
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
        outputs, normalisers = [], []
        for block in blocks:
            queries, sources = block.gather(query).mul_(scaling), _sources(block, key, value)
            output, normaliser = (
                torch.empty_like(queries),
                queries.new_empty(*queries.shape[:-1], 1),
            )
            for turn in block.turns(query.shape[1] * query.shape[2]):
                output[:, :, :, turn], normaliser[:, :, :, turn] = _output(
                    _turn(queries, turn), [source.until(turn) for source in sources]
                )
            outputs.append(_flat(output))
            normalisers.append(normaliser)
        packed = torch.cat(outputs).index_select(0, order)
        ctx.save_for_backward(query, key, value, packed, *normalisers)
        ctx.blocks, ctx.order, ctx.scaling = blocks, order, scaling
        return packed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, *normalisers = ctx.saved_tensors
        dot = (grad * output).sum(-1, keepdim=True)
        grad_tokens, prompt_grads = [], []
        for block, normaliser in zip(ctx.blocks, normalisers, strict=True):
            queries = block.gather(query).mul_(ctx.scaling)
            own, *prompt = sources = _sources(block, key, value, gradients=True)
            grad_queries = torch.zeros_like(queries)
            per_query = queries, block.gather(grad), normaliser, block.gather(dot)
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
        # A prompt's keys and values serve its own tokens and those of all rows that continue it.
        for tokens, *grads in prompt_grads:
            for total, more in zip((grad_key, grad_value), grads, strict=True):
                total[tokens, :, 0] += more.transpose(0, 1)
        return grad_query, grad_key, grad_value, None, None, None


@dataclass(frozen=True)
class _Source:
    """Keys that the queries of a block see: their own (b = Hk * B), or the prompt's, for all of its
    segments together (b = Hk).
    """

    keys: Tensor
    """[b, L, D]"""
    values: Tensor
    grad_keys: Tensor
    """[b, L, D] gradients, to which each turn adds."""
    grad_values: Tensor
    own: bool

    def flat_gradients(self, rows: int) -> list[Tensor]:
        """The gradients of a block's own keys and values, as `_flat` gives them."""
        heads, size = len(self.keys) // rows, self.keys.shape[-1]
        grads = self.grad_keys, self.grad_values
        return [_flat(grad.view(heads, rows, 1, -1, size)) for grad in grads]

    def until(self, turn: slice) -> "_Source":
        """The part that the queries of a turn see."""
        if not self.own:
            return self
        seen = slice(turn.stop)
        return _Source(
            self.keys[:, seen],
            self.values[:, seen],
            self.grad_keys[:, seen],
            self.grad_values[:, seen],
            own=True,
        )

    def scores(self, queries: Tensor) -> Tensor:
        """[b, n, L] of queries [Hk, B, G, t, D], which are the last t of their own L."""
        scores = torch.bmm(_rows(queries, self.keys), self.keys.transpose(1, 2))
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
        grad_keys, grad_values = (
            (torch.zeros_like(keys), torch.zeros_like(values)) if gradients else (keys, values)
        )
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
        each.sub_(_rows(largest, each)).exp_()
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
    normaliser: Tensor,
    dots: Tensor,
) -> Tensor:
    """Return the gradient of the queries [Hk, B, G, t, D]; adds to the gradients of the sources.
    `dots` [.., 1] = sum(grad_output * output).
    """
    grad_queries = torch.zeros_like(queries)
    for source in sources:
        rows, grad_rows = _rows(queries, source.keys), _rows(grad_output, source.keys)
        weights = source.scores(queries)
        weights.sub_(_rows(normaliser, weights)).exp_()
        source.grad_values.baddbmm_(weights.transpose(1, 2), grad_rows)
        grad_scores = (
            torch.bmm(grad_rows, source.values.transpose(1, 2))
            .sub_(_rows(dots, weights))
            .mul_(weights)
        )
        _rows(grad_queries, source.keys).baddbmm_(grad_scores, source.keys)
        source.grad_keys.baddbmm_(grad_scores.transpose(1, 2), rows)
    return grad_queries


def _turn(tensor: Tensor, turn: slice) -> Tensor:
    """[Hk, B, G, t, ..] of [Hk, B, G, T, ..]."""
    return tensor[:, :, :, turn].contiguous()


def _rows(tensor: Tensor, like: Tensor) -> Tensor:
    """[b, n, ..] of [Hk, B, G, t, ..], with the b of `like`."""
    return tensor.view(len(like), -1, tensor.shape[-1])


def _flat(tensor: Tensor) -> Tensor:
    """[B * T, Hk, G, D] of [Hk, B, G, T, D]."""
    return tensor.permute(1, 3, 0, 2, 4).reshape(
        -1, tensor.shape[0], tensor.shape[2], tensor.shape[4]
    )

"""Attention of one new token of each row over the pages of its keys and values.

Queries that share a key head are computed together, over one block of tokens after the other
(online softmax, arXiv 1805.02867). A long row is cut into parts of a fixed size, each computed by
itself, whose sums are then added in order: a few long rows fill the device too, and a long row does
not hold up short ones. A row meets the same blocks in the same order whatever the rows beside it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from retrain.model.kernels.products import factors, rounded

PART = 1024
"""Tokens of a part; two rows of 16,384 tokens, 8 key heads, are 256 programs."""
_BLOCK = 64
_TILE = 16
"""Parts that are added together."""
_MIN_BLOCK = 16
"""Rows of the smallest matrix product."""


@triton.jit
def _attend(
    query, keys, values, block_table, cache_seqlens, out, scales, scaling, window, page_tokens,
    block_table_stride, row_stride, head_stride,
    GROUP: tl.constexpr, SIZE: tl.constexpr, FACTORS: tl.constexpr, QUERIES: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    PART: tl.constexpr, CUT: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The queries of one row and key head over one part. Scores and sums are float32; weights are
    rounded before their product, as flash kernels do.

    CUT: rows may have several parts, so `out` takes sums and `scales` the largest score and the sum
    of weights; nothing is written for a part without tokens. WHOLE: a block lies within a page.
    """
    dtype: tl.constexpr = query.dtype.element_ty
    row, head, number = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    key_heads = tl.num_programs(1)
    each, part = tl.arange(0, QUERIES), tl.arange(0, WIDTH)
    length = tl.load(cache_seqlens + row)
    first = tl.maximum(length - window, 0)
    begin, end = tl.maximum(first, number * PART), tl.minimum(length, number * PART + PART)
    of_group = each < (tl.where(begin < end, GROUP, 0) if CUT else GROUP)
    own = of_group[:, None] & (part < SIZE)[None, :]
    asked = tl.load(
        query + row * row_stride + (head * GROUP + each)[:, None] * head_stride + part[None, :],
        mask=own,
        other=0.0,
    )
    largest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    summed = tl.zeros([QUERIES, WIDTH], tl.float32)
    for start in range(begin // BLOCK * BLOCK, end, BLOCK):
        place = start + tl.arange(0, BLOCK)
        seen = (place >= begin) & (place < end)
        if WHOLE:
            page = tl.load(block_table + row * block_table_stride + start // page_tokens).to(
                tl.int64
            )
        else:
            page = tl.load(
                block_table + row * block_table_stride + place // page_tokens, mask=seen, other=0
            ).to(tl.int64)
        at = ((page * page_tokens + place % page_tokens) * key_heads + head) * SIZE
        inside = seen[:, None] & (part < SIZE)[None, :]
        key = tl.load(keys + at[:, None] + part[None, :], mask=inside, other=0.0)
        scores = (
            tl.dot(asked.to(FACTORS), tl.trans(key.to(FACTORS)), input_precision="ieee") * scaling
        )
        scores = tl.where(seen[None, :], scores, float("-inf"))
        # Never -inf: every block of this loop holds a token that is seen.
        reached = tl.maximum(largest, tl.max(scores, axis=1))
        weights, shrunk = tl.exp(scores - reached[:, None]), tl.exp(largest - reached)
        value = tl.load(values + at[:, None] + part[None, :], mask=inside, other=0.0)
        product = tl.dot(
            rounded(weights, dtype).to(FACTORS), value.to(FACTORS), input_precision="ieee"
        )
        summed = summed * shrunk[:, None] + product
        total = total * shrunk + tl.sum(weights, axis=1)
        largest = reached
    target = ((row * key_heads + head) * tl.num_programs(2) + number) * GROUP + each
    if CUT:
        tl.store(scales + 2 * target, largest, mask=of_group)
        tl.store(scales + 2 * target + 1, total, mask=of_group)
    else:
        summed = rounded(summed / tl.where(total > 0, total, 1.0)[:, None], dtype)
    tl.store(
        out + target[:, None] * SIZE + part[None, :], summed.to(out.dtype.element_ty), mask=own
    )


@triton.jit
def _join(
    sums, scales, cache_seqlens, out, window, parts,
    GROUP: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Add the parts of one row and query head, `TILE` at a time. A single part keeps its bits, as
    if the row had not been cut.
    """
    dtype: tl.constexpr = out.dtype.element_ty
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heads, part = tl.num_programs(1), tl.arange(0, WIDTH)
    length = tl.load(cache_seqlens + row)
    last = (length + PART - 1) // PART
    largest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    summed = tl.zeros([WIDTH], tl.float32)
    # From the first part that has tokens: nothing was written for those before it.
    for start in range(tl.maximum(length - window, 0) // PART, last, TILE):
        number = start + tl.arange(0, TILE)
        source = ((row * (heads // GROUP) + head // GROUP) * parts + number) * GROUP + head % GROUP
        new = tl.load(scales + 2 * source, mask=number < last, other=float("-inf"))
        weights = tl.load(scales + 2 * source + 1, mask=number < last, other=0.0)
        inside = (number < last)[:, None] & (part < SIZE)[None, :]
        product = tl.load(sums + source[:, None] * SIZE + part[None, :], mask=inside, other=0.0)
        reached = tl.maximum(largest, tl.max(new, axis=0))
        shrunk, grown = tl.exp(largest - reached), tl.exp(new - reached)
        summed = summed * shrunk + tl.sum(product * grown[:, None], axis=0)
        total = total * shrunk + tl.sum(weights * grown, axis=0)
        largest = reached
    result = rounded(summed / tl.where(total > 0, total, 1.0), dtype).to(dtype)
    tl.store(out + (row * heads + head) * SIZE + part, result, mask=part < SIZE)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    scaling: float,
    window: int | None,
) -> Tensor:
    """[R, Hq, D] of queries [R, Hq, D], the last tokens of their rows, over keys and values in
    pages [P, T, Hk, D].

    Row r has `cache_seqlens` [R] tokens, in the pages `block_table` [R, M] in order.
    """
    count, heads, size = query.shape
    page_tokens, key_heads = keys.shape[1:3]
    group, width = heads // key_heads, max(_MIN_BLOCK, triton.next_power_of_2(size))
    last = 2**30 if window is None else window
    parts = triton.cdiv(block_table.shape[1] * page_tokens, PART)
    out = torch.empty(count, heads, size, dtype=query.dtype, device=query.device)
    cut = parts > 1
    sums, scales = (
        (
            torch.empty(
                count, key_heads, parts, group, each, dtype=torch.float32, device=query.device
            )
            if cut
            else out
        )
        for each in (size, 2)
    )
    _attend[count, key_heads, parts](
        query, keys, values, block_table, cache_seqlens, sums, scales, scaling, last, page_tokens,
        block_table.stride(0), query.stride(0), query.stride(1),
        GROUP=group, SIZE=size, FACTORS=factors(query),
        QUERIES=max(_MIN_BLOCK, triton.next_power_of_2(group)), WIDTH=width, BLOCK=_BLOCK,
        PART=PART, CUT=cut, WHOLE=page_tokens % _BLOCK == 0,
    )  # fmt: skip
    if cut:
        _join[count, heads](
            sums,
            scales,
            cache_seqlens,
            out,
            last,
            parts,
            GROUP=group,
            SIZE=size,
            WIDTH=width,
            PART=PART,
            TILE=_TILE,
        )
    return out

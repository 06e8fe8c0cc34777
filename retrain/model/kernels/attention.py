"""Attention of one new token of each row over the pages of its keys and values, for a torch whose flash kernel reads no pages.

Queries that share a key head are computed together, over one block of tokens after the other (online softmax, arXiv 1805.02867). A row
meets the same blocks in the same order whatever the rows beside it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from retrain.model.kernels.rounding import rounded

_BLOCK = 64
_FEWEST = 16
"""Rows of the smallest matrix product."""


@triton.jit
def _attend(
    query, keys, values, table, lengths, out, scaling, window, page_tokens, table_stride, row_stride, head_stride,
    GROUP: tl.constexpr, SIZE: tl.constexpr, FACTORS: tl.constexpr, QUERIES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The queries of one row and key head. Scores and sums are float32; weights are rounded before their product, as flash kernels do.

    FACTORS: dtype of what is multiplied, which is exact in float32 too. Triton's interpreter, on a CPU, multiplies no bfloat16.
    """
    dtype: tl.constexpr = query.dtype.element_ty
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key_heads = tl.num_programs(1)
    each, part = tl.arange(0, QUERIES), tl.arange(0, WIDTH)
    own = (each < GROUP)[:, None] & (part < SIZE)[None, :]
    asked = tl.load(query + row * row_stride + (head * GROUP + each)[:, None] * head_stride + part[None, :], mask=own, other=0.0)
    length = tl.load(lengths + row)
    first = tl.maximum(length - window, 0)
    largest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    summed = tl.zeros([QUERIES, WIDTH], tl.float32)
    for start in range(first // BLOCK * BLOCK, length, BLOCK):
        place = start + tl.arange(0, BLOCK)
        seen = (place >= first) & (place < length)
        page = tl.load(table + row * table_stride + place // page_tokens, mask=seen, other=0).to(tl.int64)
        at = ((page * page_tokens + place % page_tokens) * key_heads + head) * SIZE
        inside = seen[:, None] & (part < SIZE)[None, :]
        key = tl.load(keys + at[:, None] + part[None, :], mask=inside, other=0.0)
        scores = tl.dot(asked.to(FACTORS), tl.trans(key.to(FACTORS)), input_precision="ieee") * scaling
        scores = tl.where(seen[None, :], scores, float("-inf"))
        reached = tl.maximum(largest, tl.max(scores, axis=1))
        weights, shrunk = tl.exp(scores - reached[:, None]), tl.exp(largest - reached)
        value = tl.load(values + at[:, None] + part[None, :], mask=inside, other=0.0)
        product = tl.dot(rounded(weights, dtype).to(FACTORS), value.to(FACTORS), input_precision="ieee")
        summed = summed * shrunk[:, None] + product
        total = total * shrunk + tl.sum(weights, axis=1)
        largest = reached
    result = rounded(summed / tl.where(total > 0, total, 1.0)[:, None], dtype).to(dtype)
    tl.store(out + (row * key_heads * GROUP + (head * GROUP + each)[:, None]) * SIZE + part[None, :], result, mask=own)


def attend(query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, scaling: float, window: int | None) -> Tensor:
    """[R, Hq, D] of queries [R, Hq, D], the last tokens of their rows, over keys and values in pages [P, T, Hk, D].

    Row r has `lengths` [R] tokens, in the pages `table` [R, M] in order.
    """
    count, heads, size = query.shape
    page_tokens, key_heads = keys.shape[1:3]
    group = heads // key_heads
    out = torch.empty(count, heads, size, dtype=query.dtype, device=query.device)
    _attend[count, key_heads](
        query, keys, values, table, lengths, out, scaling, 2**30 if window is None else window, page_tokens,
        table.stride(0), query.stride(0), query.stride(1),
        GROUP=group, SIZE=size, FACTORS=tl.bfloat16 if query.dtype == torch.bfloat16 and query.is_cuda else tl.float32,
        QUERIES=max(_FEWEST, triton.next_power_of_2(group)), WIDTH=max(_FEWEST, triton.next_power_of_2(size)), BLOCK=_BLOCK,
    )  # fmt: skip
    return out

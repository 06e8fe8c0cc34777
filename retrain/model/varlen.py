"""Causal attention of sequences of any lengths laid end to end: one call for all, no mask, no
padding, no repeated key.

On CUDA it is torch's flash kernel. `plain_paged` is its form over pages in matrix products, on any
device and in any dtype, for decoding without a kernel over pages.
Shape letters: S sequences, Nq and Nk tokens of all of them, Hq query heads, Hk key-value heads, D
head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_MAX_HEAD = 256
_OLDEST_GPU = (8, 0)


@dataclass(frozen=True)
class Spans:
    """The boundaries of sequences laid end to end. The queries of a sequence are the last of its
    keys.
    """

    queries: Tensor
    """[S + 1] int32: 0, and where the queries of each sequence end."""
    keys: Tensor
    """[S + 1] int32"""
    max_seqlen_q: int
    """Most queries of one sequence."""
    max_seqlen_k: int

    @classmethod
    def of(cls, queries: Sequence[int], keys: Sequence[int], device: torch.device) -> "Spans":
        """Make spans from the lengths of each sequence."""
        ends_queries, ends_keys = (
            torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)).to(device)
            for lengths in (queries, keys)
        )
        return cls(ends_queries, ends_keys, max(queries), max(keys))


PackedKernel = Callable[[Tensor, Tensor, Tensor, Spans, float, int | None], Tensor]
"""(query [Nq, Hq, D], key and value [Nk, Hk, D], spans, scaling, window) to [Nq, Hq, D]."""


def flash(
    query: Tensor, key: Tensor, value: Tensor, spans: Spans, scaling: float, window: int | None
) -> Tensor:
    """Attend by torch's flash kernel (CUDA, half precision). Its backward is deterministic under
    torch.use_deterministic_algorithms, but not with `warn_only`.
    """
    from torch.nn.attention.varlen import varlen_attn

    lengths = spans.queries, spans.keys, spans.max_seqlen_q, spans.max_seqlen_k
    options: dict[str, Any] = {"scale": scaling, "window_size": _window_size(window)}
    # torch 2.11 does not ask, and its kernel knows fewer key heads too.
    if _takes("enable_gqa"):
        options["enable_gqa"] = True
    return varlen_attn(query, key, value, *lengths, **options)  # type: ignore[return-value]  # no log-sum-exp is asked for, so it is one tensor


def _window_size(window: int | None) -> tuple[int, int]:
    """Return the number of keys that a query sees before its own and after it, as the kernel counts
    them; -1 for all.
    """
    return (-1 if window is None else window - 1), 0


class PagedRows(NamedTuple):
    """Rows with one query each, the last of their tokens. A row's tokens lie in its pages in
    order.
    """

    block_table: Tensor
    """[R, M] int32 pages."""
    cache_seqlens: Tensor
    """[R] int32 tokens."""
    spans: Spans
    """One query per row over `cache_seqlens` keys; built once for all layers."""

    @classmethod
    def of(cls, block_table: Tensor, cache_seqlens: Tensor, page_tokens: int) -> "PagedRows":
        queries = torch.arange(
            len(cache_seqlens) + 1, dtype=torch.int32, device=cache_seqlens.device
        )
        keys = torch.nn.functional.pad(cache_seqlens.cumsum(0, dtype=torch.int32), (1, 0))
        return cls(
            block_table, cache_seqlens, Spans(queries, keys, 1, block_table.shape[1] * page_tokens)
        )


PagedKernel = Callable[[Tensor, Tensor, Tensor, PagedRows, float, int | None], Tensor]
"""(query [R, Hq, D], keys and values in pages [P, T, Hk, D], rows, scaling, window) to [R, Hq,
D]."""


def flash_paged(
    query: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, scaling: float, window: int | None
) -> Tensor:
    """Attend over pages by torch's flash kernel (CUDA, half precision). A row's result does not
    depend on the other rows, since the kernel does not split its keys.
    """
    from torch.nn.attention.varlen import varlen_attn

    spans = rows.spans
    return varlen_attn(  # type: ignore[return-value]  # no log-sum-exp is asked for, so it is one tensor
        query, keys, values, spans.queries, spans.keys, spans.max_seqlen_q, spans.max_seqlen_k,
        scale=scaling, window_size=_window_size(window), enable_gqa=True,
        seqused_k=rows.cache_seqlens, block_table=rows.block_table, num_splits=1,
    )  # fmt: skip


def plain_paged(
    query: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, scaling: float, window: int | None
) -> Tensor:
    """Attend as `flash_paged` in matrix products, over all pages that a row could hold."""
    count, heads, size = query.shape
    grouped = query.view(count, keys.shape[2], -1, size)
    k, v = (
        pages[rows.block_table.long()].flatten(1, 2).transpose(1, 2) for pages in (keys, values)
    )  # [R, Hk, L, D]
    position, seen = torch.arange(k.shape[2], device=query.device), rows.cache_seqlens[:, None]
    hidden = position >= seen
    if window is not None:
        hidden |= position < seen - window
    scores = (grouped @ k.transpose(2, 3) * scaling).masked_fill(
        hidden[:, None, None], float("-inf")
    )
    return (torch.softmax(scores.float(), dim=-1).to(v.dtype) @ v).view(count, heads, -1)


def has_flash(device_type: str, dtype: torch.dtype) -> bool:
    """Return True if `flash` runs there: torch 2.11 or later, on an NVIDIA GPU of 2020 (Ampere) or
    later, in half precision.
    """
    return (
        device_type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and _takes("window_size")
        and (not torch.cuda.is_available() or torch.cuda.get_device_capability() >= _OLDEST_GPU)
    )


def reads_pages() -> bool:
    """Return True if torch's flash kernel reads pages (torch 2.12)."""
    return _takes("block_table")


def _takes(argument: str) -> bool:
    """Return True if this torch's packed attention has that argument."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return argument in _arguments(varlen_attn)


@cache
def _arguments(kernel: Callable[..., object]) -> frozenset[str]:
    """Return the names of a function's arguments, read once: `flash` asks in every layer."""
    return frozenset(signature(kernel).parameters)


def fits_flash(query: Tensor) -> bool:
    """Return True if `flash` takes queries of this head size and dtype."""
    return query.dtype in (torch.bfloat16, torch.float16) and fits_head(query.shape[-1])


def fits_head(size: int) -> bool:
    return size % 8 == 0 and size <= _MAX_HEAD

"""Keys and values in pages of one size; a row holds as many pages as its tokens fill.

A page may belong to several rows: rows of a group share the full pages of their prompt. Page 0
belongs to no row: rows that do not decode write there. Shape letters: P pages, T tokens of a page,
H key-value heads, D head size, N tokens.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from retrain.inference_engine.sampling import upload
from retrain.model.attention import Kernel
from retrain.model.budget import PAGE_TOKENS
from retrain.model.varlen import PagedRows


class PagePool:
    """The pages of all layers: page 3 of the pool is page 3 of every layer's keys and values."""

    def __init__(
        self,
        pages: int,
        heads: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        device: torch.device,
        tokens: int = PAGE_TOKENS,
    ):
        """`pages` that rows may hold; `heads`: (H, D) of each layer.

        Zeros, not empty memory: hidden positions of a page are multiplied by a weight of 0, and 0 *
        NaN would be NaN.
        """
        self.tokens, self.pages, self.device = tokens, pages, device
        shapes = [(pages + 1, tokens, *shape) for shape in heads]
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        self._free = list(range(pages, 0, -1))
        self._holders = np.zeros(pages + 1, np.int64)

    @property
    def nbytes(self) -> int:
        return sum(stored.nbytes for stored in self.keys + self.values)

    @property
    def free(self) -> int:
        return len(self._free)

    def needed(self, tokens: int) -> int:
        """Count the pages that `tokens` fill."""
        return -(-tokens // self.tokens)

    def take(self, count: int) -> list[int]:
        """Take `count` free pages; the caller has looked that there are as many."""
        taken = [self._free.pop() for _ in range(count)]
        self._holders[taken] = 1
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """Count one more holder of each."""
        self._holders[list(pages)] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        """Count one holder less; a page that nobody holds is free."""
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def write(self, layer: int, slot_mapping: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [N, H, D] of tokens to `slot_mapping` [N], counted over the tokens
        of all pages.
        """
        for stored, new in ((self.keys[layer], keys), (self.values[layer], values)):
            stored.view(-1, *stored.shape[2:]).index_copy_(0, slot_mapping, new)

    def read(self, layer: int, slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
        """Read keys and values [N, H, D] at `slot_mapping` [N]."""
        keys, values = (
            stored.view(-1, *stored.shape[2:]).index_select(0, slot_mapping)
            for stored in (self.keys[layer], self.values[layer])
        )
        return keys, values

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole pages, in every layer."""
        source, target = (
            upload(np.array(pages, np.int64), self.device) for pages in (sources, targets)
        )
        for stored in self.keys + self.values:
            stored.index_copy_(0, target, stored.index_select(0, source))

    def slot_mapping(self, pages: Sequence[int], count: int) -> npt.NDArray[np.int64]:
        """[count] where the first tokens of a row that holds `pages` lie, for `write`."""
        position = np.arange(count)
        slot_mapping: npt.NDArray[np.int64] = (
            np.array(pages, np.int64)[position // self.tokens] * self.tokens
            + position % self.tokens
        )
        return slot_mapping


class PagedTokens:
    """One new token of each row of a decoding step, written to its page and attending to the row's
    pages.
    """

    def __init__(
        self,
        pool: PagePool,
        kernel: Kernel,
        slot_mapping: Tensor,
        block_table: Tensor,
        cache_seqlens: Tensor,
    ) -> None:
        """`slot_mapping` [R] of the new tokens; `block_table` [R, pages] int32 of each row;
        `cache_seqlens` [R] int32 with the new tokens.
        """
        self.slot_mapping = slot_mapping
        self._pool, self._attend, self._rows = (
            pool,
            kernel.paged,
            PagedRows.of(block_table, cache_seqlens, pool.tokens),
        )

    def pages(self, number: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [P, T, H, D] of a layer."""
        return self._pool.keys[number], self._pool.values[number]

    def attention(self, queries: Tensor, number: int, scaling: float, window: int | None) -> Tensor:
        """[R, Hq, D] of queries [R, Hq, D] in layer `number`, over the tokens of their rows."""
        return self._attend(queries, *self.pages(number), self._rows, scaling, window)

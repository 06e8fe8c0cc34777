"""The engine's keys and values: a contiguous cache, plugged into transformers' `Cache` interface,
and pages of one size.

In the contiguous cache active rows are the prefix 0 .. R-1 of preallocated tensors, so decoding
reads views and gathers nothing. A waiting completion or the last active row replaces a leaving row.
The engine computes prompts once, packed without padding, and copies them to the rows of their
group.

In pages a row holds as many as its tokens fill. A page may belong to several rows: rows of a group
share the full pages of their prompt. Page 0 belongs to no row: rows that do not decode write there.

Shape letters of the cache: R active rows, H key-value heads, C capacity in tokens, D head size, P
prompt tokens. Shape letters of pages: P pages, T tokens of a page, N tokens.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import Cache

from retrain.inference_engine.base import NoiseKey, SampleRequest
from retrain.inference_engine.sampling import upload
from retrain.model.attention import FusedAttention, RowLengths
from retrain.model.budget import PAGE_TOKENS
from retrain.model.varlen import PagedRows, Spans
from retrain.types import Int32Array

_SCALED = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Storage types that need a scale, with their largest value."""


@dataclass(frozen=True)
class PromptState:
    """The state that a prompt leaves behind: its keys and values in every layer, and the logits of
    its first answer token.
    """

    token_ids: Int32Array
    """[P]"""
    keys: list[Tensor]
    """Per layer [H, P, D]."""
    values: list[Tensor]
    logits: Tensor
    """[V]"""


class LayerCache:
    """Keys or values of one layer, [rows, H, C, D]: plain, or quantized with one scale per row,
    head and token.
    """

    def __init__(self, rows: int, capacity: int, like: Tensor, storage: torch.dtype | None) -> None:
        """`like` is a prompt's tensor [H, P, D]; `storage` is None for its own dtype.

        The buffers begin with zeros, because attention multiplies masked positions by a weight of
        0, and 0 * NaN would be NaN.
        """
        heads, _, dim = like.shape
        self._compute_dtype, self._storage = like.dtype, storage or like.dtype
        self._largest = _SCALED.get(self._storage)
        sizes = [(dim, self._storage)]
        if self._largest is not None:
            # Every operator can copy the bytes of 8-bit floats.
            sizes = [(dim, torch.int8), (1, torch.float32)]
        self.tensors = [
            torch.zeros(rows, heads, capacity, size, dtype=dtype, device=like.device)
            for size, dtype in sizes
        ]
        """Numbers, and where they need them their scales."""

    def begin(self, rows: Tensor, prompt: Tensor) -> None:
        """Store a prompt [H, P, D] as the first tokens of `rows`."""
        for tensor, values in zip(self.tensors, self._stored(prompt), strict=True):
            tensor[rows, :, : values.shape[1]] = values

    def append(self, places: Tensor, token: Tensor) -> None:
        """Store one token of each row, [R, H, D], where `places` [R * H] says."""
        for tensor, values in zip(self.tensors, self._stored(token), strict=True):
            tensor.view(-1, tensor.shape[-1]).index_copy_(
                0, places, values.reshape(len(places), -1)
            )

    def places(self, positions: Tensor) -> Tensor:
        """Return [R * H] for `append`: the places of the tokens at `positions` [R] of rows 0 .. R-1
        among all heads' tokens, [rows * H * C].
        """
        _, heads, capacity, _ = self.tensors[0].shape
        heads_start = (
            torch.arange(len(positions) * heads, device=positions.device).view(-1, heads) * capacity
        )
        return (heads_start + positions[:, None]).flatten()

    def _stored(self, values: Tensor) -> list[Tensor]:
        """Return values [.., D] in the storage type, and where that needs them their scales [..,
        1].
        """
        if self._largest is None:
            return [values.to(self._storage)]
        scales = values.abs().amax(-1, keepdim=True).float().clamp_(min=1e-12) / self._largest
        quantized = values.float() / scales
        if self._storage == torch.int8:
            quantized = quantized.round_()
        return [quantized.to(self._storage).view(torch.int8), scales]

    def read(self, rows: int, length: int) -> Tensor:
        """Return [rows, H, length, D] in the model's dtype, a view if stored in it."""
        data, *scales = (tensor[:rows, :, :length] for tensor in self.tensors)
        if not scales:
            return data.to(self._compute_dtype)
        return (data.view(self._storage).float() * scales[0]).to(self._compute_dtype)

    def move(self, source: Tensor, target: Tensor, length: int) -> None:
        for tensor in self.tensors:
            tensor[target, :, :length] = tensor[source, :, :length]

    def grow(self, capacity: int, rows: int, length: int) -> None:
        """Make room for `capacity` tokens per row, keeping the first `length` tokens of the first
        `rows` rows.
        """
        for number, tensor in enumerate(self.tensors):
            larger = tensor.new_zeros(*tensor.shape[:2], capacity, tensor.shape[3])
            larger[:rows, :, :length] = tensor[:rows, :, :length]
            self.tensors[number] = larger


class KVArena:
    """Keys and values of the rows that decode, for every layer; as many rows as the budget allows,
    and a growing capacity.
    """

    def __init__(
        self, rows: int, capacity: int, first: PromptState, storage: torch.dtype | None
    ) -> None:
        self.rows, self.capacity = rows, capacity
        self.keys = [LayerCache(rows, capacity, like, storage) for like in first.keys]
        self.values = [LayerCache(rows, capacity, like, storage) for like in first.values]
        self.device = first.logits.device

    def write_prompt(self, rows: Sequence[int], prompt: PromptState) -> None:
        index = torch.tensor(rows, device=self.device)
        for stored, values in zip(
            self.keys + self.values, prompt.keys + prompt.values, strict=True
        ):
            stored.begin(index, values)

    def move(self, source: Sequence[int], target: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens of rows `source` over rows `target`."""
        sources, targets = (torch.tensor(rows, device=self.device) for rows in (source, target))
        for stored in self.keys + self.values:
            stored.move(sources, targets, length)

    def reserve(self, tokens: int, most: int, active: int, used: int) -> None:
        """Make room for `tokens` in every row. The capacity doubles up to `most`, so copying stays
        linear.
        """
        if tokens <= self.capacity:
            return
        self.capacity = min(max(tokens, 2 * self.capacity), max(most, tokens))
        for stored in self.keys + self.values:
            stored.grow(self.capacity, active, used)


class PromptPass(Cache):  # type: ignore[misc]  # the base class has no types
    """Several prompts packed into one row [1, sum P]: each attends to itself only, and leaves its
    keys and values here.
    """

    def __init__(
        self, lengths: Sequence[int], kernel: FusedAttention, held: Sequence[int] = ()
    ) -> None:
        """`lengths` counts the new tokens of each prompt, `held` its earlier tokens. `update` puts
        the keys and values of the earlier tokens before the new ones.
        """
        super().__init__(layers=[])
        self._kernel = kernel
        self.lengths, self.held = list(lengths), list(held) or [0] * len(lengths)
        self.keys: dict[int, list[Tensor]] = {}
        """Per layer and prompt [H, P, D]."""
        self.values: dict[int, list[Tensor]] = {}

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        self.keys[layer_idx] = self._by_prompt(key_states)
        self.values[layer_idx] = self._by_prompt(value_states)
        return key_states, value_states

    def _by_prompt(self, states: Tensor) -> list[Tensor]:
        """Copy each prompt's part: a view would keep the layer's queries, and the other prompts of
        the pass, alive.
        """
        return [
            part.clone(memory_format=torch.contiguous_format)
            for part in torch.split(states[0], self.lengths, 1)
        ]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        lengths, seen = self.lengths, [*map(add, self.held, self.lengths)]
        kernel = self._kernel.packed_kernel(query, softcap)
        if kernel:
            q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
            output = kernel(q, k, v, Spans.of(lengths, seen, query.device), scaling, window)
            return output.transpose(0, 1).unsqueeze(0)
        parts = [
            self._kernel.causal(*part, scaling, window, softcap)
            for part in zip(
                torch.split(query, lengths, 2),
                torch.split(key, seen, 2),
                torch.split(value, seen, 2),
                strict=True,
            )
        ]
        return torch.cat(parts, dim=2)

    def states(self, prompts: Sequence[Int32Array], logits: Tensor) -> list[PromptState]:
        """Return one state per prompt, from the `logits` [N, V] of their last tokens."""
        layers = sorted(self.keys)
        return [
            PromptState(
                prompt,
                [self.keys[layer][number] for layer in layers],
                [self.values[layer][number] for layer in layers],
                last,
            )
            for number, (prompt, last) in enumerate(zip(prompts, logits, strict=True))
        ]


class DecodePass(Cache):  # type: ignore[misc]  # the base class has no types
    """One new token for each of the rows 0 .. R-1 of the arena, each written and masked at its own
    length.
    """

    def __init__(
        self, arena: KVArena, lengths: npt.NDArray[np.int64], kernel: FusedAttention
    ) -> None:
        """`lengths` [R] tokens already cached per row; the new token's position is the same
        number.
        """
        super().__init__(layers=[])
        self._arena, self._kernel = arena, kernel
        self._count = len(lengths)
        self.positions = upload(lengths, arena.device)
        self._places: dict[int, Tensor] = {}
        """Places of the new tokens, by number of key-value heads: layers with equally many share
        them."""
        self._rows = RowLengths(
            self.positions + 1, int(lengths.max()) + 1, ragged=bool((lengths != lengths[0]).any())
        )

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        keys, values = self._arena.keys[layer_idx], self._arena.values[layer_idx]
        places = self._places.get(key_states.shape[1])
        if places is None:
            places = self._places[key_states.shape[1]] = keys.places(self.positions)
        keys.append(places, key_states[:, :, 0])
        values.append(places, value_states[:, :, 0])
        count, length = self._count, self._rows.longest
        return keys.read(count, length), values.read(count, length)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._rows.longest - 1

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        return self._kernel.decode(query, key, value, self._rows, scaling, window, softcap)


PromptKey = tuple[NoiseKey, int, bytes]


class PrefixStore:
    """The newest prompts, up to `max_tokens` in all.

    The key includes the noise coordinates, so a redraw of a training group finds its prompt. Other
    callers (an evaluation, the parity gate) cannot hand their own copy to a training step. A
    resumed run, which skips them, therefore computes the same bits.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._tokens = 0
        self._states: OrderedDict[PromptKey, PromptState] = OrderedDict()

    def get(self, key: PromptKey) -> PromptState | None:
        return self._states.get(key)

    def put(self, key: PromptKey, state: PromptState) -> None:
        if len(state.token_ids) > self._max_tokens or key in self._states:
            return
        self._states[key] = state
        self._tokens += len(state.token_ids)
        while self._tokens > self._max_tokens:
            _, dropped = self._states.popitem(last=False)
            self._tokens -= len(dropped.token_ids)

    def clear(self) -> None:
        self._states.clear()
        self._tokens = 0


def prompt_key(request: SampleRequest) -> PromptKey:
    return request.noise, request.adapter_slot, request.prompt_ids.tobytes()


# -- pages -----------------------------------------------------------------------------------------


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
        """`pages` is the number of pages that rows may hold; `heads` has (H, D) of each layer.

        Pages begin with zeros, because attention multiplies hidden positions of a page by a weight
        of 0, and 0 * NaN would be NaN.
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
        """Return [count] for `write`: the slots of the first tokens of a row that holds `pages`."""
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
        kernel: FusedAttention,
        slot_mapping: Tensor,
        block_table: Tensor,
        cache_seqlens: Tensor,
    ) -> None:
        """`slot_mapping` [R] holds the slots of the new tokens. `block_table` [R, pages] int32
        holds the pages of each row, and `cache_seqlens` [R] int32 the lengths with the new tokens.
        """
        self._slot_mapping = slot_mapping
        self._pool, self._attend = pool, kernel.paged
        self._rows = PagedRows.of(block_table, cache_seqlens, pool.tokens)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values [R, H, 1, D] of the new tokens; returns the layer's pages."""
        self._pool.write(layer_idx, self._slot_mapping, key_states[:, :, 0], value_states[:, :, 0])
        return self._pool.keys[layer_idx], self._pool.values[layer_idx]

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Return [R, Hq, 1, D] of queries [R, Hq, 1, D] over the tokens of their rows, in pages. It
        ignores `softcap`, since families with a fused forward have no soft cap.
        """
        return self._attend(query[:, :, 0], key, value, self._rows, scaling, window).unsqueeze(2)

"""A decoding step from buffers to buffers: what it reads and writes stays where it is, and the host
is asked for nothing.

On CUDA a step is captured once for each number of rows in `BUCKETS` and launched as one graph;
elsewhere it is called again. Tokens are fed back on the device, which also knows when a row is
finished. The host reads what was drawn from `ring`, one step late. Shape letters: R rows of a
bucket, V vocabulary, M pages of the longest row.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from retrain.inference_engine.kv_cache import PagedTokens, PagePool
from retrain.inference_engine.rows import NOISE_BLOCK
from retrain.inference_engine.sampling import draw_scaled, upload
from retrain.model.attention import FusedAttention
from retrain.model.budget import sampling_chunk_bytes
from retrain.model.fused import FusedDecoder
from retrain.model.head import chunk_rows
from retrain.model.truncation import FixedKeptSets

BUCKETS: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 32, 48, 64, *range(96, 513, 32))
"""Numbers of rows that have a step of their own; rows beyond the active ones compute and are not
read."""
_RING = 64
"""Steps whose draws are on the device at a time."""
_COLUMNS = 4
"""Token, log-prob, entropy, tokens kept."""
_WARM_UPS = 2
"""Steps before a capture, in which libraries allocate what they keep."""


def bucket_of(rows: int) -> int:
    return next(bucket for bucket in BUCKETS if bucket >= rows)


class Variant(NamedTuple):
    """The choices of a step that are fixed when it is captured."""

    greedy: bool
    """Some rows may be greedy."""
    truncated: bool
    """Some rows may be truncated."""
    adapted: bool
    """The rows are under the adapter, not the base model."""


class StepBuffers:
    """The state of the rows, on the device."""

    def __init__(self, rows: int, pages: int, device: torch.device) -> None:
        self.device = device
        self.token, self.position, self.sampled, self.limit, self.top_k = (
            torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(5)
        )
        """token: the next to be fed, which stands at `position`. sampled: tokens drawn; `limit` is
        the most."""
        self.temperature = torch.ones(rows, dtype=torch.float32, device=device)
        self.top_p, self.min_p = (
            torch.full((rows,), off, dtype=torch.float64, device=device) for off in (1.0, 0.0)
        )
        self.noise = torch.full((rows, NOISE_BLOCK), 0.5, dtype=torch.float64, device=device)
        """The uniforms of draws 64 k to 64 k + 63, among which is the row's next."""
        self.block_table = torch.zeros(rows, pages, dtype=torch.int32, device=device)
        self.done = torch.ones(rows, dtype=torch.bool, device=device)
        self.ring = torch.zeros(_RING, rows, _COLUMNS, dtype=torch.float64, device=device)
        self.ring_place = torch.zeros(1, dtype=torch.int64, device=device)
        self._host_ring = torch.zeros(
            self.ring.shape, dtype=torch.float64, pin_memory=device.type == "cuda"
        )
        self._steps = 0

    @property
    def of_rows(self) -> dict[str, Tensor]:
        """By name, everything that has one entry per row."""
        names = (
            "token",
            "position",
            "sampled",
            "limit",
            "top_k",
            "temperature",
            "top_p",
            "min_p",
            "noise",
            "block_table",
            "done",
        )
        return {name: getattr(self, name) for name in names}

    def put(self, rows: npt.NDArray[np.int64], **values: npt.NDArray[np.generic] | Tensor) -> None:
        """Set the named buffers' entries of `rows`."""
        index = upload(rows, self.device)
        for name, value in values.items():
            buffer = getattr(self, name)
            new = (
                upload(np.ascontiguousarray(value), self.device)
                if isinstance(value, np.ndarray)
                else value
            )
            buffer.index_copy_(0, index, new.to(buffer.dtype))

    def put_pages(self, places: Sequence[tuple[int, int, int]]) -> None:
        """Enter pages into the tables: (row, which of its pages, page) each."""
        row, number, page = (
            upload(column, self.device) for column in np.array(places, np.int64).T.copy()
        )
        self.block_table.view(-1).index_copy_(
            0, row * self.block_table.shape[1] + number, page.int()
        )

    def move(self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> None:
        """Rows `sources` go to `targets`, and stop where they were."""
        source, target = upload(sources, self.device), upload(targets, self.device)
        for buffer in self.of_rows.values():
            buffer.index_copy_(0, target, buffer.index_select(0, source))
        self.stop(sources)

    def stop(self, rows: npt.NDArray[np.int64]) -> None:
        self.done.index_fill_(0, upload(rows, self.device), True)

    def read_later(self, rows: int) -> "DrawCopy":
        """Return the draws of the step just launched for the first `rows` rows; the copy to the
        host is under way when this returns.
        """
        place = self._steps % _RING
        self._steps += 1
        return DrawCopy(self.ring[place, :rows], self._host_ring[place, :rows])


class DrawCopy:
    """[R, 4] draws that the host will read: token, log-prob, entropy, tokens kept."""

    def __init__(self, device: Tensor, host: Tensor | None = None) -> None:
        self._event: torch.cuda.Event | None = None
        if device.device.type != "cuda":
            self._host = device.clone()
            return
        self._host = (
            torch.empty(device.shape, dtype=device.dtype, pin_memory=True) if host is None else host
        )
        self._host.copy_(device, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._event.record()

    def read(self) -> npt.NDArray[np.float64]:
        """Wait for the copy, and return it."""
        if self._event is not None:
            self._event.synchronize()
        drawn: npt.NDArray[np.float64] = self._host.numpy()
        return drawn


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for the warm-ups and captures of all steps on `device`.

    One, since torch before 2.15 keeps a cuBLAS workspace (32 MiB) for every stream that ever
    computed a product; and not torch's own for captures, which is on the device of the first
    capture.
    """
    with torch.cuda.device(device):
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch does not annotate it


class FixedStep:
    """The steps of all buckets over one set of buffers and one pool of pages."""

    def __init__(
        self,
        fused: FusedDecoder,
        pool: PagePool,
        buffers: StepBuffers,
        kernel: FusedAttention,
        eos_ids: npt.NDArray[np.int64],
        context: int,
    ) -> None:
        """`context`: tokens of the longest row, prompt and completion together."""
        self._fused, self._pool, self._kernel = fused, pool, kernel
        self.buffers = buffers
        self._eos_ids = upload(eos_ids, buffers.device)
        self._cos, self._sin = fused.rotary_table(context)
        self._graphs: dict[tuple[int, Variant], torch.cuda.CUDAGraph] = {}

    def launch(self, rows: int, variant: Variant) -> None:
        """Launch one step of the first `rows` rows, a number of `BUCKETS`."""
        if self.buffers.device.type != "cuda":
            self.step(rows, variant)
            return
        key = rows, variant
        if key not in self._graphs:
            self._graphs[key] = self._capture(rows, variant)
        self._graphs[key].replay()

    @torch.no_grad()
    def step(self, rows: int, variant: Variant) -> None:
        """Feed each row its token, draw the next and store it; a row that is done changes nothing
        and writes to page 0.
        """
        state = self.buffers
        active = ~state.done[:rows]
        position = state.position[:rows]
        page = state.block_table[:rows].gather(1, (position // self._pool.tokens)[:, None])[:, 0]
        slot_mapping = torch.where(
            active, page * self._pool.tokens + position % self._pool.tokens, 0
        )
        cache_seqlens = torch.where(active, position + 1, 1).int()
        batch = PagedTokens(
            self._pool, self._kernel, slot_mapping, state.block_table[:rows], cache_seqlens
        )
        cos, sin = (table.index_select(0, position)[:, None] for table in (self._cos, self._sin))
        tokens = state.token[:rows, None]
        hidden = self._fused.hidden_states(tokens, (cos, sin), batch, cache=batch)
        drawn = self.draw(self._fused.logits(hidden[:, 0]), slice(rows), variant)
        state.ring[:, :rows].index_copy_(0, state.ring_place, drawn[None])
        self._take_over(drawn, active, slice(rows))
        state.ring_place.add_(1).remainder_(_RING)

    @torch.no_grad()
    def first(self, rows: Tensor, logits: Tensor, variant: Variant) -> Tensor:
        """[R, 4] the first draws of `rows` [R], rows that were just put into the buffers, from the
        logits [R, V] of their prompts.
        """
        drawn = self.draw(logits, rows, variant)
        self._take_over(drawn, ~self.buffers.done[rows], rows)
        return drawn

    def draw(self, logits: Tensor, rows: slice | Tensor, variant: Variant) -> Tensor:
        """[R, 4] from logits [R, V] of `rows`: token, log-prob, entropy, tokens kept."""
        state = self.buffers
        temperature, sampled = state.temperature[rows], state.sampled[rows]
        uniforms = state.noise[rows].gather(1, (sampled % NOISE_BLOCK)[:, None])[:, 0]
        cuts = state.top_k[rows], state.top_p[rows], state.min_p[rows]
        chunk = chunk_rows(logits.shape[1], sampling_chunk_bytes(logits.device.type))
        inputs = zip(
            *(torch.split(tensor, chunk) for tensor in (logits, temperature, uniforms, *cuts)),
            strict=True,
        )
        drawn = torch.cat([_draw_chunk(*tensors, variant=variant) for tensors in inputs])
        return torch.nn.functional.pad(drawn, (0, _COLUMNS - drawn.shape[1]))

    def _take_over(self, drawn: Tensor, active: Tensor, rows: slice | Tensor) -> None:
        """Feed the drawn tokens back; rows end at an end token, at their limit, or where the
        model's numbers are not finite.
        """
        state, token = self.buffers, drawn[:, 0].long()
        sampled = state.sampled[rows] + active
        ended = (
            (token[:, None] == self._eos_ids).any(-1)
            | (sampled >= state.limit[rows])
            | ~drawn[:, 1:3].isfinite().all(-1)
        )
        state.done[rows] = state.done[rows] | ended
        state.sampled[rows] = sampled
        state.position[rows] = state.position[rows] + active
        state.token[rows] = torch.where(active, token, state.token[rows])

    def _capture(self, rows: int, variant: Variant) -> "torch.cuda.CUDAGraph":
        """Capture the step as a graph. The warm-up steps run with every row done, so that they
        change nothing.
        """
        state = self.buffers
        before = {
            name: buffer.clone()
            for name, buffer in (
                state.of_rows | {"ring": state.ring, "ring_place": state.ring_place}
            ).items()
        }
        state.done.fill_(True)
        stream = _capture_stream(state.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self.step(rows, variant)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # One memory for all graphs: one runs at a time, and its results lie in the buffers.
        shared = None
        if self._graphs:
            shared = next(iter(self._graphs.values())).pool()
        with torch.cuda.graph(graph, pool=shared, stream=stream, capture_error_mode="thread_local"):
            self.step(rows, variant)
        for name, values in before.items():
            getattr(state, name).copy_(values)
        return graph


def _draw_chunk(
    logits: Tensor, temperature: Tensor, uniforms: Tensor, *cuts: Tensor, variant: Variant
) -> Tensor:
    """Return draws [r, 3 or 4] from logits [r, V]; `cuts`: top_k, top_p and min_p [r] each."""

    def keep(z: Tensor, weights: Tensor) -> FixedKeptSets:
        return FixedKeptSets.of_device_cuts(z, weights.sum(-1, dtype=torch.float64), *cuts)

    greedy, divisors = None, temperature
    if variant.greedy:
        greedy = temperature == 0
        divisors = torch.where(greedy, 1.0, temperature)
    z = logits.float() / divisors[:, None]
    columns = draw_scaled(z, uniforms, greedy, keep if variant.truncated else None)
    return torch.cat([column.double() for column in columns], dim=1)

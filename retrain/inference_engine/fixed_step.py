"""A decoding step from buffers to buffers: its inputs and outputs keep their addresses, and it asks
the host for nothing.

On CUDA the engine captures a step once for each number of rows in `BUCKETS` and launches it as one
graph. Elsewhere it calls the step again. The device feeds tokens back, and knows when a row ends.
The host reads the draws one step late.
"""

from functools import cache

import torch

from retrain.inference_engine.kv_cache import PagedTokens, PagePool
from retrain.inference_engine.rows import RowBuffers, Variant
from retrain.inference_engine.sampling import COLUMNS
from retrain.model.attention import FusedAttention
from retrain.model.fused import FusedDecoder

BUCKETS: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 32, 48, 64, *range(96, 513, 32))
"""Numbers of rows that have a step of their own. The engine ignores the results of rows beyond the
active rows.
"""
_WARM_UPS = 2
"""Steps before a capture, in which libraries allocate what they keep."""


def bucket_of(rows: int) -> int:
    return next(bucket for bucket in BUCKETS if bucket >= rows)


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for the warm-ups and captures of all steps on `device`.

    All steps share a stream, since torch before 2.15 keeps a cuBLAS workspace (32 MiB) for every
    stream that ever computed a product. Torch's own capture stream would be on the device of the
    first capture.
    """
    with torch.cuda.device(device):
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch does not annotate it


class FixedStep:
    """The steps of all buckets over one set of buffers and one pool of pages."""

    def __init__(
        self,
        fused: FusedDecoder,
        pool: PagePool,
        buffers: RowBuffers,
        kernel: FusedAttention,
        context: int,
    ) -> None:
        """`context`: tokens of the longest row, prompt and completion together."""
        self._fused, self._pool, self._kernel = fused, pool, kernel
        self.buffers = buffers
        self.drawn = buffers.noise.new_zeros(len(buffers.done), COLUMNS)
        """[R, 4] draws of the last step."""
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
        """Feed each row its token, draw the next and store it. A finished row changes nothing and
        writes to page 0.
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
        self.drawn[:rows] = state.draw(slice(rows), self._fused.logits(hidden[:, 0]), variant)

    def _capture(self, rows: int, variant: Variant) -> "torch.cuda.CUDAGraph":
        """Capture the step as a graph. The warm-up steps run with every row done, so that they
        change nothing.
        """
        state = self.buffers
        before = {name: buffer.clone() for name, buffer in state.of_rows.items()}
        state.done.fill_(True)
        stream = _capture_stream(state.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self.step(rows, variant)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # One memory for all graphs: one runs at a time, and its results lie in the buffers.
        shared = next(iter(self._graphs.values())).pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=shared, stream=stream, capture_error_mode="thread_local"):
            self.step(rows, variant)
        for name, values in before.items():
            getattr(state, name).copy_(values)
        return graph

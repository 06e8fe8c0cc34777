"""The PyTorch engine: samples from the very model that retrain trains.

Sampler and learner share the base weights, which never change. All completions of a call decode
together, within a budget of rows and KV tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from time import monotonic

import numpy as np
import torch
from torch import nn

from retrain.distributed import ALONE, World
from retrain.errors import ConfigurationError
from retrain.inference_engine.base import BASE_MODEL, RequestFeed, SampleRequest
from retrain.inference_engine.decoder import Decoder
from retrain.inference_engine.kv_cache import PrefixStore
from retrain.inference_engine.paged_run import PagedEngine, PagedRun, wanted_tokens
from retrain.inference_engine.pytorch import PyTorchEngine
from retrain.inference_engine.rows import SampleJob, pieces
from retrain.inference_engine.scheduler import ContiguousRun, DecodeRun
from retrain.model.budget import STORE_SHARE, DecodeLimits
from retrain.model.devices import EngineOptions
from retrain.model.fused import FusedDecoder
from retrain.model.pool import Pool
from retrain.model.varlen import fits_head
from retrain.types import Completion

MAX_PIECES = {"cpu": 16}
"""Most pieces of a call, by device. With more completions than these have rows, pieces grow longer
and reuse their rows. Other devices decode a call in one piece.
"""


class TorchEngine(PyTorchEngine):
    """`InferenceEngine` on a transformers model in this process.

    The same requests give the same bytes in every process that has the same limits and number of
    threads. Between two completions the model is as the caller left it: training flags, attention,
    gradient mode, adapter.
    """

    def __init__(
        self,
        model: nn.Module,
        eos_ids: Sequence[int],
        device: torch.device | str,
        *,
        decode_rows: int = 128,
        decode_tokens: int = 1 << 20,
        options: EngineOptions = EngineOptions(),  # noqa: B008 - frozen
        fused: FusedDecoder | None = None,
        shards: World = ALONE,
        follow: Callable[[], None] | None = None,
        pool: Pool | None = None,
    ) -> None:
        """`model`: a causal language model of transformers on `device`, bare or wrapped by peft. It
        stays the caller's.

        `decode_rows`, `decode_tokens`: the budget of one batch, in rows and KV tokens. `fused`: the
        caller's fused forward of `model`, which the engine shares. `shards`: the ranks that hold
        `model` in parts. All of them call `sample`, with requests or none, and read it to its end.
        `follow`: copies the learner's adapter into `model`, if `model` is a copy for sampling.
        `pool`: computes the pieces of a call.
        """
        self._model = model
        self._copy = None
        self._copy_seconds = 0.0
        if options.weights is None:
            self._decoder = Decoder(model, options.flash, fused, shards)
        else:
            self._copy = CastCopy(model, options.weights)
            self._decoder = Decoder(
                self._copy.model, options.flash, merge=fused is not None and fused.merge
            )
        self._eos_ids = np.asarray(sorted(set(eos_ids)), dtype=np.int64)
        self._limits = DecodeLimits(decode_rows, decode_tokens)
        self._prefixes = None
        if options.prefix_caching:
            self._prefixes = PrefixStore(decode_tokens // STORE_SHARE)
        self._kv_storage = options.kv_storage
        self._options = options
        self._paged: PagedEngine | None = None
        """Pages and captured steps, while the engine holds them."""
        self._pool = pool or Pool()
        self._forgets_prompts = pool is not None and torch.device(device).type == "cpu"
        """True if the engine drops stored prompts before each piece. Another worker may have run an
        earlier piece, and a recomputed prompt may differ in its bits. One worker drops them too,
        because a run has the same bytes with any number of workers.
        """
        self._decode = self._pool.shared(self._decode_piece)
        self._weights_version = weights_version(model)
        self._follow = follow

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[Completion]:
        """Completions under the base model follow those under the adapter."""
        jobs = self._jobs(requests)
        most = MAX_PIECES.get(self._decoder.device.type, 1) if not self._is_paged else 1
        for _, completion in self._decode(pieces(jobs, self._limits.rows, most)):
            yield completion
        self._decoder.run_dummy_passes()

    def sample_feed(self, feed: RequestFeed) -> Iterator[Completion]:
        """Over pages requests join the running batch; else there are rounds, since a row's bits
        would depend on when another joins.
        """
        given, left = 0, list[SampleJob]()
        if not (self._is_paged and self._pool.workers == self._decoder.shards.size == 1):
            while self._decoder.shards.any_rank(bool(requests := feed.more(idle=True))):
                for completion in self.sample(requests):
                    yield replace(completion, request=given + completion.request)
                given += len(requests)
            return
        # A run goes on while it can take the requests. A request for longer rows, or another
        # adapter, begins the next run.
        while left or (requests := feed.more(idle=True)):
            if not left:
                left, given = self._jobs(requests, given), given + len(requests)
            self._follow_weights()
            with closing(self._paged_run(left)) as run:
                left = []
                while run.unfinished:
                    # Leave the context before each yield: the consumer may train or score
                    # meanwhile.
                    with self._decoder.sampling(run.adapter_slot):
                        finished = run.advance()
                    yield from finished
                    requests = feed.more(idle=not run.unfinished and not left)
                    for job in self._jobs(requests, given):
                        if not run.join(job):
                            left.append(job)
                    given += len(requests)

    def _decode_piece(self, jobs: Sequence[SampleJob]) -> Iterator[Completion]:
        if self._forgets_prompts:
            self.release()
        self._follow_weights()
        for slot in (0, BASE_MODEL):
            batch = [job for job in jobs if job.request.adapter_slot == slot]
            if not batch:
                continue
            with closing(self._run(batch)) as run:
                while run.unfinished:
                    with self._decoder.sampling(slot):
                        finished = run.advance()
                    yield from finished

    @property
    def _is_paged(self) -> bool:
        fused = self._decoder.fused
        return (
            self._options.paged
            and self._kv_storage is None
            and fused is not None
            and all(fits_head(size) for _, size in fused.kv_heads)
        )

    def _run(self, jobs: Sequence[SampleJob]) -> DecodeRun:
        if self._is_paged:
            return self._paged_run(jobs)
        return ContiguousRun(
            self._decoder, jobs, self._limits, self._eos_ids, self._prefixes, self._kv_storage
        )

    def _paged_run(self, jobs: Sequence[SampleJob]) -> PagedRun:
        """Return a run in pages. The engine holds pages and captured steps from one call to the
        next, as long as rows fit their tables. A call that begins before another ends gets its own
        pages.
        """
        longest, page = max(job.tokens for job in jobs) + 1, self._options.page_tokens
        # Room for later turns, or else each would begin a batch.
        if any(job.request.extendable for job in jobs):
            longest = min(2 * longest, self._decoder.context)
        wanted = DecodeLimits(
            min(self._limits.rows, len(jobs)), min(self._limits.tokens, wanted_tokens(jobs, page))
        )
        if self._paged is None or self._paged.busy or not self._paged.serves(wanted, longest):
            self._paged = None  # first, so that the memory never holds both
            self._paged = PagedEngine(
                self._decoder,
                wanted,
                self._eos_ids,
                longest,
                page,
                keeps_prompts=self._options.prefix_caching,
            )
        return PagedRun(self._decoder, jobs, self._paged)

    def sync(self, save_adapter: Callable[[Path], None], step: int) -> None:
        """Do nothing for shared weights; update a copy. The next call drops results of the old
        weights.
        """
        if self._follow is not None:
            self._follow()

    def release(self) -> None:
        """Free the memory that the engine holds between calls."""
        if self._prefixes is not None:
            self._prefixes.clear()
        if self._paged is not None:
            self._paged.pager.forget()

    @property
    def layout_seconds(self) -> float:  # type: ignore[override]  # a number elsewhere
        fused = self._decoder.fused
        return self._copy_seconds + (fused.layout_seconds if fused else 0.0)

    @property
    def held_bytes(self) -> int:
        """Bytes of the pages that the engine holds between calls."""
        return 0 if self._paged is None else self._paged.pool.nbytes

    def free_pages(self) -> None:
        """Free the pages. The next call makes new pages and captures its steps again."""
        self._paged = None

    def close(self) -> None:
        self.release()
        self.free_pages()

    def _jobs(self, requests: Sequence[SampleRequest], first: int = 0) -> list[SampleJob]:
        """Jobs for the completions of all requests; `first` is the number of the first request."""
        jobs: list[SampleJob] = []
        for index, request in enumerate(requests, start=first):
            prompt_tokens = len(request.prompt_ids)
            limit = min(request.max_tokens, self._decoder.context - prompt_tokens)
            if request.adapter_slot not in (0, BASE_MODEL):
                raise ConfigurationError(
                    f"The pytorch engine serves one adapter of a run, slot 0, and got"
                    f" {request.adapter_slot}."
                )
            if prompt_tokens < 1 or limit < 1 or request.temperature < 0:
                raise ConfigurationError(
                    f"The engine cannot sample {request.max_tokens} tokens after a prompt of"
                    f" {prompt_tokens} at temperature {request.temperature}. The model's"
                    f" context is {self._decoder.context} tokens; prompt and max_tokens are at"
                    " least 1."
                )
            jobs += [
                SampleJob(index, request, request.first_sample + number, limit)
                for number in range(request.count)
            ]
        return jobs

    def _follow_weights(self) -> None:
        """After a change of the weights, drop the stored prompts, whose keys and values belong to
        the old weights, and update the merged copy.
        """
        version = weights_version(self._model)
        if version != self._weights_version:
            self.release()
            if self._copy is not None:
                start = monotonic()
                self._copy.follow()
                self._copy_seconds += monotonic() - start
            self._weights_version = version


WeightsVersion = tuple[tuple[int, int], ...]


def weights_version(model: nn.Module) -> WeightsVersion:
    """Return a version that changes with every in-place write to a trained weight and with every
    replacement.
    """
    return tuple(
        (parameter.data_ptr(), parameter._version)
        for parameter in model.parameters()
        if parameter.requires_grad
    )


class CastCopy:
    """A second copy of the model in another dtype, for an `[inference] dtype` that differs from the
    dtype of the model.

    Autocast would convert every frozen weight again for every token. The learner keeps the exact
    weights; sampler and learner then differ by the dtype's rounding, which the parity gate bounds.
    """

    def __init__(self, source: nn.Module, dtype: torch.dtype) -> None:
        self._source = source
        self.model = deepcopy(source).requires_grad_(False)
        # Buffers stay: rotary frequencies are float32 in every dtype.
        for parameter in self.model.parameters():
            parameter.data, parameter.grad = parameter.data.to(dtype), None

    def follow(self) -> None:
        """Copy the trained weights."""
        with torch.no_grad():
            for target, source in zip(
                self.model.parameters(), self._source.parameters(), strict=True
            ):
                if source.requires_grad:
                    target.copy_(source)

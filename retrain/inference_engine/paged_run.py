"""Continuous batching over pages and fixed buffers: rows enter by the memory they fill, and the
host never waits for the device.

A completion takes a row when its prompt's pages and a reserve are free. When pages run out, prompts
kept for redraws go first, then the youngest row, by its place in the call and not by time. The
preempted row returns to the queue with its tokens, and one later pass computes them again. The
engine launches a step before it reads the draws of the previous step. A finished row therefore
decodes one extra token, which the engine discards.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from retrain.inference_engine.base import NoiseKey
from retrain.inference_engine.decoder import Decoder
from retrain.inference_engine.fixed_step import BUCKETS, FixedStep, bucket_of
from retrain.inference_engine.kv_cache import PagePool, PromptKey, PromptPass, prompt_key
from retrain.inference_engine.rows import RowBuffers, RunningRow, SampleJob, prefill_batches
from retrain.inference_engine.sampling import upload
from retrain.inference_engine.scheduler import DecodeRun
from retrain.model.attention import FusedAttention
from retrain.model.budget import DecodeLimits
from retrain.model.truncation import FixedKeptSets

_RESERVE = 4
"""A completion enters only if one free page remains for every 4 running rows."""


class PagedPromptPass(PromptPass):
    """A packed pass over sequences that writes keys and values straight to their pages. The pages
    may already hold the first tokens.
    """

    def __init__(
        self, sequences: Sequence["CachedTokens"], kernel: FusedAttention, pool: PagePool
    ) -> None:
        super().__init__(
            [len(sequence.new) for sequence in sequences],
            kernel,
            [sequence.held for sequence in sequences],
        )
        whole = [pool.slot_mapping(sequence.pages, len(sequence.ids)) for sequence in sequences]
        new = [slots[held:] for slots, held in zip(whole, self.held, strict=True)]
        self._pool = pool
        self._new = upload(np.concatenate(new), pool.device)
        self._whole = None
        if any(self.held):
            self._whole = upload(np.concatenate(whole), pool.device)

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        self._pool.write(
            layer_idx, self._new, key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        )
        if self._whole is None:
            return key_states, value_states
        keys, values = self._pool.read(layer_idx, self._whole)
        return keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)


@dataclass
class CachedTokens:
    """Tokens [T] and one holder of their pages. Entering rows also get the logits [V] after the
    last token, after their computation.

    The pager keeps prompts for the other completions of their group and for redraws, and ended rows
    for a request that extends them.
    """

    ids: npt.NDArray[np.int32]
    pages: list[int]
    held: int = 0
    """Number of tokens at the beginning whose computation came before the row entered."""
    logits: Tensor | None = None

    @property
    def new(self) -> npt.NDArray[np.int32]:
        return self.ids[self.held :]


RowKey = tuple[NoiseKey, int, bytes, int]
"""The key of a finished row: a `PromptKey` over all tokens that were fed, and the sample."""


def row_key(job: SampleJob, fed: npt.NDArray[np.int32]) -> RowKey:
    """Return the cache key of a row for `fed` [T], prompt and completion."""
    return job.request.noise, job.request.adapter_slot, fed.astype(np.int32).tobytes(), job.sample


class Pager:
    """Who holds which page: rows, and the cached tokens that give way when pages run out."""

    def __init__(self, pool: PagePool, *, keeps_prompts: bool) -> None:
        self.pool, self.keeps_prompts = pool, keeps_prompts
        self.cached: OrderedDict[PromptKey | RowKey, CachedTokens] = OrderedDict()

    def shares(self, row: RunningRow) -> bool:
        """Return True if the row shares its prompt with its group: it has no draws, and extends
        nothing.
        """
        return self.keeps_prompts and not (row.draws or row.job.request.extends)

    def enter(
        self, row: RunningRow, using: dict[PromptKey, CachedTokens], running: int
    ) -> CachedTokens | None:
        """Give a row its pages, if they are free in addition to a reserve for `running` rows.
        Returns the cached tokens from which the row continues.

        The pager evicts cached tokens, except the tokens that the row itself needs: its prompt goes
        to `using`.
        """
        request, ids, cached = row.job.request, row.ids, self.cached
        key, shares = prompt_key(request), self.shares(row)
        if shares and key in cached:
            using[key] = cached.pop(key)
        # The extended row never fed its last token, so the cache lacks it.
        extended = row_key(row.job, request.prompt_ids[: max(0, request.extends - 1)])
        begun = cached.pop(extended, None)
        pages, first = self.pool.needed(len(ids)), begun.pages if begun else []
        # A shared prompt once, and for each row its own last page, which is not full.
        own = pages - (len(ids) // self.pool.tokens if shares else len(first))
        for_prompt = pages if shares and key not in using else 0
        wanted = own + for_prompt + -(-running // _RESERVE)
        if not self._makes_room(wanted):
            if begun:
                cached[extended] = begun
            return None
        if not shares:
            row.pages = first + self.pool.take(own)
            return CachedTokens(ids, row.pages, len(begun.ids) if begun else 0)
        if for_prompt:
            using[key] = CachedTokens(ids, self.pool.take(for_prompt))
        # Rows read a full page together; the last one they write on in, so each has its own.
        full = using[key].pages[: pages - own]
        self.pool.share(full)
        row.pages = full + self.pool.take(own)
        return using[key]

    def _makes_room(self, pages: int) -> bool:
        """Evict until so many pages are free. Returns False if that is impossible."""
        while self.pool.free < pages and self.evict():
            pass
        return self.pool.free >= pages

    def deallocate(self, row: RunningRow) -> None:
        self.pool.give_back(row.pages)
        row.pages = []

    def keep(self, row: RunningRow) -> None:
        """Keep a finished row's tokens for a request that extends it. Its last token was never
        fed.
        """
        fed = row.ids[:-1]
        pages = row.pages[: self.pool.needed(len(fed))]
        self.pool.share(pages)
        key = row_key(row.job, fed)
        before = self.cached.pop(key, None)
        if before:
            # The same tokens again, as after a rewritten history.
            self.pool.give_back(before.pages)
        self.cached[key] = CachedTokens(fed, pages)

    def evict(self) -> bool:
        """Forget the oldest cached tokens. Returns False if there are none."""
        if not self.cached:
            return False
        _, oldest = self.cached.popitem(last=False)
        self.pool.give_back(oldest.pages)
        return True

    def forget(self) -> None:
        """Forget all cached tokens."""
        while self.evict():
            pass


class PagedEngine:
    """The state that outlives one call: pages, buffers, captured steps, and the prompts of the
    newest calls.
    """

    def __init__(
        self,
        decoder: Decoder,
        limits: DecodeLimits,
        eos_ids: npt.NDArray[np.int64],
        context: int,
        page_tokens: int,
        *,
        keeps_prompts: bool,
    ) -> None:
        """`context`: tokens of the longest row that it can decode."""
        assert decoder.fused is not None
        # The longest row must fit, whatever the limits.
        pages = max(limits.tokens, context) // page_tokens + 1
        self.context, self.eos_ids = context, eos_ids
        self.pool = PagePool(
            pages, decoder.fused.kv_heads, decoder.dtype, decoder.device, page_tokens
        )
        self.rows = min(limits.rows, BUCKETS[-1])
        self.buffers = RowBuffers(
            bucket_of(self.rows), self.pool.needed(context), decoder.device, eos_ids, FixedKeptSets
        )
        self.step = FixedStep(decoder.fused, self.pool, self.buffers, decoder.kernel, context)
        self.pager = Pager(self.pool, keeps_prompts=keeps_prompts)
        self.busy = False
        """A run has its rows in the buffers."""

    def serves(self, limits: DecodeLimits, context: int) -> bool:
        """Return True if it has the rows and tokens of `limits`, for rows of up to `context`
        tokens.
        """
        return (
            self.rows >= min(limits.rows, BUCKETS[-1])
            and self.pool.pages * self.pool.tokens >= limits.tokens
            and self.context >= context
        )


def wanted_tokens(jobs: Sequence[SampleJob], page_tokens: int) -> int:
    """Count the tokens of pages that let all jobs decode at their longest, with room for their
    prompts.
    """
    prompts = {prompt_key(job.request): len(job.request.prompt_ids) for job in jobs}
    return (
        sum(prompts.values())
        + sum(job.tokens for job in jobs)
        + page_tokens * (len(prompts) + 2 * len(jobs))
    )


class PagedRun(DecodeRun):
    """Rows in pages. The newest step is still under way when `advance` returns finished
    completions.
    """

    _late = 1

    def __init__(self, decoder: Decoder, jobs: Sequence[SampleJob], engine: PagedEngine) -> None:
        slots = min(engine.rows, len(jobs))
        super().__init__(decoder, jobs, engine.eos_ids, engine.buffers, slots)
        self._engine, self._pager, self._pool = engine, engine.pager, engine.pool
        self._numbers = count(len(jobs))
        engine.busy = True
        self.adapter_slot = jobs[0].request.adapter_slot

    def join(self, job: SampleJob) -> bool:
        """Take one more completion into the batch. False if its row would be too long, or needs
        what this batch was not begun with.
        """
        request, page = job.request, self._pool.tokens
        fits = self._engine.serves(DecodeLimits(1, job.tokens + 2 * page), job.tokens + 1)
        known = request.adapter_slot == self.adapter_slot and (
            request.temperature > 0 or self._variant.greedy
        )
        if not (fits and known and (self._variant.truncated or not job.truncation.active)):
            return False
        self._waiting.append(RunningRow(next(self._numbers), job))
        return True

    def close(self) -> None:
        """Free the pages, also of abandoned rows, once no step is under way.

        The engine may drop captured steps after a run. The allocator then unmaps their memory
        (expandable segments) when the stream of their capture is idle. It does not look at the
        stream on which they run.
        """
        self._stop(self.running)
        self._collect(0)
        self._engine.busy = False

    # -- prefill -----------------------------------------------------------------------------------

    def admit(self) -> None:
        """Give free slots to waiting completions while there is memory, run their prompts, and draw
        the first token of each.
        """
        free = [slot for slot, row in enumerate(self._slots) if row is None]
        using: dict[PromptKey, CachedTokens] = {}
        entering: list[tuple[RunningRow, CachedTokens]] = []
        while (
            free
            and self._waiting
            and (begun := self._pager.enter(self._waiting[0], using, len(self.running)))
        ):
            row = self._waiting.popleft()
            row.slot = free.pop(0)
            self._slots[row.slot] = row
            entering.append((row, begun))
        if entering:
            self._prefill({id(begun): begun for _, begun in entering if begun.logits is None})
            # A page that is not full is each row's own: the rows write on in it.
            copied = [
                (begun.pages[-1], row.pages[-1])
                for row, begun in entering
                if begun.pages[-1] != row.pages[-1]
            ]
            if copied:
                self._pool.copy(*zip(*copied, strict=True))
            logits = [begun.logits for _, begun in entering if begun.logits is not None]
            self._begin([row for row, _ in entering], torch.stack(logits))
        # Cache prompts only now, since a further reservation could evict what an entering row
        # reads.
        for key, prompt in using.items():
            self._pager.cached[key] = prompt

    def _prefill(self, owners: dict[int, CachedTokens]) -> None:
        """Compute keys and values of new tokens, into their pages, and the logits of the last."""
        begun = list(owners.values())
        for batch in prefill_batches(begun, [len(tokens.new) for tokens in begun]):
            prompts = PagedPromptPass(batch, self._decoder.kernel, self._pool)
            logits = self._decoder.run_prompts([tokens.new for tokens in batch], prompts)
            for tokens, last in zip(batch, logits, strict=True):
                tokens.logits = last

    # -- decode ------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        self.grow()
        self._compact(bucket_of(max(1, len(self.running))))

    def _step(self, count: int) -> Tensor:
        bucket = bucket_of(count)
        self._engine.step.launch(bucket, self._variant)
        return self._engine.step.drawn[: min(bucket, len(self._slots))]

    def grow(self) -> None:
        """Give every row the page that its next token needs. If pages run out, free cached tokens,
        then rows that have finished meanwhile, then preempt the youngest row.
        """
        while len(growing := self._growing()) > self._pool.free:
            if self._pager.evict():
                continue
            if self._unread:
                self.collect()
                continue
            self.preempt(max(self.running, key=lambda row: row.number))
        for row in growing:
            row.pages += self._pool.take(1)
        if growing:
            self.buffers.put(growing, block_table=self.buffers.pages_of(growing))

    def _growing(self) -> list[RunningRow]:
        """Return the rows that need a further page for their next token."""
        size = self._pool.tokens
        return [row for row in self.running if row.grows_past(len(row.pages) * size)]

    def preempt(self, row: RunningRow) -> None:
        """Take the row's pages; it waits, first of all, with the tokens that it has."""
        self._stop([row])
        self._waiting.appendleft(row)

    def _stop(self, rows: Sequence[RunningRow]) -> None:
        """Free the slots of unfinished rows, and mark them done on the device."""
        if rows:
            self.buffers.stop(np.array([row.slot for row in rows], np.int64))
        for row in rows:
            self._leave(row)

    def _leave(self, row: RunningRow, *, finished: bool = False) -> None:
        if finished and row.job.request.extendable and self._pager.keeps_prompts:
            self._pager.keep(row)
        super()._leave(row)
        self._pager.deallocate(row)

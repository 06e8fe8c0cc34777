"""Continuous batching over pages and fixed buffers: rows enter by the memory they fill, and the
device is never waited for.

A completion takes a row when its prompt's pages and a reserve are free. When pages run out, prompts
kept for redraws go first, then the youngest row, by its place in the call and not by time: it is
put back in the queue with the tokens it has, which are later computed again in one pass. A step is
launched before the draws of the one before it are read, so a finished row decodes once more in
vain.
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from retrain.inference_engine.base import BASE_MODEL, NoiseKey
from retrain.inference_engine.decoder import Decoder
from retrain.inference_engine.fixed_step import (
    BUCKETS,
    NOISE_BLOCK,
    Drawn,
    FixedStep,
    StepBuffers,
    Variant,
    bucket_of,
)
from retrain.inference_engine.kv_cache import PromptKey, PromptPass, prompt_key
from retrain.inference_engine.pages import PagePool
from retrain.inference_engine.sampling import upload
from retrain.inference_engine.scheduler import Job, not_finite, prefill_batches
from retrain.model.attention import Kernel
from retrain.model.budget import DecodeLimits
from retrain.noise import uniform
from retrain.types import Completion, FinishReason

_RESERVE = 4
"""A completion enters only if a page for one in so many of the active rows stays free."""


class PagedPromptPass(PromptPass):
    """A packed pass over sequences whose keys and values go straight to their pages, where those of
    their first tokens may lie already.
    """

    def __init__(self, sequences: Sequence["_Sequence"], kernel: Kernel, pool: PagePool) -> None:
        super().__init__(
            [len(sequence.new) for sequence in sequences],
            kernel,
            [sequence.held for sequence in sequences],
        )
        whole = [pool.slot_mapping(sequence.pages, len(sequence.ids)) for sequence in sequences]
        new = [slots[sequence.held :] for slots, sequence in zip(whole, sequences, strict=True)]
        self._pool = pool
        self._new = upload(np.concatenate(new), pool.device)
        self._whole = upload(np.concatenate(whole), pool.device) if any(self.held) else None

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
class _Kept:
    """Tokens that are computed: one holder of their pages, and for a prompt the logits [V] of its
    first answer token.

    Prompts are kept for the other completions of their group and for redraws, ended rows for a
    request that extends them.
    """

    pages: list[int]
    tokens: int
    logits: Tensor | None = None


_RowKey = tuple[NoiseKey, int, bytes, int]
"""The key of an ended row: a `PromptKey` of all tokens that were fed, and the sample."""


class _Sequence(NamedTuple):
    """Tokens to compute in one pass, and where their keys and values go."""

    ids: npt.NDArray[np.int32]
    job: Job
    pages: list[int]
    owner: "_Kept | _Row"
    held: int = 0
    """Tokens at its beginning whose keys and values its pages have."""

    @property
    def new(self) -> npt.NDArray[np.int32]:
        return self.ids[self.held :]


@dataclass
class _Row:
    """A completion under way, on the host."""

    number: int
    """Its place in the call: the youngest has the largest."""
    job: Job
    draws: list[npt.NDArray[np.float64]] = field(default_factory=list)
    """[4] each."""
    launched: int = 0
    """Draws under way included."""
    pages: list[int] = field(default_factory=list)
    held: int = 0
    """Tokens at its beginning that its pages have when it enters."""
    slot: int = -1
    """Its place in the buffers; -1 while it waits."""
    logits: Tensor | None = None
    """[V] of its next token, while it enters."""

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """Prompt and drawn tokens."""
        return np.concatenate(
            [self.job.request.prompt_ids, np.array([draw[0] for draw in self.draws], np.int32)]
        ).astype(np.int32)

    def grows_past(self, tokens: int) -> bool:
        """Return whether the next step feeds it a token beyond this number."""
        return (
            self.launched < self.job.limit
            and len(self.job.request.prompt_ids) + self.launched > tokens
        )

    def completion(self, eos_ids: Collection[int]) -> Completion:
        draws = np.array(self.draws)
        return Completion(
            request=self.job.request_index,
            sample=self.job.sample,
            token_ids=draws[:, 0].astype(np.int32),
            logprobs=draws[:, 1].astype(np.float32),
            entropies=draws[:, 2].astype(np.float32),
            finish_reason=(
                FinishReason.STOP if int(draws[-1, 0]) in eos_ids else FinishReason.LENGTH
            ),
            kept=draws[:, 3].astype(np.int32) if self.job.truncation.active else None,
        )


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
        pages = max(limits.tokens, context) // page_tokens + 1
        self.context, self.eos_ids, self.keeps_prompts = context, eos_ids, keeps_prompts
        self.pool = PagePool(
            pages, decoder.fused.kv_heads, decoder.dtype, decoder.device, page_tokens
        )
        self.rows = min(limits.rows, BUCKETS[-1])
        self.buffers = StepBuffers(bucket_of(self.rows), self.pool.needed(context), decoder.device)
        self.step = FixedStep(
            decoder.fused, self.pool, self.buffers, decoder.kernel, eos_ids, context
        )
        self.kept: OrderedDict[PromptKey | _RowKey, _Kept] = OrderedDict()
        self.busy = False
        """A run has its rows in the buffers."""

    def serves(self, limits: DecodeLimits, context: int) -> bool:
        """Return whether it has the rows and tokens of `limits`, for rows of up to `context`
        tokens.
        """
        return (
            self.rows >= min(limits.rows, BUCKETS[-1])
            and self.pool.pages * self.pool.tokens >= limits.tokens
            and self.context >= context
        )

    def evict(self) -> bool:
        """Forget what was kept first. False: there was nothing."""
        if not self.kept:
            return False
        _, oldest = self.kept.popitem(last=False)
        self.pool.give_back(oldest.pages)
        return True

    def forget(self) -> None:
        """Forget everything that is kept."""
        while self.evict():
            pass


def wanted_tokens(jobs: Sequence[Job], page_tokens: int) -> int:
    """Count the tokens of pages that let all jobs decode at their longest, beside their prompts."""
    prompts = {prompt_key(job.request): len(job.request.prompt_ids) for job in jobs}
    return (
        sum(prompts.values())
        + sum(job.tokens for job in jobs)
        + page_tokens * (len(prompts) + 2 * len(jobs))
    )


class PagedRun:
    """One batch of jobs under one adapter slot, from the first prompt to the last token; the
    counterpart of `scheduler.DecodeRun`.
    """

    def __init__(self, decoder: Decoder, jobs: Sequence[Job], engine: PagedEngine) -> None:
        self._decoder, self._engine = decoder, engine
        self._pool, self._buffers = engine.pool, engine.buffers
        self._queue = deque(_Row(number, job) for number, job in enumerate(jobs))
        self._numbers = count(len(jobs))
        self._slots: list[_Row | None] = [None] * min(engine.rows, len(jobs))
        self._unread: deque[tuple[Drawn, list[_Row | None]]] = deque()
        engine.busy = True
        self._finished: list[Completion] = []
        self._ends = frozenset(engine.eos_ids.tolist())
        self.adapter_slot = jobs[0].request.adapter_slot
        self._variant = Variant(
            greedy=any(job.request.temperature == 0 for job in jobs),
            truncated=any(job.truncation.active for job in jobs),
            adapted=self.adapter_slot != BASE_MODEL,
        )

    def join(self, job: Job) -> bool:
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
        self._queue.append(_Row(next(self._numbers), job))
        return True

    @property
    def unfinished(self) -> bool:
        return bool(self._queue or self._active or self._finished)

    @property
    def _active(self) -> list[_Row]:
        return [row for row in self._slots if row is not None]

    def advance(self) -> list[Completion]:
        """Launch steps until at least one completion is finished; the newest step is then still
        under way.
        """
        while self.unfinished:
            self._admit()
            under_way = 1 if self._launch() else 0
            while len(self._unread) > under_way:
                self._read()
            if self._finished:
                finished, self._finished = self._finished, []
                return finished
        return []

    def close(self) -> None:
        """Give the pages back, also of rows that were abandoned, once no step is under way.

        Captured steps may be dropped after a run. The allocator then unmaps their memory
        (expandable segments) when the stream of their capture is idle, and does not look at the
        stream that they run on.
        """
        self._stop(self._active)
        while self._unread:
            drawn, _ = self._unread.popleft()
            drawn.read()
        self._engine.busy = False

    # -- reading -----------------------------------------------------------------------------------

    def _read(self) -> None:
        """Take over the oldest draws that were not read; the rows that they finish leave."""
        drawn, rows = self._unread.popleft()
        table = drawn.read().copy()
        for row, draws, finite in zip(
            rows, table, np.isfinite(table[:, 1] + table[:, 2]), strict=True
        ):
            if row is None or row.slot < 0:  # it was finished by the draw before
                continue
            if not finite:
                raise not_finite(row.job, len(row.draws))
            row.draws.append(draws)
            if int(draws[0]) in self._ends or len(row.draws) == row.job.limit:
                self._finished.append(row.completion(self._ends))
                if (
                    row.job.request.extendable and self._engine.keeps_prompts
                ):  # another request may extend it; its last token was never fed
                    fed = row.ids[:-1]
                    pages = row.pages[: self._pool.needed(len(fed))]
                    self._pool.share(pages)
                    key = _row_key(row.job, fed)
                    if before := self._engine.kept.pop(
                        key, None
                    ):  # the same tokens again, as after a rewritten history
                        self._pool.give_back(before.pages)
                    self._engine.kept[key] = _Kept(pages, len(fed))
                self._leave(row)

    def _leave(self, row: _Row) -> None:
        self._slots[row.slot] = None
        self._pool.give_back(row.pages)
        row.slot, row.pages, row.held = -1, [], 0

    def _stop(self, rows: Sequence[_Row]) -> None:
        """Rows that are not finished leave; the device is told."""
        if rows:
            self._buffers.stop(np.array([row.slot for row in rows], np.int64))
        for row in rows:
            self._leave(row)

    # -- decoding ----------------------------------------------------------------------------------

    def _launch(self) -> bool:
        """Launch one step of the active rows; False if none of them has a token to draw."""
        self._find_pages()
        self._close_ranks()
        rows = [row if row and row.launched < row.job.limit else None for row in self._slots]
        launching = [row for row in rows if row]
        if not launching:
            return False
        fresh = [row for row in launching if row.launched % NOISE_BLOCK == 0]
        if fresh:
            self._buffers.put(np.array([row.slot for row in fresh], np.int64), noise=_noise(fresh))
        bucket = bucket_of(launching[-1].slot + 1)
        self._engine.step.launch(bucket, self._variant)
        for row in launching:
            row.launched += 1
        rows = rows[:bucket]
        self._unread.append((self._buffers.read_later(len(rows)), rows))
        return True

    def _find_pages(self) -> None:
        """Give every row the page that its next token needs; where there are too few, the youngest
        rows go back.
        """
        while (
            len(
                lacking := [
                    row
                    for row in self._active
                    if row.grows_past(len(row.pages) * self._pool.tokens)
                ]
            )
            > self._pool.free
        ):
            if self._engine.evict():
                continue
            if self._unread:
                self._read()
                continue
            youngest = max(self._active, key=lambda row: row.number)
            self._stop([youngest])
            self._queue.appendleft(youngest)
        for row in lacking:
            row.pages += self._pool.take(1)
        if lacking:
            self._buffers.put_pages(
                [(row.slot, len(row.pages) - 1, row.pages[-1]) for row in lacking]
            )

    def _close_ranks(self) -> None:
        """Move the last rows into free slots where a smaller bucket then holds all."""
        active = self._active
        bucket = bucket_of(max(1, len(active)))
        beyond = [row for row in active if row.slot >= bucket]
        if not beyond:
            return
        free = [slot for slot in range(bucket) if self._slots[slot] is None]
        moves = [(row.slot, slot) for row, slot in zip(beyond, free, strict=False)]
        sources, targets = np.array(moves, np.int64).T.copy()
        self._buffers.move(sources, targets)
        for row, (source, target) in zip(beyond, moves, strict=True):
            self._slots[source], self._slots[target], row.slot = None, row, target

    # -- admission ---------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give free slots to waiting completions while there is memory, and draw the first token of
        each.
        """
        free = [slot for slot, row in enumerate(self._slots) if row is None]
        using: dict[PromptKey, _Kept] = {}
        entering: list[_Row] = []
        sequences: list[_Sequence] = []
        while free and self._queue and self._has_room(self._queue[0], using):
            row = self._queue.popleft()
            row.slot = free.pop(0)
            self._slots[row.slot] = row
            sequences += self._place(row, using)
            entering.append(row)
        for batch in (
            prefill_batches(sequences, [len(sequence.new) for sequence in sequences])
            if entering
            else ()
        ):
            prompts = PagedPromptPass(
                batch, self._decoder.kernel, self._pool
            )  # keys and values go to the sequences' pages
            logits = self._decoder.run_prompts([sequence.new for sequence in batch], prompts)
            for sequence, last in zip(batch, logits, strict=True):
                sequence.owner.logits = last
        if entering:
            self._start(entering, using)
        for key, prompt in using.items():
            self._engine.kept[key] = prompt

    def _shares(self, row: _Row) -> bool:
        return self._engine.keeps_prompts and not row.draws and not row.job.request.extends

    def _has_room(self, row: _Row, using: dict[PromptKey, _Kept]) -> bool:
        """Return whether its pages are free beside a reserve; what is kept gives way, but not what
        the row itself needs.
        """
        key, engine = prompt_key(row.job.request), self._engine
        if self._shares(row) and key in engine.kept:
            using[key] = engine.kept.pop(key)
        extended = _row_key(
            row.job, row.job.request.prompt_ids[: max(0, row.job.request.extends - 1)]
        )
        begun = engine.kept.pop(extended, None)
        tokens = len(row.ids)
        wanted = self._pool.needed(tokens)
        if begun:
            wanted -= len(begun.pages)
        elif self._shares(row):
            wanted = (0 if key in using else wanted) + wanted - tokens // self._pool.tokens
        wanted += -(-len(self._active) // _RESERVE)
        while self._pool.free < wanted and engine.evict():
            pass
        has_room = self._pool.free >= wanted
        if begun and has_room:
            row.pages, row.held = begun.pages, begun.tokens
        elif begun:
            engine.kept[extended] = begun
        return has_room

    def _place(self, row: _Row, using: dict[PromptKey, _Kept]) -> list["_Sequence"]:
        """Give a row its pages; returns what has to be computed for it."""
        ids = row.ids
        pages = self._pool.needed(len(ids))
        if not self._shares(row):
            row.pages = row.pages + self._pool.take(pages - len(row.pages))
            return [_Sequence(ids, row.job, row.pages, row, row.held)]
        key = prompt_key(row.job.request)
        computed: list[_Sequence] = []
        if key not in using:
            using[key] = _Kept(self._pool.take(pages), len(ids))
            computed = [_Sequence(ids, row.job, using[key].pages, using[key])]
        whole = using[key].pages[: len(ids) // self._pool.tokens]
        self._pool.share(whole)
        row.pages = whole + self._pool.take(pages - len(whole))
        return computed

    def _start(self, rows: Sequence[_Row], using: dict[PromptKey, _Kept]) -> None:
        """Put the rows into the buffers, and draw the first token of each."""
        sharing = [(row, using[prompt_key(row.job.request)]) for row in rows if self._shares(row)]
        begun = [
            (prompt.pages[-1], row.pages[-1])
            for row, prompt in sharing
            if prompt.tokens % self._pool.tokens
        ]
        if begun:
            self._pool.copy(*zip(*begun, strict=True))
        for row, prompt in sharing:
            row.logits = prompt.logits
        slots = np.array([row.slot for row in rows], np.int64)
        self._buffers.put(
            slots, **_state(rows, self._buffers.block_table.shape[1]), noise=_noise(rows)
        )
        drawn = self._engine.step.first(
            upload(slots, self._pool.device),
            torch.stack([row.logits for row in rows if row.logits is not None]),
            self._variant,
        )
        for row in rows:
            row.launched, row.logits = len(row.draws) + 1, None
        self._unread.append((Drawn(drawn), list(rows)))


def _row_key(job: Job, fed: npt.NDArray[np.int32]) -> _RowKey:
    return job.request.noise, job.request.adapter_slot, fed.astype(np.int32).tobytes(), job.sample


def _state(rows: Sequence[_Row], pages: int) -> dict[str, npt.NDArray[np.generic]]:
    """Return the buffers of rows whose next token is drawn from the logits of their last one."""
    requests, cuts = [row.job.request for row in rows], [row.job.truncation for row in rows]
    block_table = np.zeros((len(rows), pages), np.int32)
    for number, row in enumerate(rows):
        block_table[number, : len(row.pages)] = row.pages
    return {
        "position": np.array([len(row.ids) - 1 for row in rows]),
        "sampled": np.array([len(row.draws) for row in rows]),
        "limit": np.array([row.job.limit for row in rows]),
        "temperature": np.array([request.temperature for request in requests], np.float32),
        "top_k": np.array([cut.top_k for cut in cuts]),
        "top_p": np.array([cut.top_p for cut in cuts]),
        "min_p": np.array([cut.min_p for cut in cuts]),
        "done": np.zeros(len(rows), bool),
        "block_table": block_table,
    }


def _noise(rows: Sequence[_Row]) -> npt.NDArray[np.float64]:
    """[R, 64] uniforms of the block of draws that each row's next one belongs to."""
    keys = [(row.job.request.noise, row.job.sample) for row in rows]
    first = np.array(
        [row.job.request.first_position + row.launched // NOISE_BLOCK * NOISE_BLOCK for row in rows]
    )
    positions = first[:, None] + np.arange(NOISE_BLOCK)
    noise = np.empty((len(rows), NOISE_BLOCK))
    for seed, stream in sorted({(key.seed, key.stream) for key, _ in keys}):
        same = [
            number
            for number, (key, _) in enumerate(keys)
            if (key.seed, key.stream) == (seed, stream)
        ]
        step, prompt, sample = (
            np.array(column)[:, None]
            for column in zip(
                *((keys[n][0].step, keys[n][0].prompt, keys[n][1]) for n in same), strict=True
            )
        )
        noise[same] = uniform(seed, stream, step, prompt, sample, positions[same])
    return noise

"""Continuous batching: a completion takes a row as soon as one is free, all rows decode together,
and each leaves when it is finished.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from retrain.errors import RunFailed
from retrain.inference_engine.base import WHOLE_VOCABULARY, SampleRequest, Truncation
from retrain.inference_engine.decoder import Decoder
from retrain.inference_engine.kv_cache import (
    KVArena,
    PrefixStore,
    PromptKey,
    PromptState,
    prompt_key,
)
from retrain.inference_engine.sampling import Draws, draw
from retrain.model.budget import PREFILL_TOKENS, DecodeLimits
from retrain.model.truncation import Cuts
from retrain.noise import uniform
from retrain.types import Completion, FinishReason

Prompted = TypeVar("Prompted")

_FIRST_TOKENS = 64
"""Completion tokens for which a row has room at first; the arena doubles as completions grow."""
_NOISE_BLOCK = 64
"""Positions whose noise is computed at once, for all rows."""


@dataclass(frozen=True)
class Job:
    """One completion to sample."""

    request_index: int
    request: SampleRequest
    sample: int
    limit: int
    """Most tokens of the completion: max_tokens, or what the context leaves."""

    @property
    def tokens(self) -> int:
        """Most KV tokens that it needs; the last token of a completion is never fed back."""
        return len(self.request.prompt_ids) + self.limit - 1

    @property
    def truncation(self) -> Truncation:
        """Greedy sampling takes the largest logit, which no cut removes."""
        return self.request.truncation if self.request.temperature > 0 else WHOLE_VOCABULARY


def pieces(jobs: Sequence[Job], rows: int, most: int) -> list[Sequence[Job]]:
    """Cut the jobs into consecutive parts of nearly equal size, which decode apart from each other:
    at most `rows` jobs each, or else `most` parts.

    A row's bits depend on the rows beside it, so the parts are a function of the jobs alone, not of
    the number of workers.
    """
    count = min(-(-len(jobs) // rows), most)
    edges = [len(jobs) * number // count for number in range(count + 1)] if count else []
    return [jobs[start:stop] for start, stop in pairwise(edges)]


class DecodeRun:
    """One batch of jobs under one adapter slot, from the first prompt to the last token."""

    def __init__(
        self,
        decoder: Decoder,
        jobs: Sequence[Job],
        limits: DecodeLimits,
        eos_ids: npt.NDArray[np.int64],
        prefixes: PrefixStore | None,
        kv_storage: torch.dtype | None,
    ) -> None:
        """`prefixes`: None if every completion computes its own prompt."""
        self._decoder, self._eos_ids, self._prefixes, self._kv_storage = (
            decoder,
            eos_ids,
            prefixes,
            kv_storage,
        )
        self._queue = deque(jobs)
        self._most_tokens = max(job.tokens for job in jobs)
        self._max_rows = limits.rows_together(self._most_tokens, len(jobs))
        self._rows = Rows(self._max_rows, max(job.limit for job in jobs))
        self._prompts: dict[PromptKey, PromptState] = {}
        self._arena: KVArena | None = None

    def close(self) -> None:
        """Release its memory."""

    @property
    def unfinished(self) -> bool:
        return bool(self._queue) or self._rows.count > 0

    def advance(self) -> list[Completion]:
        """Prefill and decode until at least one completion is finished."""
        while self.unfinished:
            free = self._max_rows - self._rows.count
            if free and self._queue:
                rows, logits = self._admit(
                    [self._queue.popleft() for _ in range(min(free, len(self._queue)))]
                )
            else:
                rows, logits = self._decode()
            if finished := self._sample(rows, logits):
                return finished
        return []

    def _admit(self, jobs: list[Job]) -> tuple[slice, Tensor]:
        """Prefill: give each job a row. Returns these rows and the logits [R, V] of their first
        tokens, from their prompts.
        """
        prompts = self._prompt_states(jobs)
        added = self._rows.start(jobs)
        longest = int(self._rows.cached[: self._rows.count].max())
        if self._arena is None:
            self._arena = KVArena(
                self._max_rows,
                min(longest + _FIRST_TOKENS, self._most_tokens),
                prompts[0],
                self._kv_storage,
            )
        self._arena.reserve(
            longest, self._most_tokens, self._rows.count, min(longest, self._arena.capacity)
        )
        by_prompt: dict[int, tuple[PromptState, list[int]]] = {}
        for row, prompt in zip(added, prompts, strict=True):
            by_prompt.setdefault(id(prompt), (prompt, []))[1].append(row)
        for prompt, rows in by_prompt.values():
            self._arena.write_prompt(rows, prompt)
        return slice(added.start, added.stop), torch.stack([prompt.logits for prompt in prompts])

    def _decode(self) -> tuple[slice, Tensor]:
        """Feed every active row its last token. Returns these rows and the logits [R, V] of their
        next tokens.
        """
        assert self._arena is not None
        rows = slice(0, self._rows.count)
        cached = self._rows.cached[rows]
        self._arena.reserve(
            int(cached.max()) + 1, self._most_tokens, self._rows.count, int(cached.max())
        )
        logits = self._decoder.decode(
            self._arena, self._rows.last_tokens[rows].copy(), cached.copy()
        )
        self._rows.cached[rows] += 1
        return rows, logits

    def _sample(self, rows: slice, logits: Tensor) -> list[Completion]:
        """Draw one token for each of `rows`; the completions that it finishes leave."""
        draws = draw(
            logits, self._rows.temperatures[rows], self._rows.uniforms(rows), self._rows.cuts(rows)
        )
        wrong = np.flatnonzero(~(np.isfinite(draws.logprobs) & np.isfinite(draws.entropies)))
        if len(wrong):
            row = rows.start + int(wrong[0])
            raise not_finite(self._rows.jobs[row], int(self._rows.sampled[row]))
        done = self._rows.record(rows, draws, self._eos_ids)
        finished = [self._rows.completion(int(row), self._eos_ids) for row in done]
        if finished:
            sources, targets = self._rows.remove(done)
            if sources and self._arena is not None:
                self._arena.move(sources, targets, int(self._rows.cached[targets].max()))
        return finished

    def _prompt_states(self, jobs: Sequence[Job]) -> list[PromptState]:
        """Return one state per job, in order. With shared prefixes a prompt is computed once for
        all of its completions.
        """
        if self._prefixes is None:
            return self._prefill(jobs)
        keys = [prompt_key(job.request) for job in jobs]
        new: dict[PromptKey, Job] = {}
        for key, job in zip(keys, jobs, strict=True):
            if key in self._prompts:
                continue
            stored = self._prefixes.get(key)
            if stored is None:
                new.setdefault(key, job)
            else:
                self._prompts[key] = stored
        for key, state in zip(new, self._prefill(list(new.values())), strict=True):
            self._prompts[key] = state
            self._prefixes.put(key, state)
        states = [self._prompts[key] for key in keys]
        still_needed = {prompt_key(self._queue[0].request)} if self._queue else set()
        self._prompts = {key: state for key, state in self._prompts.items() if key in still_needed}
        return states

    def _prefill(self, jobs: Sequence[Job]) -> list[PromptState]:
        states: list[PromptState] = []
        for batch in prefill_batches(jobs, [len(job.request.prompt_ids) for job in jobs]):
            states += self._decoder.prefill([job.request.prompt_ids for job in batch])
        return states


def not_finite(job: Job, position: int) -> RunFailed:
    key = job.request.noise
    return RunFailed(
        f"The model's logits are not finite at step {key.step}, prompt slot {key.prompt}, sample"
        f" {job.sample}, completion token {position}: the adapter has diverged or the dtype is too"
        " narrow; lower [training] lr, or resume from an earlier checkpoint, or set [model] dtype"
        ' = "fp32".'
    )


def prefill_batches(
    sequences: Sequence[Prompted], lengths: Sequence[int]
) -> Iterator[list[Prompted]]:
    """Group consecutive sequences of `lengths` tokens that go through the model in one packed
    pass.
    """
    batch: list[Prompted] = []
    tokens = 0
    for sequence, size in zip(sequences, lengths, strict=True):
        if batch and tokens + size > PREFILL_TOKENS:
            yield batch
            batch, tokens = [], 0
        batch.append(sequence)
        tokens += size
    if batch:
        yield batch


class Rows:
    """The state of the active rows, 0 .. count - 1. A row moves with all of its state, so that the
    active ones stay a prefix.
    """

    def __init__(self, rows: int, longest: int) -> None:
        self.count = 0
        self.jobs: list[Job] = []
        self.cached = np.zeros(rows, dtype=np.int64)
        """Tokens in the KV cache."""
        self.sampled = np.zeros(rows, dtype=np.int64)
        """Tokens drawn so far: the position of the next draw in the completion."""
        self.limits = np.zeros(rows, dtype=np.int64)
        self.temperatures = np.zeros(rows, dtype=np.float32)
        self.last_tokens = np.zeros(rows, dtype=np.int64)
        self._top_k = np.zeros(rows, dtype=np.int64)
        self._top_p = np.ones(rows)
        self._min_p = np.zeros(rows)
        self._noise_keys = np.zeros((rows, 6), dtype=np.int64)
        self._noise = np.zeros((rows, _NOISE_BLOCK))
        self._noise_start = np.zeros(rows, dtype=np.int64)
        self._tokens = np.zeros((rows, longest), dtype=np.int32)
        self._logprobs = np.zeros((rows, longest), dtype=np.float32)
        self._entropies = np.zeros((rows, longest), dtype=np.float32)
        self._kept = np.zeros((rows, longest), dtype=np.int32)
        self._all: list[npt.NDArray[Any]] = [
            self.cached, self.sampled, self.limits, self.temperatures, self.last_tokens,
            self._top_k, self._top_p, self._min_p,
            self._noise_keys, self._noise, self._noise_start, self._tokens, self._logprobs,
            self._entropies, self._kept,
        ]  # fmt: skip

    def start(self, jobs: list[Job]) -> range:
        """Append a row for each job; returns their numbers."""
        added = range(self.count, self.count + len(jobs))
        for row, job in zip(added, jobs, strict=True):
            request, key, cut = job.request, job.request.noise, job.truncation
            self.cached[row], self.sampled[row], self.limits[row] = (
                len(request.prompt_ids),
                0,
                job.limit,
            )
            self.temperatures[row] = request.temperature
            self._top_k[row], self._top_p[row], self._min_p[row] = cut.top_k, cut.top_p, cut.min_p
            self._noise_keys[row] = (
                key.seed,
                key.stream,
                key.step,
                key.prompt,
                job.sample,
                request.first_position,
            )
        self.jobs += jobs
        self.count = added.stop
        self._refill_noise(np.arange(added.start, added.stop))
        return added

    def uniforms(self, rows: slice) -> npt.NDArray[np.float64]:
        """Return the uniform of each row's next draw. When one row has used up its block, all rows
        get a new one.
        """
        index = np.arange(rows.start, rows.stop)
        offset = self.sampled[rows] - self._noise_start[rows]
        if offset.max(initial=0) >= _NOISE_BLOCK:
            self._refill_noise(index)
            offset = np.zeros_like(offset)
        noise: npt.NDArray[np.float64] = self._noise[index, offset]
        return noise

    def cuts(self, rows: slice) -> Cuts | None:
        """Return the cuts of these rows; None if no row is truncated."""
        cuts = Cuts(self._top_k, self._top_p, self._min_p)[rows]
        return cuts if cuts.active.any() else None

    def _refill_noise(self, rows: npt.NDArray[np.int64]) -> None:
        self._noise_start[rows] = self.sampled[rows]
        positions = (self._noise_keys[rows, 5] + self.sampled[rows])[:, None] + np.arange(
            _NOISE_BLOCK
        )
        seeds_streams = self._noise_keys[rows, :2]
        for seed, stream in np.unique(seeds_streams, axis=0):
            same = (seeds_streams == (seed, stream)).all(axis=1)
            step, prompt, sample = (
                self._noise_keys[rows[same], column][:, None] for column in (2, 3, 4)
            )
            self._noise[rows[same]] = uniform(
                int(seed), int(stream), step, prompt, sample, positions[same]
            )

    def record(
        self, rows: slice, draws: Draws, eos_ids: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Append one draw to each of `rows`; returns the numbers of the rows that it finishes."""
        index = np.arange(rows.start, rows.stop)
        place = self.sampled[rows]
        self._tokens[index, place] = draws.tokens
        self._logprobs[index, place] = draws.logprobs
        self._entropies[index, place] = draws.entropies
        if draws.kept is not None:
            self._kept[index, place] = draws.kept
        self.last_tokens[rows] = draws.tokens
        self.sampled[rows] += 1
        done = np.isin(draws.tokens, eos_ids) | (self.sampled[rows] >= self.limits[rows])
        return index[done]

    def completion(self, row: int, eos_ids: npt.NDArray[np.int64]) -> Completion:
        job, length = self.jobs[row], int(self.sampled[row])
        stopped = bool(np.isin(self.last_tokens[row], eos_ids))
        return Completion(
            request=job.request_index,
            sample=job.sample,
            token_ids=self._tokens[row, :length].copy(),
            logprobs=self._logprobs[row, :length].copy(),
            entropies=self._entropies[row, :length].copy(),
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            kept=self._kept[row, :length].copy() if job.truncation.active else None,
        )

    def remove(self, rows: npt.NDArray[np.int64]) -> tuple[list[int], list[int]]:
        """Drop `rows` and fill their places with the last active rows; returns the moves as
        (sources, targets).
        """
        left = self.count - len(rows)
        dropped = set(rows.tolist())
        targets = [row for row in rows.tolist() if row < left]
        sources = [row for row in range(left, self.count) if row not in dropped]
        if sources:
            for array in self._all:
                array[targets] = array[sources]
        for source, target in zip(sources, targets, strict=True):
            self.jobs[target] = self.jobs[source]
        del self.jobs[left:]
        self.count = left
        return sources, targets

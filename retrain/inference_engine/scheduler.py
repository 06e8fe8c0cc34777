"""Continuous batching: a completion takes a row as soon as one is free, all rows decode together,
and each leaves when it is finished.
"""

from collections import deque
from collections.abc import Collection, Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from retrain.inference_engine.decoder import Decoder
from retrain.inference_engine.kv_cache import (
    KVArena,
    PrefixStore,
    PromptKey,
    PromptState,
    prompt_key,
)
from retrain.inference_engine.rows import (
    NOISE_BLOCK,
    SampleJob,
    completion_of,
    noise_block,
    noise_key,
    not_finite,
    prefill_batches,
    row_settings,
)
from retrain.inference_engine.sampling import Draws, draw
from retrain.model.budget import DecodeLimits
from retrain.model.truncation import Cuts
from retrain.types import Completion

_FIRST_TOKENS = 64
"""Completion tokens that a row has room for at first; the arena doubles as completions grow."""


class DecodeRun:
    """One batch of jobs under one adapter slot, from the first prompt to the last token."""

    def __init__(
        self,
        decoder: Decoder,
        jobs: Sequence[SampleJob],
        limits: DecodeLimits,
        eos_ids: npt.NDArray[np.int64],
        prefixes: PrefixStore | None,
        kv_storage: torch.dtype | None,
    ) -> None:
        """`prefixes`: None if every completion computes its own prompt."""
        self._decoder, self._prefixes, self._kv_storage = decoder, prefixes, kv_storage
        self._ends = frozenset(eos_ids.tolist())
        self._waiting = deque(jobs)
        self._max_tokens = max(job.tokens for job in jobs)
        self._max_rows = limits.rows_together(self._max_tokens, len(jobs))
        self._rows = Rows(self._max_rows, max(job.limit for job in jobs))
        self._prompts: dict[PromptKey, PromptState] = {}
        self._arena: KVArena | None = None

    def close(self) -> None:
        """Release its memory."""

    @property
    def unfinished(self) -> bool:
        return bool(self._waiting) or self._rows.count > 0

    def advance(self) -> list[Completion]:
        """Prefill and decode until at least one completion is finished."""
        while self.unfinished:
            free = self._max_rows - self._rows.count
            if free and self._waiting:
                rows, logits = self._admit(
                    [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
                )
            else:
                rows, logits = self._decode()
            finished = self._sample(rows, logits)
            if finished:
                return finished
        return []

    def _admit(self, jobs: list[SampleJob]) -> tuple[slice, Tensor]:
        """Prefill: give each job a row. Returns these rows and the logits [R, V] of their first
        tokens, from their prompts.
        """
        prompts = self._prompt_states(jobs)
        added = self._rows.start(jobs)
        longest = int(self._rows.cached[: self._rows.count].max())
        if self._arena is None:
            self._arena = KVArena(
                self._max_rows,
                min(longest + _FIRST_TOKENS, self._max_tokens),
                prompts[0],
                self._kv_storage,
            )
        # The new rows hold nothing yet, and the others at most the capacity.
        self._arena.reserve(
            longest, self._max_tokens, self._rows.count, min(longest, self._arena.capacity)
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
            int(cached.max()) + 1, self._max_tokens, self._rows.count, int(cached.max())
        )
        logits = self._decoder.decode(
            self._arena, self._rows.last_tokens[rows].copy(), cached.copy()
        )
        self._rows.cached[rows] += 1
        return rows, logits

    def _sample(self, rows: slice, logits: Tensor) -> list[Completion]:
        """Draw one token for each of `rows`; the completions that it finishes leave."""
        draws = draw(
            logits, self._rows.temperature[rows], self._rows.uniforms(rows), self._rows.cuts(rows)
        )
        wrong = np.flatnonzero(~(np.isfinite(draws.logprobs) & np.isfinite(draws.entropies)))
        if len(wrong):
            row = rows.start + int(wrong[0])
            raise not_finite(self._rows.jobs[row], int(self._rows.sampled[row]))
        done = self._rows.record(rows, draws, self._ends)
        finished = [self._rows.completion(int(row), self._ends) for row in done]
        if finished:
            sources, targets = self._rows.remove(done)
            if sources and self._arena is not None:
                self._arena.move(sources, targets, int(self._rows.cached[targets].max()))
        return finished

    def _prompt_states(self, jobs: Sequence[SampleJob]) -> list[PromptState]:
        """Return one state per job, in order. With shared prefixes a prompt is computed once for
        all of its completions.
        """
        if self._prefixes is None:
            return self._prefill(jobs)
        keys = [prompt_key(job.request) for job in jobs]
        new: dict[PromptKey, SampleJob] = {}
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
        # Completions of a prompt wait side by side, so only the next one's is still needed.
        following = {prompt_key(job.request) for job in islice(self._waiting, 1)}
        self._prompts = {key: state for key, state in self._prompts.items() if key in following}
        return states

    def _prefill(self, jobs: Sequence[SampleJob]) -> list[PromptState]:
        states: list[PromptState] = []
        for batch in prefill_batches(jobs, [len(job.request.prompt_ids) for job in jobs]):
            states += self._decoder.prefill([job.request.prompt_ids for job in batch])
        return states


class Rows:
    """The state of the active rows, 0 .. count - 1. A row moves with all of its state, so that the
    active ones stay a prefix.
    """

    def __init__(self, rows: int, longest: int) -> None:
        self.count = 0
        self.jobs: list[SampleJob] = []
        self.cached = np.zeros(rows, dtype=np.int64)
        """Tokens in the KV cache."""
        self.sampled = np.zeros(rows, dtype=np.int64)
        """Tokens drawn so far: the position of the next draw in the completion."""
        self.limit = np.zeros(rows, dtype=np.int64)
        self.temperature = np.zeros(rows, dtype=np.float32)
        self.last_tokens = np.zeros(rows, dtype=np.int64)
        self.top_k = np.zeros(rows, dtype=np.int64)
        self.top_p = np.ones(rows)
        self.min_p = np.zeros(rows)
        self._noise_keys = np.zeros((rows, 5), dtype=np.int64)
        self._first_positions = np.zeros(rows, dtype=np.int64)
        """Position of the completion's first token in its trajectory."""
        self._noise = np.zeros((rows, NOISE_BLOCK))
        self._noise_start = np.zeros(rows, dtype=np.int64)
        self._tokens = np.zeros((rows, longest), dtype=np.int64)
        self._logprobs = np.zeros((rows, longest), dtype=np.float32)
        self._entropies = np.zeros((rows, longest), dtype=np.float32)
        self._kept = np.zeros((rows, longest), dtype=np.int32)
        self._all: list[npt.NDArray[Any]] = [
            value for value in vars(self).values() if isinstance(value, np.ndarray)
        ]

    def start(self, jobs: list[SampleJob]) -> range:
        """Append a row for each job; returns their numbers."""
        added = range(self.count, self.count + len(jobs))
        rows = np.arange(added.start, added.stop)
        self.cached[rows] = [len(job.request.prompt_ids) for job in jobs]
        self.sampled[rows] = 0
        self._noise_keys[rows] = [noise_key(job) for job in jobs]
        self._first_positions[rows] = [job.request.first_position for job in jobs]
        for name, values in row_settings(jobs).items():
            getattr(self, name)[rows] = values
        self.jobs += jobs
        self.count = added.stop
        self._refill_noise(rows)
        return added

    def uniforms(self, rows: slice) -> npt.NDArray[np.float64]:
        """Return the uniform of each row's next draw. When one row has used up its block, all rows
        get a new one.
        """
        index = np.arange(rows.start, rows.stop)
        offset = self.sampled[rows] - self._noise_start[rows]
        if offset.max(initial=0) >= NOISE_BLOCK:
            self._refill_noise(index)
            offset = np.zeros_like(offset)
        noise: npt.NDArray[np.float64] = self._noise[index, offset]
        return noise

    def cuts(self, rows: slice) -> Cuts | None:
        """Return the cuts of these rows; None if no row is truncated."""
        cuts = Cuts(self.top_k, self.top_p, self.min_p)[rows]
        return cuts if cuts.active.any() else None

    def _refill_noise(self, rows: npt.NDArray[np.int64]) -> None:
        self._noise_start[rows] = self.sampled[rows]
        first = self._first_positions[rows] + self.sampled[rows]
        self._noise[rows] = noise_block(self._noise_keys[rows], first)

    def record(self, rows: slice, draws: Draws, ends: Collection[int]) -> npt.NDArray[np.int64]:
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
        done = np.isin(draws.tokens, list(ends)) | (self.sampled[rows] >= self.limit[rows])
        return index[done]

    def completion(self, row: int, ends: Collection[int]) -> Completion:
        """Return the completion of a row that is finished."""
        done = row, slice(int(self.sampled[row]))
        draws = Draws(
            self._tokens[done], self._logprobs[done], self._entropies[done], self._kept[done]
        )
        return completion_of(self.jobs[row], draws, ends)

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

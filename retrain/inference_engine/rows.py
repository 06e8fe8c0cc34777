"""The host's side of the rows that decode: where each stands, its noise ahead of time, and what it has produced so far.

Everything per token is one numpy operation over all rows; Python loops only over rows that start or finish.
Shape letters: R active rows, T tokens of the longest completion.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from retrain.inference_engine.base import WHOLE_VOCABULARY, SampleRequest, Truncation
from retrain.inference_engine.sampling import Draws
from retrain.model.truncation import Cuts
from retrain.noise import uniform
from retrain.types import Completion, FinishReason

_NOISE_AHEAD = 64
"""Positions whose noise is computed at once, for all rows."""


@dataclass(frozen=True)
class Waiting:
    """A completion that has not started."""

    request_index: int
    request: SampleRequest
    sample: int
    limit: int
    """Tokens it may have: max_tokens, or what the context leaves."""

    @property
    def tokens(self) -> int:
        """KV tokens that it may come to need; its last token is never fed back."""
        return len(self.request.prompt_ids) + self.limit - 1

    @property
    def truncation(self) -> Truncation:
        """A greedy completion takes the largest logit, which no cut removes."""
        return self.request.truncation if self.request.temperature > 0 else WHOLE_VOCABULARY


class Rows:
    """State of rows 0 .. count-1. A row moves with all of its state, so that the active rows stay a prefix."""

    def __init__(self, rows: int, longest: int) -> None:
        self.count = 0
        self.waiting: list[Waiting] = []
        self.cached = np.zeros(rows, dtype=np.int64)
        """Tokens in the KV cache."""
        self.sampled = np.zeros(rows, dtype=np.int64)
        """Tokens drawn so far: the position of the next draw in the completion."""
        self.limits = np.zeros(rows, dtype=np.int64)
        self.temperatures = np.zeros(rows, dtype=np.float32)
        self.last_tokens = np.zeros(rows, dtype=np.int64)
        self.slots = np.zeros(rows, dtype=np.int64)
        """Of their adapters."""
        self._top_k = np.zeros(rows, dtype=np.int64)
        self._top_p = np.ones(rows)
        self._min_p = np.zeros(rows)
        self._noise_keys = np.zeros((rows, 5), dtype=np.int64)
        self._noise = np.zeros((rows, _NOISE_AHEAD))
        self._noise_start = np.zeros(rows, dtype=np.int64)
        self._tokens = np.zeros((rows, longest), dtype=np.int32)
        self._logprobs = np.zeros((rows, longest), dtype=np.float32)
        self._entropies = np.zeros((rows, longest), dtype=np.float32)
        self._kept = np.zeros((rows, longest), dtype=np.int32)
        self._all: list[npt.NDArray[Any]] = [
            self.cached, self.sampled, self.limits, self.temperatures, self.last_tokens, self.slots, self._top_k, self._top_p, self._min_p,
            self._noise_keys, self._noise, self._noise_start, self._tokens, self._logprobs, self._entropies, self._kept,
        ]  # fmt: skip

    def start(self, waiting: list[Waiting]) -> range:
        """Append rows for completions whose prompts are cached; returns their numbers."""
        added = range(self.count, self.count + len(waiting))
        for row, one in zip(added, waiting, strict=True):
            request = one.request
            key = request.noise
            self.cached[row], self.sampled[row], self.limits[row] = len(request.prompt_ids), 0, one.limit
            self.temperatures[row], self.slots[row] = request.temperature, request.adapter_slot
            cut = one.truncation
            self._top_k[row], self._top_p[row], self._min_p[row] = cut.top_k, cut.top_p, cut.min_p
            self._noise_keys[row] = key.seed, key.stream, key.step, key.prompt, one.sample
        self.waiting += waiting
        self.count = added.stop
        self._refill_noise(np.arange(added.start, added.stop))
        return added

    def uniforms(self, rows: slice) -> npt.NDArray[np.float64]:
        """The uniform of each row's next draw. When one row has used up its block, all rows get a new one."""
        index = np.arange(rows.start, rows.stop)
        offset = self.sampled[rows] - self._noise_start[rows]
        if offset.max(initial=0) >= _NOISE_AHEAD:
            self._refill_noise(index)
            offset = np.zeros_like(offset)
        noise: npt.NDArray[np.float64] = self._noise[index, offset]
        return noise

    def cuts(self, rows: slice) -> Cuts | None:
        """None where none of the rows is truncated."""
        cuts = Cuts(self._top_k, self._top_p, self._min_p)[rows]
        return cuts if cuts.active.any() else None

    def _refill_noise(self, rows: npt.NDArray[np.int64]) -> None:
        self._noise_start[rows] = self.sampled[rows]
        positions = self.sampled[rows][:, None] + np.arange(_NOISE_AHEAD)
        seeds_streams = self._noise_keys[rows, :2]
        for seed, stream in np.unique(seeds_streams, axis=0):
            same = (seeds_streams == (seed, stream)).all(axis=1)
            step, prompt, sample = (self._noise_keys[rows[same], column][:, None] for column in (2, 3, 4))
            self._noise[rows[same]] = uniform(int(seed), int(stream), step, prompt, sample, positions[same])

    def record(self, rows: slice, draws: Draws, eos_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Append one draw to each of `rows`; returns the numbers of those that are finished by it."""
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
        one, length = self.waiting[row], int(self.sampled[row])
        stopped = bool(np.isin(self.last_tokens[row], eos_ids))
        return Completion(
            request=one.request_index,
            sample=one.sample,
            token_ids=self._tokens[row, :length].copy(),
            logprobs=self._logprobs[row, :length].copy(),
            entropies=self._entropies[row, :length].copy(),
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            kept=self._kept[row, :length].copy() if one.truncation.active else None,
        )

    def remove(self, rows: npt.NDArray[np.int64]) -> tuple[list[int], list[int]]:
        """Drop `rows` and close the holes with the last active rows; returns the moves as (sources, targets)."""
        left = self.count - len(rows)
        dropped = set(rows.tolist())
        targets = [row for row in rows.tolist() if row < left]
        sources = [row for row in range(left, self.count) if row not in dropped]
        if sources:
            for array in self._all:
                array[targets] = array[sources]
        for source, target in zip(sources, targets, strict=True):
            self.waiting[target] = self.waiting[source]
        del self.waiting[left:]
        self.count = left
        return sources, targets

"""Continuous batching: completions wait, take a row when one is free, decode together, and leave as soon as they finish."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from retrain.errors import RunFailed
from retrain.inference_engine.base import WHOLE_VOCABULARY, SampleRequest, Truncation
from retrain.inference_engine.decoder import Decoder, Slots, is_mixed
from retrain.inference_engine.kv_cache import KVArena, PrefixStore, PromptKey, PromptState, prompt_key
from retrain.inference_engine.sampling import Draws, draw
from retrain.model.budget import DecodeLimits
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


_FIRST_TOKENS = 64
"""Answer tokens a row has place for at first; the arena doubles as completions grow."""
_PREFILL_TOKENS = 8192
"""Prompt tokens of one packed pass; a longer prompt has a pass of its own."""


def pieces(waiting: Sequence[Waiting], rows: int, most: int) -> list[Sequence[Waiting]]:
    """Consecutive parts of nearly equal size, which decode apart from each other: of at most `rows` completions, or `most` parts.

    A row's bits depend on the rows beside it, so this rule may know nothing but the completions.
    """
    count = min(-(-len(waiting) // rows), most)
    edges = [len(waiting) * number // count for number in range(count + 1)] if count else []
    return [waiting[start:stop] for start, stop in pairwise(edges)]


class DecodeRun:
    """One batch of completions, from the first prompt to the last token."""

    def __init__(
        self,
        decoder: Decoder,
        waiting: Sequence[Waiting],
        limits: DecodeLimits,
        eos_ids: npt.NDArray[np.int64],
        prefixes: PrefixStore | None,
        kv_storage: torch.dtype | None,
    ) -> None:
        """`prefixes` is None where every completion computes its own prompt."""
        self._decoder, self._eos_ids, self._prefixes, self._kv_storage = decoder, eos_ids, prefixes, kv_storage
        self._queue = deque(waiting)
        self.slots = frozenset(one.request.adapter_slot for one in waiting)
        """Adapters of its rows."""
        self._mixed = is_mixed(self.slots)
        self._most_tokens = max(one.tokens for one in waiting)
        self._max_rows = limits.rows_together(self._most_tokens, len(waiting))
        self._rows = Rows(self._max_rows, max(one.limit for one in waiting))
        self._prompts: dict[PromptKey, PromptState] = {}
        self._arena: KVArena | None = None

    @property
    def unfinished(self) -> bool:
        return bool(self._queue) or self._rows.count > 0

    def advance(self) -> list[Completion]:
        """Decode until at least one completion is finished."""
        while self.unfinished:
            if finished := self._admit() or self._step():
                return finished
        return []

    def _admit(self) -> list[Completion]:
        """Give the free rows to waiting completions and draw their first tokens from their prompts' logits."""
        admitted = [self._queue.popleft() for _ in range(min(self._max_rows - self._rows.count, len(self._queue)))]
        if not admitted:
            return []
        prompts = self._prompt_states(admitted)
        added = self._rows.start(admitted)
        arena = self._reserve(prompts[0])
        by_prompt: dict[int, list[int]] = {}
        for row, prompt in zip(added, prompts, strict=True):
            by_prompt.setdefault(id(prompt), []).append(row)
        for prompt in {id(prompt): prompt for prompt in prompts}.values():
            arena.write_prompt(by_prompt[id(prompt)], prompt)
        return self._draw(torch.stack([prompt.logits for prompt in prompts]), slice(added.start, added.stop))

    def _step(self) -> list[Completion]:
        """One more token for every active row."""
        rows = slice(0, self._rows.count)
        if self._rows.count == 0:
            return []
        assert self._arena is not None
        cached = self._rows.cached[rows]
        self._arena.reserve(int(cached.max()) + 1, self._most_tokens, self._rows.count, int(cached.max()))
        logits = self._decoder.decode(self._arena, self._rows.last_tokens[rows].copy(), cached.copy(), self._slots_of(rows))
        self._rows.cached[rows] += 1
        return self._draw(logits, rows)

    def _slots_of(self, rows: slice) -> Slots | None:
        return self._rows.slots[rows] if self._mixed else None

    def _draw(self, logits: Tensor, rows: slice) -> list[Completion]:
        draws = draw(logits, self._rows.temperatures[rows], self._rows.uniforms(rows), self._rows.cuts(rows))
        self._check_finite(draws, rows)
        done = self._rows.record(rows, draws, self._eos_ids)
        finished = [self._rows.completion(int(row), self._eos_ids) for row in done]
        if finished:
            sources, targets = self._rows.remove(done)
            if sources and self._arena is not None:
                self._arena.move(sources, targets, int(self._rows.cached[targets].max()))
        return finished

    def _reserve(self, like: PromptState) -> KVArena:
        """The arena, with place for the longest active prompt and some answer."""
        longest = int(self._rows.cached[: self._rows.count].max())
        if self._arena is None:
            capacity = min(longest + _FIRST_TOKENS, self._most_tokens)
            self._arena = KVArena(self._max_rows, capacity, like, self._kv_storage)
        self._arena.reserve(longest, self._most_tokens, self._rows.count, min(longest, self._arena.capacity))
        return self._arena

    def _prompt_states(self, admitted: Sequence[Waiting]) -> list[PromptState]:
        """The prompts' states in the order of `admitted`, each computed once a group unless prefixes are not shared."""
        if self._prefixes is None:
            return self._prefill(admitted)
        keys = [prompt_key(one.request) for one in admitted]
        new: dict[PromptKey, Waiting] = {}
        for key, one in zip(keys, admitted, strict=True):
            if key in self._prompts or key in new:
                continue
            known = self._prefixes.get(key)
            if known is None:
                new[key] = one
            else:
                self._prompts[key] = known
        for key, state in zip(new, self._prefill(list(new.values())), strict=True):
            self._prompts[key] = state
            self._prefixes.put(key, state)
        states = [self._prompts[key] for key in keys]
        still_needed = {prompt_key(self._queue[0].request)} if self._queue else set()
        self._prompts = {key: state for key, state in self._prompts.items() if key in still_needed}
        return states

    def _prefill(self, completions: Sequence[Waiting]) -> list[PromptState]:
        """Prompts in packed passes of bounded size."""
        states: list[PromptState] = []
        packed: list[Waiting] = []
        tokens = 0
        for one in [*completions, None]:
            size = 0 if one is None else len(one.request.prompt_ids)
            if packed and (one is None or tokens + size > _PREFILL_TOKENS):
                slots = np.array([each.request.adapter_slot for each in packed]) if self._mixed else None
                states += self._decoder.prefill([each.request.prompt_ids for each in packed], slots)
                packed, tokens = [], 0
            if one is not None:
                packed.append(one)
                tokens += size
        return states

    def _check_finite(self, draws: Draws, rows: slice) -> None:
        wrong = np.flatnonzero(~(np.isfinite(draws.logprobs) & np.isfinite(draws.entropies)))
        if not len(wrong):
            return
        row = rows.start + int(wrong[0])
        one = self._rows.waiting[row]
        key = one.request.noise
        raise RunFailed(
            f"The model's logits are not finite at step {key.step}, prompt slot {key.prompt}, sample {one.sample}, completion token "
            f"{int(self._rows.sampled[row])}: the adapter has diverged or the dtype is too narrow; lower [training] lr, or resume from an "
            'earlier checkpoint, or set [model] dtype = "fp32".'
        )

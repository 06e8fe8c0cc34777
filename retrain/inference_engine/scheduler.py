"""Continuous batching: a completion takes a row as soon as a row is free, all rows decode together,
and each leaves at its end.

`DecodeRun` keeps the rows. Their keys and values are in rows of one capacity here, and in pages in
`paged_run.py`.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from itertools import islice

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
    DrawCopy,
    RowBuffers,
    RunningRow,
    SampleJob,
    Variant,
    noise_of,
    not_finite,
    prefill_batches,
)
from retrain.model.budget import DecodeLimits
from retrain.types import Completion

_FIRST_TOKENS = 64
"""Completion tokens that a row has room for at first; the arena doubles as completions grow."""


class DecodeRun(ABC):
    """One batch of jobs under one adapter slot, from the first prompt to the last token."""

    _late = 0
    """Number of steps under way while the engine reads the draws of the previous step."""

    def __init__(
        self,
        decoder: Decoder,
        jobs: Sequence[SampleJob],
        eos_ids: npt.NDArray[np.int64],
        buffers: RowBuffers,
        slots: int,
    ) -> None:
        """`slots`: rows that decode together."""
        self._decoder, self.buffers = decoder, buffers
        self._waiting = deque(RunningRow(number, job) for number, job in enumerate(jobs))
        self._slots: list[RunningRow | None] = [None] * slots
        self._unread: deque[tuple[DrawCopy, list[RunningRow | None]]] = deque()
        self._finished: list[Completion] = []
        self._ends = frozenset(eos_ids.tolist())
        self._variant = Variant.of(jobs)

    @abstractmethod
    def admit(self) -> None:
        """Give free slots to waiting completions, run their prompts, and `_begin` them."""

    @abstractmethod
    def _step(self, count: int) -> Tensor:
        """Return [R, 4] draws of one step of the first `count` slots or more."""

    def close(self) -> None:  # noqa: B027 - rows of one capacity go with the run
        """Release its memory."""

    @property
    def unfinished(self) -> bool:
        return bool(self._waiting or self.running or self._finished)

    @property
    def running(self) -> list[RunningRow]:
        return [row for row in self._slots if row is not None]

    def advance(self) -> list[Completion]:
        """Prefill and decode until at least one completion ends."""
        while self.unfinished:
            self.admit()
            if not self._late:
                self._collect(0)
            under_way = self._late if not self._finished and self.launch() else 0
            self._collect(under_way)
            if self._finished:
                finished, self._finished = self._finished, []
                return finished
        return []

    def _begin(self, rows: Sequence[RunningRow], logits: Tensor) -> None:
        """Put rows with a slot into the buffers, and draw from the `logits` [R, V] of their last
        tokens.
        """
        slots = self.buffers.begin(rows)
        drawn = self.buffers.draw(slots, logits.to(self.buffers.device), self._variant)
        for row in rows:
            row.launched = len(row.draws) + 1
        self._unread.append((DrawCopy(drawn), list(rows)))

    def launch(self) -> bool:
        """Launch one step of the running rows; False if none of them has a token to draw."""
        self._make_room()
        rows = [row if row and row.launched < row.job.limit else None for row in self._slots]
        launching = [row for row in rows if row]
        if not launching:
            return False
        fresh = [row for row in launching if row.launched % NOISE_BLOCK == 0]
        if fresh:
            self.buffers.put(fresh, noise=noise_of(fresh))
        # `launching` is in the order of the slots.
        drawn = self._step(launching[-1].slot + 1)
        for row in launching:
            row.launched += 1
        self._unread.append((DrawCopy(drawn), rows[: len(drawn)]))
        return True

    def _make_room(self) -> None:  # noqa: B027 - rows of one capacity have it
        """Give every row room for its next token."""

    def _compact(self, count: int) -> list[tuple[int, int]]:
        """Move the rows beyond the first `count` slots into free ones; returns the moves as
        (source, target).
        """
        beyond = [row for row in self._slots[count:] if row]
        free = [slot for slot, row in enumerate(self._slots[:count]) if row is None]
        moves = [(row.slot, slot) for row, slot in zip(beyond, free, strict=False)]
        if moves:
            self.buffers.move(*np.array(moves, np.int64).T.copy())
        for row, (source, target) in zip(beyond, moves, strict=True):
            self._slots[source], self._slots[target], row.slot = None, row, target
        return moves

    def _collect(self, under_way: int) -> None:
        """Take over the draws of all steps but the newest `under_way`; the rows that they finish
        leave.
        """
        while len(self._unread) > under_way:
            self.collect()

    def collect(self) -> None:
        """Read the oldest unread draws into the rows."""
        drawn, rows = self._unread.popleft()
        table = drawn.read().copy()  # the engine reuses page-locked memory
        finite = np.isfinite(table[:, 1] + table[:, 2]).tolist()
        for row, draws, token, is_finite in zip(
            rows, table, table[:, 0].tolist(), finite, strict=True
        ):
            if row is None or row.slot < 0:  # the previous draw ended it
                continue
            if not is_finite:
                raise not_finite(row.job, len(row.draws))
            row.draws.append(draws)
            if token in self._ends or len(row.draws) == row.job.limit:
                self._finished.append(row.completion(self._ends))
                self._leave(row, finished=True)

    def _leave(self, row: RunningRow, *, finished: bool = False) -> None:
        self._slots[row.slot] = None
        row.slot = -1


class ContiguousRun(DecodeRun):
    """Rows of one capacity: the active ones are a prefix of the slots, and each has room for the
    longest completion.
    """

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
        self._max_tokens = max(job.tokens for job in jobs)
        rows = limits.rows_together(self._max_tokens, len(jobs))
        # MPS has no float64.
        device = torch.device("cpu") if decoder.device.type == "mps" else decoder.device
        super().__init__(decoder, jobs, eos_ids, RowBuffers(rows, 0, device, eos_ids), rows)
        self._prefixes, self._kv_storage = prefixes, kv_storage
        self._prompts: dict[PromptKey, PromptState] = {}
        self._arena: KVArena | None = None

    def _cached(self, count: int) -> npt.NDArray[np.int64]:
        """Return [count] tokens of the first slots in the cache: the position of the next one."""
        cached: npt.NDArray[np.int64] = self.buffers.position[:count].cpu().numpy()
        return cached

    def admit(self) -> None:
        start = len(self.running)
        moves = self._compact(start)
        if moves and self._arena is not None:
            sources, targets = map(list, zip(*moves, strict=True))
            longest = int(self._cached(start)[targets].max())
            self._arena.move(sources, targets, longest)
        entering = [
            self._waiting.popleft()
            for _ in range(min(len(self._slots) - start, len(self._waiting)))
        ]
        if not entering:
            return
        prompts = self._prompt_states([row.job for row in entering])
        longest = max([*(len(each.token_ids) for each in prompts), *self._cached(start).tolist()])
        if self._arena is None:
            capacity = min(longest + _FIRST_TOKENS, self._max_tokens)
            self._arena = KVArena(len(self._slots), capacity, prompts[0], self._kv_storage)
        # The new rows hold nothing yet, and the others at most the capacity.
        used = min(longest, self._arena.capacity)
        self._arena.reserve(longest, self._max_tokens, start + len(entering), used)
        for slot, row in enumerate(entering, start):
            self._slots[slot], row.slot = row, slot
        by_prompt = {id(prompt): prompt for prompt in prompts}
        for number, prompt in by_prompt.items():
            slots = [slot for slot, each in enumerate(prompts, start) if id(each) == number]
            self._arena.write_prompt(slots, prompt)
        self._begin(entering, torch.stack([prompt.logits for prompt in prompts]))

    def _step(self, count: int) -> Tensor:
        assert self._arena is not None
        cached = self._cached(count)
        longest = int(cached.max())
        self._arena.reserve(longest + 1, self._max_tokens, count, longest)
        logits = self._decoder.decode(self._arena, self.buffers.token[:count], cached)
        return self.buffers.draw(slice(count), logits.to(self.buffers.device), self._variant)

    def _prompt_states(self, jobs: Sequence[SampleJob]) -> list[PromptState]:
        """Return one state per job, in order. With shared prefixes one computation of a prompt
        serves all of its completions.
        """
        store = self._prefixes
        if store is None:
            return self._prefill(jobs)
        by_key = {prompt_key(job.request): job for job in jobs}
        known = {key: state for key in by_key if (state := store.get(key))} | self._prompts
        new = [key for key in by_key if key not in known]
        for key, state in zip(new, self._prefill([by_key[key] for key in new]), strict=True):
            known[key] = state
            store.put(key, state)
        # Completions of a prompt wait side by side, so only the next one's is still needed.
        following = {prompt_key(row.job.request) for row in islice(self._waiting, 1)}
        self._prompts = {key: known[key] for key in following & known.keys()}
        return [known[prompt_key(job.request)] for job in jobs]

    def _prefill(self, jobs: Sequence[SampleJob]) -> list[PromptState]:
        states: list[PromptState] = []
        for batch in prefill_batches(jobs, [len(job.request.prompt_ids) for job in jobs]):
            states += self._decoder.prefill([job.request.prompt_ids for job in batch])
        return states

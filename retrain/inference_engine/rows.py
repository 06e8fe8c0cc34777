"""The rows of a decoder: a completion's job and draws on the host, and on the device what its next
draw depends on.

Shape letters: R rows, T tokens of a completion, M pages of the longest row, V vocabulary.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from retrain.errors import RunFailed
from retrain.inference_engine.base import BASE_MODEL, WHOLE_VOCABULARY, SampleRequest, Truncation
from retrain.inference_engine.sampling import draw, upload
from retrain.model.budget import PREFILL_TOKENS
from retrain.model.truncation import KeptSets, TruncationSettings
from retrain.noise import uniform
from retrain.types import Completion, FinishReason

Prompted = TypeVar("Prompted")

NOISE_BLOCK = 64
"""Number of positions per computation of noise."""


@dataclass(frozen=True)
class SampleJob:
    """One completion to sample."""

    request_index: int
    request: SampleRequest
    sample: int
    limit: int
    """Maximum number of tokens of the completion: max_tokens, or what the context leaves."""

    @property
    def tokens(self) -> int:
        """Maximum number of KV tokens that it needs; a completion's last token is never fed
        back.
        """
        return len(self.request.prompt_ids) + self.limit - 1

    @property
    def truncation(self) -> Truncation:
        """Greedy sampling takes the largest logit, which no cut removes."""
        return self.request.truncation if self.request.temperature > 0 else WHOLE_VOCABULARY


def pieces(jobs: Sequence[SampleJob], rows: int, most: int) -> list[Sequence[SampleJob]]:
    """Cut the jobs into consecutive parts of nearly equal size, which decode separately: at most
    `rows` jobs each, or else `most` parts.

    A row's bits depend on the other rows of its batch. The parts are therefore a function of the
    jobs alone, not of the number of workers.
    """
    count = min(-(-len(jobs) // rows), most)
    edges = [len(jobs) * number // count for number in range(count + 1)] if count else []
    return [jobs[start:stop] for start, stop in pairwise(edges)]


@dataclass
class RunningRow:
    """A completion under way, on the host."""

    number: int
    """Its place in the call: the youngest has the largest."""
    job: SampleJob
    draws: list[npt.NDArray[np.float64]] = field(default_factory=list)
    """[4] each."""
    launched: int = 0
    """Draws under way included."""
    slot: int = -1
    """Its place in the buffers; -1 while it waits."""
    pages: list[int] = field(default_factory=list)

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """Prompt and drawn tokens."""
        drawn = np.array([draws[0] for draws in self.draws], np.int32)
        return np.concatenate([self.job.request.prompt_ids, drawn]).astype(np.int32)

    def grows_past(self, tokens: int) -> bool:
        """Return True if the next step feeds it a token beyond this number."""
        return (
            self.launched < self.job.limit
            and len(self.job.request.prompt_ids) + self.launched > tokens
        )

    def completion(self, ends: Collection[int]) -> Completion:
        """Return the finished completion; `ends` are the end tokens."""
        tokens, logprobs, entropies, kept = np.array(self.draws).T
        return Completion(
            request=self.job.request_index,
            sample=self.job.sample,
            token_ids=tokens.astype(np.int32),
            logprobs=logprobs.astype(np.float32),
            entropies=entropies.astype(np.float32),
            finish_reason=FinishReason.STOP if tokens[-1] in ends else FinishReason.LENGTH,
            kept=kept.astype(np.int32) if self.job.truncation.active else None,
        )


def noise_of(rows: Sequence[RunningRow]) -> npt.NDArray[np.float64]:
    """Return the uniforms [R, NOISE_BLOCK] of the block of draws that each row's next one belongs
    to.
    """
    noise = np.empty((len(rows), NOISE_BLOCK))
    by_generator: dict[tuple[int, int], list[int]] = {}
    # The generator takes one seed and stream a call; a batch mostly has one.
    for number, row in enumerate(rows):
        key = row.job.request.noise
        by_generator.setdefault((key.seed, key.stream), []).append(number)
    for (seed, stream), same in by_generator.items():
        step, prompt, sample, first = np.array(
            [
                (
                    job.request.noise.step,
                    job.request.noise.prompt,
                    job.sample,
                    job.request.first_position + rows[number].launched // NOISE_BLOCK * NOISE_BLOCK,
                )
                for number in same
                for job in (rows[number].job,)
            ]
        ).T[:, :, None]
        noise[same] = uniform(seed, stream, step, prompt, sample, first + np.arange(NOISE_BLOCK))
    return noise


class Variant(NamedTuple):
    """Properties that at least one row of a run has; a captured step fixes them."""

    greedy: bool
    truncated: bool
    adapted: bool
    """True if the rows are under the adapter, not the base model."""

    @classmethod
    def of(cls, jobs: Sequence[SampleJob]) -> "Variant":
        return cls(
            greedy=any(job.request.temperature == 0 for job in jobs),
            truncated=any(job.truncation.active for job in jobs),
            adapted=jobs[0].request.adapter_slot != BASE_MODEL,
        )


class RowBuffers:
    """The state of the rows on the device that draws, in tensors that stay where they are."""

    def __init__(
        self,
        rows: int,
        pages: int,
        device: torch.device,
        eos_ids: npt.NDArray[np.int64],
        kept_sets: type[KeptSets] = KeptSets,
    ) -> None:
        """`pages` is M. `kept_sets` finds the cuts of truncated rows."""
        self.device, self._kept_sets, self._eos_ids = device, kept_sets, upload(eos_ids, device)
        self.token, self.position, self.sampled, self.limit, self.top_k = (
            torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(5)
        )
        """`token` is the next token to feed, at `position`. `sampled` counts the drawn tokens, at
        most `limit`.
        """
        self.temperature = torch.ones(rows, dtype=torch.float32, device=device)
        self.top_p, self.min_p = (
            torch.full((rows,), off, dtype=torch.float64, device=device) for off in (1.0, 0.0)
        )
        self.noise = torch.full((rows, NOISE_BLOCK), 0.5, dtype=torch.float64, device=device)
        """The uniforms of draws 64 k to 64 k + 63, among which is the row's next."""
        self.block_table = torch.zeros(rows, pages, dtype=torch.int32, device=device)
        self.done = torch.ones(rows, dtype=torch.bool, device=device)

    @property
    def of_rows(self) -> dict[str, Tensor]:
        """Return, by name, everything that has one entry per row."""
        return {
            name: value
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and name != "_eos_ids"
        }

    def begin(self, rows: Sequence[RunningRow]) -> Tensor:
        """Enter rows before their next draw, from the logits of their last token; returns their
        slots [R] on the device.
        """
        jobs, cuts = [row.job for row in rows], [row.job.truncation for row in rows]
        return self.put(
            rows,
            limit=np.array([job.limit for job in jobs]),
            temperature=np.array([job.request.temperature for job in jobs], np.float32),
            top_k=np.array([cut.top_k for cut in cuts]),
            top_p=np.array([cut.top_p for cut in cuts]),
            min_p=np.array([cut.min_p for cut in cuts]),
            position=np.array([len(row.ids) - 1 for row in rows]),
            sampled=np.array([len(row.draws) for row in rows]),
            done=np.zeros(len(rows), bool),
            block_table=self.pages_of(rows),
            noise=noise_of(rows),
        )

    def put(self, rows: Sequence[RunningRow], **values: npt.NDArray[np.generic]) -> Tensor:
        """Set the named buffers' entries of `rows`; returns their slots [R] on the device."""
        index = upload(np.array([row.slot for row in rows], np.int64), self.device)
        for name, value in values.items():
            buffer = getattr(self, name)
            buffer.index_copy_(0, index, upload(value, self.device).to(buffer.dtype))
        return index

    def pages_of(self, rows: Sequence[RunningRow]) -> npt.NDArray[np.int32]:
        """Return [R, M] the pages of rows, for `put`."""
        block_table = np.zeros((len(rows), self.block_table.shape[1]), np.int32)
        for number, row in enumerate(rows):
            block_table[number, : len(row.pages)] = row.pages
        return block_table

    def move(self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> None:
        """Rows `sources` go to `targets`, and stop where they were."""
        source, target = upload(sources, self.device), upload(targets, self.device)
        for buffer in self.of_rows.values():
            buffer.index_copy_(0, target, buffer.index_select(0, source))
        self.stop(sources)

    def stop(self, rows: npt.NDArray[np.int64]) -> None:
        self.done.index_fill_(0, upload(rows, self.device), True)

    def draw(self, rows: slice | Tensor, logits: Tensor, variant: Variant) -> Tensor:
        """Return [R, 4] draws of `rows` from logits [R, V], as `sampling.draw`, and feed the tokens
        back.

        Rows end at an end token, at their limit, or where the model's numbers are not finite. A
        finished row changes nothing.
        """
        place = self.sampled[rows] % NOISE_BLOCK
        drawn = draw(
            logits,
            self.temperature[rows],
            self.noise[rows].gather(1, place[:, None])[:, 0],
            TruncationSettings(self.top_k, self.top_p, self.min_p)(rows)
            if variant.truncated
            else None,
            greedy=variant.greedy,
            kept_sets=self._kept_sets,
        )
        active, token = ~self.done[rows], drawn[:, 0].long()
        sampled = self.sampled[rows] + active
        ended = (
            (token[:, None] == self._eos_ids).any(-1)
            | (sampled >= self.limit[rows])
            | ~drawn[:, 1:3].isfinite().all(-1)
        )
        self.done[rows] = ~active | ended
        self.sampled[rows] = sampled
        self.position[rows] = self.position[rows] + active
        self.token[rows] = torch.where(active, token, self.token[rows])
        return drawn


class DrawCopy:
    """[R, 4] draws that the host will read: token, log-prob, entropy, tokens kept."""

    def __init__(self, drawn: Tensor) -> None:
        """Begin the copy; `to` takes page-locked memory for it."""
        self._host = drawn.to("cpu", non_blocking=True, copy=True)
        self._event: torch.cuda.Event | None = None
        if drawn.device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch does not annotate it
            self._event.record()

    def read(self) -> npt.NDArray[np.float64]:
        """Wait for the copy, and return it."""
        if self._event is not None:
            self._event.synchronize()
        drawn: npt.NDArray[np.float64] = self._host.numpy()
        return drawn


def not_finite(job: SampleJob, position: int) -> RunFailed:
    """Return the failure of a row whose logits hold NaN or +inf."""
    key = job.request.noise
    return RunFailed(
        f"The model's logits are not finite at step {key.step}, prompt slot {key.prompt},"
        f" sample {job.sample}, completion token {position}. The adapter has diverged, or the"
        " dtype is too narrow. Lower [training] lr, resume from an earlier checkpoint, or set"
        ' [model] dtype = "fp32".'
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

"""A completion in both decoders: its job, its noise, its settings and its result.

Shape letters: R rows, T tokens of a completion.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from retrain.errors import RunFailed
from retrain.inference_engine.base import WHOLE_VOCABULARY, SampleRequest, Truncation
from retrain.inference_engine.sampling import Draws
from retrain.model.budget import PREFILL_TOKENS
from retrain.noise import uniform
from retrain.types import Completion, FinishReason

Prompted = TypeVar("Prompted")

NOISE_BLOCK = 64
"""Positions whose noise is computed at once."""


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
    """Cut the jobs into consecutive parts of nearly equal size, which decode apart from each other:
    at most `rows` jobs each, or else `most` parts.

    A row's bits depend on the rows beside it, so the parts are a function of the jobs alone, not of
    the number of workers.
    """
    count = min(-(-len(jobs) // rows), most)
    edges = []
    if count:
        edges = [len(jobs) * number // count for number in range(count + 1)]
    return [jobs[start:stop] for start, stop in pairwise(edges)]


def row_settings(jobs: Sequence[SampleJob]) -> dict[str, npt.NDArray[np.generic]]:
    """Return how each row is sampled, by name: [R] each."""
    cuts = [job.truncation for job in jobs]
    return {
        "limit": np.array([job.limit for job in jobs]),
        "temperature": np.array([job.request.temperature for job in jobs], np.float32),
        "top_k": np.array([cut.top_k for cut in cuts]),
        "top_p": np.array([cut.top_p for cut in cuts]),
        "min_p": np.array([cut.min_p for cut in cuts]),
    }


def noise_key(job: SampleJob) -> tuple[int, int, int, int, int]:
    """Return the coordinates of the job's noise, but for the position."""
    key = job.request.noise
    return key.seed, key.stream, key.step, key.prompt, job.sample


def noise_block(
    keys: npt.NDArray[np.int64], first: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return the uniforms [R, NOISE_BLOCK] of the positions from `first` [R], for rows with noise
    keys [R, 5].
    """
    positions = first[:, None] + np.arange(NOISE_BLOCK)
    noise = np.empty(positions.shape)
    # The generator takes one seed and stream a call; a batch mostly has one.
    for seed, stream in np.unique(keys[:, :2], axis=0):
        same = (keys[:, :2] == (seed, stream)).all(axis=1)
        step, prompt, sample = (keys[same, column][:, None] for column in (2, 3, 4))
        noise[same] = uniform(int(seed), int(stream), step, prompt, sample, positions[same])
    return noise


def completion_of(job: SampleJob, draws: Draws, ends: Collection[int]) -> Completion:
    """Return the finished completion from its draws [T]; `ends`: the end tokens."""
    kept = draws.kept if job.truncation.active else None
    return Completion(
        request=job.request_index,
        sample=job.sample,
        token_ids=draws.tokens.astype(np.int32),
        logprobs=draws.logprobs.astype(np.float32),
        entropies=draws.entropies.astype(np.float32),
        finish_reason=(FinishReason.STOP if int(draws.tokens[-1]) in ends else FinishReason.LENGTH),
        kept=None if kept is None else kept.astype(np.int32),
    )


def not_finite(job: SampleJob, position: int) -> RunFailed:
    """Return the failure of a row whose logits hold NaN or +inf."""
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

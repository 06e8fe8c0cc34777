"""Prompts, lengths and rows as functions of a few numbers, so that every process makes the same
ones. numpy only.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FIRST_TOKEN = 3
"""Random ids start above the usual special tokens."""


@dataclass(frozen=True)
class Job:
    """Prompts and, per completion, the number of tokens; completion j of prompt i is lengths[i *
    group + j].
    """

    prompts: list[npt.NDArray[np.int32]]
    group: int
    lengths: list[int]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def uniform(self) -> bool:
        return len(set(self.lengths)) == 1


@dataclass(frozen=True)
class Rows:
    """Prompts with sampled completions, and one advantage per completion."""

    job: Job
    completions: list[npt.NDArray[np.int32]]
    advantages: npt.NDArray[np.float32]

    def prompt_of(self, row: int) -> npt.NDArray[np.int32]:
        return self.job.prompts[row // self.job.group]


def make_job(
    vocabulary: int,
    prompts: int,
    group: int,
    tokens: int,
    ragged: bool,
    step: int,
    prompt_tokens: int | None = None,
) -> Job:
    """Random prompts, new at each step, of `prompt_tokens` ids, or of tokens / 2 to tokens ids.

    Ragged completions have tokens / 8 to `tokens` tokens, the same at each step.
    """
    shape, content = np.random.default_rng(0), np.random.default_rng([1, step])
    sizes = (
        [prompt_tokens] * prompts
        if prompt_tokens
        else shape.integers(max(1, tokens // 2), tokens + 1, prompts).tolist()
    )
    made = [content.integers(FIRST_TOKEN, vocabulary, size).astype(np.int32) for size in sizes]
    lengths = (
        shape.integers(max(1, tokens // 8), tokens + 1, prompts * group).tolist()
        if ragged
        else [tokens] * (prompts * group)
    )
    return Job(made, group, lengths)


def make_rows(vocabulary: int, prompts: int, group: int, tokens: int, ragged: bool) -> Rows:
    """Random completions. No advantage is 0, so that every row is trained on; their mean is not 0,
    so that the loss is not 0.
    """
    job = make_job(vocabulary, prompts, group, tokens, ragged, 0)
    rng = np.random.default_rng(2)
    completions = [
        rng.integers(FIRST_TOKEN, vocabulary, length).astype(np.int32) for length in job.lengths
    ]
    return Rows(job, completions, rng.standard_normal(prompts * group).astype(np.float32))

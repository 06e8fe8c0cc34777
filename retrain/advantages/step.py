"""The tokens of one step, all completions concatenated in one flat array, so that credit assignment
is a few array operations.

Shape letters: N completions, n tokens of all of them together.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from retrain.advantages.algorithms import AdvantageContext, no_reference
from retrain.types import (
    Completion,
    Example,
    FinishReason,
    Float32Array,
    Float64Array,
    Group,
    Prompt,
    Score,
    Scored,
    Trajectory,
)

# -- flat ragged arrays ----------------------------------------------------------------------------


Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Scalar = TypeVar("Scalar", bound=np.generic)


class Segments:
    """The place of each completion in the flat arrays; completions may be empty."""

    def __init__(self, lengths: Iterable[int]) -> None:
        self.lengths: Int64Array = np.fromiter(lengths, dtype=np.int64)
        """[N]"""
        self.offsets: Int64Array = np.concatenate(
            [np.zeros(1, dtype=np.int64), np.cumsum(self.lengths)]
        )
        """[N + 1], from 0 to n."""
        # reduceat reads a foreign element where a segment is empty.
        self._filled = np.flatnonzero(self.lengths)
        self._starts = self.offsets[self._filled]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def total(self) -> int:
        return int(self.offsets[-1])

    def sums(self, values: Float64Array) -> Float64Array:
        """Sum over each completion, [n] -> [N]; 0 if it is empty."""
        return self._reduce(np.add, values)

    def minima(self, values: Float64Array) -> Float64Array:
        """Take the minimum of each completion, [n] -> [N]; 0 if it is empty."""
        return self._reduce(np.minimum, values)

    def maxima(self, values: Float64Array) -> Float64Array:
        """Take the maximum of each completion, [n] -> [N]; 0 if it is empty."""
        return self._reduce(np.maximum, values)

    def means(self, values: Float64Array) -> Float64Array:
        """Return the average over each completion, [n] -> [N]; 0 if it is empty. A constant
        completion's mean is that constant to the last bit.
        """
        means = self.sums(values) / np.maximum(self.lengths, 1)
        low, high = self.minima(values), self.maxima(values)
        return np.where(low == high, low, means)

    def spread(self, per_segment: Float64Array) -> Float64Array:
        """Repeat each value over its completion's tokens, [N] -> [n]."""
        return np.repeat(per_segment, self.lengths)

    def split(self, values: npt.NDArray[Scalar]) -> list[npt.NDArray[Scalar]]:
        """Return the N views of [n] values, one per completion."""
        return [
            values[start:stop]
            for start, stop in zip(self.offsets[:-1], self.offsets[1:], strict=True)
        ]

    def locate(self, position: int) -> tuple[int, int]:
        """Return the completion of a flat position, and the position within it."""
        segment = int(np.searchsorted(self.offsets, position, side="right")) - 1
        return segment, position - int(self.offsets[segment])

    def _reduce(self, operation: np.ufunc, values: Float64Array) -> Float64Array:
        reduced = np.zeros(len(self), dtype=np.float64)
        if len(self._filled):
            reduced[self._filled] = operation.reduceat(values, self._starts)
        return reduced


def flatten(rows: Iterable[Sequence[float] | npt.NDArray[np.floating]]) -> Float64Array:
    """Join N sequences into one float64 array [n]."""
    arrays = [np.asarray(row, dtype=np.float64) for row in rows]
    if arrays:
        return np.concatenate(arrays)
    return np.zeros(0, dtype=np.float64)


# -- a step's tokens -------------------------------------------------------------------------------


Item = TypeVar("Item")
Teacher = Callable[[], Float64Array]
"""Computes [n] log-probs of the step's tokens by the teacher of `[algorithm] teacher`."""


@dataclass(frozen=True)
class StepTokens:
    """The action tokens of one step: P groups with G completions each, N in all, whose n tokens lie
    end to end. Raises ValueError for arrays that do not fit.

    A trajectory of several turns counts as one completion: credit knows its actions, one after the
    other.
    """

    rewards: list[list[float]]
    """[P][G] rewards."""
    segments: Segments
    """The N completions, group by group."""
    logprobs: Float64Array
    """[n] log-probs of the sampled policy."""
    entropies: Float64Array | None
    """[n] Shannon entropies in nats; None if the engine has none."""
    planning: BoolArray
    """[n] True inside a planning phrase; all False for a condition that does not look for them."""
    in_loss: BoolArray
    """[N] False for a completion that the loss leaves out."""
    sources: Sequence[Group] | None = field(default=None, repr=False)
    """[P] the judged groups; None for a made-up step."""
    teacher: Teacher = field(default=no_reference, repr=False)
    group_of: Int64Array = field(init=False)
    """[N] number of each completion's group."""

    def __post_init__(self) -> None:
        sizes = [len(rewards) for rewards in self.rewards]
        object.__setattr__(self, "group_of", np.repeat(np.arange(len(sizes)), sizes))
        if len(self.segments) != sum(sizes):
            raise ValueError(f"{len(self.segments)} completions for {sum(sizes)} rewards")
        if len(self.planning) != self.segments.total:
            raise ValueError(f"{len(self.planning)} mask entries for {self.segments.total} tokens")
        self._check(self.logprobs, "log-prob")
        if self.entropies is not None:
            self._check(self.entropies, "entropy")

    @classmethod
    def of(
        cls,
        groups: Sequence[Group],
        planning: BoolArray | None,
        mask_truncated: bool,
        teacher: Teacher = no_reference,
    ) -> "StepTokens":
        """Build the arrays from judged groups; without a planning mask [n] every token counts as
        execution.
        """
        trajectories = list(chain.from_iterable(group.trajectories for group in groups))
        segments = Segments(len(trajectory.token_ids) for trajectory in trajectories)
        for index, trajectory in enumerate(trajectories):
            if len(trajectory.logprobs) != len(trajectory.token_ids):
                raise ValueError(
                    f"completion {index}: {len(trajectory.logprobs)} log-probs for"
                    f" {len(trajectory.token_ids)} tokens"
                )
        entropies = [
            trajectory.entropies for trajectory in trajectories if trajectory.entropies is not None
        ]
        return cls(
            rewards=[group.rewards for group in groups],
            segments=segments,
            logprobs=flatten(trajectory.logprobs for trajectory in trajectories),
            entropies=flatten(entropies) if len(entropies) == len(trajectories) else None,
            planning=np.zeros(segments.total, dtype=np.bool_) if planning is None else planning,
            in_loss=np.array(
                [
                    not (mask_truncated and one.finish_reason is FinishReason.LENGTH)
                    for one in trajectories
                ],
                dtype=np.bool_,
            ),
            sources=groups,
            teacher=teacher,
        )

    @cached_property
    def reference_logprobs(self) -> Float64Array:
        """[n] log-probs by the teacher, computed when they are first read. Raises NoTeacher, and
        ValueError for one that is not finite.
        """
        logprobs = np.asarray(self.teacher(), dtype=np.float64)
        self._check(logprobs, "the teacher's log-prob")
        return logprobs

    @cached_property
    def nested_reference(self) -> list[list[list[float]]]:
        """The same as plain lists [P][G][T]."""
        return self.nested(self.reference_logprobs)

    @property
    def token_counts(self) -> list[list[int]]:
        """[P][G] action tokens of each completion."""
        return self.by_group(self.segments.lengths.tolist())

    def by_group(self, per_completion: Sequence[Item]) -> list[list[Item]]:
        """Group values by prompt, [N] -> [P][G]."""
        edges = np.cumsum([0, *(len(rewards) for rewards in self.rewards)]).tolist()
        return [list(per_completion[start:stop]) for start, stop in pairwise(edges)]

    def contexts(
        self, step: int, params: dict[str, Any], max_tokens: int
    ) -> list[AdvantageContext]:
        """Return [P] each group as a plugin sees it."""
        sources: Sequence[Group | None] = self.sources or [None] * len(self.rewards)
        given = zip(self.rewards, self.token_counts, sources, strict=True)
        return [
            AdvantageContext(
                list(rewards),
                counts,
                step,
                group,
                params,
                source,
                max_tokens,
                partial(self.reference_of, group),
            )
            for group, (rewards, counts, source) in enumerate(given)
        ]

    def reference_of(self, group: int) -> list[list[float]]:
        """Return [G][T] the teacher's log-probs of one group."""
        return self.nested_reference[group]

    def place(self, completion: int) -> str:
        """Name a completion by its flat index: group 3, completion 1."""
        group, number = self.of_group(completion)
        return f"group {group}, completion {number}"

    def of_group(self, completion: int) -> tuple[int, int]:
        """Return the group of a completion, and its number within it, from its flat index."""
        group = int(self.group_of[completion])
        return group, completion - int(np.searchsorted(self.group_of, group))

    def token_place(self, token: int) -> str:
        completion, position = self.segments.locate(token)
        return f"{self.place(completion)}, position {position}"

    def nested(self, values: Float64Array) -> list[list[list[float]]]:
        """Turn flat values into plain lists, [n] -> [P][G][T]."""
        return self.by_group([piece.tolist() for piece in self.segments.split(values)])

    def nested_masks(self) -> list[list[list[int]]]:
        """Return the planning mask as plain lists [P][G][T]."""
        return self.by_group(
            [piece.astype(int).tolist() for piece in self.segments.split(self.planning)]
        )

    def token_groups(self) -> Int64Array:
        """Return the group of each token, [n]."""
        return np.repeat(self.group_of, self.segments.lengths)

    def _check(self, values: Float64Array, name: str) -> None:
        """Refuse NaN and +inf, and a log-prob of -inf, since a ratio against it has no value."""
        if len(values) != self.segments.total:
            raise ValueError(f"{len(values)} {name} values for {self.segments.total} tokens")
        for token in np.flatnonzero(~np.isfinite(values)):
            raise ValueError(
                f"{self.token_place(int(token))}: {name} is {values[token]}, it must be a finite"
                " number"
            )


def made_up_group(
    example: Example, slot: int, scores: Sequence[Score], logprobs: Sequence[Float32Array]
) -> Group:
    """Return a judged group with these log-probs and no texts, for trials."""
    members = []
    for sample, (score, row) in enumerate(zip(scores, logprobs, strict=False)):
        ids = np.arange(len(row), dtype=np.int32)
        completion = Completion(slot, sample, ids, row, -row, FinishReason.STOP)
        members.append(Scored(Trajectory.of(completion), "", score))
    return Group(Prompt(example, "", np.zeros(1, np.int32)), slot, members)

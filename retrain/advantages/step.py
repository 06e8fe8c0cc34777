"""The tokens of one step as credit assignment sees them, and what is recorded about them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from retrain.advantages.ragged import BoolArray, Float64Array, Int64Array, Segments, flatten
from retrain.types import FinishReason, Group

Nested = list[list[list[float]]]
"""[P][G][T]"""


@dataclass(frozen=True)
class StepTokens:
    """P groups with G completions each, N in all, whose n action tokens lie end to end. Raises ValueError for arrays that do not fit."""

    rewards: list[list[float]]
    """[P][G]."""
    segments: Segments
    """N completions, group by group."""
    logprobs: Float64Array
    """[n]"""
    entropies: Float64Array | None
    """[n] Shannon entropies in nats; None where the engine has none."""
    planning: BoolArray
    """[n] inside a planning phrase; all False where nobody looked."""
    in_loss: BoolArray
    """[N] False for a completion that the loss leaves out."""
    group_of: Int64Array = field(init=False)
    """[N] the group of each completion."""

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
    def of(cls, groups: Sequence[Group], planning: BoolArray | None, mask_truncated: bool) -> "StepTokens":
        """From judged groups; without a planning mask [n] every token counts as execution."""
        completions = [completion for group in groups for completion in group.completions]
        segments = Segments(len(completion.token_ids) for completion in completions)
        for index, completion in enumerate(completions):
            if len(completion.logprobs) != len(completion.token_ids):
                raise ValueError(f"completion {index}: {len(completion.logprobs)} log-probs for {len(completion.token_ids)} tokens")
        entropies = [completion.entropies for completion in completions if completion.entropies is not None]
        return cls(
            rewards=[group.rewards for group in groups],
            segments=segments,
            logprobs=flatten(completion.logprobs for completion in completions),
            entropies=flatten(entropies) if len(entropies) == len(completions) else None,
            planning=np.zeros(segments.total, dtype=np.bool_) if planning is None else planning,
            in_loss=np.array([not (mask_truncated and c.finish_reason is FinishReason.LENGTH) for c in completions], dtype=np.bool_),
        )

    @property
    def token_counts(self) -> list[list[int]]:
        """[P][G]."""
        counts = iter(self.segments.lengths.tolist())
        return [[next(counts) for _ in rewards] for rewards in self.rewards]

    def place(self, completion: int) -> str:
        """Names a completion by its flat index: group 3, completion 1."""
        group = int(self.group_of[completion])
        return f"group {group}, completion {completion - int(np.searchsorted(self.group_of, group))}"

    def token_place(self, token: int) -> str:
        completion, position = self.segments.locate(token)
        return f"{self.place(completion)}, position {position}"

    def nested(self, values: Float64Array) -> Nested:
        """[n] -> [P][G][T] plain lists."""
        pieces = iter(self.segments.split(values))
        return [[next(pieces).tolist() for _ in rewards] for rewards in self.rewards]

    def nested_masks(self) -> list[list[list[int]]]:
        pieces = iter(self.segments.split(self.planning.astype(np.float64)))
        return [[next(pieces).astype(int).tolist() for _ in rewards] for rewards in self.rewards]

    def token_groups(self) -> Int64Array:
        """[n] the group of each token."""
        return np.repeat(self.group_of, self.segments.lengths)

    def _check(self, values: Float64Array, name: str) -> None:
        """Refuse NaN and +inf; a log-prob of -inf too, since a ratio against it is undefined."""
        if len(values) != self.segments.total:
            raise ValueError(f"{len(values)} {name} values for {self.segments.total} tokens")
        for token in np.flatnonzero(~np.isfinite(values)):
            raise ValueError(f"{self.token_place(int(token))}: {name} is {values[token]}, it must be a finite number")


@dataclass(frozen=True)
class CreditStatistics:
    """What the step record takes from credit assignment, in its names; None where there is nothing to average.

    Means and variances (population) weigh every token of the judged completions equally; skipped groups count. Execution tokens are
    all tokens outside planning phrases, i.e. all tokens where the condition does not look for phrases.
    """

    exec_entropy_mean: float | None = None
    exec_entropy_var: float | None = None
    plan_entropy_mean: float | None = None
    plan_entropy_var: float | None = None
    exec_surprisal_mean: float | None = None
    exec_surprisal_var: float | None = None
    plan_surprisal_mean: float | None = None
    plan_surprisal_var: float | None = None
    max_abs_advantage: float | None = None
    surprisal_kept_fraction: float | None = None
    """Of the tokens that the mask chose from; None with the mask off."""
    surprisal_tau: float | None = None
    """The mask's threshold; None with the mask off, and where every group or completion has its own."""
    informative_fraction: float | None = None
    """Of the groups: those in which some token has an advantage."""
    groups_skipped_all_correct: int = 0
    groups_skipped_all_wrong: int = 0
    groups_skipped_other: int = 0


def mean_and_variance(values: Float64Array) -> tuple[float, float] | tuple[None, None]:
    return (float(values.mean()), float(values.var())) if len(values) else (None, None)

"""The nouns of one training step, from an example to a gradient.

Shape letters: P prompt tokens, T action tokens (sampled, the sampled EOS included), G completions of a group.
Token ids are the record and text is a view: nothing here is ever re-encoded.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


class ChatMessage(TypedDict):
    role: str
    content: str


@dataclass(frozen=True)
class Example:
    """A problem and its reference answer, as a data source yields it."""

    prompt: str | list[ChatMessage]
    reference: str
    task: str = "default"
    info: dict[str, Any] | None = None
    """Everything else in the source: subject, level, columns that retrain does not read."""
    example_id: str = ""
    """Stable over runs; where a source leaves it empty it becomes "<source>-<index>"."""


@dataclass(frozen=True)
class Prompt:
    """An example rendered with the chat template and encoded once."""

    example: Example
    text: str
    token_ids: Int32Array
    """[P]"""

    @property
    def prompt_id(self) -> str:
        return self.example.example_id


class FinishReason(StrEnum):
    STOP = "stop"
    """The model sampled an end-of-sequence token, which is the last action."""
    LENGTH = "length"


@dataclass(frozen=True)
class Completion:
    """What an engine sampled for one prompt. It holds no text: an engine knows token ids only."""

    request: int
    """Index of the request in the call to `sample`."""
    sample: int
    """The noise coordinate: 0..G-1 in the first draw, G..2G-1 in the next."""
    token_ids: Int32Array
    """[T], the sampled EOS included, nothing after it."""
    logprobs: Float32Array
    """[T] natural log-probabilities of the sampled distribution: softmax(logits / temperature), renormalised where it is truncated."""
    entropies: Float32Array | None
    """[T] Shannon entropy in nats of the distribution each token was drawn from; None where the engine has only log-probs."""
    finish_reason: FinishReason
    kept: Int32Array | None = None
    """[T] each token was drawn from this many most probable tokens; None where it was the whole vocabulary."""
    kept_ids: tuple[Int32Array, ...] | None = None
    """[T] the tokens themselves, from an engine that says them for a trainer elsewhere."""


class Outcome(StrEnum):
    RIGHT = "right"
    WRONG = "wrong"
    COULD_NOT_JUDGE = "could_not_judge"


@dataclass(frozen=True)
class Score:
    """A verdict on one completion. `reward` is None exactly when the outcome is COULD_NOT_JUDGE."""

    outcome: Outcome
    reward: float | None
    reason: str = ""
    """One sentence saying why a completion could not be judged; empty otherwise."""

    @classmethod
    def of(cls, reward: float, correct_threshold: float) -> "Score":
        """The verdict on a completion that could be judged: right above the threshold."""
        return cls(Outcome.RIGHT if reward > correct_threshold else Outcome.WRONG, reward)


@dataclass(frozen=True)
class Scored:
    """A completion, its text, and the verdict on it."""

    completion: Completion
    text: str
    score: Score


@dataclass(frozen=True)
class Group:
    """The scored completions of one prompt."""

    prompt: Prompt
    slot: int
    """The prompt's place in the step: the noise coordinate that all conditions share."""
    members: list[Scored]
    """[G] in the order of their sample index."""

    def judged(self) -> "Group":
        """The same group without the completions that could not be judged."""
        return replace(self, members=[member for member in self.members if member.score.outcome is not Outcome.COULD_NOT_JUDGE])

    @property
    def completions(self) -> list[Completion]:
        """[G]."""
        return [member.completion for member in self.members]

    @property
    def rewards(self) -> list[float]:
        """Rewards of the completions that were judged; [G] in a judged group."""
        return [member.score.reward for member in self.members if member.score.reward is not None]

    @property
    def correct(self) -> int:
        """Completions that are right."""
        return sum(member.score.outcome is Outcome.RIGHT for member in self.members)

    def __len__(self) -> int:
        return len(self.members)


RowKey = tuple[int, int]
"""(number of the group, sample index): names a row within its step."""


@dataclass(frozen=True)
class Row:
    """One sequence as the learner sees it. T counts the tokens inside `spans`."""

    token_ids: Int32Array
    """[P + T] and, in several turns, the environment's tokens between the actions."""
    spans: tuple[tuple[int, int], ...]
    """Half-open ranges of action positions in `token_ids`, in order and disjoint; the first starts at 1 or later."""
    logprobs: Float32Array
    """[T] log-probs as the sampler recorded them, at the sampling temperature."""
    advantages: Float32Array
    """[T]"""
    group: int
    """The number of its group in the step; rows of one group share their prompt."""
    sample: int = 0
    """The sample index of its completion within the group."""
    trained: bool = True
    """The loss has a term for the row. False for a row that counts in the divisor of aggregation = "constant" and nowhere else."""
    counted: int | None = None
    """Tokens that count in a mean of the policy term. None: all T. 0: the row has KL and entropy terms only."""
    kept: Int32Array | None = None
    """[T] each action was drawn from this many most probable tokens; None where it was the whole vocabulary."""
    kept_ids: tuple[Int32Array, ...] | None = None
    """[T] the tokens themselves, where the engine says them."""

    @classmethod
    def from_completion(
        cls,
        prompt: Prompt,
        completion: Completion,
        advantages: Float32Array,
        group: int,
        counted: int | None = None,
        trained: bool = True,
    ) -> "Row":
        """A single-turn row: every sampled token is an action, the sampled EOS included."""
        start, count = len(prompt.token_ids), len(completion.token_ids)
        return cls(
            token_ids=np.concatenate([prompt.token_ids, completion.token_ids]).astype(np.int32),
            spans=((start, start + count),) if count else (),
            logprobs=completion.logprobs,
            advantages=np.asarray(advantages, np.float32),
            group=group,
            sample=completion.sample,
            trained=trained,
            counted=counted,
            kept=completion.kept,
            kept_ids=completion.kept_ids,
        )

    @property
    def key(self) -> RowKey:
        return self.group, self.sample

    @property
    def num_actions(self) -> int:
        return sum(stop - start for start, stop in self.spans)

    @property
    def num_counted(self) -> int:
        return self.num_actions if self.counted is None else self.counted

    def action_positions(self) -> Iterator[int]:
        for start, stop in self.spans:
            yield from range(start, stop)


@dataclass(frozen=True)
class StepResult:
    """What one call to `Backend.train` did.

    Ratio statistics count each action token of the trained rows once. Where old log-probs are recomputed, they are taken before the first
    optimizer step; elsewhere in the first pass, whose later minibatches already contain the updates of the earlier ones.
    """

    loss: float | None
    """Mean over the updates of this step; None when no row was trained."""
    grad_norm: float | None
    ratio_mean: float | None
    """exp(learner - sampler log-prob) over action tokens."""
    ratio_max: float | None
    mismatch_k1: float | None
    """mean(old - new)."""
    mismatch_k3: float | None
    """mean(exp(d) - 1 - d), d = new - old."""
    ess: float | None
    """Effective sample size of the ratios as a fraction of the tokens: (sum w)^2 / (n sum w^2)."""
    updates: int
    nonfinite_updates: int
    """Updates skipped because a loss, gradient or log-prob was not finite."""
    nonfinite_tensor: str = ""
    """The name of the first such tensor."""
    log_ratio_mean: float | None = None
    """Mean of |learner - sampler log-prob| over action tokens, in nats; the next three fields are its quantiles."""
    log_ratio_p50: float | None = None
    log_ratio_p90: float | None = None
    log_ratio_p99: float | None = None
    loss_is_placeholder: bool = False
    """True where an asynchronous backend reports a number that is not this step's loss."""
    ratio_min: float | None = None
    clip_fraction: float | None = None
    """Tokens (gspo: sequences) whose policy gradient the clip removed, or whose weight it bounded (cispo), as a fraction of those with an
    advantage, over all updates of the step."""


@dataclass(frozen=True)
class MachineChoices:
    """Settings chosen from the machine before the first step. A resumed run uses the stored choices, so that it stays byte-exact."""

    threads: int
    """Intra-op threads of torch."""
    decode_rows: int
    """Most rows that decode together."""
    decode_tokens: int
    """Most KV tokens over all rows that decode together."""
    micro_batch_tokens: int
    """Most tokens in one forward and backward pass of the learner."""
    gradient_checkpointing: bool
    merge_adapter: bool = False
    """Sampler and learner compute with a scratch copy of the weights that contains the adapter."""
    workers: int = field(default=1, compare=False)
    """Processes that share the pieces of a step, with `threads` each. The bytes do not depend on their number, so a resumed run may choose
    another."""

"""The nouns of one training step, from an example to a gradient.

Shape letters: P prompt tokens, T action tokens (sampled, the sampled EOS included), G completions
of a group. Token ids are the record and text is a view: nothing here is ever re-encoded.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, NotRequired, Self, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]

WHOLE_MODEL = "model.safetensors"
"""The file of a model trained as a whole. retrain never writes it in place, because it may be a
link.
"""


THOUGHT_TAGS: tuple[tuple[str, str], ...] = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
    ("<|channel>thought", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("◁think▷", "◁/think▷"),
)
"""Opening and closing texts of the thoughts of known models."""


class LogLine(str):
    """A line of progress; a pipe and output.log show it whole, and a terminal shows `brief`."""

    brief: str

    def __new__(cls, line: str, brief: str = "") -> Self:
        self = super().__new__(cls, line)
        self.brief = brief
        return self


class Doing(LogLine):
    """The progress of a long phase, for the bar alone."""


class ChatMessage(TypedDict):
    """A message of a chat, with the keys of a tool's use where it has them."""

    role: str
    content: str
    name: NotRequired[str]
    tool_calls: NotRequired[list[Any]]
    tool_call_id: NotRequired[str]


@dataclass(frozen=True)
class Example:
    """A problem and its reference answer, as a data source yields it."""

    prompt: str | list[ChatMessage]
    reference: str
    task: str = "default"
    info: dict[str, Any] | None = None
    """Everything else in the source, such as the subject: columns that retrain does not read."""
    example_id: str = ""
    """A name that is stable over runs; if a source leaves it empty, it becomes
    "<source>-<index>"."""


@dataclass(frozen=True)
class Prompt:
    """An example rendered with the chat template and encoded once."""

    example: Example
    text: str
    token_ids: Int32Array
    """[P] token ids."""
    messages: tuple[ChatMessage, ...] = ()
    """The messages for the chat template; empty for a prompt without text."""

    @property
    def prompt_id(self) -> str:
        return self.example.example_id


class FinishReason(StrEnum):
    STOP = "stop"
    """The model sampled an end-of-sequence token, which is the last action."""
    LENGTH = "length"


@dataclass(frozen=True)
class Completion:
    """An engine's answer to one prompt."""

    request: int
    """Index of the request in the call to `sample`."""
    sample: int
    """The noise coordinate: 0..G-1 in the first draw, G..2G-1 in the next."""
    token_ids: Int32Array
    """[T] sampled tokens, the sampled EOS included; nothing comes after it."""
    logprobs: Float32Array
    """[T] natural log-probabilities of the sampled distribution: softmax(logits / temperature),
    renormalized if truncated.
    """
    entropies: Float32Array | None
    """[T] Shannon entropy in nats of the distribution that gave each token; None if the engine has
    only log-probs.
    """
    finish_reason: FinishReason
    kept: Int32Array | None = None
    """[T] the number of most probable tokens from which the sampler drew each token; it is None for
    the whole vocabulary.
    """
    kept_ids: tuple[Int32Array, ...] | None = None
    """[T] the ids of those tokens, if the engine returns them for a trainer elsewhere."""
    text: str | None = None
    """In an evaluation, the text from a server that returns no token ids: `token_ids` are this text
    encoded again, for counting, and `logprobs` are NaN. It is None otherwise, since an engine knows
    token ids only.
    """
    server: str = ""
    """The address of the server that sampled it; "" if no server did."""


MAX_REWARD = 1e15
"""The largest reward, of either sign: squared gradients of a larger one may overflow in float32."""
_NO_TOKENS = np.zeros(0, np.int32)


@dataclass(frozen=True)
class Turn:
    """One reply of the model, and the new context tokens since its last reply."""

    completion: Completion
    context: Int32Array = field(default_factory=lambda: _NO_TOKENS)
    """[C] the environment's tokens before the reply, which continue the tokens so far; empty in a
    first turn, which follows the prompt."""
    restarts: bool = False
    """True after a rewrite of the history: `context` is the whole prompt of this turn, and the
    model saw nothing from before.
    """


@dataclass(frozen=True)
class Trajectory:
    """One episode after its prompt, of one turn or several. T counts the action tokens of all
    turns.
    """

    turns: tuple[Turn, ...]
    """The turns in order, at least one."""
    cut: bool = False
    """True if it ended because it had no tokens for another reply."""

    @classmethod
    def of(cls, completion: Completion) -> "Trajectory":
        """Make a trajectory of one turn from a completion."""
        return cls((Turn(completion),))

    @property
    def completions(self) -> list[Completion]:
        return [turn.completion for turn in self.turns]

    @property
    def sample(self) -> int:
        """The sample index, a coordinate of the noise and the same in every turn."""
        return self.turns[0].completion.sample

    @property
    def finish_reason(self) -> FinishReason:
        """LENGTH if the tokens of the trajectory ran out, otherwise STOP."""
        return FinishReason.LENGTH if self.cut else self.turns[-1].completion.finish_reason

    @property
    def num_actions(self) -> int:
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    @property
    def num_tokens(self) -> int:
        """Number of actions and of the environment's tokens."""
        return self.num_actions + sum(len(turn.context) for turn in self.turns)

    @cached_property
    def token_ids(self) -> Int32Array:
        """[T] action tokens."""
        return _joined([completion.token_ids for completion in self.completions])

    @cached_property
    def logprobs(self) -> Float32Array:
        """[T] log-probs of the actions."""
        return _joined([completion.logprobs for completion in self.completions])

    @cached_property
    def entropies(self) -> Float32Array | None:
        """[T] entropies at the actions; None if the engine has only log-probs."""
        return joined_or_none([completion.entropies for completion in self.completions])

    @cached_property
    def kept(self) -> Int32Array | None:
        """[T] number of tokens from which the sampler drew each action; None without truncation."""
        return joined_or_none([completion.kept for completion in self.completions])

    @cached_property
    def kept_ids(self) -> tuple[Int32Array, ...] | None:
        """[T] the ids of those tokens; None if an engine did not return them."""
        known = [
            completion.kept_ids
            for completion in self.completions
            if completion.kept_ids is not None
        ]
        if len(known) == len(self.turns):
            return tuple(chain.from_iterable(known))
        return None

    def parts(self) -> list[tuple[Turn, ...]]:
        """Group the turns into parts, which begin at the first turn and at each restart."""
        starts = [
            0,
            *(number for number, turn in enumerate(self.turns) if number and turn.restarts),
            len(self.turns),
        ]
        return [self.turns[start:stop] for start, stop in pairwise(starts)]


Array = TypeVar("Array", Int32Array, Float32Array)


def _joined(arrays: Sequence[Array]) -> Array:
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate(arrays)


def joined_or_none(arrays: Sequence[Array | None]) -> Array | None:
    known = [array for array in arrays if array is not None]
    if len(known) == len(arrays):
        return _joined(known)
    return None


class Outcome(StrEnum):
    RIGHT = "right"
    WRONG = "wrong"
    COULD_NOT_JUDGE = "could_not_judge"


@dataclass(frozen=True)
class JudgeUsage:
    """The requests, tokens and cost that the judge's language model took for one verdict, or for
    all of a step.
    """

    requests: int = 0
    """HTTP requests sent, retries included."""
    cached: int = 0
    """Verdicts that came from the cache, or from the pending verdict on an identical completion."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None
    """The price by `[reward] judge_prices`, or as the server reports it; None if neither is
    known."""

    def __add__(self, other: "JudgeUsage") -> "JudgeUsage":
        costs = [usage.cost for usage in (self, other) if usage.cost is not None]
        return JudgeUsage(
            requests=self.requests + other.requests,
            cached=self.cached + other.cached,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            cost=sum(costs) if costs else None,
        )


@dataclass(frozen=True)
class Score:
    """A verdict on one completion. `reward` is None exactly when the outcome is COULD_NOT_JUDGE."""

    outcome: Outcome
    reward: float | None
    reason: str = ""
    """One sentence saying why a completion has no verdict; empty otherwise."""
    usage: JudgeUsage | None = field(default=None, compare=False)
    """The judge's usage; None if no language model judged."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Quantities that an environment measured in addition to the reward."""
    turn_rewards: tuple[float, ...] = ()
    """The reward of each turn; empty if the environment judges the whole."""
    parts: tuple[float, ...] = field(default=(), compare=False)
    """The rewards of `[reward] type` before their weights; empty where an environment judges."""

    @classmethod
    def of(cls, reward: float, correct_threshold: float) -> "Score":
        """Return the verdict on a judged completion: it is right above the threshold."""
        return cls(Outcome.RIGHT if reward > correct_threshold else Outcome.WRONG, reward)


@dataclass(frozen=True)
class Scored:
    """A trajectory, its text, and the verdict on it."""

    trajectory: Trajectory
    text: str
    """The text after the prompt; with several turns it shows special tokens, so that one sees who
    speaks."""
    score: Score


@dataclass(frozen=True)
class Group:
    """The scored trajectories of one prompt."""

    prompt: Prompt
    slot: int
    """The prompt's place in the step, a coordinate of the noise that all conditions share."""
    members: list[Scored]
    """[G] scored trajectories in the order of their sample index."""

    def judged(self) -> "Group":
        """Return the group without unjudged trajectories."""
        return replace(
            self,
            members=[
                member
                for member in self.members
                if member.score.outcome is not Outcome.COULD_NOT_JUDGE
            ],
        )

    @property
    def trajectories(self) -> list[Trajectory]:
        """[G] trajectories."""
        return [member.trajectory for member in self.members]

    @property
    def rewards(self) -> list[float]:
        """Rewards of the judged trajectories, [G] in a judged group."""
        return [member.score.reward for member in self.members if member.score.reward is not None]

    @property
    def correct(self) -> int:
        """Number of trajectories that are right."""
        return sum(member.score.outcome is Outcome.RIGHT for member in self.members)

    def __len__(self) -> int:
        return len(self.members)


RowKey = tuple[int, int, int]
"""(number of the group, sample index, part of the trajectory): names a row within its step."""


@dataclass(frozen=True)
class Row:
    """One sequence as the learner sees it. T counts the tokens inside `spans`."""

    token_ids: Int32Array
    """[P + T] prompt and actions, and with several turns the environment's tokens between the
    actions."""
    spans: tuple[tuple[int, int], ...]
    """Half-open ranges of action positions in `token_ids`, in order and disjoint; the first starts
    at 1 or later."""
    logprobs: Float32Array
    """[T] log-probs as the sampler recorded them, at the sampling temperature."""
    advantages: Float32Array
    """[T] token advantages."""
    group: int
    """Number of the row's group in the step; rows of one group share their prompt."""
    sample: int = 0
    """Sample index of its trajectory within the group."""
    part: int = 0
    """Number of its part of the trajectory: 0 without a rewrite of the history."""
    trained: bool = True
    """True if the loss has a term for the row. It is False for a row that only counts in the
    divisor of aggregation = "constant"."""
    counted: int | None = None
    """Number of tokens that count in a mean of the policy term, where None means all T. A row with
    0 has only KL and entropy terms.
    """
    kept: Int32Array | None = None
    """[T] the number of most probable tokens from which the sampler drew each action; it is None
    for the whole vocabulary.
    """
    kept_ids: tuple[Int32Array, ...] | None = None
    """[T] the ids of those tokens, if the engine returns them."""

    @classmethod
    def of(
        cls,
        prompt: Prompt,
        trajectory: Trajectory,
        advantages: Float32Array,
        group: int,
        counts: npt.NDArray[np.bool_] | None = None,
        trained: bool = True,
    ) -> "list[Row]":
        """Make a row for each part of the trajectory: the sampled tokens are actions, the sampled
        EOS included.

        `advantages` [T]; `counts` [T] the tokens that count in a mean of the policy term, None for
        all.
        """
        rows, done = [], 0
        for number, turns in enumerate(trajectory.parts()):
            token_ids, spans = _sequence(prompt, turns)
            own = slice(done, done + sum(len(turn.completion.token_ids) for turn in turns))
            done = own.stop
            rows.append(
                cls(
                    token_ids=token_ids,
                    spans=spans,
                    logprobs=trajectory.logprobs[own],
                    advantages=np.asarray(advantages, np.float32)[own],
                    group=group,
                    sample=trajectory.sample,
                    part=number,
                    trained=trained,
                    counted=None if counts is None else int(counts[own].sum()),
                    kept=None if trajectory.kept is None else trajectory.kept[own],
                    kept_ids=None if trajectory.kept_ids is None else trajectory.kept_ids[own],
                )
            )
        return rows

    @property
    def key(self) -> RowKey:
        return self.group, self.sample, self.part

    @property
    def num_actions(self) -> int:
        return sum(stop - start for start, stop in self.spans)

    @property
    def num_counted(self) -> int:
        return self.num_actions if self.counted is None else self.counted

    def action_positions(self) -> Iterator[int]:
        for start, stop in self.spans:
            yield from range(start, stop)


def _sequence(
    prompt: Prompt, turns: Sequence[Turn]
) -> tuple[Int32Array, tuple[tuple[int, int], ...]]:
    """Return the token ids of turns that continue each other, prompt included, and the spans of
    their actions.
    """
    pieces: list[Int32Array] = [] if turns[0].restarts else [prompt.token_ids]
    spans = []
    for turn in turns:
        pieces += [turn.context, turn.completion.token_ids]
        stop = sum(map(len, pieces))
        count = len(turn.completion.token_ids)
        if count:
            spans.append((stop - count, stop))
    return np.concatenate(pieces).astype(np.int32), tuple(spans)


@dataclass(frozen=True)
class StepResult:
    """The result of one call to `Backend.train`.

    Ratio statistics count each action token of the trained rows once. Recomputed old log-probs come
    from before the first optimizer step. Other old log-probs come from the first pass, whose later
    minibatches already contain earlier updates. `logprob_diff_*` count the rows of the first
    minibatch alone, which no update of the step has moved.
    """

    loss: float | None
    """Mean loss over the updates of this step; None if the learner trained no row."""
    grad_norm: float | None
    ratio_mean: float | None
    """Mean of exp(learner - sampler log-prob) over the action tokens."""
    ratio_max: float | None
    mismatch_k1: float | None
    """Mean of sampler - learner log-prob."""
    mismatch_kl: float | None
    """Mean of exp(d) - 1 - d, where d is learner - sampler log-prob."""
    ess: float | None
    """Effective sample size of the ratios as a fraction of the tokens: (sum w)^2 / (n sum w^2)."""
    updates: int
    nonfinite_updates: int
    """Updates skipped because a loss, gradient or log-prob was not finite."""
    nonfinite_tensor: str = ""
    """Name of the first tensor that was not finite."""
    logprob_diff_mean: float | None = None
    """Mean of |learner - sampler log-prob|, in nats; the next fields are its quantiles and the
    number of tokens."""
    logprob_diff_p50: float | None = None
    logprob_diff_p90: float | None = None
    logprob_diff_p99: float | None = None
    logprob_diff_tokens: int | None = None
    logprob_diff_by_depth: list[float | None] | None = None
    """The mean by quarter of the positions up to [training] max_tokens."""
    loss_is_placeholder: bool = False
    """True if an asynchronous backend reports a number that is not this step's loss."""
    ratio_min: float | None = None
    clip_fraction: float | None = None
    """Fraction of tokens (gspo: sequences) whose policy gradient the clip removed, or whose weight
    it bounded (cispo). The denominator counts tokens with an advantage, over all updates of the
    step.
    """
    kl_mean: float | None = None
    """Mean KL divergence of the policy from the frozen base before the first update, by the
    estimator of the loss. It is None if the loss reads no base.
    """
    entropy_mean: float | None = None
    """Mean Shannon entropy of the policy at the action tokens of the first minibatch, before the
    first update; None if the engine records entropies.
    """
    loss_metrics: dict[str, float] | None = None
    """Mean of each quantity that a custom loss reports, over the tokens (or sequences) of all
    updates of the step.
    """


@dataclass(frozen=True)
class MachineChoices:
    """Settings chosen from the machine before the first step. A resumed run uses the stored
    choices, so that it stays byte-exact.
    """

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
    """True if sampler and learner compute with a scratch copy of the weights that contains the
    adapter."""
    workers: int = field(default=1, compare=False)
    """Number of processes that share the pieces of a step, with `threads` each. Results do not
    depend on it, so a resumed run may choose another."""

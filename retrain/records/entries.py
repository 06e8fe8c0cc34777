"""The lines of a run's files. Every reader of a run (status, compare, report, load_runs) goes through these dataclasses.

A missing value is None in memory and null in the file, never 0: a step without planning tokens has no planning entropy.
"""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cache
from math import isfinite
from types import UnionType
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

from retrain.errors import RunFailed


@dataclass(frozen=True)
class _Record:
    def to_json(self) -> dict[str, Any]:
        """One line of the file, keys in the order of the fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Self:
        """Reads a line of any version: unknown keys are dropped, and missing ones get their defaults.

        Raises RunFailed for a value whose type is not its field's, and for a missing field without a default.
        """
        kinds = _field_kinds(cls)  # type: ignore[arg-type]  # a class is hashable
        values = {name: line[name] for name in kinds if name in line}
        for name, value in values.items():
            if type(value) not in kinds[name] or (isinstance(value, float) and not isfinite(value)):
                raise RunFailed(_misshapen(cls, f"{name} = {str(value)[:_SHOWN]!r}", f"{name} is of another type"))
        try:
            return cls(**values)
        except TypeError:
            missing = [item.name for item in fields(cls) if item.default is MISSING and item.name not in values]
            raise RunFailed(_misshapen(cls, f"no {missing[0]}", "every line has one")) from None


_SHOWN = 80
"""Characters of a value that a sentence shows."""


@cache
def _field_kinds(record: type[_Record]) -> dict[str, frozenset[type]]:
    """Field -> the types of its JSON values; an integer is a number too."""
    hints = {name: get_args(hint) if get_origin(hint) is UnionType else (hint,) for name, hint in get_type_hints(record).items()}
    kinds = {name: frozenset(get_origin(part) or part for part in parts) for name, parts in hints.items()}
    return {name: types | {int} if float in types else types for name, types in kinds.items()}


def _misshapen(record: type[_Record], found: str, because: str) -> str:
    return f"A {record.__name__} of the run has {found}, and {because}: the file was changed or another program wrote it."


Direction = Literal["higher", "lower"] | None
"""Which direction of a number is an improvement; None where neither is."""


def better(direction: Direction) -> Any:
    """A number that may be missing, and which direction of it is an improvement."""
    return field(default=None, metadata={"better": direction})


@dataclass(frozen=True)
class StepRecord(_Record):
    """One training step, one line of metrics.jsonl. Entropies and surprisals in nats, times in seconds."""

    step: int
    """Counts from 0."""
    condition: str
    """`{advantage}+{transform}`, or the algorithm mode."""
    loss: float | None = better(None)
    """Mean over the step's updates of the loss at the sampled policy; None when no row was trained."""
    reported_loss: float | None = better(None)
    """The backend's number where it is not the loss of this step."""
    loss_is_placeholder: bool = False
    """True where `reported_loss` is not this step's loss."""

    mean_reward: float | None = better("higher")
    """Over the judged completions of the first draw of every prompt, skipped groups included: what a redraw gives is selected by its
    rewards. `correct_rate`, `max_token_hit_rate`, `truncated_reward_mean` and `completion_tokens_mean` are over the same completions."""
    correct_rate: float | None = better("higher")
    """Fraction of the judged completions above the reward's correct threshold; also what opens SEPA's gate."""
    running_correct_rate: float | None = better("higher")
    """The same over all steps so far; it lags and is no primary metric."""
    sepa_lambda: float | None = better(None)
    sepa_gate_open: bool | None = None
    sepa_gate_step: int | None = better(None)
    """The step whose correct rate opened the gate."""

    num_datums: int | None = better(None)
    """Completions that were trained on: with an advantage in their group, or any with a KL or entropy term."""
    informative_fraction: float | None = better(None)
    """Groups in which some token has an advantage, over all groups of the step; the others are counted by groups_skipped_*."""
    max_token_hit_rate: float | None = better("lower")
    """Fraction of the completions that ended by length."""
    truncated_reward_mean: float | None = better("higher")
    """Mean reward of those completions."""
    batch_size: int | None = better(None)
    """Prompts used in this step."""
    next_batch_size: int | None = better(None)
    group_size: int | None = better(None)
    groups_redrawn: int | None = better("lower")
    """Draws beyond the first of a prompt (dynamic_sampling)."""
    completion_tokens_mean: float | None = better(None)

    ratio_mean: float | None = better(None)
    """exp(learner - sampler log-prob), each token once: before the first optimizer step where old log-probs are recomputed, else in the
    first pass, where from its second minibatch on the updates before are in it. The learner drops out as in training."""
    ratio_max: float | None = better(None)
    ratio_min: float | None = better(None)
    mismatch_k1: float | None = better("lower")
    mismatch_k3: float | None = better("lower")
    ess: float | None = better("higher")
    """Effective sample size of the ratios as a fraction of the tokens."""
    clip_fraction: float | None = better(None)
    """Tokens (gspo: sequences) whose policy gradient the clip took away, or whose weight it bounded (cispo), as a fraction of those with
    an advantage, over all updates of the step."""
    log_ratio_mean: float | None = better("lower")
    """Mean of |learner - sampler log-prob| over action tokens before the first optimizer step; its quantiles follow."""
    log_ratio_p50: float | None = better("lower")
    log_ratio_p90: float | None = better("lower")
    log_ratio_p99: float | None = better("lower")
    grad_norm: float | None = better(None)
    nonfinite_updates: int | None = better("lower")
    """Updates that were skipped because something was not finite."""
    max_abs_advantage: float | None = better(None)

    exec_entropy_mean: float | None = better(None)
    """Shannon entropy of the tokens outside planning phrases; null where the engine has none."""
    exec_entropy_var: float | None = better(None)
    plan_entropy_mean: float | None = better(None)
    """Shannon entropy of the tokens inside planning phrases."""
    plan_entropy_var: float | None = better(None)
    exec_surprisal_mean: float | None = better(None)
    """Minus the log-prob of the sampled token."""
    exec_surprisal_var: float | None = better(None)
    plan_surprisal_mean: float | None = better(None)
    plan_surprisal_var: float | None = better(None)
    plan_token_fraction: float | None = better(None)
    """Planning tokens over action tokens; null where the condition does not look for them."""
    uncertainty_kind: str | None = None
    surprisal_kept_fraction: float | None = better(None)
    """Fraction of the tokens that the top-rho mask kept."""
    surprisal_tau: float | None = better(None)
    """The mask's threshold."""

    reward_could_not_judge: int | None = better("lower")
    """Completions left out because their reward could not be judged."""
    judge_requests: int | None = better(None)
    """Requests to the judge, retries included, for every draw of the step; null, like the rest of judge_*, where no judge is used."""
    judge_cached: int | None = better(None)
    """Verdicts that came from the cache or from an identical completion: after a resume, those of the steps that are repeated."""
    judge_prompt_tokens: int | None = better(None)
    judge_completion_tokens: int | None = better(None)
    judge_cost: float | None = better("lower")
    """By [reward] judge_prices, else as the server reports it; null where neither says."""
    groups_skipped_all_correct: int | None = better(None)
    groups_skipped_all_wrong: int | None = better(None)
    groups_skipped_other: int | None = better(None)
    """Groups whose equal rewards are neither all right nor all wrong, or with fewer than two judged completions."""

    turns_mean: float | None = better(None)
    """Replies per trajectory; with the next two fields null without an environment."""
    trajectories_rewritten: int | None = better(None)
    """Trajectories of more than one row, since the chat template or the environment rewrote their history."""
    environment_metrics: dict[str, float] | None = None
    """Means of what the environment measured over the judged trajectories that have it; turn_reward_N is that of reply N."""

    bp_action: str | None = None
    """The action of back pressure: sweep (while it warms up), hold, increase or throttle."""
    bp_regime: str | None = None
    bp_optimal_concurrency: float | None = better(None)
    """p* of the fitted scaling law, in completions."""
    bp_sigma: float | None = better(None)
    """Contention."""
    bp_kappa: float | None = better(None)
    """Coherency."""
    bp_r2: float | None = better(None)
    bp_utilization: float | None = better(None)
    """Smoothed throughput over the best that the law predicts."""
    bp_step_time_s: float | None = better(None)
    """The step time that the decision is based on: this step's, or the one that it took before the run was resumed."""

    time_sample_s: float | None = better("lower")
    time_reward_s: float | None = better("lower")
    """Waiting for scores after the last completion."""
    time_credit_s: float | None = better("lower")
    time_learn_s: float | None = better("lower")
    step_time_s: float | None = better("lower")
    tokens_per_s: float | None = better("higher")
    """Prompt and completion tokens of everything sampled, over the step's time."""
    peak_memory_gib: float | None = better("lower")


@dataclass(frozen=True)
class EvaluationRecord(_Record):
    """One held-out problem of one evaluation, one line of evaluation.jsonl."""

    step: int
    """Steps completed when it was made."""
    example_id: str
    task: str
    samples: int
    """Judged samples."""
    correct: int
    could_not_judge: int
    reward_mean: float | None
    judge_requests: int | None = None
    """Requests to the judge for this problem's answers; null, like the rest of judge_*, where no judge is used."""
    judge_cached: int | None = None
    judge_prompt_tokens: int | None = None
    judge_completion_tokens: int | None = None
    judge_cost: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.correct <= self.samples:
            raise RunFailed(_misshapen(type(self), f"{self.correct} correct of {self.samples} samples", "that cannot be"))


@dataclass(frozen=True)
class SampleRecord(_Record):
    """One answer to a held-out problem, one line of samples.jsonl in an evaluation's folder."""

    example_id: str
    task: str
    sample: int
    prompt: str
    completion: str
    reference: str
    reward: float | None
    """None when it could not be judged."""
    outcome: str
    """right, wrong, could_not_judge."""
    reason: str
    """Why it could not be judged; else empty."""
    finish_reason: str
    num_tokens: int


@dataclass(frozen=True)
class GenerationRecord(_Record):
    """One trajectory as text, one line of emergence/generations.jsonl."""

    step: int
    prompt_id: str
    sample: int
    prompt: str
    completion: str
    reward: float | None
    """None when it could not be judged."""
    outcome: str
    """right, wrong, could_not_judge."""
    advantage: float | None
    """The advantage of the whole completion, before any token transform; None if it was not trained on."""
    finish_reason: str
    num_tokens: int
    """Sampled tokens."""
    turns: int | None = None
    """Replies; with the next two fields null without an environment."""
    turn_rewards: list[float] | None = None
    metrics: dict[str, float] | None = None


EMERGENCE_FIELDS = (
    "step", "condition", "correct_rate", "mean_reward", "completion_tokens_mean", "max_token_hit_rate", "plan_token_fraction",
    "plan_entropy_mean", "plan_entropy_var", "exec_entropy_mean", "exec_entropy_var",
    "plan_surprisal_mean", "plan_surprisal_var", "exec_surprisal_mean", "exec_surprisal_var", "sepa_lambda", "sepa_gate_open",
)  # fmt: skip
"""The part of a StepRecord in emergence/steps.jsonl: how reasoning changes, without the machinery."""

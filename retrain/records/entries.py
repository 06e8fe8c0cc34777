"""The lines of a run's files. Every reader of a run (status, compare, report, load_runs) goes through these dataclasses.

A missing value is None in memory and null in the file, never 0: a step without planning tokens has no planning entropy.
"""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cache
from math import isfinite
from typing import Any, Self, get_args, get_type_hints

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
    kinds = {name: frozenset(get_args(hint) or (hint,)) for name, hint in get_type_hints(record).items()}
    return {name: types | {int} if float in types else types for name, types in kinds.items()}


def _misshapen(record: type[_Record], found: str, because: str) -> str:
    return f"A {record.__name__} of the run has {found}, and {because}: the file was changed or another program wrote it."


@dataclass(frozen=True)
class StepRecord(_Record):
    """One training step, one line of metrics.jsonl. Entropies and surprisals in nats, times in seconds."""

    step: int
    """Counts from 0."""
    condition: str
    """`{advantage}+{transform}`, or the algorithm mode."""
    loss: float | None = None
    """Mean over the step's updates of the loss at the sampled policy; None when no row was trained."""
    reported_loss: float | None = None
    """The backend's number where it is not the loss of this step."""
    loss_is_placeholder: bool = False
    """True where `reported_loss` is not this step's loss."""

    mean_reward: float | None = None
    """Over the judged completions of the first draw of every prompt, skipped groups included: what a redraw gives is selected by its
    rewards. `correct_rate`, `max_token_hit_rate`, `truncated_reward_mean` and `completion_tokens_mean` are over the same completions."""
    correct_rate: float | None = None
    """Fraction of the judged completions above the reward's correct threshold; also what opens SEPA's gate."""
    running_correct_rate: float | None = None
    """The same over all steps so far; it lags and is no primary metric."""
    sepa_lambda: float | None = None
    sepa_gate_open: bool | None = None
    sepa_gate_step: int | None = None
    """The step whose correct rate opened the gate."""

    num_datums: int | None = None
    """Completions that were trained on: with an advantage in their group, or any with a KL or entropy term."""
    informative_fraction: float | None = None
    """Groups in which some token has an advantage, over all groups of the step; the others are counted by groups_skipped_*."""
    max_token_hit_rate: float | None = None
    """Fraction of the completions that ended by length."""
    truncated_reward_mean: float | None = None
    """Mean reward of those completions."""
    batch_size: int | None = None
    """Prompts used in this step."""
    next_batch_size: int | None = None
    group_size: int | None = None
    groups_redrawn: int | None = None
    """Draws beyond the first of a prompt (dynamic_sampling)."""
    completion_tokens_mean: float | None = None

    ratio_mean: float | None = None
    """exp(learner - sampler log-prob), each token once: before the first optimizer step where old log-probs are recomputed, else in the
    first pass, where from its second minibatch on the updates before are in it. The learner drops out as in training."""
    ratio_max: float | None = None
    ratio_min: float | None = None
    mismatch_k1: float | None = None
    mismatch_k3: float | None = None
    ess: float | None = None
    """Effective sample size of the ratios as a fraction of the tokens."""
    clip_fraction: float | None = None
    """Tokens (gspo: sequences) whose policy gradient the clip took away, or whose weight it bounded (cispo), as a fraction of those with
    an advantage, over all updates of the step."""
    log_ratio_mean: float | None = None
    """Mean of |learner - sampler log-prob| over action tokens before the first optimizer step; its quantiles follow."""
    log_ratio_p50: float | None = None
    log_ratio_p90: float | None = None
    log_ratio_p99: float | None = None
    grad_norm: float | None = None
    nonfinite_updates: int | None = None
    """Updates that were skipped because something was not finite."""
    max_abs_advantage: float | None = None

    exec_entropy_mean: float | None = None
    """Shannon entropy of the tokens outside planning phrases; null where the engine has none."""
    exec_entropy_var: float | None = None
    plan_entropy_mean: float | None = None
    """Shannon entropy of the tokens inside planning phrases."""
    plan_entropy_var: float | None = None
    exec_surprisal_mean: float | None = None
    """Minus the log-prob of the sampled token."""
    exec_surprisal_var: float | None = None
    plan_surprisal_mean: float | None = None
    plan_surprisal_var: float | None = None
    plan_token_fraction: float | None = None
    """Planning tokens over action tokens; null where the condition does not look for them."""
    uncertainty_kind: str | None = None
    surprisal_kept_fraction: float | None = None
    """Fraction of the tokens that the top-rho mask kept."""
    surprisal_tau: float | None = None
    """The mask's threshold."""

    reward_could_not_judge: int | None = None
    """Completions left out because their reward could not be judged."""
    judge_requests: int | None = None
    """Requests to the judge, retries included, for every draw of the step; null, like the rest of judge_*, where no judge is used."""
    judge_cached: int | None = None
    """Verdicts that came from the cache or from an identical completion: after a resume, those of the steps that are repeated."""
    judge_prompt_tokens: int | None = None
    judge_completion_tokens: int | None = None
    judge_cost: float | None = None
    """By [reward] judge_prices, else as the server reports it; null where neither says."""
    groups_skipped_all_correct: int | None = None
    groups_skipped_all_wrong: int | None = None
    groups_skipped_other: int | None = None
    """Groups whose equal rewards are neither all right nor all wrong, or with fewer than two judged completions."""

    bp_action: str | None = None
    """The action of back pressure: sweep (while it warms up), hold, increase or throttle."""
    bp_regime: str | None = None
    bp_optimal_concurrency: float | None = None
    """p* of the fitted scaling law, in completions."""
    bp_sigma: float | None = None
    """Contention."""
    bp_kappa: float | None = None
    """Coherency."""
    bp_r2: float | None = None
    bp_utilization: float | None = None
    """Smoothed throughput over the best that the law predicts."""

    time_sample_s: float | None = None
    time_reward_s: float | None = None
    """Waiting for scores after the last completion."""
    time_credit_s: float | None = None
    time_learn_s: float | None = None
    step_time_s: float | None = None
    tokens_per_s: float | None = None
    """Prompt and completion tokens of everything sampled, over the step's time."""
    peak_memory_gib: float | None = None


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

    def __post_init__(self) -> None:
        if not 0 <= self.correct <= self.samples:
            raise RunFailed(_misshapen(type(self), f"{self.correct} correct of {self.samples} samples", "that cannot be"))


@dataclass(frozen=True)
class GenerationRecord(_Record):
    """One completion as text, one line of emergence/generations.jsonl."""

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


EMERGENCE_FIELDS = (
    "step", "condition", "correct_rate", "mean_reward", "completion_tokens_mean", "max_token_hit_rate", "plan_token_fraction",
    "plan_entropy_mean", "plan_entropy_var", "exec_entropy_mean", "exec_entropy_var",
    "plan_surprisal_mean", "plan_surprisal_var", "exec_surprisal_mean", "exec_surprisal_var", "sepa_lambda", "sepa_gate_open",
)  # fmt: skip
"""The part of a StepRecord in emergence/steps.jsonl: how reasoning changes, without the machinery."""

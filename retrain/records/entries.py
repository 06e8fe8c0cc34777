"""The lines of a run's files. Every reader of a run (status, compare, report, load_runs) goes
through these dataclasses.

A missing value is None in memory and null in the file, never 0: a step without planning tokens has
no planning entropy.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cache
from math import isfinite
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

from retrain.config.names import ALIASES
from retrain.errors import RunFailed
from retrain.records.jsonl import read_jsonl
from retrain.system import Json


@dataclass(frozen=True)
class _Record:
    def to_json(self) -> Json:
        """Return one line of the file, keys in the order of the fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, line: Mapping[str, Any], path: Path = Path("a run")) -> Self:
        """Read a line of any version: drop unknown keys, and give missing keys their defaults.

        Raises RunFailed for a value of another type than its field, and for a missing field without
        a default. The sentence names `path`, the file of the line, and the line's step.
        """
        kinds, defaults = _fields_of(cls)  # type: ignore[arg-type]  # a class is hashable
        values = {name: value for name, value in line.items() if name in kinds}
        values = defaults | values
        for problem in cls._problems(kinds, values):
            raise RunFailed(
                f"{path}, step {line.get('step')}: a {cls.__name__} has {problem}: the file was"
                " changed or another program wrote it."
            )
        # A frozen record's own constructor sets its ninety fields one by one, which takes twice as
        # long as all the rest here.
        record = object.__new__(cls)
        record.__dict__.update(values)
        return record

    @classmethod
    def _problems(cls, kinds: "Kinds", values: Json) -> Iterator[str]:
        """Yield the faults of a line, each as the end of a sentence."""
        yield from (f"no {name}, and every line has one" for name in kinds if name not in values)
        for name, value in values.items():
            if isinstance(value, float) and not isfinite(value):
                yield f"{name} = {value}, which is not a finite number"
            elif type(value) not in kinds[name]:
                yield f"{name} = {str(value)[:_SHOWN]!r}, and {name} is of another type"

    @classmethod
    def read(cls, path: Path) -> Iterator[Self]:
        """Return the records of a file, oldest first; none without a file. Raises RunFailed for a
        damaged line, with the file, and its line or step.
        """
        return (cls.from_json(line, path) for line in read_jsonl(path))


RENAMED_FIELDS = {
    "max_token_hit_rate": "truncated_fraction",
    "log_ratio_mean": "logprob_diff_mean",
    "log_ratio_p50": "logprob_diff_p50",
    "log_ratio_p90": "logprob_diff_p90",
    "log_ratio_p99": "logprob_diff_p99",
    "log_ratio_tokens": "logprob_diff_tokens",
    "log_ratio_by_depth": "logprob_diff_by_depth",
    "mismatch_k3": "mismatch_kl",
}
"""Names of a step's fields in 0.10 and before -> today's names."""


def renamed(line: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a line of metrics.jsonl with today's names of fields and of scheduled keys."""
    moved = line.get("scheduled")
    if isinstance(moved, dict):
        line = {**line, "scheduled": {ALIASES.get(key, key): moved[key] for key in moved}}
    if RENAMED_FIELDS.keys() & line:
        line = {RENAMED_FIELDS.get(name, name): value for name, value in line.items()}
    return line


_SHOWN = 80
"""Characters of a value that a sentence shows."""


Kinds = Mapping[str, Collection[type]]
"""Field -> the types of its JSON values. The types of a number include the integer."""


@cache
def _fields_of(record: type[_Record]) -> tuple[Kinds, Json]:
    """Return the types of the fields, and the defaults that some have."""
    kinds = {}
    for name, hint in get_type_hints(record).items():
        parts = get_args(hint) if get_origin(hint) is UnionType else (hint,)
        types = {get_origin(part) or part for part in parts}
        kinds[name] = types | {int} if float in types else types
    return kinds, {one.name: one.default for one in fields(record) if one.default is not MISSING}


Direction = Literal["higher", "lower"] | None
"""The direction in which a number improves; None if no direction is better."""


def better(direction: Direction) -> Any:
    """Return a field for a number that may be absent, whose improvement is `direction`."""
    return field(default=None, metadata={"better": direction})


Figure = float | None
"""A number, or None where it has no meaning."""
Count = int | None


@dataclass(frozen=True)
class StepRecord(_Record):
    """One training step. Entropies and surprisals are in nats, times in seconds."""

    @classmethod
    def from_json(cls, line: Mapping[str, Any], path: Path = Path("a run")) -> Self:
        return super().from_json(renamed(line), path)

    def to_json(self) -> Json:
        line = super().to_json()
        for name in ("scheduled", "by_task"):
            if line[name] is None:
                del line[name]
        return line

    step: int
    """The step's number, counted from 0."""
    condition: str
    """The name of the algorithm: `{advantage}+{transform}`, or the algorithm mode."""
    loss: Figure = None
    """Mean over the step's updates of the loss at the sampled policy; null if the step trained no
    row.
    """
    reported_loss: Figure = None
    """The loss that the backend reported, which an asynchronous backend has not computed from this
    step's rows."""
    loss_is_placeholder: bool = False
    """True if `reported_loss` is not this step's loss; `loss` is null then."""

    mean_reward: Figure = better("higher")
    """Mean reward of the judged completions of the first draw of every prompt, skipped groups
    included. Later draws would bias it, since rewards decide which groups get one. `correct_rate`,
    `truncated_fraction`, `truncated_reward_mean` and `completion_tokens_mean` are over the same
    completions, and so are `reward_std`, `answer_found_rate`, `length_reward_z` and
    `groups_identical`.
    """
    reward_std: Figure = None
    """Standard deviation of the same rewards; exactly 0 if all are equal."""
    correct_rate: Figure = better("higher")
    """Fraction of the judged completions whose reward exceeds `[reward] correct_threshold`; it
    opens SEPA's gate.
    """
    running_correct_rate: Figure = better("higher")
    """The same over all steps so far, so it lags behind the policy."""
    sepa_lambda: Figure = None
    """The strength, from 0 to 1, with which SEPA pooled the uncertainty of execution tokens in this
    step."""
    sepa_gate_open: bool | None = None
    """True once SEPA's gate, `[sepa] correct_rate_gate`, has opened, in this step or before."""
    sepa_gate_step: Count = None
    """The step whose correct rate opened the gate."""

    num_datums: Count = None
    """Completions that the step trained on: the groups that have an advantage, or all judged ones
    with a KL or entropy term.
    """
    informative_fraction: Figure = None
    """Fraction of the step's groups in which some token has an advantage; groups_skipped_* count
    the others by reason."""
    truncated_fraction: Figure = better("lower")
    """Fraction of the completions that reached `[training] max_tokens` without an EOS."""
    truncated_reward_mean: Figure = better("higher")
    """Mean reward of the completions that reached `[training] max_tokens`."""
    answer_found_rate: Figure = better("higher")
    """Fraction of the completions that hold a `\\boxed{}`, without which `match` and `math` give 0.
    Null if the reward is another.
    """
    batch_size: Count = None
    """Prompts used in this step."""
    next_batch_size: Count = None
    """Prompts of the next step; another number only while back pressure changes it."""
    group_size: Count = None
    """Completions sampled per prompt."""
    groups_redrawn: Count = better("lower")
    """Groups that `[training] max_resamples` drew again; it counts each redraw."""
    completion_tokens_mean: Figure = None
    """Mean number of sampled tokens per completion."""
    length_reward_z: Figure = None
    """Covariance of completion length and reward, summed over the groups, in standard deviations of
    what shuffled rewards give. It is above 0 if longer completions of a group got more reward. Null
    if no group has both unequal lengths and unequal rewards.
    """

    ratio_mean: Figure = None
    """Mean over all trained tokens of the ratio exp(learner log-prob - sampler log-prob), 1 on
    policy. If the learner recomputes old log-probs, it measures the ratio before the first update.
    Otherwise it does so during the first pass, where each minibatch after the first sees the
    updates before it. The same holds for the ratio's other figures, mismatch_k1, mismatch_kl and
    ess. The learner's dropout is on.
    """
    ratio_max: Figure = None
    """Largest ratio of a token."""
    ratio_min: Figure = None
    """Smallest ratio of a token."""
    mismatch_k1: Figure = better("lower")
    """Estimate of KL(sampler || learner) in nats: mean of (sampler - learner log-prob). Unbiased,
    and may be negative."""
    mismatch_kl: Figure = better("lower")
    """Estimate k3 of the same divergence: mean of (ratio - 1 - log ratio), which is never negative
    and varies less."""
    ess: Figure = better("higher")
    """Effective sample size of the ratios as a fraction of the tokens."""
    clip_fraction: Figure = None
    """Fraction of the tokens with an advantage (gspo: sequences) whose policy gradient the clip
    removed, over all updates of the step. With cispo, the fraction whose weight the clip bounded.
    """
    kl_mean: Figure = None
    """Estimate of KL(policy || `[loss] kl_reference`) in nats, by `[loss] kl_estimator`. It is the
    mean over the action tokens of the rows that the loss reads, before the step's first update.
    Null if the loss reads no reference, for example without `[loss] kl_coef`.
    """
    logprob_diff_mean: Figure = better("lower")
    """Mean of |learner log-prob - sampler log-prob| before the step's first update, over the
    trained rows of its first minibatch. Its quantiles follow. `[inference] max_logprob_diff` limits
    this number. In a step without a trained row it is over 4 completions, and the limit does not
    count the step.
    """
    logprob_diff_p50: Figure = better("lower")
    """Median of the same."""
    logprob_diff_p90: Figure = better("lower")
    """90th percentile of the same."""
    logprob_diff_p99: Figure = better("lower")
    """99th percentile of the same."""
    logprob_diff_tokens: Count = None
    """Number of action tokens behind these figures."""
    logprob_diff_by_depth: list[Figure] | None = None
    """The mean of the same in each quarter of the positions up to `[training] max_tokens`, since a
    difference may grow with the context. Null in a quarter without tokens.
    """
    identical_chance: Figure = None
    """Upper bound on the probability that independent sampling gives this many identical
    completions (16 tokens or more) in a group. It is 1 without identical ones, and near 0 if the
    engine does not sample independently. Null if the log-probs do not belong to the sampled policy.
    """
    grad_norm: Figure = None
    """Norm of the adapter's gradient before clipping, averaged over the step's updates."""
    nonfinite_updates: Count = better("lower")
    """Optimizer updates that the learner skipped because a loss or a gradient was not finite."""
    max_abs_advantage: Figure = None
    """Largest absolute advantage of a token."""

    entropy_mean: Figure = None
    """Mean Shannon entropy of the policy at all action tokens of the first draw of every prompt.
    Servers return no entropies. There the local learner computes it in the step's first update,
    from the rows of that update alone, with dropout if it is on. Null with services.
    """
    surprisal_mean: Figure = None
    """Mean surprisal, minus the log-prob of the sampled token, of the same tokens: an estimate of
    the entropy from one sample each."""
    exec_entropy_mean: Figure = None
    """Mean Shannon entropy of the policy at the tokens outside planning phrases. The exec_* and
    plan_* are null if the condition does not look for phrases. They are over the last draw of every
    prompt; under `[training] max_resamples` the rewards select that draw.
    """
    exec_entropy_var: Figure = None
    """Variance of the same."""
    plan_entropy_mean: Figure = None
    """Mean Shannon entropy of the policy at the tokens inside planning phrases."""
    plan_entropy_var: Figure = None
    """Variance of the same."""
    exec_surprisal_mean: Figure = None
    """Mean surprisal of the tokens outside planning phrases."""
    exec_surprisal_var: Figure = None
    """Variance of the same."""
    plan_surprisal_mean: Figure = None
    """Mean surprisal of the tokens inside planning phrases."""
    plan_surprisal_var: Figure = None
    """Variance of the same."""
    plan_token_fraction: Figure = None
    """Fraction of the action tokens inside planning phrases; null if the condition does not look
    for them.
    """
    uncertainty_kind: str | None = None
    """The uncertainty that weights tokens, `[algorithm] uncertainty_kind`."""
    surprisal_kept_fraction: Figure = None
    """Fraction of the tokens that the mask of `[algorithm] surprisal_mask_rho` kept."""
    surprisal_tau: Figure = None
    """Threshold of that mask, which keeps tokens of at least this uncertainty."""

    reward_could_not_judge: Count = better("lower")
    """Completions of the step, every draw included, that the step left out because their reward
    could not judge them.
    """
    judge_requests: Count = None
    """Requests to the judge, retries included, for every draw of the step; null without a judge,
    like the rest of judge_*.
    """
    judge_cached: Count = None
    """Verdicts from the cache, for example for steps that a resume repeats, or from an identical
    completion.
    """
    judge_prompt_tokens: Count = None
    """Tokens that the judge read."""
    judge_completion_tokens: Count = None
    """Tokens that the judge wrote."""
    judge_cost: Figure = better("lower")
    """Price of the step's requests by [reward] judge_prices, else from the server's report; null
    without both.
    """
    groups_skipped_all_correct: Count = None
    """Groups without an advantage because every completion is right."""
    groups_skipped_all_wrong: Count = None
    """Groups without an advantage because every completion is wrong."""
    groups_skipped_other: Count = None
    """Groups without an advantage for another reason, such as fewer than two judged completions."""
    groups_identical: Count = better("lower")
    """Groups whose completions are all the same, token by token."""

    turns_mean: Figure = None
    """Mean number of replies per trajectory; null, like the next two fields, without an
    environment."""
    trajectories_rewritten: Count = None
    """Trajectories that the learner trained as several rows, because the chat template or the
    environment rewrote their history.
    """
    loss_metrics: dict[str, float] | None = None
    """Mean of each quantity that a plugin of `[loss] mode` reports, over the tokens or sequences of
    all updates; null without a plugin.
    """
    scheduled: dict[str, float] | None = None
    """The values of the keys that `[schedule]` moved in this step; absent without a schedule."""
    by_task: dict[str, float] | None = None
    """For each source of `[[data.mix]]`: prompts/NAME counts its prompts in this step. Over their
    first draws, reward/NAME is the mean reward and correct/NAME the fraction of right completions.
    Absent without a mixture.
    """
    environment_metrics: dict[str, float] | None = None
    """Mean of each quantity that the environment reports, over the trajectories that have it;
    turn_reward_N is the reward of reply N."""

    bp_action: str | None = None
    """The action of back pressure: sweep (while it warms up), hold, increase or throttle."""
    bp_regime: str | None = None
    """The batch size relative to p*, which is the reason for the action. While the batch may grow
    it includes the roofline's bound, if its two keys have values.
    """
    bp_optimal_concurrency: Figure = None
    """Concurrency of the highest throughput by the fitted scaling law (p*), in completions."""
    bp_sigma: Figure = None
    """Contention: the share of the work that does not run in parallel, in the fitted scaling
    law."""
    bp_kappa: Figure = None
    """Coherency: the cost of coordination, which grows with the square of the concurrency."""
    bp_r2: Figure = None
    """Fraction of the throughput's variance that the fitted law explains."""
    bp_utilization: Figure = None
    """Smoothed throughput as a fraction of the highest throughput that the fitted law predicts."""
    bp_step_time_s: Figure = None
    """The step time behind the decision. For a step that a resume repeats it is the first measured
    time.
    """

    time_sample_s: Figure = better("lower")
    """Time of sampling; rewards run during it too."""
    time_layout_s: Figure = better("lower")
    """Time to lay out changed weights for the sampler, a part of time_sample_s; None unless
    `[model] train = "full"`.
    """
    time_reward_s: Figure = better("lower")
    """Time of waiting for rewards after the last completion."""
    time_credit_s: Figure = better("lower")
    """Time of credit assignment, from rewards to token advantages."""
    time_learn_s: Figure = better("lower")
    """Time of the learner: forward and backward passes, and the optimizer."""
    step_time_s: Figure = better("lower")
    """Time of the whole step, without evaluations and checkpoints."""
    tokens_per_s: Figure = better("higher")
    """Prompt and completion tokens of everything sampled, per second of the step."""
    peak_memory_gib: Figure = better("lower")
    """Peak memory since the start: of the CUDA device, or else of this process without its
    workers.
    """


MEASURED = frozenset(
    field.name
    for field in fields(StepRecord)
    if field.name.startswith(("time_", "bp_", "step_time_s", "tokens_per_s", "peak_memory_gib"))
)
"""The fields of a step that the clock and the machine decide, so that two equal runs differ in
them."""


@dataclass(frozen=True)
class SftRecord(_Record):
    """One step of the supervised stage."""

    step: int
    """The step's number within the stage, counted from 0."""
    loss: Figure
    """Mean cross-entropy of the learned tokens before the update, in nats; null if it was not
    finite."""
    grad_norm: Figure
    """L2 norm of the gradient before clipping; null if it was not finite."""
    lr: float
    """Learning rate of the update."""
    tokens: int
    """Tokens of the batch, prompts included."""
    learned_tokens: int
    """Number of tokens in the loss."""
    step_time_s: float
    """Seconds of the step."""
    heldout_logprob: Figure = None
    """Mean log-prob of the held-out traces' tokens before the step, in nats; null without a
    measurement.
    """


@dataclass(frozen=True)
class EvaluationRecord(_Record):
    """One held-out problem of one evaluation."""

    step: int
    """Completed steps at the time of the evaluation."""
    example_id: str
    """Name of the problem, the same in every run on the data."""
    task: str
    """Name of the task: `retrain compare` and the report group problems by it."""
    samples: int
    """Judged answers."""
    correct: int
    """Judged answers whose reward exceeds `[reward] correct_threshold`."""
    could_not_judge: int
    """Answers that the reward could not judge; no rate counts them."""
    reward_mean: Figure
    """Mean reward of the judged answers; null when there are none."""
    judge_requests: Count = None
    """Requests to the judge for this problem's answers, retries included; null without a judge,
    like the rest of judge_*.
    """
    judge_cached: Count = None
    """Verdicts taken from the cache."""
    judge_prompt_tokens: Count = None
    """Tokens that the judge read."""
    judge_completion_tokens: Count = None
    """Tokens that the judge wrote."""
    judge_cost: Figure = None
    """Price by `[reward] judge_prices`, else from the server's report; null without both."""

    @classmethod
    def _problems(cls, kinds: "Kinds", values: Json) -> Iterator[str]:
        yield from super()._problems(kinds, values)
        if not 0 <= values["correct"] <= values["samples"]:
            yield f"{values['correct']} correct of {values['samples']} samples, which cannot be"


@dataclass(frozen=True)
class SampleRecord(_Record):
    """One answer to a held-out problem, in the folder that `retrain eval` writes."""

    example_id: str
    """Name of the problem."""
    task: str
    """Name of its task."""
    sample: int
    """Number of the answer among the answers to the problem, from 0."""
    prompt: str
    """The prompt as text, chat template included."""
    completion: str
    """The answer as text."""
    reference: str
    """The reference that the reward compares with."""
    reward: Figure
    """The answer's reward; null if the reward could not judge it."""
    outcome: str
    """right, wrong or could_not_judge."""
    reason: str
    """The reason why the reward could not judge it; empty otherwise."""
    finish_reason: str
    """The reason why it ended: a stop token, or the length."""
    num_tokens: int
    """Sampled tokens."""


@dataclass(frozen=True)
class GenerationRecord(_Record):
    """One completion, or one dialogue with an environment, as text. `[logging] generations_every`
    and `generations_per_step` bound them.
    """

    step: int
    """The training step, from 0."""
    prompt_id: str
    """Name of the problem."""
    sample: int
    """Number of the completion in its group, from 0."""
    prompt: str
    """The prompt as text, chat template included."""
    completion: str
    """The completion as text."""
    reward: Figure
    """The completion's reward; null if the reward could not judge it."""
    outcome: str
    """right, wrong or could_not_judge."""
    advantage: Figure
    """The advantage of the whole completion, before any token transform; null if the step did not
    train on it.
    """
    finish_reason: str
    """The reason why it ended: a stop token, or the length."""
    num_tokens: int
    """Sampled tokens."""
    turns: Count = None
    """Replies of the model; null, like the next two fields, without an environment."""
    turn_rewards: list[float] | None = None
    """Reward of each reply, if the environment gives one."""
    metrics: dict[str, float] | None = None
    """The quantities that the environment reports for this trajectory."""


EMERGENCE_FIELDS = (
    "step", "condition", "correct_rate", "mean_reward", "completion_tokens_mean",
    "truncated_fraction", "entropy_mean", "surprisal_mean", "plan_token_fraction",
    "plan_entropy_mean", "plan_entropy_var", "exec_entropy_mean", "exec_entropy_var",
    "plan_surprisal_mean", "plan_surprisal_var", "exec_surprisal_mean", "exec_surprisal_var",
    "sepa_lambda", "sepa_gate_open",
)  # fmt: skip
"""The part of a StepRecord in emergence/steps.jsonl: how reasoning changes, without the
machinery."""

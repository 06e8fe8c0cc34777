"""The only list of keys: sections, types, defaults, ranges and one sentence each.

Flags, the manual, the documentation's tables, the JSON Schema, the annotated retrain.toml and every error are made from
these classes. A key's documentation says what it does; its type and range say what is allowed, so the sentence does not.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo

from retrain.config.names import ALIASES, bracketed, condition_label, fixed_aggregation, moved_aliases
from retrain.config.rules import RuleViolations, Violation, broken_rules
from retrain.config.values import (
    MAX_SEED,
    MOST_COMPLETIONS,
    OpenName,
    check_arguments,
    check_devices,
    check_grams,
    check_holdable,
    check_label,
    check_path,
    check_prices,
    check_server_url,
    check_svd_device,
    check_table,
    check_variable,
    parse_devices,
    parse_grams,
    table_from_json,
)


@dataclass(frozen=True)
class Provenance:
    """Where a configuration came from: its file, and what gave each value."""

    path: Path | None = None
    origins: Mapping[str, str] = field(default_factory=dict)
    """ "section.key" to "file", "environment NAME" or "flag --name"; keys left to their default are absent."""
    foreign: bool = False
    """Found in a run's folder, which anyone may have made: code that it names is not run."""


@dataclass(frozen=True)
class Traits:
    """Properties of a key, or of every key of a section, besides its values. Lists of keys are derived from them (`Key.traits`)."""

    meaningful_unset: bool = False
    """Leaving the key out does something that no value can say, so a written configuration leaves it out too."""
    acts_by_presence: bool = False
    """A section that does something by being there, so a written configuration leaves it out while it is unset."""
    may_change_at_resume: bool = False
    own_to_a_run: bool = False
    """May differ between two runs that are compared without being a difference of their training."""
    sizes_memory: bool = False
    sets_step_time: bool = False
    """The time of a step depends on it most."""
    whole_campaign: bool = False
    """Says something about a campaign as a whole, so a condition cannot set it."""
    not_for_a_condition: str = ""
    """The reason why a condition cannot set it, and the key that does."""
    echoes_training: bool = False
    """Unset, it is the key of that name in [training], which a bare name means."""
    parameter_of: tuple[str, ...] = ()
    """The rewards whose judgement depends on it; "plugin" stands for every plugin."""

    def __or__(self, other: "Traits") -> "Traits":
        """The traits of either: those of a key and those of its section."""
        return Traits(**{trait.name: getattr(self, trait.name) or getattr(other, trait.name) for trait in fields(Traits)})


NO_TRAITS = Traits()
_TRAITS = tuple(trait.name for trait in fields(Traits))


def key(default: Any, doc: str, *, example: Any = None, **marks: Any) -> Any:
    """A key with its default and its documentation.

    `example` stands in the annotated file where there is no default. `marks` are the key's Traits, and pydantic's ge, gt, le, lt,
    min_length and alias.
    """
    traits = {name: marks.pop(name) for name in _TRAITS if name in marks}
    examples = None if example is None else [example]
    return Field(default, description=doc, examples=examples, json_schema_extra={"traits": traits}, **marks)


def traits_of(field: FieldInfo) -> Traits:
    """The traits that `key` was given."""
    extra: Any = field.json_schema_extra
    return Traits(**extra["traits"]) if extra else NO_TRAITS


Strings = list[str]
PathText = Annotated[str, AfterValidator(check_path)]
Table = Annotated[dict[str, Any], AfterValidator(check_table)]
Positive = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]


class Section(BaseModel):
    """Strict, frozen, and closed: an unknown key is an error, "5" is not 5, and nan and inf are not numbers."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)
    traits: ClassVar[Traits] = NO_TRAITS
    """The traits of every key of the section."""

    @field_validator("*")
    @classmethod
    def _is_holdable(cls, value: Any) -> Any:
        return check_holdable(value)


class Backend(Section):
    """Where the model is trained."""

    traits = Traits(own_to_a_run=True, sizes_memory=True)

    backend: Annotated[str, OpenName("backend")] = key(
        "local", "Training backend: local (PyTorch and PEFT), tinker (remote), prime_rl (external trainer and inference), or a plugin."
    )
    devices: Annotated[str, AfterValidator(check_devices)] = key(
        "gpu:0",
        "Comma-separated devices; two mean split mode, inference on the first and training on the last; unset falls back to cpu.",
        meaningful_unset=True,
        sets_step_time=True,
        not_for_a_condition="[campaign] devices_per_run and workers_per_device share the devices out",
    )
    shard_base: bool = key(
        False,
        "Shard the frozen layers over the processes of torchrun, for a model too big for one GPU; layers are gathered one at a time.",
        may_change_at_resume=True,
    )
    adapter_path: PathText = key(
        "",
        "Folder for checkpoints, in a subfolder named after the run; unset means <log_dir>/checkpoints.",
        meaningful_unset=True,
        may_change_at_resume=True,
    )
    options: Table = key(
        {},
        "Options of one backend; prime_rl knows transport, zmq_*, strict_advantages, sync_*, wire, output_dir and trainer_ranks; tinker "
        "knows base_model, loss_reduction and timeout_s.",
    )
    max_concurrent: int = key(4, "Most simultaneous Tinker calls, over all workers of a campaign.", ge=1, may_change_at_resume=True)
    throttle_dir: PathText = key("", "Folder of the locks that Tinker workers share; campaigns set it.", may_change_at_resume=True)

    @property
    def device_list(self) -> tuple[str, ...]:
        """torch's names of the devices."""
        return parse_devices(self.devices)

    @property
    def prime_rl(self) -> "PrimeRLOptions":
        """The options as the prime_rl backend reads them, with defaults filled in."""
        return PrimeRLOptions.model_validate(self.options_of("prime_rl"))

    @property
    def tinker(self) -> "TinkerOptions":
        """The same for the tinker backend."""
        return TinkerOptions.model_validate(self.options_of("tinker"))

    def options_of(self, backend: str) -> dict[str, Any]:
        """The given options that belong to a backend."""
        return {name: value for name, value in self.options.items() if name in BACKEND_OPTIONS[backend].model_fields}


class PrimeRLOptions(Section):
    """What `[backend.options]` may hold with backend = "prime_rl"."""

    transport: Literal["filesystem", "zmq"] = key("filesystem", "How batches reach the trainer.")
    zmq_host: str = key("localhost", "Host of the ZMQ transport.", min_length=1)
    zmq_port: int = key(5555, "Port of the ZMQ transport.", ge=1, le=65535)
    zmq_hwm: int = key(10, "Messages that ZMQ holds before it drops or blocks.", ge=1)
    strict_advantages: bool = key(True, "Must stay true: per-token advantages are never averaged silently.")
    sync_wait_s: float = key(30, "Longest wait for broadcast weights, in seconds; above the time of one of the trainer's steps.", gt=0)
    sync_poll_s: float = key(0.2, "Seconds between checks for broadcast weights.", gt=0)
    wire: Literal["v0.9"] = key("v0.9", "Version of PRIME-RL's wire format: v0.9.0 and later.")
    output_dir: PathText = key(
        "", "The trainer's output_dir, on a file system that both see; unset means [backend] adapter_path, else <log_dir>/prime_rl."
    )
    trainer_ranks: int = key(1, "Data ranks of the trainer: its GPUs, unless it shards sequences too.", ge=1)


class TinkerOptions(Section):
    """What `[backend.options]` may hold with backend = "tinker"."""

    base_model: str = key("", "Name of the base model at the service; empty means [model] model.")
    loss_reduction: Literal["sum", "mean"] = key(
        "sum",
        "How the service adds up a loss: sum, as the hosted one does, or mean over positions and rows (SkyRL's JAX backend); the gradient "
        "is normalised by [loss] aggregation either way.",
    )
    timeout_s: float = key(1800, "Longest wait for one answer, in seconds.", gt=0)


BACKEND_OPTIONS: dict[str, type[Section]] = {"prime_rl": PrimeRLOptions, "tinker": TinkerOptions}


class Model(Section):
    """The base model."""

    traits = Traits(sizes_memory=True)

    model: PathText = key(
        "Qwen/Qwen3-4B-Instruct-2507", 'Model id on the Hugging Face hub, a local folder, or "lab".', min_length=1, sets_step_time=True
    )
    base_url: str = key("", "Tinker service URL (tinker backend only).", may_change_at_resume=True)
    lora_rank: int = key(32, "LoRA rank; alpha is twice the rank unless [lora] alpha is set.", ge=1, sets_step_time=True)
    revision: str = key("", "Branch, tag or commit of the model on the hub; empty means the default branch.")
    dtype: Literal["auto", "bf16", "fp32"] = key(
        "auto", "Data type of the frozen weights; auto is bf16 on CUDA and fp32 elsewhere.", sets_step_time=True
    )
    trust_remote_code: bool = key(False, "Run Python code that comes with the model.")
    load_in_4bit: bool = key(False, "Hold the frozen weights in 4 bits (CUDA, needs bitsandbytes).")


class Algorithm(Section):
    """How rewards become token advantages."""

    algorithm_mode: Annotated[str, OpenName("algorithm", may_be_empty=True)] = key(
        "",
        "A whole algorithm, built in or a plugin; when set it replaces advantage_mode and transform_mode.",
        not_for_a_condition="write algorithm_mode",
    )
    advantage_mode: Annotated[str, OpenName("advantage")] = key(
        "maxrl", "Advantage of a completion within its group, built in or a plugin.", not_for_a_condition="write advantage_mode"
    )
    transform_mode: Annotated[str, OpenName("transform")] = key(
        "gtpo_sepa",
        "How a completion's advantage is spread over its tokens, built in or a plugin.",
        not_for_a_condition="write transform_mode",
    )
    uncertainty_kind: Annotated[str, OpenName("uncertainty")] = key(
        "surprisal", "Per-token uncertainty that GTPO weights by; shannon_entropy needs engine pytorch and backend local."
    )
    surprisal_mask_rho: float = key(
        0.0, "Train only on this fraction of tokens, those with the highest uncertainty (arXiv 2506.01939); 0 is off.", ge=0, le=1
    )
    surprisal_mask_scope: Literal["batch", "group", "completion"] = key("batch", "Tokens over which the mask's threshold is computed.")
    surprisal_mask_denominator: Literal["all", "kept"] = key(
        "all", "Tokens over which the means of [loss] aggregation are taken: all, masked ones as zeros, or the kept ones of each update."
    )
    params: Table = key({}, "Parameters of an algorithm_mode plugin.")
    advantage_params: Table = key({}, "Parameters of the advantage.")
    transform_params: Table = key({}, "Parameters of the transform; its uncertainty_kind overrides the key of that name.")
    uncertainty_params: Table = key({}, "Parameters of an uncertainty plugin.")


class Plugins(Section):
    """How plugins are found."""

    search_paths: Strings = key(["plugins"], "Module prefixes searched before normal imports.")
    strict: bool = key(True, "Stop when a plugin fails its shape probe; false prints a warning.")


class Training(Section):
    """The training loop."""

    traits = Traits(sizes_memory=True)

    seed: int = key(
        -1,
        "Seed of everything random; -1 draws one, prints and stores it.",
        ge=-1,
        le=MAX_SEED,
        own_to_a_run=True,
        not_for_a_condition="[campaign] seeds gives it",
    )
    max_steps: int = key(
        500,
        "Total number of training steps.",
        ge=1,
        may_change_at_resume=True,
        not_for_a_condition="conditions are compared after the same steps, so [campaign] max_steps gives it",
    )
    batch_size: int = key(8, "Prompts per step.", ge=1, le=MOST_COMPLETIONS, sets_step_time=True)
    group_size: int = key(16, "Completions sampled per prompt.", ge=1, le=MOST_COMPLETIONS, sets_step_time=True)
    max_tokens: int = key(10240, "Most new tokens per completion.", ge=1, sets_step_time=True)
    temperature: float = key(
        0.7, "Sampling temperature; the trained policy is the model at this temperature. Unset with backend tinker it is 1.", gt=0
    )
    top_k: int = key(0, "Sample from, and train over, the k most probable tokens at each position, renormalised; 0 is off.", ge=0)
    top_p: float = key(
        1.0,
        "Sample from, and train over, the fewest most probable tokens with a total probability of at least top_p, after top_k; 1 is off.",
        gt=0,
        le=1,
    )
    min_p: float = key(0.0, "Sample from, and train over, tokens of at least min_p times the largest probability; 0 is off.", ge=0, lt=1)
    lr: float = key(4e-5, "Learning rate.", ge=0)
    lr_schedule: Literal["constant", "linear", "cosine"] = key(
        "constant", "Learning rate after warm-up: constant, or falling to 0 at max_steps."
    )
    lr_warmup_steps: int = key(0, "Steps over which the learning rate rises from 0.", ge=0)
    weight_decay: float = key(0.0, "AdamW weight decay.", ge=0)
    updates_per_batch: int = key(1, "Passes over each batch.", ge=1, sets_step_time=True)
    minibatches: int = key(1, "Optimizer updates per pass.", ge=1)
    micro_batch_tokens: int = key(0, "Most tokens per forward and backward pass; 0 chooses by the machine.", ge=0)
    gradient_checkpointing: Literal["auto"] | bool = key("auto", "Recompute activations in the backward pass; auto decides by the machine.")
    dynamic_sampling: int = key(
        0,
        "Most times that a group whose rewards are all equal is sampled again; correct_rate, mean_reward and SEPA's gate use the first "
        "draws, which are not selected by reward.",
        ge=0,
        le=1000,
    )
    max_examples: int = key(0, "Number of the data source's examples to use; 0 uses all.", ge=0)
    save_every: int = key(20, "Steps between checkpoints.", ge=1, may_change_at_resume=True, own_to_a_run=True)
    keep_checkpoints: int = key(
        0,
        "Number of newest checkpoints to keep, at least 2 to survive a crash; 0 keeps all.",
        ge=0,
        may_change_at_resume=True,
        own_to_a_run=True,
    )
    max_hours: float = key(0.0, "Save and stop after this many hours; 0 is no limit.", ge=0, may_change_at_resume=True, own_to_a_run=True)

    @property
    def truncated(self) -> bool:
        """True if the policy that is sampled and trained leaves out improbable tokens."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class Optimizer(Section):
    """AdamW."""

    beta1: float = key(0.9, "AdamW beta1.", ge=0, lt=1)
    beta2: float = key(0.95, "AdamW beta2.", ge=0, lt=1)
    eps: float = key(1e-8, "AdamW epsilon.", gt=0)


class Lora(Section):
    """The adapter."""

    traits = Traits(sizes_memory=True)

    alpha: int = key(0, "LoRA alpha; 0 means twice the rank.", ge=0)
    dropout: float = key(0.0, "LoRA dropout rate.", ge=0, lt=1)
    target_modules: Strings = key([], "Names of the adapted layers; empty means all linear layers of the blocks.")
    init_from: PathText = key("", "PEFT folder with the adapter's initial weights.")
    use_rslora: bool = key(False, "Scale the update by alpha / sqrt(rank) instead of alpha / rank.")


DEFAULT_CLIPS = {"importance_sampling": (0.0, 0.0), "ppo": (0.2, 0.2), "gspo": (3e-4, 4e-4), "cispo": (0.0, 4.0)}
"""(clip_low, clip_high) of a mode where they are unset; importance sampling has no clip."""


class Loss(Section):
    """The policy loss (formulas and divisors: docs/losses.md)."""

    mode: Literal["importance_sampling", "ppo", "gspo", "cispo"] = key("importance_sampling", "Per-token objective.")
    clip_low: float | None = key(
        None,
        "Lower clip distance (ppo, gspo) or bound (cispo) of the ratio; unset is 0.2, 3e-4, 0 by mode.",
        ge=0,
        meaningful_unset=True,
        example=0.2,
    )
    clip_high: float | None = key(
        None,
        "Upper clip distance (ppo, gspo) or bound (cispo) of the ratio; unset is 0.2, 4e-4, 4 by mode.",
        ge=0,
        meaningful_unset=True,
        example=0.2,
    )
    dual_clip: float = key(0.0, "Bound above 1 on the ratio of tokens with negative advantage (ppo); 0 is off.", ge=0)
    correction: Literal["none", "tis", "icepop"] = key(
        "none", 'Correction for the mismatch of sampler and learner; needs old_logprobs = "recomputed".'
    )
    correction_cap: float = key(2.0, "Largest correction weight of tis.", gt=0)
    correction_low: float = key(0.5, "Tokens with a correction weight below this are dropped (icepop).", ge=0)
    correction_high: float = key(5.0, "Tokens with a correction weight above this are dropped (icepop).", gt=0)
    aggregation: Literal["token_mean", "sequence_mean", "constant", "sum"] = key(
        "token_mean",
        "How token losses become an update's loss: means are over the completions with an advantage, constant divides by max_tokens for "
        "every judged completion of the step, sum does not divide; unset is token_mean, or constant with algorithm_mode dr_grpo.",
        meaningful_unset=True,
    )
    kl_coef: float = key(
        0.0,
        "Weight of the KL divergence to the frozen base model, aggregated over all judged completions, including groups with equal "
        "rewards; 0 skips the base model's forward pass.",
        ge=0,
    )
    kl_estimator: Literal["k1", "k2", "k3"] = key(
        "k3",
        "Per-token KL estimator. Its expected gradient is the gradient of KL(policy || base) for k2, of KL(base || policy) for k3, and 0 "
        "for k1, which is refused.",
    )
    entropy_coef: float = key(0.0, "Weight of the entropy bonus, aggregated like the KL divergence.", ge=0)
    max_grad_norm: float = key(0.0, "Clip the gradient norm at this value; 0 is off.", ge=0)
    log_ratio_clamp: float = key(20.0, "Clamp log-ratios to this magnitude before exp.", gt=0)
    old_logprobs: Literal["sampler", "recomputed"] = key(
        "sampler",
        "Log-probs in the ratio's denominator: the sampler's, or recomputed by the learner before the first update, under the same dropout "
        "masks; unset is sampler, or recomputed with mode gspo in half precision.",
        meaningful_unset=True,
    )
    mask_truncated: bool = key(
        False, "Leave completions cut off at max_tokens out of the loss and its means; aggregation constant still counts them."
    )

    @property
    def clips(self) -> tuple[float, float]:
        """(clip_low, clip_high) that act."""
        low, high = DEFAULT_CLIPS[self.mode]
        return low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high


class Evaluation(Section):
    """Accuracy on held-out problems."""

    traits = Traits(may_change_at_resume=True, sizes_memory=True)

    every: int = key(0, "Steps between evaluations; 0 is off.", ge=0)
    at_start: bool = key(False, "Evaluate before the first step.")
    at_end: bool = key(False, "Evaluate after the last step; unset is true in campaigns.", meaningful_unset=True)
    source: Annotated[str, OpenName("data", may_be_empty=True)] = key("", "Data source; empty means the training source's held-out split.")
    reward: Annotated[str, OpenName("reward", may_be_empty=True)] = key(
        "",
        "Reward that judges held-out answers, with the parameters of [reward]; empty means training's without the random one, and "
        "in campaigns the base's for all conditions.",
    )
    max_examples: int = key(200, "Most problems evaluated; 0 uses all.", ge=0)
    samples: int = key(1, "Completions sampled per problem.", ge=1, le=MOST_COMPLETIONS)
    temperature: float | None = key(
        None,
        "Sampling temperature, 0 for greedy; unset means training's. Above 0, top_k, top_p and min_p apply too.",
        ge=0,
        meaningful_unset=True,
        example=1.0,
    )
    max_tokens: int | None = key(
        None, "Most new tokens per completion; unset means training's.", ge=1, meaningful_unset=True, echoes_training=True, example=1024
    )
    top_k: int | None = key(
        None,
        "As [training] top_k, for held-out samples; unset means training's.",
        ge=0,
        meaningful_unset=True,
        echoes_training=True,
        example=0,
    )
    top_p: float | None = key(
        None,
        "As [training] top_p, for held-out samples; unset means training's.",
        gt=0,
        le=1,
        meaningful_unset=True,
        echoes_training=True,
        example=1.0,
    )
    min_p: float | None = key(
        None,
        "As [training] min_p, for held-out samples; unset means training's.",
        ge=0,
        lt=1,
        meaningful_unset=True,
        echoes_training=True,
        example=0.0,
    )
    k: list[Positive] = key([1], "Values of k for which pass@k is reported.", min_length=1)
    covariate: Literal["auto", "off"] = key(
        "auto", "Use the base model's pass rate per problem at step 0 in the interval for new problems where it narrows it."
    )

    @property
    def asked_for(self) -> bool:
        return self.every > 0 or self.at_start or self.at_end


class Gtpo(Section):
    """Entropy-weighted credit."""

    beta: float = key(0.1, "Strength of the weighting; 0 disables it, above 1 clips weights at 0.", ge=0)
    norm: Literal["completion", "group"] = key("completion", "Tokens over which the mean uncertainty is taken.")
    negative: Literal["same", "inverse"] = key(
        "same", "Weighting of completions with negative advantage: the same, or by inverse uncertainty."
    )


class Hicra(Section):
    """Planning-token amplification."""

    alpha: float = key(0.2, "Amplification of planning tokens; 0 disables it.", ge=0, le=1)


class Sepa(Section):
    """Selective entropy pooling and its schedule."""

    steps: int = key(500, "Duration of the linear ramp from 0 to 1.", ge=0)
    schedule: Literal["linear", "auto"] = key("linear", "linear ramps; auto follows the decay of the uncertainty's variance.")
    delay_steps: int = key(50, "Steps before the ramp begins.", ge=0)
    correct_rate_gate: float = key(0.1, "Correct rate at which a step opens the gate for good; 0 opens it from the start.", ge=0, le=1)
    ema_decay: float = key(0.99, "Decay of the variance's moving average (auto).", ge=0, lt=1)
    var_threshold: float = key(0.2, "Fraction of the reference variance at which pooling is complete (auto).", gt=0)
    warmup: int = key(50, "Steps before the reference variance is fixed (auto).", ge=1)


class Planning(Section):
    """Which tokens are planning."""

    detector: Literal["regex", "semantic"] = key("regex", "How planning tokens are found.")
    model: str = key("all-MiniLM-L6-v2", "Sentence-transformers model of the semantic detector: its name or folder.", min_length=1)
    threshold: float = key(0.02, "Margin by which a window must be nearer to planning than to execution (semantic).", ge=-2, le=2)
    min_similarity: float = key(0.25, "Smallest similarity to planning (semantic).", ge=-1, le=1)
    strategic_grams: Annotated[str | Strings, AfterValidator(check_grams)] = key(
        "", "Planning phrases as a list, a JSON array or comma-separated; empty means the built-in ones."
    )

    @property
    def grams(self) -> list[str]:
        """The phrases that were configured; empty means the built-in ones."""
        return parse_grams(self.strategic_grams)


ServerURL = Annotated[str, AfterValidator(check_server_url)]


class Inference(Section):
    """What samples the completions."""

    traits = Traits(sizes_memory=True)

    engine: Annotated[str, OpenName("engine")] = key("pytorch", "Inference engine, built in or a plugin.", sets_step_time=True)
    url: ServerURL | Annotated[list[ServerURL], Field(min_length=1)] = key(
        "",
        "Server of the engines other than pytorch, such as http://127.0.0.1:8000; requests are balanced over a list.",
        may_change_at_resume=True,
        own_to_a_run=True,
    )
    served_model: str = key("", "Name of the base model on the server; empty takes the only one it has.")
    api_key_env: Annotated[str, AfterValidator(check_variable)] = key(
        "", "Environment variable with the server's API key; empty sends none.", may_change_at_resume=True, own_to_a_run=True
    )
    timeout_s: float = key(300.0, "Seconds until a request to the server is given up.", gt=0, may_change_at_resume=True, own_to_a_run=True)
    attention_kernel: Literal["default", "flash", "triton", "tk", "cutlass"] = key(
        "default",
        "Attention implementation. default: torch's flash kernel where it runs, else torch's choice. flash: that or nothing. cutlass: "
        "torch's other CUDA kernel. triton and tk are refused.",
    )
    dtype: Literal["auto", "bf16", "fp8", "fp4"] = key("auto", "Data type of inference.")
    kv_cache_dtype: Literal["auto", "bf16", "fp8", "int8"] = key("auto", "Data type of the KV cache.")
    prefix_caching: bool = key(True, "Share the prompt's KV cache among the completions of a group.")
    mismatch_limit: float | None = key(
        None,
        "Stop the run when the mean |learner - sampler log-prob|, in nats, exceeds this for 3 steps in a row; 0 is off; unset is ten times "
        "the parity gate's own mean, at least 1e-3 (half precision: 0.02), and off with dropout or in split mode.",
        ge=0,
        meaningful_unset=True,
        example=0.02,
        may_change_at_resume=True,
    )

    @property
    def urls(self) -> list[str]:
        """The servers; empty for the pytorch engine."""
        return [self.url] * bool(self.url) if isinstance(self.url, str) else list(self.url)


class Data(Section):
    """The problems."""

    source: Annotated[str, OpenName("data")] = key(
        "math", "Data source: built in, hub:NAME[:config][:split], a .jsonl or .parquet file or folder, or a plugin."
    )
    path: PathText = key("", "File or folder for jsonl, parquet, or a local copy of math or gsm8k.")
    prompt_column: str = key("prompt", "Column that holds the problem.", min_length=1)
    answer_column: str = key("answer", "Column that holds the reference answer.", min_length=1)
    system_prompt: str = key("", "System message before every prompt; empty is none.")
    prompt_template: str | None = key(
        None,
        "Text around a problem, with {prompt} in it; unset asks math and gsm8k for steps and a box.",
        meaningful_unset=True,
        example="{prompt}\n",
    )
    chat_template_args: Table = key({}, "Arguments of the tokenizer's chat template, such as enable_thinking = false.")
    difficulty: int = key(1, "Difficulty of the lab's arithmetic.", ge=1)
    params: Table = key({}, "Parameters of a data plugin.")


Arguments = Annotated[dict[str, Any], BeforeValidator(table_from_json), AfterValidator(check_arguments)]


class Environment(Section):
    """Problems with a rubric, possibly over several turns."""

    provider: Annotated[str, OpenName("environment", may_be_empty=True)] = key(
        "", "Environment provider, built in or a plugin (a dotted path); empty is none."
    )
    id: str = key("", "Environment id: such as primeintellect/gsm8k, a task of reasoning_gym, or a game of textarena.")
    args: Arguments = key({}, "Arguments of the environment, as a table or a JSON string.")
    max_turns: int = key(-1, "Most turns in multi-turn environments; -1 leaves it to the environment.", ge=-1)
    auto_install: bool = key(False, "Install a missing environment from the Prime hub.")
    timeout_s: float = key(600.0, "Seconds that the environment itself may take for a trajectory; one over it could not be judged.", gt=0)


RewardType = Annotated[str, OpenName("reward")]


class Reward(Section):
    """How a completion is judged."""

    type: RewardType | Annotated[list[RewardType], Field(min_length=1)] = key(
        "match", "Reward, or a list of rewards whose weighted sum is used."
    )
    weights: list[float] = key([], "Weights of the rewards in the list; empty means 1 each.")
    judge_model: str = key("", "Model of the judge reward, such as gpt-4o-mini.", parameter_of=("judge",))
    judge_base_url: ServerURL = key(
        "",
        "Where the judge is served, such as http://127.0.0.1:8000/v1; empty means https://api.openai.com/v1.",
        parameter_of=("judge",),
        may_change_at_resume=True,
        own_to_a_run=True,
    )
    judge_api_key_env: Annotated[str, AfterValidator(check_variable)] = key(
        "OPENAI_API_KEY",
        "Environment variable that holds the judge's API key.",
        parameter_of=("judge",),
        may_change_at_resume=True,
        own_to_a_run=True,
    )
    judge_template: str = key(
        "",
        "What the judge is asked, with {question}, {reference} and {completion} in their places; empty is the built-in question.",
        parameter_of=("judge",),
    )
    judge_concurrency: int = key(
        8, "Most requests to the judge at a time.", ge=1, le=4096, parameter_of=("judge",), may_change_at_resume=True, own_to_a_run=True
    )
    judge_cache: bool = key(
        True,
        "Keep the judge's verdicts in the run's folder, and ask only once for equal completions.",
        parameter_of=("judge",),
        may_change_at_resume=True,
        own_to_a_run=True,
    )
    judge_timeout_s: float = key(
        60.0, "Seconds for one answer of the judge.", gt=0, parameter_of=("judge",), may_change_at_resume=True, own_to_a_run=True
    )
    judge_prices: Annotated[list[Annotated[float, Field(ge=0)]], AfterValidator(check_prices)] = key(
        [],
        "Price of a million tokens that the judge reads, and of a million that it writes, for judge_cost in metrics.jsonl.",
        parameter_of=("judge",),
        may_change_at_resume=True,
        own_to_a_run=True,
    )
    custom_module: str = key("", "Python module of the custom reward.", parameter_of=("custom",))
    custom_function: str = key("score", "Function in that module.", min_length=1, parameter_of=("custom",))
    random_p: float = key(0.5, "Probability of 1 in the random reward.", ge=0, le=1, parameter_of=("random",))
    params: Table = key({}, "Parameters of a custom or plugin reward.", parameter_of=("custom", "plugin"))
    after_think: bool = key(
        True,
        "Count a box, and show the judge, only what follows the last </think>, where there is one.",
        parameter_of=("match", "math", "judge"),
    )
    normalize: Literal["none", "hendrycks"] = key(
        "none", "Normalisation of both sides before match compares them.", parameter_of=("match",)
    )
    correct_threshold: float = key(0.5, "A completion is correct when its reward is above this.")
    max_failure_rate: float = key(
        0.05, "Stop when more than this fraction of the last 20 steps' completions could not be judged; 1 is off.", ge=0, le=1
    )
    deadline_s: float = key(5.0, "Seconds after which a verification is killed.", gt=0)
    workers: int = key(
        0, "Worker processes that verify; 0 chooses by the machine.", ge=0, le=1024, may_change_at_resume=True, own_to_a_run=True
    )

    @property
    def types(self) -> list[str]:
        return [self.type] if isinstance(self.type, str) else list(self.type)

    @property
    def type_weights(self) -> list[float]:
        return list(self.weights) or [1.0] * len(self.types)


class Backpressure(Section):
    """Batch size that follows measured throughput."""

    enabled: bool = key(False, "Adapt the batch size.")
    warmup_steps: int = key(10, "Steps to collect before the throughput model is fitted.", ge=1)
    ema_decay: float = key(0.9, "Decay of the throughput's moving average.", ge=0, lt=1)
    throttle_margin: float = key(0.85, "Target fraction of the optimal concurrency.", gt=0, le=1)
    increase_margin: float = key(0.5, "Fraction of that target below which the batch grows.", ge=0, le=1)
    min_batch_size: int = key(1, "Smallest batch size.", ge=1)
    max_batch_size: int = key(64, "Largest batch size.", ge=1)
    peak_gflops: float = key(0.0, "Peak GFLOP/s of the hardware for roofline hints; 0 skips them.", ge=0)
    peak_bw_gb_s: float = key(0.0, "Peak memory bandwidth in GB/s for roofline hints; 0 skips them.", ge=0)
    cooldown: int = key(5, "Fewest steps between two changes.", ge=0)
    min_r2: float = key(0.5, "Smallest R squared at which a fit is trusted.", ge=0, le=1)
    weights: Literal["relative", "none"] = key("relative", "Weights of the fit.")


class Squeeze(Section):
    """Rank analysis and compression of an adapter."""

    traits = Traits(own_to_a_run=True, whole_campaign=True, acts_by_presence=True)

    min_variance_retention: float = key(0.95, "Fraction of the variance that the recommended rank must keep.", gt=0, le=1)
    adapter_path: PathText = key(
        "", "Adapter to analyse, a PEFT folder or a tinker:// path; a file with this key and no [campaign] is a squeeze job."
    )
    source_rank: int = key(0, "Expected rank of the adapter; 0 reads it from the weights.", ge=0)
    target_ranks: list[Positive] = key([], "Ranks to evaluate; empty means powers of two.")
    output_path: PathText = key("", "Folder for the compressed adapter; empty does not compress.")
    compress_to: int = key(0, "Rank of the compressed adapter; 0 takes the recommended one.", ge=0)
    device: Annotated[str, AfterValidator(check_svd_device)] = key("cpu", "Torch device of the SVD.")
    rule: Literal["mean", "min"] = key("mean", "What must keep the variance: the mean of the layers, or the worst layer.")
    per_layer: bool = key(False, "Choose a rank for each layer.")
    evaluate: bool = key(False, "Evaluate the compressed adapter.")


class Resume(Section):
    """Resuming a run."""

    traits = Traits(own_to_a_run=True, whole_campaign=True)

    from_: PathText = key("", "Folder of the run to resume (it holds trainer_state.json).", alias="from", may_change_at_resume=True)


class Logging(Section):
    """What a run writes."""

    traits = Traits(may_change_at_resume=True, own_to_a_run=True)

    log_dir: PathText = key(
        "logs/train",
        "Folder of the run, or of the campaign (unset: logs/campaign_<time>).",
        min_length=1,
        not_for_a_condition="each run has its own folder",
    )
    label: Annotated[str, AfterValidator(check_label)] = key(
        "",
        "Name of the condition in metrics and on the screen; empty means {advantage}+{transform}; campaigns set it.",
        not_for_a_condition="label names the condition",
    )
    wandb_project: str = key("", "Weights & Biases project; setting it switches wandb on.")
    wandb_run_name: str = key("", "Name of the wandb run; empty means the condition's label.")
    wandb_entity: str = key("", "wandb entity or team.")
    wandb_group: str = key("", "wandb group.")
    wandb_tags: str = key("", "Comma-separated wandb tags.")
    trackers: list[Literal["wandb", "trackio", "tensorboard"]] = key([], "Trackers beside the run's own files.")
    generations_every: int = key(1, "Steps between records of generations; 0 is off.", ge=0)
    generations_per_step: int = key(8, "Generations recorded at each such step.", ge=0)
    tokens_every: int = key(0, "Steps between per-token files for inspect; 0 is off.", ge=0)

    @property
    def tags(self) -> list[str]:
        return [tag.strip() for tag in self.wandb_tags.split(",") if tag.strip()]


def _open_condition(schema: dict[str, Any]) -> None:
    """For editors: a condition may hold any key of a run."""
    schema["properties"].pop("sets")
    schema["additionalProperties"] = True


class Condition(Section):
    """One arm of a campaign: both modes, or an algorithm in their place, and whatever else it sets over the base."""

    model_config = ConfigDict(json_schema_extra=_open_condition)

    advantage_mode: Annotated[str, OpenName("advantage", may_be_empty=True)] = key("", "Advantage of this condition.")
    transform_mode: Annotated[str, OpenName("transform", may_be_empty=True)] = key("", "Transform of this condition.")
    algorithm_mode: Annotated[str, OpenName("algorithm", may_be_empty=True)] = key("", "A whole algorithm in place of the two modes.")
    given_label: Annotated[str, AfterValidator(check_label)] = key(
        "", "Name of the condition; empty means {advantage}+{transform}, or the algorithm.", alias="label"
    )
    sets: dict[str, Any] = Field(default={})
    """ "section.key" to value: every other key that the table holds. Their values are checked with the base under them."""

    @model_serializer(mode="wrap")
    def _flat(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """As a file holds it: `loss.mode` beside `label`."""
        values: dict[str, Any] = handler(self)
        if "given_label" in values:
            values["label"] = values.pop("given_label")
        sets: dict[str, Any] = values.pop("sets", {})
        return values | sets

    @property
    def label(self) -> str:
        return self.given_label or condition_label(self.advantage_mode, self.transform_mode, self.algorithm_mode)


DEFAULT_CONDITIONS = tuple(
    Condition(advantage_mode=advantage, transform_mode=transform)
    for advantage, transform in (("grpo", "none"), ("maxrl", "none"), ("maxrl", "gtpo"), ("maxrl", "gtpo_hicra"), ("maxrl", "gtpo_sepa"))
)
"""The progressive ablation from plain GRPO to MaxRL with GTPO and SEPA."""


class Campaign(Section):
    """Conditions times seeds."""

    traits = Traits(own_to_a_run=True, whole_campaign=True, acts_by_presence=True)

    seeds: Annotated[list[Seed], Field(min_length=1)] = key([42, 101, 202, 303, 404, 505, 606, 707], "Seeds that each condition runs with.")
    max_steps: int | None = key(
        None, "Steps of each run; unset means [training] max_steps (500).", ge=1, meaningful_unset=True, example=500
    )
    stop: Literal["seeds", "evidence"] = key("seeds", "End after all seeds, or look after every seed and stop when the evidence decides.")
    max_seeds: int = key(
        0, 'Most seeds with stop = "evidence", beyond those of `seeds` counted on from the largest; 0 is as many as `seeds` names.', ge=0
    )
    parallel: bool = key(False, "Run conditions simultaneously.")
    max_workers: int = key(0, "Most simultaneous runs; 0 starts all, on CUDA as many as the devices hold.", ge=0)
    stagger_seconds: float = key(0.0, "Seconds between starts of runs.", ge=0)
    conditions: list[Condition] = key([], "The conditions; empty means the five of the standard ablation.")
    launcher: Literal["local", "ray"] = key("local", "What starts the runs.")
    ray_address: str = key("", "Address of a Ray cluster; empty starts a local one.")
    max_retries: int = key(2, "Times that a run is restarted after its worker was lost (killed, or its machine gone).", ge=0)
    devices_per_run: int = key(1, "Devices of one run.", ge=1)
    workers_per_device: int = key(1, "Runs that share one device.", ge=1)
    price_per_hour: float = key(0.0, "Price of one device hour, for the cost in reports.", ge=0)


class TrainConfig(Section):
    """A whole configuration. Sections are attributes; every key keeps its TOML name (`from` is `from_`)."""

    backend: Backend = Field(default_factory=Backend)
    model: Model = Field(default_factory=Model)
    algorithm: Algorithm = Field(default_factory=Algorithm)
    plugins: Plugins = Field(default_factory=Plugins)
    training: Training = Field(default_factory=Training)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    lora: Lora = Field(default_factory=Lora)
    loss: Loss = Field(default_factory=Loss)
    evaluation: Evaluation = Field(default_factory=Evaluation)
    gtpo: Gtpo = Field(default_factory=Gtpo)
    hicra: Hicra = Field(default_factory=Hicra)
    sepa: Sepa = Field(default_factory=Sepa)
    planning: Planning = Field(default_factory=Planning)
    inference: Inference = Field(default_factory=Inference)
    data: Data = Field(default_factory=Data)
    environment: Environment = Field(default_factory=Environment)
    reward: Reward = Field(default_factory=Reward)
    backpressure: Backpressure = Field(default_factory=Backpressure)
    squeeze: Squeeze = Field(default_factory=Squeeze)
    resume: Resume = Field(default_factory=Resume)
    logging: Logging = Field(default_factory=Logging)
    campaign: Campaign | None = Field(default=None)

    _provenance: Provenance = PrivateAttr(default_factory=Provenance)

    @model_validator(mode="before")
    @classmethod
    def _canonical(cls, data: Any) -> Any:
        """Aliases under their canonical key, the aggregation that an algorithm such as dr_grpo brings along, Tinker's temperature."""
        if not isinstance(data, dict):
            return data
        data, both_given = moved_aliases(data)
        if both_given:
            sentence = "{} is another name of {} and both are given; keep the second"
            pairs = [(alias, ALIASES[alias]) for alias in both_given]
            raise RuleViolations([Violation(pair, sentence.format(*map(bracketed, pair))) for pair in pairs])
        algorithm, loss = data.get("algorithm"), data.get("loss", {})
        mode = algorithm.get("algorithm_mode") if isinstance(algorithm, dict) else None
        aggregation = fixed_aggregation(mode) if isinstance(mode, str) else ""
        if aggregation and isinstance(loss, dict):
            data["loss"] = {"aggregation": aggregation, **loss}
        backend, training = data.get("backend"), data.get("training", {})
        if isinstance(backend, dict) and backend.get("backend") == "tinker" and isinstance(training, dict):
            data["training"] = {"temperature": 1.0, **training}  # the only one that its learner knows
        return data

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> "TrainConfig":
        judged = info.context is None or info.context["rules"]
        violations = broken_rules(self) if judged else []
        if violations:
            raise RuleViolations(violations)
        return self

    def __eq__(self, other: object) -> bool:
        """Equal values: where they came from does not count."""
        return isinstance(other, TrainConfig) and self.model_dump() == other.model_dump()

    __hash__ = None  # type: ignore[assignment]  # tables and lists are not hashable

    @property
    def source_path(self) -> Path | None:
        """The file it was loaded from; None when built in Python."""
        return self._provenance.path

    @property
    def origins(self) -> dict[str, str]:
        """Where each value comes from: "section.key" to "default", "file", "environment NAME" or "flag --name"."""
        from retrain.config.keys import all_keys

        given = self._provenance.origins
        return {path: given.get(path, "file" if self.is_set(path) else "default") for path in (k.path for k in all_keys())}

    def is_set(self, path: str) -> bool:
        """True if a section ("squeeze") or a key ("backend.devices") was given rather than left to its default."""
        section, _, name = path.partition(".")
        if section not in self.model_fields_set or not name:
            return section in self.model_fields_set
        value = getattr(self, section)
        return value is not None and ("from_" if name == "from" else name) in value.model_fields_set

    def value(self, path: str) -> Any:
        """The value of "section.key"; None for a key of an absent [campaign]."""
        section, _, name = path.partition(".")
        return getattr(getattr(self, section), "from_" if name == "from" else name, None)

    @property
    def kind(self) -> Literal["run", "campaign", "squeeze"]:
        if self.campaign is not None:
            return "campaign"
        return "squeeze" if self.squeeze.adapter_path else "run"

    @property
    def condition_label(self) -> str:
        """The condition of a single run, as metrics and folders name it."""
        algorithm = self.algorithm
        return self.logging.label or condition_label(algorithm.advantage_mode, algorithm.transform_mode, algorithm.algorithm_mode)

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """The arms of a campaign; of a single run, its own algorithm alone."""
        if self.campaign is not None:
            return tuple(self.campaign.conditions) or DEFAULT_CONDITIONS
        if self.algorithm.algorithm_mode:
            return (Condition(algorithm_mode=self.algorithm.algorithm_mode),)
        return (Condition(advantage_mode=self.algorithm.advantage_mode, transform_mode=self.algorithm.transform_mode),)

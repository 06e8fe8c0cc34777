"""Sections about the model and how it learns: base model, backend, credit assignment, training,
loss.

A key's documentation says what it does; its type and range say what is allowed, so the sentence
does not.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, model_validator

from retrain.config.section import PathText, Section, Strings, Table, Traits, key
from retrain.config.values import (
    MAX_COMPLETIONS,
    MAX_SEED,
    OpenName,
    check_devices,
    check_grams,
    check_path,
    named_layers,
    parse_devices,
    parse_grams,
)
from retrain.errors import ConfigurationError
from retrain.system import Json


def _expanded_options(options: Json) -> Json:
    """Return the options with the one path among them expanded."""
    if isinstance(folder := options.get("output_dir"), str):
        return {**options, "output_dir": check_path(folder)}
    return options


class Backend(Section):
    """The backend that trains the model."""

    traits = Traits(own_to_a_run=True, sizes_memory=True)

    backend: Annotated[str, OpenName("backend")] = key(
        "local",
        "Training backend: local (PyTorch and PEFT), tinker (remote), prime_rl (external trainer"
        " and inference), or a plugin.",
    )
    devices: Annotated[str, AfterValidator(check_devices)] = key(
        "gpu:0",
        "Comma-separated devices; two mean split mode, inference on the first and training on the"
        " last; unset falls back to cpu.",
        meaningful_unset=True,
        sets_step_time=True,
        not_for_a_condition=(
            "[campaign] devices_per_run and workers_per_device share the devices out"
        ),
        needs="weights",
    )
    shard_base: bool = key(
        False,
        "Shard the frozen layers over the processes of torchrun, for a model too big for one GPU;"
        " layers are gathered one at a time.",
        may_change_at_resume=True,
        needs="shards",
    )
    adapter_path: PathText = key(
        "",
        "Folder for checkpoints, in a subfolder named after the run; unset means"
        " <log_dir>/checkpoints.",
        meaningful_unset=True,
        may_change_at_resume=True,
    )
    options: Annotated[Table, AfterValidator(_expanded_options)] = key(
        {},
        "Options of one backend; prime_rl knows transport, zmq_*, strict_advantages, sync_*, wire,"
        " output_dir and trainer_ranks; tinker knows base_model, loss_reduction and timeout_s.",
    )
    max_concurrent: int = key(
        4,
        "Maximum number of simultaneous Tinker calls, over all workers of a campaign.",
        ge=1,
        may_change_at_resume=True,
        needs="service",
    )
    throttle_dir: PathText = key(
        "",
        "Folder of the locks that Tinker workers share; campaigns set it.",
        may_change_at_resume=True,
        needs="service",
    )

    @property
    def device_list(self) -> tuple[str, ...]:
        """The devices by torch's names."""
        return parse_devices(self.devices)

    def splits_base(self, processes: int) -> bool:
        """Return True if `processes` hold the frozen weights in parts. Raises ConfigurationError
        where there is one process alone.
        """
        if self.shard_base and processes == 1:
            raise ConfigurationError(
                "[backend] shard_base = true splits the frozen weights over the processes of"
                " torchrun, and this run has one process; start the run by torchrun"
                " --nproc-per-node N -m retrain, or leave shard_base false."
            )
        return self.shard_base

    @property
    def prime_rl(self) -> "PrimeRLOptions":
        """The options as the prime_rl backend reads them, with defaults filled in."""
        return PrimeRLOptions.model_validate(self.options_of("prime_rl"))

    @property
    def tinker(self) -> "TinkerOptions":
        """The same for the tinker backend."""
        return TinkerOptions.model_validate(self.options_of("tinker"))

    def options_of(self, backend: str) -> Json:
        """The given options that belong to a backend."""
        return {
            name: value
            for name, value in self.options.items()
            if name in BACKEND_OPTIONS[backend].model_fields
        }


class PrimeRLOptions(Section):
    """The keys of `[backend.options]` with backend = "prime_rl"."""

    transport: Literal["filesystem", "zmq"] = key("filesystem", "How batches reach the trainer.")
    zmq_host: str = key("localhost", "Host of the ZMQ transport.", min_length=1)
    zmq_port: int = key(5555, "Port of the ZMQ transport.", ge=1, le=65535)
    zmq_hwm: int = key(10, "Messages that ZMQ holds before it drops or blocks.", ge=1)
    strict_advantages: bool = key(
        True, "Must stay true: per-token advantages are never averaged silently."
    )
    sync_wait_s: float = key(
        30,
        "Maximum wait for broadcast weights, in seconds; set it longer than one step of the"
        " trainer.",
        gt=0,
    )
    sync_poll_s: float = key(0.2, "Seconds between checks for broadcast weights.", gt=0)
    wire: Literal["v0.9"] = key("v0.9", "Version of PRIME-RL's wire format: v0.9.0 and later.")
    output_dir: PathText = key(
        "",
        "The trainer's output_dir, on a file system that both see; unset means [backend]"
        " adapter_path, else <log_dir>/prime_rl.",
    )
    trainer_ranks: int = key(
        1, "Data ranks of the trainer: its GPUs, unless it shards sequences too.", ge=1
    )


class TinkerOptions(Section):
    """The keys of `[backend.options]` with backend = "tinker"."""

    base_model: str = key("", "Name of the base model at the service; empty means [model] model.")
    loss_reduction: Literal["sum", "mean"] = key(
        "sum",
        "How the service adds up a loss: sum, as the hosted one does, or mean over positions and"
        " rows (SkyRL's JAX backend); the gradient is normalised by [loss] aggregation either way.",
    )
    timeout_s: float = key(1800, "Maximum wait for one answer, in seconds.", gt=0)


BACKEND_OPTIONS: dict[str, type[Section]] = {"prime_rl": PrimeRLOptions, "tinker": TinkerOptions}


class Model(Section):
    """The base model."""

    traits = Traits(sizes_memory=True)

    model: PathText = key(
        "Qwen/Qwen3-4B-Instruct-2507",
        'Model id on the Hugging Face hub, a local folder, "lab" or "lab2".',
        min_length=1,
        sets_step_time=True,
    )
    base_url: str = key(
        "", "Tinker service URL (tinker backend only).", may_change_at_resume=True, needs="service"
    )
    lora_rank: int = key(
        32,
        "LoRA rank; alpha is twice the rank unless [lora] alpha is set.",
        ge=1,
        sets_step_time=True,
        needs="optimizer",
    )
    revision: str = key(
        "", "Branch, tag or commit of the model on the hub; empty means the default branch."
    )
    dtype: Literal["auto", "bf16", "fp32"] = key(
        "auto",
        "Data type of the frozen weights; auto is bf16 on CUDA and fp32 elsewhere.",
        sets_step_time=True,
        needs="weights",
    )
    trust_remote_code: bool = key(False, "Run Python code that comes with the model.")
    load_in_4bit: bool = key(
        False, "Hold the frozen weights in 4 bits (CUDA, needs bitsandbytes).", needs="weights"
    )


class Algorithm(Section):
    """The algorithm that turns rewards into token advantages."""

    algorithm_mode: Annotated[str, OpenName("algorithm", may_be_empty=True)] = key(
        "",
        "A whole algorithm, built in or a plugin; when set it replaces advantage_mode and"
        " transform_mode.",
        not_for_a_condition="write algorithm_mode",
    )
    advantage_mode: Annotated[str, OpenName("advantage")] = key(
        "maxrl",
        "Advantage of a completion within its group, built in or a plugin.",
        not_for_a_condition="write advantage_mode",
    )
    transform_mode: Annotated[str, OpenName("transform")] = key(
        "gtpo_sepa",
        "How a completion's advantage is spread over its tokens, built in or a plugin.",
        not_for_a_condition="write transform_mode",
    )
    uncertainty_kind: Annotated[str, OpenName("uncertainty")] = key(
        "surprisal",
        "Per-token uncertainty that GTPO weights by; shannon_entropy needs engine pytorch and"
        " backend local.",
    )
    surprisal_mask_rho: float = key(
        0.0,
        "Train only on this fraction of tokens, those with the highest uncertainty (arXiv"
        " 2506.01939); 0 is off.",
        ge=0,
        le=1,
        movable=True,
        needs="token_advantages",
    )
    surprisal_mask_scope: Literal["batch", "group", "completion"] = key(
        "batch",
        "Tokens over which the mask's threshold is computed.",
        applies_when="surprisal_mask_rho not in (0)",
    )
    surprisal_mask_denominator: Literal["all", "kept"] = key(
        "all",
        "Tokens over which the means of [loss] aggregation are taken: all, masked ones as zeros, or"
        " the kept ones of each update.",
        applies_when="surprisal_mask_rho not in (0)",
    )
    reference: PathText = key(
        "",
        'Teacher whose log-probs of the sampled tokens a stage may read: "base" (the frozen model),'
        ' "gold" (the policy itself with the answer in its prompt), or the folder of an adapter of'
        " this model; empty is none.",
        needs="teacher",
    )
    reference_prompt: str = key(
        "{prompt}\n\nThe correct answer is {answer}.",
        'The last user message of the teacher with reference = "gold"; {prompt} is what the policy'
        " was given, {answer} the reference answer.",
        applies_when="reference in (gold)",
    )
    reference_coef: float = key(
        1.0, "Weight of the teacher's log-ratio in transform_mode distill.", ge=0, movable=True
    )
    params: Table = key({}, "Parameters of an algorithm_mode plugin.")
    advantage_params: Table = key({}, "Parameters of the advantage.")
    transform_params: Table = key(
        {}, "Parameters of the transform; its uncertainty_kind overrides the key of that name."
    )
    uncertainty_params: Table = key({}, "Parameters of an uncertainty plugin.")

    @property
    def uncertainty(self) -> str:
        """The name in the transform's table, else `uncertainty_kind`."""
        return str(self.transform_params.get("uncertainty_kind", self.uncertainty_kind))


class Plugins(Section):
    """The search for plugins."""

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
        not_for_a_condition=(
            "conditions are compared after the same steps, so [campaign] max_steps gives it"
        ),
    )
    batch_size: int = key(8, "Prompts per step.", ge=1, le=MAX_COMPLETIONS, sets_step_time=True)
    group_size: int = key(
        16, "Completions sampled per prompt.", ge=1, le=MAX_COMPLETIONS, sets_step_time=True
    )
    max_tokens: int = key(
        10240, "Maximum number of new tokens per completion.", ge=1, sets_step_time=True
    )
    temperature: float = key(
        0.7,
        "Sampling temperature; the trained policy is the model at this temperature. Unset with"
        " backend tinker it is 1.",
        gt=0,
        movable=True,
    )
    top_k: int = key(
        0,
        "Sample from, and train over, the k most probable tokens at each position, renormalised; 0"
        " is off.",
        ge=0,
        needs="kept_sets",
    )
    top_p: float = key(
        1.0,
        "Sample from, and train over, the fewest most probable tokens with a total probability of"
        " at least top_p, after top_k; 1 is off.",
        gt=0,
        le=1,
        needs="kept_sets",
    )
    min_p: float = key(
        0.0,
        "Sample from, and train over, tokens of at least min_p times the largest probability; 0 is"
        " off.",
        ge=0,
        lt=1,
        needs="kept_sets",
    )
    lr: float = key(
        4e-5,
        "Learning rate.",
        ge=0,
        movable=True,
        needs="optimizer",
    )
    lr_schedule: Literal["constant", "linear", "cosine"] = key(
        "constant",
        "Learning rate after warm-up: constant, or falling to 0 at lr_horizon.",
        needs="optimizer",
    )
    lr_horizon: int = key(
        0,
        "Step at which a falling learning rate reaches 0; 0 is max_steps. A resume that raises"
        " max_steps names it.",
        ge=0,
        applies_when="lr_schedule in (linear, cosine)",
        needs="optimizer",
    )
    lr_warmup_steps: int = key(
        0, "Steps over which the learning rate rises from 0.", ge=0, needs="optimizer"
    )
    weight_decay: float = key(0.0, "AdamW weight decay.", ge=0, needs="optimizer")
    updates_per_batch: int = key(
        1, "Passes over each batch.", ge=1, sets_step_time=True, needs="updates"
    )
    minibatches: int = key(1, "Optimizer updates per pass.", ge=1, needs="updates")
    micro_batch_tokens: int = key(
        0,
        "Maximum number of tokens per forward and backward pass; 0 chooses by the machine.",
        ge=0,
        needs="micro_batches",
    )
    gradient_checkpointing: Literal["auto"] | bool = key(
        "auto",
        "Recompute activations in the backward pass; auto decides by the machine.",
        needs="weights",
    )
    dynamic_sampling: int = key(
        0,
        "Maximum number of times that a group whose rewards are all equal is sampled again;"
        " correct_rate, mean_reward and SEPA's gate use the first draws, which are not"
        " selected by reward.",
        ge=0,
        le=1000,
    )
    max_examples: int = key(0, "Number of the data source's examples to use; 0 uses all.", ge=0)
    save_every: int = key(
        20,
        "Steps between checkpoints; 0 saves only at the end and when the run is stopped.",
        ge=0,
        may_change_at_resume=True,
        own_to_a_run=True,
    )
    keep_checkpoints: int = key(
        0,
        "Number of newest checkpoints to keep, at least 2 to survive a crash; 0 keeps all.",
        ge=0,
        may_change_at_resume=True,
        own_to_a_run=True,
    )
    max_hours: float = key(
        0.0,
        "Save and stop after this many hours; 0 is no limit.",
        ge=0,
        may_change_at_resume=True,
        own_to_a_run=True,
    )

    @property
    def truncated(self) -> bool:
        """True if the policy that is sampled and trained leaves out improbable tokens."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def more_hours(self, seconds: float) -> str:
        """Return the flag with which a run that max_hours ended after `seconds` goes on."""
        return f"--max-hours {2 * max(self.max_hours, seconds / 3600):.3g}"


class Optimizer(Section):
    """AdamW."""

    traits = Traits(needs="optimizer")

    beta1: float = key(0.9, "AdamW beta1.", ge=0, lt=1)
    beta2: float = key(0.95, "AdamW beta2.", ge=0, lt=1)
    eps: float = key(1e-8, "AdamW epsilon.", gt=0)


class Lora(Section):
    """The adapter."""

    traits = Traits(sizes_memory=True)

    alpha: int = key(0, "LoRA alpha; 0 means twice the rank.", ge=0, needs="scale")
    dropout: float = key(0.0, "LoRA dropout rate.", ge=0, lt=1, needs="adapter")
    target_modules: Annotated[Strings, BeforeValidator(named_layers)] = key(
        [],
        "Names of the adapted layers; empty, or all-linear, means all linear layers of the blocks"
        " but a router.",
        needs="adapter",
    )
    init_from: PathText = key(
        "", "PEFT folder with the adapter's initial weights.", needs="adapter"
    )
    use_rslora: bool = key(
        False, "Scale the update by alpha / sqrt(rank) instead of alpha / rank.", needs="adapter"
    )


DEFAULT_CLIPS = {
    "ppo": (0.2, 0.2),
    "gspo": (3e-4, 4e-4),
    "cispo": (0.0, 4.0),
    "gmpo": (0.4, 0.4),
    "dppo": (0.15, 0.15),
}
"""(clip_low, clip_high) of a mode where they are unset; the others have no clip."""


class Loss(Section):
    """The policy loss (formulas and divisors: docs/losses.md)."""

    mode: Annotated[str, OpenName("loss")] = key(
        "importance_sampling",
        "Per-token objective, built in or a plugin.",
        needs="loss",
    )
    params: Table = key(
        {},
        "Parameters of a mode: tau_pos and tau_neg (sapo), cap (dppo), or a plugin's own.",
        needs="clips",
    )
    clip_low: float | None = key(
        None,
        "Lower clip distance of the ratio (ppo, gspo), bound of it (cispo), or distance of its"
        " logarithm (gmpo) or of the probability (dppo); unset is 0.2, 3e-4, 0, 0.4, 0.15 by mode.",
        ge=0,
        meaningful_unset=True,
        example=0.2,
        applies_when="mode in (ppo, gspo, cispo, gmpo, dppo)",
        movable=True,
        needs="clips",
    )
    clip_high: float | None = key(
        None,
        "Upper clip distance of the ratio (ppo, gspo), bound of it (cispo), or distance of its"
        " logarithm (gmpo) or of the probability (dppo); unset is 0.2, 4e-4, 4, 0.4, 0.15 by mode.",
        ge=0,
        meaningful_unset=True,
        example=0.2,
        applies_when="mode in (ppo, gspo, cispo, gmpo, dppo)",
        movable=True,
        needs="clips",
    )
    dual_clip: float = key(
        0.0,
        "Bound above 1 on the ratio of tokens with negative advantage (ppo); 0 is off.",
        ge=0,
        applies_when="mode in (ppo)",
        movable=True,
        needs="dual_clip",
    )
    correction: Annotated[str, OpenName("correction")] = key(
        "none",
        "Correction for the mismatch of sampler and learner, built in or a plugin; needs"
        ' old_logprobs = "recomputed".',
        needs="correction",
    )
    correction_cap: float = key(
        2.0,
        "Largest correction weight of a token (tis) or a completion (seq_tis).",
        gt=0,
        movable=True,
    )
    correction_low: float = key(
        0.5,
        "Tokens (icepop) or completions (seq_mask, geometric) with a correction weight below this"
        " are dropped.",
        ge=0,
        movable=True,
    )
    correction_high: float = key(
        5.0,
        "Tokens (icepop) or completions (seq_mask, geometric) with a correction weight above this"
        " are dropped.",
        gt=0,
        movable=True,
    )
    aggregation: Annotated[str, OpenName("aggregation")] = key(
        "token_mean",
        "How token losses become an update's loss, built in or a plugin: means are over the"
        " completions with an advantage, constant divides by max_tokens for every judged completion"
        " of the step, sum does not divide; unset is token_mean, or constant with algorithm_mode"
        " grpo_constant.",
        meaningful_unset=True,
    )
    kl_coef: float = key(
        0.0,
        "Weight of the KL divergence to the frozen base model, aggregated over all judged"
        " completions, including groups with equal rewards; 0 skips the base model's forward pass.",
        ge=0,
        movable=True,
        needs="kl",
    )
    kl_estimator: Literal["k1", "k2", "k3"] = key(
        "k3",
        "Per-token KL estimator. Its expected gradient is the gradient of KL(policy || base) for"
        " k2, of KL(base || policy) for k3, and 0 for k1, which is refused.",
        applies_when="kl_coef not in (0)",
    )
    entropy_coef: float = key(
        0.0,
        "Weight of the entropy bonus, aggregated like the KL divergence.",
        ge=0,
        movable=True,
        needs="entropy_bonus",
    )
    max_grad_norm: float = key(
        0.0,
        "Clip the gradient norm at this value; 0 is off.",
        ge=0,
        movable=True,
        needs="optimizer",
    )
    log_ratio_clamp: float = key(
        20.0,
        "Clamp log-ratios to this magnitude before exp.",
        gt=0,
        movable=True,
        needs="log_ratios",
    )
    old_logprobs: Literal["sampler", "recomputed"] = key(
        "sampler",
        "Log-probs in the ratio's denominator: the sampler's, or recomputed by the learner before"
        " the first update, under the same dropout masks; unset is sampler, or recomputed with mode"
        " gspo in half precision.",
        meaningful_unset=True,
        needs="correction",
    )
    mask_truncated: bool = key(
        False,
        "Leave completions cut off at max_tokens out of the loss and its means; aggregation"
        " constant still counts them.",
    )

    @property
    def clips(self) -> tuple[float, float]:
        """(clip_low, clip_high) that act."""
        low, high = DEFAULT_CLIPS.get(self.mode, (0.0, 0.0))
        return (
            low if self.clip_low is None else self.clip_low,
            high if self.clip_high is None else self.clip_high,
        )


def _open_schedule(schema: Json) -> None:
    """Let the JSON Schema accept any "section.key", for editors."""
    schema["additionalProperties"] = True


class Schedule(Section):
    """Keys that move with the step: "section.key" = [[step, value], ...]."""

    model_config = ConfigDict(json_schema_extra=_open_schedule)

    points: Table = key(
        {},
        'The schedules, "section.key" -> points [step, value], linear between them; a file may'
        " write each as a key of the section.",
    )

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, data: Any) -> Any:
        return gathered_schedule(data) if isinstance(data, dict) else data


def gathered_schedule(data: Json) -> Json:
    """Move what is named "section.key", quoted or not, under `points`."""
    moved: Json = {}
    own = {}
    for name, value in data.items():
        if name in Schedule.model_fields:
            own[name] = value
        elif "." in name:
            moved[name] = value
        elif isinstance(value, dict):
            moved |= {f"{name}.{rest}": points for rest, points in _flat(value)}
        else:
            own[name] = value
    if moved and isinstance(own.get("points", {}), dict):
        own["points"] = {**own.get("points", {}), **moved}
    return own


def _flat(table: Json) -> Iterator[tuple[str, Any]]:
    """The values of nested tables by their dotted names."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{rest}", inner) for rest, inner in _flat(value))
        else:
            yield name, value


class Gtpo(Section):
    """Entropy-weighted credit."""

    beta: float = key(
        0.1,
        "Strength of the weighting; 0 disables it, above 1 clips weights at 0.",
        ge=0,
        movable=True,
    )
    norm: Literal["completion", "group"] = key(
        "completion",
        "Tokens over which the mean uncertainty is taken.",
        applies_when="beta not in (0)",
    )
    negative: Literal["same", "inverse"] = key(
        "same",
        "Weighting of completions with negative advantage: the same, or by inverse uncertainty.",
        applies_when="beta not in (0)",
    )


class Hicra(Section):
    """Planning-token amplification."""

    alpha: float = key(
        0.2, "Amplification of planning tokens; 0 disables it.", ge=0, le=1, movable=True
    )


class Sepa(Section):
    """Selective entropy pooling and its schedule."""

    steps: int = key(500, "Duration of the linear ramp from 0 to 1.", ge=0)
    schedule: Literal["linear", "auto"] = key(
        "linear", "linear ramps; auto follows the decay of the uncertainty's variance."
    )
    delay_steps: int = key(50, "Steps before the ramp begins.", ge=0)
    correct_rate_gate: float = key(
        0.1,
        "Correct rate at which a step opens the gate for good; 0 opens it from the start.",
        ge=0,
        le=1,
    )
    ema_decay: float = key(
        0.99,
        "Decay of the variance's moving average (auto).",
        ge=0,
        lt=1,
        applies_when="schedule not in (linear)",
    )
    var_threshold: float = key(
        0.2,
        "Fraction of the reference variance below which pooling starts; it completes as the"
        " variance goes to 0 (auto).",
        gt=0,
        applies_when="schedule not in (linear)",
    )
    warmup: int = key(
        50,
        "Steps before the reference variance is fixed (auto).",
        ge=1,
        applies_when="schedule not in (linear)",
    )


class Planning(Section):
    """The detector of planning tokens."""

    detector: Literal["regex", "semantic"] = key("regex", "How planning tokens are found.")
    model: PathText = key(
        "all-MiniLM-L6-v2",
        "Sentence-transformers model of the semantic detector: its name or folder.",
        min_length=1,
        applies_when="detector not in (regex)",
    )
    threshold: float = key(
        0.02,
        "Margin by which a window must be nearer to planning than to execution (semantic).",
        ge=-2,
        le=2,
        applies_when="detector not in (regex)",
    )
    min_similarity: float = key(
        0.25,
        "Smallest similarity to planning (semantic).",
        ge=-1,
        le=1,
        applies_when="detector not in (regex)",
    )
    strategic_grams: Annotated[str | Strings, AfterValidator(check_grams)] = key(
        "",
        "Planning phrases as a list, a JSON array or comma-separated; empty means the built-in"
        " ones.",
        applies_when="detector not in (semantic)",
    )

    @property
    def grams(self) -> list[str]:
        """The phrases that were configured; empty means the built-in ones."""
        return parse_grams(self.strategic_grams)

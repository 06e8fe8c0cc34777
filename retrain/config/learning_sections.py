"""Sections about the model and how it learns: base model, backend, training, loss.

A key's documentation says what it does. Its type and range say which values are valid, so the
sentence does not.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ValidationError

from retrain.config.fields import describe_field
from retrain.config.names import builtin_names, fixed_aggregation, nearest, table
from retrain.config.section import (
    PathText,
    Section,
    Strings,
    Table,
    Traits,
    Violation,
    Violations,
    key,
)
from retrain.config.values import (
    MAX_COMPLETIONS,
    MAX_SEED,
    OpenName,
    check_devices,
    check_path,
    named_layers,
    parse_devices,
    with_former_names,
)
from retrain.errors import MAX_SENTENCES, ConfigurationError
from retrain.system import Json, toml_value


def _expanded_options(options: Json) -> Json:
    """Return the options with their only path, `output_dir`, expanded."""
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
        "Comma-separated devices. Two mean split mode: inference on the first, training on the"
        " last. Unset falls back to cpu.",
        meaningful_unset=True,
        sets_step_time=True,
        not_for_a_condition=(
            "[campaign] devices_per_run and workers_per_device share the devices out"
        ),
        needs="weights",
    )
    shard_base: bool = key(
        False,
        "Shard the frozen layers over the processes of torchrun, for a model too big for one"
        " GPU. A process gathers one layer at a time.",
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
        "Options of one backend. prime_rl knows transport, zmq_*, strict_advantages, sync_*,"
        " wire, output_dir and trainer_ranks. tinker knows base_model, loss_reduction and"
        " timeout_s.",
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
        """Return True if `processes` hold the frozen weights in parts. Raises ConfigurationError if
        there is one process alone.
        """
        if self.shard_base and processes == 1:
            raise ConfigurationError(
                "[backend] shard_base = true needs several processes, and this run has one;"
                " start it by torchrun --nproc-per-node N -m retrain, or leave shard_base"
                " false."
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
        """Return the given options that belong to a backend."""
        return {
            name: value
            for name, value in self.options.items()
            if name in BACKEND_OPTIONS[backend].model_fields
        }

    def problems(self, config: Any) -> Violations:  # noqa: ARG002 - a rule of one section
        """Check the options of every backend, whichever the file chooses, so that a file can switch
        backends.
        """
        if self.backend in builtin_names("backend") and self.options:
            for problem in self._option_problems():
                yield Violation(("backend.options",), f"[backend.options] {problem}")

    def _option_problems(self) -> Iterator[str]:
        """Yield clauses on wrong options, to follow the name of their table."""
        known = list(chain.from_iterable(model.model_fields for model in BACKEND_OPTIONS.values()))
        wrong = [name for name in self.options if name not in known]
        for name in wrong[: MAX_SENTENCES - 1]:
            near = nearest(name, known)
            hint = f'did you mean "{near}"?' if near else f"known are {', '.join(known)}"
            yield f"{name} is not a known option; {hint}"
        more = len(wrong[MAX_SENTENCES - 1 :])
        if more:
            yield f"{more:,} more of its names are not known options"
        for owner, model in BACKEND_OPTIONS.items():
            try:
                model.model_validate(self.options_of(owner))
            except ValidationError as error:
                for problem in error.errors(include_url=False)[:MAX_SENTENCES]:
                    name, value = str(problem["loc"][0]), toml_value(problem["input"])
                    allowed = describe_field(model.model_fields[name])
                    yield f"{name} = {value} is refused; allowed: {allowed}"
        if self.options.get("strict_advantages") is False:
            yield (
                "strict_advantages = false would average per-token advantages silently; leave"
                " it true"
            )


class PrimeRLOptions(Section):
    """The keys of `[backend.options]` with backend = "prime_rl"."""

    transport: Literal["filesystem", "zmq"] = key("filesystem", "How batches reach the trainer.")
    zmq_host: str = key("localhost", "Host of the ZMQ transport.", min_length=1)
    zmq_port: int = key(5555, "Port of the ZMQ transport.", ge=1, le=65535)
    zmq_hwm: int = key(10, "Messages that ZMQ holds before it drops or blocks.", ge=1)
    strict_advantages: bool = key(
        True, "Must stay true: retrain never averages per-token advantages silently."
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
        "How the service adds up a loss. The hosted one takes the sum, SkyRL's JAX backend the"
        " mean over positions and rows. [loss] aggregation normalizes the gradient either way.",
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
    train: Literal["lora", "full"] = key(
        "lora",
        "The weights that retrain trains: a LoRA adapter, or full, all weights of the language"
        " model.",
        sets_step_time=True,
        needs="all_weights",
    )
    lora_rank: int = key(
        32,
        "LoRA rank; alpha is twice the rank unless you set [lora] alpha.",
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
        "Total number of training steps; 0 ends the run after its [sft] stage.",
        ge=0,
        may_change_at_resume=True,
        not_for_a_condition=(
            "all conditions need the same steps, so [campaign] max_steps gives it"
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
        "Sample from, and train over, the k most probable tokens at each position, renormalized; 0"
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
        'Learning rate. Unset with [model] train = "full" it is 1e-6.',
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
    max_resamples: int = key(
        0,
        "Maximum number of times that retrain samples a group of equal rewards again. The"
        " metrics correct_rate and mean_reward and SEPA's gate use the first draws, so"
        " resampling does not bias them.",
        ge=0,
        le=1000,
    )
    max_examples: int = key(0, "Number of the data source's examples to use; 0 uses all.", ge=0)
    save_every: int = key(
        20,
        "Steps between checkpoints; 0 saves only at the end and when the run stops.",
        ge=0,
        may_change_at_resume=True,
        own_to_a_run=True,
    )
    keep_checkpoints: int = key(
        0,
        "Number of newest checkpoints to keep, at least 2 to survive a crash; 0 keeps all. Unset"
        ' with [model] train = "full" it is 2.',
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
        """True if the policy omits improbable tokens, in sampling and in training."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def more_hours(self, seconds: float) -> str:
        """Return the flag with which a run that max_hours ended after `seconds` goes on."""
        return f"--max-hours {2 * max(self.max_hours, seconds / 3600):.3g}"

    def problems(self, config: Any) -> Violations:
        yield from self._group_problems(config)
        if self.top_k == 1:
            yield Violation(
                ("training.top_k",),
                "[training] top_k = 1 makes all completions of a prompt equal, so the run"
                " learns nothing; give 0 (off) or 2 or more",
            )
        if self.keep_checkpoints == 1:
            yield Violation(
                ("training.keep_checkpoints",),
                "[training] keep_checkpoints = 1 leaves no second checkpoint to fall back on;"
                " give 0 (all) or 2 or more",
            )
        completions = self.batch_size * self.group_size
        if completions > MAX_COMPLETIONS:
            yield Violation(
                ("training.batch_size", "training.group_size"),
                f"[training] batch_size x group_size = {completions:,} completions per step,"
                f" and memory holds them all at once; give {MAX_COMPLETIONS:,} at most",
            )
        if self.minibatches > completions:
            yield Violation(
                ("training.minibatches", "training.batch_size", "training.group_size"),
                f"[training] minibatches = {self.minibatches} is more than the {completions}"
                f" completions of a step (batch_size x group_size); give at most {completions}",
            )

    def _group_problems(self, config: Any) -> Violations:
        relative = [
            name for name, built_in in table("advantage").items() if built_in.group_relative
        ]
        shown = [name for name in config.advantages if name in relative]
        if self.group_size == 1 and shown:
            yield Violation(
                ("training.group_size", "algorithm.advantage_mode"),
                "[training] group_size = 1 gives every completion an advantage of 0 with"
                f' "{shown[0]}", which compares within a group; give 2 or more',
            )


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
        " logarithm (gmpo) or of the probability (dppo). Unset is 0.2, 3e-4, 0, 0.4, 0.15 by"
        " mode.",
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
        " logarithm (gmpo) or of the probability (dppo). Unset is 0.2, 4e-4, 4, 0.4, 0.15 by"
        " mode.",
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
        "Drop tokens (icepop) or completions (seq_mask, geometric) with a correction weight"
        " below this.",
        ge=0,
        movable=True,
    )
    correction_high: float = key(
        5.0,
        "Drop tokens (icepop) or completions (seq_mask, geometric) with a correction weight"
        " above this.",
        gt=0,
        movable=True,
    )
    aggregation: Annotated[str, OpenName("aggregation"), with_former_names("loss.aggregation")] = (
        key(
            "token_mean",
            "How token losses become an update's loss, built in or a plugin. Means are over the"
            " completions with an advantage. constant divides by max_tokens for every judged"
            " completion of the step. sum does not divide. Unset is token_mean, or constant with"
            " algorithm_mode grpo_constant.",
            meaningful_unset=True,
        )
    )
    kl_coef: float = key(
        0.0,
        "Weight of the KL divergence to kl_reference, aggregated over all judged completions,"
        " including groups with equal rewards; 0 skips that model's forward pass.",
        ge=0,
        movable=True,
        needs="kl",
    )
    kl_reference: Literal["base", "start"] = key(
        "base",
        "Reference policy of the KL divergence: the frozen base model, or the weights before"
        " the first RL step, after [sft] or [lora] init_from.",
        needs="start",
    )
    kl_estimator: Literal["k1", "k2", "k3"] = key(
        "k3",
        "Per-token KL estimator. k2 has the expected gradient of KL(policy || base), k3 of"
        " KL(base || policy). A loss term cannot use k1, whose expected gradient is 0.",
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
        "Log-probs in the ratio's denominator, from the sampler or recomputed. The learner"
        " recomputes them before the first update, with the same dropout masks. Unset is"
        " sampler, or recomputed with mode gspo in half precision.",
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

    def problems(self, config: Any) -> Violations:
        yield from self._correction_problems()
        yield from self._clip_problems()
        if self.kl_coef > 0 and self.kl_estimator == "k1":
            yield Violation(
                ("loss.kl_estimator", "loss.kl_coef"),
                '[loss] kl_estimator = "k1" has an expected gradient of 0; use "k2" (policy to'
                ' base) or "k3" (base to policy)',
            )
        for mode in dict.fromkeys(condition.algorithm_mode for condition in config.conditions):
            fixed = fixed_aggregation(mode)
            if fixed and self.is_set("aggregation") and self.aggregation != fixed:
                yield Violation(
                    ("loss.aggregation", "algorithm.algorithm_mode"),
                    f'[loss] aggregation = "{self.aggregation}" contradicts algorithm_mode ='
                    f' "{mode}", which fixes aggregation = "{fixed}"; leave it out',
                )

    def _correction_problems(self) -> Violations:
        if self.correction != "none" and self.old_logprobs != "recomputed":
            yield Violation(
                ("loss.correction", "loss.old_logprobs"),
                f'[loss] correction = "{self.correction}" needs old_logprobs = "recomputed", since'
                " it weighs the learner's log-probs against the sampler's",
            )
        bounded = self.is_set("correction_low") and self.is_set("correction_high")
        if self.correction == "geometric" and not bounded:
            yield Violation(
                ("loss.correction", "loss.correction_low", "loss.correction_high"),
                '[loss] correction = "geometric" needs correction_low and correction_high,'
                " such as 0.999 and 1.001; a completion's mean ratio stays near 1, so the"
                " defaults drop none",
            )
        if self.correction_low > self.correction_high:
            yield Violation(
                ("loss.correction_low", "loss.correction_high"),
                f"[loss] correction_low = {self.correction_low} is above correction_high ="
                f" {self.correction_high}, which drops every token",
            )

    def _clip_problems(self) -> Violations:
        if 0 < self.dual_clip <= 1:
            yield Violation(
                ("loss.dual_clip",),
                f"[loss] dual_clip = {self.dual_clip} would clip tokens on policy; give 0 (off) or"
                " a number above 1, such as 3",
            )
        low, high = self.clips
        if self.mode == "cispo" and low > high:
            unset = " (its default)" if self.clip_high is None else ""
            yield Violation(
                ("loss.clip_low", "loss.clip_high", "loss.mode"),
                f"[loss] clip_low = {low} is above clip_high = {high}{unset}, and mode ="
                f' "cispo" bounds the ratio by both; give at most {high}, or raise clip_high',
            )
        if self.mode in ("ppo", "gspo") and low >= 1:
            yield Violation(
                ("loss.clip_low", "loss.mode"),
                f"[loss] clip_low = {low} would clip the ratio at 1 - clip_low <= 0 with mode ="
                f' "{self.mode}"; give a number below 1',
            )

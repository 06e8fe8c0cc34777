"""Sections about the rest of a run: sampling and evaluation, files and trackers, the adapter's
rank.

A key's documentation says what it does. Its type and range say which values are valid, so the
sentence does not.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from retrain.config.learning_sections import Training
from retrain.config.names import source_task
from retrain.config.section import (
    PathText,
    Positive,
    Section,
    ServerURL,
    Traits,
    Violation,
    Violations,
    key,
    repeated,
)
from retrain.config.values import (
    MAX_COMPLETIONS,
    OpenName,
    check_label,
    check_svd_device,
    check_table,
    check_variable,
    refuse,
)
from retrain.system import Json

SourceName = Annotated[str, OpenName("data", may_be_empty=True)]


class TaskSettings(BaseModel):
    """A table of [evaluation.tasks]: what differs for the problems of one source."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    samples: int | None = Field(None, ge=1, le=MAX_COMPLETIONS)
    temperature: float | None = Field(None, ge=0)
    max_examples: int | None = Field(None, ge=0)
    path: PathText = ""
    """A local copy of the source's data."""


def check_tasks(tasks: Json) -> Json:
    """Expand the paths of tasks. Refuse a table that holds something else than settings."""
    checked = {}
    for name, settings in check_table(tasks).items():
        try:
            task = TaskSettings.model_validate(settings)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            key = ".".join([name, *map(str, problem["loc"])])
            known = ", ".join(TaskSettings.model_fields)
            cause = problem["msg"][:1].lower() + problem["msg"][1:]
            raise refuse(f"is wrong at {key} ({cause}); a task takes {known}") from error
        checked[name] = task.model_dump(exclude_unset=True)
    return checked


class Evaluation(Section):
    """Accuracy on held-out problems."""

    traits = Traits(may_change_at_resume=True, sizes_memory=True)

    every: int = key(0, "Steps between evaluations; 0 is off.", ge=0)
    at_start: bool = key(False, "Evaluate before the first step.")
    at_end: bool = key(
        False, "Evaluate after the last step; unset is true in campaigns.", meaningful_unset=True
    )
    source: SourceName | Annotated[list[SourceName], Field(min_length=1)] = key(
        "",
        "Data source of the problems, or a list of them, each a task of its own; empty means the"
        " training source's held-out split.",
    )
    tasks: Annotated[Json, AfterValidator(check_tasks)] = key(
        {},
        "Settings of a source of the list, by its name: samples, temperature, max_examples,"
        " and path, a local copy of its data.",
        example={"aime24": {"samples": 32}},
    )
    reward: Annotated[str, OpenName("reward", may_be_empty=True)] = key(
        "",
        "Reward that judges held-out answers, with the parameters of [reward]. Empty means"
        " training's without random, overlong and majority, and in campaigns the base's for"
        " all conditions.",
    )
    max_examples: int = key(200, "Maximum number of problems evaluated; 0 uses all.", ge=0)
    samples: int = key(1, "Completions sampled per problem.", ge=1, le=MAX_COMPLETIONS)
    temperature: float | None = key(
        None,
        "Sampling temperature, 0 for greedy; unset means training's. Above 0, top_k, top_p and"
        " min_p apply too.",
        ge=0,
        meaningful_unset=True,
        example=1.0,
    )
    max_tokens: int | None = key(
        None,
        "Maximum number of new tokens per completion; unset means training's.",
        ge=1,
        meaningful_unset=True,
        echoes_training=True,
        example=1024,
    )
    top_k: int | None = key(
        None,
        "Top-k of held-out samples; unset means [training] top_k.",
        ge=0,
        meaningful_unset=True,
        echoes_training=True,
        example=0,
    )
    top_p: float | None = key(
        None,
        "Top-p of held-out samples; unset means [training] top_p.",
        gt=0,
        le=1,
        meaningful_unset=True,
        echoes_training=True,
        example=1.0,
    )
    min_p: float | None = key(
        None,
        "Min-p of held-out samples; unset means [training] min_p.",
        ge=0,
        lt=1,
        meaningful_unset=True,
        echoes_training=True,
        example=0.0,
    )
    k: list[Positive] = key([1], "Values of k of pass@k.", min_length=1)

    @property
    def sources(self) -> list[str]:
        if isinstance(self.source, str):
            return [self.source]
        return list(self.source)

    @property
    def parts(self) -> list["Evaluation"]:
        """The evaluation of each source, with the settings of its table; this section alone if
        there is one source without a table.
        """
        return [self._part(source) for source in self.sources]

    def _part(self, source: str) -> "Evaluation":
        settings = self.tasks.get(source_task(source), {})
        own = {name: value for name, value in settings.items() if name != "path"}
        return self.model_copy(update={"source": source, **own})

    def path_of(self, source: str) -> str:
        """Return the local copy of a source's data; "" if there is none."""
        return str(self.tasks.get(source_task(source), {}).get("path", ""))

    @property
    def asked_for(self) -> bool:
        return self.every > 0 or self.at_start or self.at_end

    def over(self, training: Training) -> Training:
        """Return [training] with the sampling settings of held-out answers. A setting that is unset
        here keeps its value in `training`.
        """
        names = ("temperature", "max_tokens", "top_k", "top_p", "min_p")
        own = {name: getattr(self, name) for name in names}
        return training.model_copy(update={k: v for k, v in own.items() if v is not None})

    def problems(self, config: Any) -> Violations:
        samples = max(part.samples for part in self.parts)
        if max(self.k) > samples:
            yield Violation(
                ("evaluation.k", "evaluation.samples"),
                f"[evaluation] k = {self.k} asks for pass@{max(self.k)} of samples = {samples};"
                f" give samples of {max(self.k)} or more",
            )
        for part in self.parts:
            if part.temperature == 0 and part.samples > 1:
                yield Violation(
                    ("evaluation.samples", "evaluation.temperature"),
                    f"[evaluation] samples = {part.samples} would be {part.samples} equal"
                    " completions at temperature = 0; give samples = 1 or a temperature above 0",
                )
        tasks = [source_task(source or config.data.source) for source in self.sources]
        # Only "" names the own source; in a list nobody could tell its task.
        if len(tasks) > 1 and "" in self.sources:
            yield Violation(
                ("evaluation.source",),
                '[evaluation] source = "" in a list is not a source; name each of them',
            )
        for task in repeated(tasks):
            yield Violation(
                ("evaluation.source",),
                f'[evaluation] source names the task "{task}" twice; rename a file, or drop one',
            )
        for name in [name for name in self.tasks if name not in tasks][:1]:
            yield Violation(
                ("evaluation.tasks", "evaluation.source"),
                f'[evaluation] tasks has "{name}", and source gives {", ".join(tasks)}; name'
                " these alone",
            )


class Inference(Section):
    """The engine that samples the completions."""

    traits = Traits(sizes_memory=True)

    engine: Annotated[str, OpenName("engine")] = key(
        "pytorch",
        "Inference engine, built in or a plugin.",
        sets_step_time=True,
        needs="engine",
    )
    url: ServerURL | Annotated[list[ServerURL], Field(min_length=1)] = key(
        "",
        "Server of the engines other than pytorch, such as http://127.0.0.1:8000; a list"
        " shares the requests.",
        may_change_at_resume=True,
        own_to_a_run=True,
        needs="server",
    )
    served_model: str = key(
        "",
        "Name of the base model on the server; empty takes the only one it has.",
        needs="server",
    )
    api_key_env: Annotated[str, AfterValidator(check_variable)] = key(
        "",
        "Environment variable with the server's API key; empty sends none.",
        may_change_at_resume=True,
        own_to_a_run=True,
        needs="server",
    )
    timeout_s: float = key(
        300.0,
        "Maximum wait for an answer of the server, in seconds.",
        gt=0,
        may_change_at_resume=True,
        own_to_a_run=True,
        needs="server",
    )
    retry_timeout_s: float = key(
        600.0,
        "Seconds for which retrain asks a busy or absent server again before it saves and"
        " stops the run.",
        gt=0,
        may_change_at_resume=True,
        own_to_a_run=True,
        needs="server",
    )
    adapter_dir: PathText = key(
        "",
        "Folder in which a server reads each step's adapter, seen by both under this path; empty is"
        " the run's own folder.",
        may_change_at_resume=True,
        own_to_a_run=True,
        needs="engine server",
    )
    attention_kernel: Literal["default", "flash", "triton", "tk", "cutlass"] = key(
        "default",
        "Attention implementation. The default is torch's flash kernel where it runs, else"
        " torch's choice. With flash a run needs that kernel. The kernel cutlass is torch's"
        " other one for CUDA. This engine lacks triton and tk.",
        needs="engine kernels",
    )
    dtype: Literal["auto", "bf16", "fp8", "fp4"] = key(
        "auto", "Data type of inference.", needs="engine"
    )
    kv_cache_dtype: Literal["auto", "bf16", "fp8", "int8"] = key(
        "auto",
        "Data type of the KV cache.",
        needs="engine",
    )
    prefix_caching: bool = key(
        True,
        "Share the prompt's KV cache among the completions of a group.",
        needs="engine kernels",
    )
    max_logprob_diff: float | None = key(
        None,
        "Stop the run when logprob_diff_mean exceeds this for 3 steps in a row; 0 is off. The"
        " metric is the mean |learner - sampler log-prob| in nats before a step's first"
        " update. Unset is ten times the parity gate's own mean, at least 1e-3 (half precision"
        " 0.02), and off with dropout or in split mode.",
        ge=0,
        meaningful_unset=True,
        example=0.02,
        may_change_at_resume=True,
        needs="log_ratios_recorded",
    )

    @property
    def urls(self) -> list[str]:
        """The servers; empty for the pytorch engine."""
        if isinstance(self.url, str):
            return [self.url] * bool(self.url)
        return list(self.url)

    @property
    def reduced_precision(self) -> bool:
        """The sampler computes, or caches keys and values, in 16 bits or fewer."""
        return self.dtype != "auto" or self.kv_cache_dtype != "auto"

    @property
    def eight_bits(self) -> bool:
        """The sampler computes, or caches keys and values, in 8 bits or fewer."""
        return not {self.dtype, self.kv_cache_dtype} <= {"auto", "bf16"}


class Backpressure(Section):
    """Batch size that follows measured throughput."""

    enabled: bool = key(False, "Adapt the batch size.")
    warmup_steps: int = key(
        10, "Steps to collect before the first fit of the throughput model.", ge=1
    )
    ema_decay: float = key(0.9, "Decay of the throughput's moving average.", ge=0, lt=1)
    throttle_margin: float = key(0.85, "Target fraction of the optimal concurrency.", gt=0, le=1)
    increase_margin: float = key(
        0.5, "Fraction of that target below which the batch grows.", ge=0, le=1
    )
    min_batch_size: int = key(1, "Smallest batch size.", ge=1)
    max_batch_size: int = key(64, "Largest batch size.", ge=1)
    peak_gflops: float = key(
        0.0, "Peak GFLOP/s of the hardware for roofline hints; 0 skips them.", ge=0
    )
    peak_bw_gb_s: float = key(
        0.0, "Peak memory bandwidth in GB/s for roofline hints; 0 skips them.", ge=0
    )
    cooldown: int = key(5, "Minimum number of steps between two changes.", ge=0)
    min_r2: float = key(0.5, "Smallest R squared of a fit that retrain trusts.", ge=0, le=1)
    weights: Literal["relative", "none"] = key("relative", "Weights of the fit.")

    def problems(self, config: Any) -> Violations:
        if self.min_batch_size > self.max_batch_size:
            yield Violation(
                ("backpressure.min_batch_size", "backpressure.max_batch_size"),
                f"[backpressure] min_batch_size = {self.min_batch_size} is above max_batch_size ="
                f" {self.max_batch_size}",
            )
        if self.enabled and len(config.backend.device_list) > 1:
            yield Violation(
                ("backpressure.enabled", "backend.devices"),
                "[backpressure] enabled = true needs one [backend] device, since two sample a"
                " step before the last one's measurement; name one, or leave it false",
            )


class Squeeze(Section):
    """Rank analysis and compression of an adapter."""

    traits = Traits(own_to_a_run=True, whole_campaign=True, acts_by_presence=True)

    min_variance_retention: float = key(
        0.95, "Fraction of the variance that the recommended rank must keep.", gt=0, le=1
    )
    adapter_path: PathText = key(
        "",
        "Adapter to analyze, a PEFT folder or a tinker:// path; a file with this key and no"
        " [campaign] is a squeeze job.",
    )
    source_rank: int = key(0, "Expected rank of the adapter; 0 reads it from the weights.", ge=0)
    target_ranks: list[Positive] = key([], "Ranks to evaluate; empty means powers of two.")
    output_path: PathText = key("", "Folder for the compressed adapter; empty does not compress.")
    compress_to: int = key(0, "Rank of the compressed adapter; 0 takes the recommended one.", ge=0)
    device: Annotated[str, AfterValidator(check_svd_device)] = key(
        "cpu", "Torch device of the SVD."
    )
    rule: Literal["mean", "min"] = key(
        "mean", "Layers that must keep the variance: their mean, or the worst one."
    )
    per_layer: bool = key(False, "Choose a rank for each layer.")
    evaluate: bool = key(False, "Evaluate the compressed adapter.")

    @property
    def is_remote(self) -> bool:
        """Return True if a Tinker service stores the adapter."""
        return self.adapter_path.startswith("tinker://")

    def problems(self, config: Any) -> Violations:  # noqa: ARG002 - a rule of one section
        if self.per_layer and self.compress_to:
            yield Violation(
                ("squeeze.compress_to", "squeeze.per_layer"),
                f"[squeeze] compress_to = {self.compress_to} is one rank for all layers, and"
                " per_layer = true chooses one for each; leave one of them out",
            )


class Resume(Section):
    """Resuming a run."""

    traits = Traits(own_to_a_run=True, whole_campaign=True)

    from_: PathText = key(
        "",
        "Folder of the run to resume (it holds trainer_state.json).",
        alias="from",
        may_change_at_resume=True,
    )


class Logging(Section):
    """The files and trackers that a run writes to."""

    traits = Traits(may_change_at_resume=True, own_to_a_run=True)

    log_dir: PathText = key(
        "logs/train",
        "Folder of the run, or of the campaign (unset: logs/campaign_<time>).",
        min_length=1,
        not_for_a_condition="each run has its own folder",
    )
    label: Annotated[str, AfterValidator(check_label)] = key(
        "",
        "Name of the condition in metrics and on the screen; campaigns set it. Empty means"
        " {advantage}+{transform}.",
        not_for_a_condition="label names the condition",
    )
    wandb_project: str = key("", "Weights & Biases project; setting it switches wandb on.")
    wandb_run_name: str = key("", "Name of the wandb run; empty means the condition's label.")
    wandb_entity: str = key("", "wandb entity or team.")
    wandb_group: str = key("", "wandb group.")
    wandb_tags: str = key("", "Comma-separated wandb tags.")
    trackers: list[Literal["wandb", "trackio", "tensorboard"]] = key(
        [], "Trackers in addition to the run's own files."
    )
    generations_every: int = key(1, "Steps between records of generations; 0 is off.", ge=0)
    generations_per_step: int = key(
        8,
        "Generations recorded at each such step.",
        ge=0,
        applies_when="generations_every not in (0)",
    )
    tokens_every: int = key(
        0,
        "Steps between per-token files for inspect with log-ratios; 0 keeps the first and the last"
        " step, without log-ratios.",
        ge=0,
    )
    groups: bool = key(
        False,
        "Print a line per group in every step, even for more than 8 groups.",
    )

    @property
    def tags(self) -> list[str]:
        return [tag.strip() for tag in self.wandb_tags.split(",") if tag.strip()]

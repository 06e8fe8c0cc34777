"""Tables of what each backend and engine does with each key: use it, leave it to `retrain serve`,
ignore it, or refuse it.

The tables are the only place where this is written. `outcomes.py` makes the sentences of a run and
of `explain` from them, the documents print them, and the tests set every key of every row.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from retrain.config.schema import TrainConfig

Use = Literal["used", "serve", "unused", "refused"]
"""serve: a setting of the server, which `retrain serve` passes on; a run cannot change it. unused:
said at the start. refused: exit 2."""

BACKEND_SECTIONS = ("backend", "model", "training", "optimizer", "lora", "loss", "inference")
"""Every key of these has a row in the table of every backend."""
ENGINE_SECTIONS = ("inference",)
"""The same for engines, with the local backend."""


@dataclass(frozen=True)
class Support:
    """The outcome of some keys. The first row that covers a key and its value holds."""

    use: Use
    keys: tuple[str, ...]
    """ "section.key", or "section.*"."""
    because: str = ""
    """Ends the sentence that names the key and its value; for a refused key it also says what to
    do."""
    values: tuple[Any, ...] = ()
    """The row holds for these values alone; empty: for every value, but a refused row lets a key be
    written at its default."""
    refuses_default: bool = False
    """The default itself does what the row refuses, so it may be left out and not written."""
    when: Callable[["TrainConfig"], bool] | None = None
    """None: always."""

    def covers(self, path: str) -> bool:
        return path in self.keys or f"{path.partition('.')[0]}.*" in self.keys

    def holds(self, config: "TrainConfig", path: str) -> bool:
        return (
            self.covers(path)
            and (not self.values or config.value(path) in self.values)
            and (self.when is None or self.when(config))
        )


Table = tuple[Support, ...]


def used(*keys: str) -> Support:
    return Support("used", keys)


def serve(*keys: str, because: str, when: Callable[["TrainConfig"], bool] | None = None) -> Support:
    return Support("serve", keys, because, when=when)


def unused(*keys: str, because: str) -> Support:
    return Support("unused", keys, because)


def refused(*keys: str, because: str, values: tuple[Any, ...] = ()) -> Support:
    return Support("refused", keys, because, values)


# -- backends --------------------------------------------------------------------------------------

_SAMPLING = ("training.seed", "training.max_tokens", "training.temperature")
_LOOP = (
    "training.max_steps",
    "training.batch_size",
    "training.group_size",
    "training.dynamic_sampling",
    "training.max_examples",
    "training.save_every",
    "training.keep_checkpoints",
    "training.max_hours",
)
_CUTS = ("training.top_k", "training.top_p", "training.min_p")
_RATE = ("training.lr", "training.lr_schedule", "training.lr_warmup_steps", "training.weight_decay")
_FILES = (
    "backend.backend",
    "backend.adapter_path",
    "model.model",
    "model.revision",
    "model.trust_remote_code",
)
_TINKER_ONLY = ("backend.max_concurrent", "backend.throttle_dir", "model.base_url")
_CORRECTION = (
    "loss.correction_cap",
    "loss.correction_low",
    "loss.correction_high",
    "loss.correction_params",
)
_MEMORY = ("training.micro_batch_tokens", "training.gradient_checkpointing")

LOCAL: Table = (
    unused(*_TINKER_ONLY, because="it belongs to the tinker backend"),
    used("backend.*", "model.*", "training.*", "optimizer.*", "lora.*", "loss.*", "inference.*"),
)
"""`backend.options` of another backend is said to be unused option by option."""

TINKER: Table = (
    used(*_FILES, *_TINKER_ONLY, "backend.options", "training.seed", "training.max_tokens", *_LOOP),
    Support("used", ("training.temperature",), values=(1.0,)),
    Support(
        "refused",
        ("training.temperature",),
        "Tinker's learner knows log-probs at temperature 1 only, so another policy would be sampled"
        " than is trained; leave it out (remove [training] temperature), or write 1.0",
        refuses_default=True,
    ),
    unused(
        "backend.devices",
        "model.dtype",
        "model.load_in_4bit",
        *_MEMORY,
        because="Tinker holds the model",
    ),
    refused(
        "backend.shard_base",
        because="the service holds the model, so there is nothing to shard; leave it false",
    ),
    refused(
        *_CUTS,
        because=(
            "Tinker's losses are over the whole vocabulary, so a truncated policy cannot be"
            " trained; leave it off"
        ),
    ),
    used(
        *_RATE,
        "optimizer.*",
        "loss.max_grad_norm",
        "training.updates_per_batch",
        "training.minibatches",
    ),
    used("model.lora_rank"),
    unused("lora.alpha", because="the service chooses the scale of the adapter"),
    refused("lora.dropout", because="Tinker trains without dropout; leave it at 0"),
    refused(
        "lora.target_modules",
        because="Tinker adapts all linear layers of the blocks; leave it empty",
    ),
    refused(
        "lora.init_from",
        because="Tinker starts from its own checkpoints, not from a PEFT folder; leave it empty",
    ),
    refused(
        "lora.use_rslora", because="the service chooses the scale of the adapter; leave it false"
    ),
    refused(
        "loss.mode",
        because=(
            "its clip is narrower than the rounding of a service in half precision; use"
            " importance_sampling, ppo, cispo, sapo, gmpo, dppo or a plugin"
        ),
        values=("gspo",),
    ),
    used("loss.mode", "loss.params", "loss.clip_low", "loss.clip_high", "loss.mask_truncated"),
    used("loss.aggregation", "loss.aggregation_params"),
    refused("loss.dual_clip", because="Tinker's ppo has no second clip; leave it at 0"),
    refused("loss.kl_coef", because="Tinker's losses have no KL term; leave it at 0"),
    unused("loss.kl_estimator", because="Tinker's losses have no KL term"),
    refused("loss.entropy_coef", because="Tinker's losses have no entropy term; leave it at 0"),
    refused(
        "loss.old_logprobs",
        "loss.correction",
        because=(
            "Tinker's ratio is against the sampler's log-probs; leave out [loss] correction and"
            " old_logprobs"
        ),
    ),
    unused(*_CORRECTION, because="Tinker corrects no mismatch"),
    Support(
        "used",
        ("loss.log_ratio_clamp",),
        when=lambda config: config.loss.mode in ("sapo", "gmpo", "dppo"),
    ),
    unused("loss.log_ratio_clamp", because="Tinker computes the ratio"),
    used("inference.mismatch_limit"),
    unused("inference.*", because="Tinker samples by itself"),
)

_TRAINERS_OWN = "the configuration of PRIME-RL's trainer says it"
PRIME_RL: Table = (
    used(*_FILES, "backend.options", *_SAMPLING, *_LOOP, *_CUTS),
    unused(*_TINKER_ONLY, because="it belongs to the tinker backend"),
    used("training.micro_batch_tokens"),
    unused(
        "backend.devices",
        "model.dtype",
        "model.load_in_4bit",
        *_MEMORY,
        because="PRIME-RL's trainer holds the model",
    ),
    refused(
        "backend.shard_base",
        because="PRIME-RL's trainer holds the model, so there is nothing to shard; leave it false",
    ),
    unused(
        *_RATE,
        "optimizer.*",
        "loss.max_grad_norm",
        "model.lora_rank",
        "lora.*",
        because=_TRAINERS_OWN,
    ),
    refused(
        "training.updates_per_batch",
        "training.minibatches",
        because="PRIME-RL's trainer makes one update per batch; leave it at 1",
    ),
    refused(
        "loss.mode",
        because=(
            "PRIME-RL's trainer has its own loss; leave it out here and set that in the trainer's"
            " configuration"
        ),
    ),
    unused(
        "loss.params",
        "loss.clip_low",
        "loss.clip_high",
        "loss.dual_clip",
        "loss.log_ratio_clamp",
        because=_TRAINERS_OWN,
    ),
    unused("loss.aggregation_params", because=_TRAINERS_OWN),
    refused(
        "loss.aggregation",
        because=(
            "PRIME-RL's trainer divides by the tokens of the batch, which is token_mean; use that,"
            " or leave it out"
        ),
    ),
    refused(
        "loss.kl_coef",
        because="the KL term stands in the configuration of PRIME-RL's trainer; leave it at 0",
    ),
    unused("loss.kl_estimator", because=_TRAINERS_OWN),
    refused("loss.entropy_coef", because="PRIME-RL's trainer has no entropy term; leave it at 0"),
    refused(
        "loss.old_logprobs",
        "loss.correction",
        because=(
            "PRIME-RL's ratio is against the sampler's log-probs; leave out [loss] correction and"
            " old_logprobs"
        ),
    ),
    unused(*_CORRECTION, because=_TRAINERS_OWN),
    used("loss.mask_truncated"),
    used("inference.url", "inference.served_model", "inference.api_key_env", "inference.timeout_s"),
    unused("inference.mismatch_limit", because="PRIME-RL's trainer reports no log-ratios"),
    unused("inference.*", because="PRIME-RL's own inference server samples"),
)

BACKEND_KEYS: dict[str, Table] = {"local": LOCAL, "tinker": TINKER, "prime_rl": PRIME_RL}


# -- engines, with the local backend ---------------------------------------------------------------

_SERVER = (
    "inference.url",
    "inference.served_model",
    "inference.api_key_env",
    "inference.timeout_s",
    "inference.adapter_dir",
)
_ROUNDING = ("inference.dtype", "inference.kv_cache_dtype")
"""A server's own setting, which `retrain serve` passes on; in a run it says that the parity gate
must allow for the rounding."""


def _server(engine: str) -> Table:
    return (
        used("inference.engine", "inference.mismatch_limit", *_SERVER, *_ROUNDING),
        serve(
            "inference.attention_kernel",
            "inference.prefix_caching",
            because=(
                f"the running server has its own setting, and `retrain serve {engine} FILE` prints"
                " the command that starts it so"
            ),
            when=lambda config: engine != "max" or bool(config.inference.url),
        ),
        used("inference.attention_kernel", "inference.prefix_caching"),
    )


ENGINE_KEYS: dict[str, Table] = {
    "pytorch": (
        unused(*_SERVER, because='engine "pytorch" samples in this process'),
        used("inference.*"),
    ),
    "vllm": _server("vllm"),
    "sglang": _server("sglang"),
    "mlx": _server("mlx"),
    "max": _server("max"),
    "openai": (
        used("inference.engine", "inference.mismatch_limit", *_SERVER, *_ROUNDING),
        unused(
            "inference.attention_kernel",
            "inference.prefix_caching",
            because="the server has its own setting",
        ),
    ),
}


# -- reading the tables ----------------------------------------------------------------------------


def tables_of(config: "TrainConfig") -> Iterator[tuple[str, Table]]:
    """(where the name stands, its table) for the built-in backend and engine of a configuration."""
    backend, engine = config.backend.backend, config.inference.engine
    if backend in BACKEND_KEYS:
        yield f'backend = "{backend}"', BACKEND_KEYS[backend]
    if backend == "local" and engine in ENGINE_KEYS:
        yield f'engine = "{engine}"', ENGINE_KEYS[engine]


def support_of(table: Table, config: "TrainConfig", path: str) -> Support | None:
    """The row that holds for a key at its value; None where the table says nothing about it."""
    return next((row for row in table if row.holds(config, path)), None)

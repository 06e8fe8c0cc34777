"""The command that starts a server as a configuration needs it: one function for each engine,
without importing any of them.
"""

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from retrain.errors import ConfigurationError, EnvironmentFailure
from retrain.parsing import toml_value

if TYPE_CHECKING:
    from retrain.config import TrainConfig
    from retrain.config.schema import Inference, Model, Training

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's --max-lora-rank."""
MOST_SEQUENCES = 256
"""Sequences that a server is told to run at once; it queues the others."""
_PORTS = {"vllm": 8000, "sglang": 30000, "mlx": 8080, "max": 8000}
_GIB = 2**30


class Variable(str):
    """The name of an environment variable that stands for its value, so that a key is neither
    printed nor stored.
    """


@dataclass(frozen=True)
class ServerNeeds:
    """Facts that a server must be told beside the configuration."""

    model: str
    """Folder or hub id."""
    dtype: str
    """float32 or bfloat16: the type of the learner's frozen weights, or [inference] dtype."""
    device: str
    """cpu or cuda."""
    context: int
    """Tokens of the longest prompt and completion together."""
    kv_bytes: int
    """Bytes of one token's keys and values."""


@dataclass
class ServerCommand:
    arguments: list[str]
    """The program, its flags and their values."""
    environment: dict[str, str] = field(default_factory=dict)

    def add(self, *arguments: str) -> None:
        self.arguments += arguments

    def shell(self) -> str:
        """Write the command for a terminal or a script: the variables, the program, and one flag
        per line.
        """
        lines = [f"{name}={_quoted(value)}" for name, value in self.environment.items()]
        line = ""
        for argument in self.arguments:
            if argument.startswith("--") and line:
                lines.append(line)
                line = " "
            line += f" {_quoted(argument)}" if line else _quoted(argument)
        return " \\\n".join([*lines, line]) + "\n"

    def run(self) -> None:
        """Replace this process with the server. Raises EnvironmentFailure where its program or a
        variable is missing.
        """
        environment = os.environ | {
            name: _resolved(value) for name, value in self.environment.items()
        }
        arguments = [_resolved(argument) for argument in self.arguments]
        try:
            os.execvpe(arguments[0], arguments, environment)
        except OSError as error:
            raise EnvironmentFailure(
                f"{arguments[0]} cannot be started ({error.strerror}); name the Python of the"
                " server's environment with --python, or start the printed command there."
            ) from error


def _quoted(value: str) -> str:
    return f'"${value}"' if isinstance(value, Variable) else shlex.quote(value)


def _resolved(value: str) -> str:
    if isinstance(value, Variable) and value not in os.environ:
        raise EnvironmentFailure(f"[inference] api_key_env names {value}, which is not set.")
    return os.environ[value] if isinstance(value, Variable) else value


# -- what all servers are told ---------------------------------------------------------------------


def server_command(
    engine: str, config: "TrainConfig", needs: ServerNeeds, python: str = "python"
) -> ServerCommand:
    """Return the command for `engine`, whatever `[inference] engine` says. Raises
    ConfigurationError for a key that this server cannot follow.

    `python` is the interpreter of the server's environment.
    """
    builder = COMMANDS.get(engine)
    if builder is None:
        raise ConfigurationError(
            f"{engine!r} is not a server that retrain can start; name one of {', '.join(COMMANDS)}."
        )
    return builder(config, needs, python)


def address(engine: str, inference: "Inference") -> tuple[str, int]:
    """Return host and port of the first `[inference] url`, or this machine's loopback and the port
    that the server uses by itself.
    """
    urls = inference.urls
    parts = urlsplit(urls[0] if urls else "")
    host = parts.hostname or "127.0.0.1"
    return ("127.0.0.1" if host == "localhost" else host), parts.port or _PORTS[engine]


def _model_flags(model: "Model", served_model: str, revision: str) -> list[str]:
    name = ["--served-model-name", served_model] if served_model else []
    commit = [revision, model.revision] if model.revision else []
    return name + commit + (["--trust-remote-code"] if model.trust_remote_code else [])


def _sequences(training: "Training") -> int:
    return min(training.batch_size * training.group_size, MOST_SEQUENCES)


def _choice(
    engine: str, inference: "Inference", name: str, known: dict[str, tuple[str, ...]]
) -> tuple[str, ...]:
    """Return the flags for a key of `[inference]`; its default has none. Raises ConfigurationError
    for a value that is not known.
    """
    value = getattr(inference, name)
    if value in ("auto", "default"):
        return ()
    if value not in known:
        allowed = " or ".join(
            map(toml_value, [*known, "default" if name == "attention_kernel" else "auto"])
        )
        raise ConfigurationError(
            f"[inference] {name} = {toml_value(value)}: a server of {engine} has no such setting;"
            f" use {allowed}."
        )
    return known[value]


def _refuse_four_bits(engine: str, model: "Model") -> None:
    if model.load_in_4bit:
        raise ConfigurationError(
            f"[model] load_in_4bit = true: a server of {engine} has no such setting; leave it"
            " false."
        )


# -- one server each -------------------------------------------------------------------------------


def _vllm(config: "TrainConfig", needs: ServerNeeds, python: str) -> ServerCommand:
    host, port = address("vllm", config.inference)
    rank = next((rank for rank in VLLM_RANKS if rank >= config.model.lora_rank), 0)
    if not rank:
        raise ConfigurationError(
            f"[model] lora_rank = {config.model.lora_rank}: vLLM serves ranks up to"
            f" {VLLM_RANKS[-1]}; give that or less."
        )
    command = ServerCommand(
        [
            python,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            needs.model,
            "--host",
            host,
            "--port",
            str(port),
        ],
        # Adapters are loaded while it runs, and its prefix cache can be emptied.
        {
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        },
    )
    if config.inference.api_key_env:
        command.environment["VLLM_API_KEY"] = Variable(config.inference.api_key_env)
    command.add(*_model_flags(config.model, config.inference.served_model, "--revision"))
    command.add(
        "--dtype",
        needs.dtype,
        *_choice("vllm", config.inference, "dtype", {"bf16": (), "fp8": ("--quantization", "fp8")}),
    )
    command.add(*(("--quantization", "bitsandbytes") if config.model.load_in_4bit else ()))
    command.add(
        "--max-model-len", str(needs.context), "--max-num-seqs", str(_sequences(config.training))
    )
    # Two adapters: the new version is loaded before the old one goes.
    command.add(
        "--enable-lora", "--max-lora-rank", str(rank), "--max-loras", "2", "--max-cpu-loras", "2"
    )
    # Log-probs of the sampled distribution: the default is before the temperature. No sampling
    # defaults from the model's own files.
    command.add("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm")
    command.add(
        "--enable-prefix-caching"
        if config.inference.prefix_caching
        else "--no-enable-prefix-caching"
    )
    kernels = {"flash": "FLASH_ATTN", "triton": "TRITON_ATTN", "cutlass": "CUTLASS_MLA"}
    command.add(
        *_choice(
            "vllm",
            config.inference,
            "attention_kernel",
            {key: ("--attention-backend", name) for key, name in kernels.items()},
        )
    )
    caches = {"bf16": "bfloat16", "fp8": "fp8", "int8": "int8_per_token_head"}
    command.add(
        *_choice(
            "vllm",
            config.inference,
            "kv_cache_dtype",
            {key: ("--kv-cache-dtype", flag) for key, flag in caches.items()},
        )
    )
    if config.training.truncated:
        command.add("--enable-scale-out", "--return-sampling-mask")
    if needs.device == "cpu":
        space = ceil(_sequences(config.training) * needs.context * needs.kv_bytes / _GIB)
        command.environment["VLLM_CPU_KVCACHE_SPACE"] = str(min(max(space, 1), 16))
        # Else the first request for log-probs compiles a function, and kills the engine on a
        # machine without a C++ compiler.
        command.environment["TORCHDYNAMO_DISABLE"] = "1"
        command.add("--enforce-eager")  # compiling takes longer than most runs on a CPU
    else:
        command.add("--enable-sleep-mode")
    return command


def _sglang(config: "TrainConfig", needs: ServerNeeds, python: str) -> ServerCommand:
    host, port = address("sglang", config.inference)
    _refuse_four_bits("sglang", config.model)
    command = ServerCommand(
        [
            python,
            "-m",
            "sglang.launch_server",
            "--model-path",
            needs.model,
            "--host",
            host,
            "--port",
            str(port),
        ]
    )
    if config.inference.api_key_env:
        command.add("--api-key", Variable(config.inference.api_key_env))
    command.add(*_model_flags(config.model, config.inference.served_model, "--revision"))
    command.add(
        "--dtype",
        needs.dtype,
        *_choice(
            "sglang", config.inference, "dtype", {"bf16": (), "fp8": ("--quantization", "fp8")}
        ),
    )
    command.add(
        "--context-length",
        str(needs.context),
        "--max-running-requests",
        str(_sequences(config.training)),
    )
    command.add(
        "--enable-lora",
        "--max-lora-rank",
        str(config.model.lora_rank),
        "--max-loras-per-batch",
        "2",
    )
    command.add("--lora-target-modules", *(config.lora.target_modules or ["all"]))
    if not config.inference.prefix_caching:
        command.add("--disable-radix-cache")
    kernels = {"flash": "fa3", "triton": "triton", "cutlass": "cutlass_mla"}
    command.add(
        *_choice(
            "sglang",
            config.inference,
            "attention_kernel",
            {key: ("--attention-backend", name) for key, name in kernels.items()},
        )
    )
    caches = {"bf16": "bf16", "fp8": "fp8_e4m3"}
    command.add(
        *_choice(
            "sglang",
            config.inference,
            "kv_cache_dtype",
            {key: ("--kv-cache-dtype", flag) for key, flag in caches.items()},
        )
    )
    return command


def _mlx(config: "TrainConfig", needs: ServerNeeds, python: str) -> ServerCommand:
    """It computes in the checkpoint's own dtype, takes adapters with each request, and has no limit
    of its own on the context.
    """
    host, port = address("mlx", config.inference)
    _refuse_four_bits("mlx", config.model)
    if config.model.revision:
        raise ConfigurationError(
            f'[model] revision = "{config.model.revision}": mlx_lm.server takes no revision;'
            " download this one, and give its folder as [model] model."
        )
    command = ServerCommand(
        [
            python,
            "-m",
            "mlx_lm",
            "server",
            "--model",
            config.inference.served_model or needs.model,
            "--host",
            host,
            "--port",
            str(port),
        ]
    )
    if config.model.trust_remote_code:
        command.add("--trust-remote-code")
    command.add("--decode-concurrency", str(_sequences(config.training)))
    _choice("mlx", config.inference, "dtype", {"bf16": ()})
    _choice("mlx", config.inference, "attention_kernel", {})
    command.add(
        *_choice(
            "mlx",
            config.inference,
            "kv_cache_dtype",
            {"int8": ("--kv-bits", "8", "--quantized-kv-start", "0")},
        )
    )
    if not config.inference.prefix_caching:
        command.add("--prompt-cache-size", "0")
    return command


def _max(config: "TrainConfig", needs: ServerNeeds, python: str) -> ServerCommand:
    """`max serve` stands beside its Python. It serves adapters on a GPU only, without its prefix
    cache.
    """
    host, port = address("max", config.inference)
    _refuse_four_bits("max", config.model)
    folder = os.path.dirname(python)  # noqa: PTH120 - pathlib would make a bare name of ./max, to be looked up on PATH
    program = os.path.join(folder, "max") if folder else "max"  # noqa: PTH118 - for the same reason
    command = ServerCommand(
        [program, "serve", "--model", needs.model, "--host", host, "--port", str(port)],
        {"MAX_SERVE_DISABLE_TELEMETRY": "1"},
    )
    command.add(
        *_model_flags(config.model, config.inference.served_model, "--huggingface-model-revision"),
        "--no-enable-echo",
    )
    _choice("max", config.inference, "dtype", {"bf16": ()})
    _choice("max", config.inference, "attention_kernel", {})
    _choice("max", config.inference, "kv_cache_dtype", {})
    command.add(
        "--devices",
        "cpu" if needs.device == "cpu" else "gpu:0",
        "--quantization-encoding",
        needs.dtype,
    )
    command.add(
        "--max-length", str(needs.context), "--max-batch-size", str(_sequences(config.training))
    )
    if needs.device == "cpu":
        command.add(
            "--enable-prefix-caching"
            if config.inference.prefix_caching
            else "--no-enable-prefix-caching"
        )
    else:
        command.add(
            "--enable-lora", "--max-lora-rank", str(config.model.lora_rank), "--max-num-loras", "2"
        )
        command.add("--no-enable-prefix-caching", "--prefer-module-v3")
    return command


COMMANDS: dict[str, Callable[["TrainConfig", ServerNeeds, str], ServerCommand]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "mlx": _mlx,
    "max": _max,
}

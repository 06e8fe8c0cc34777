"""`retrain serve ENGINE FILE`: the command that starts a server as a configuration needs it."""

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from retrain.cli.shared import (
    FLAGS_FOLLOW,
    flags_after,
    load_dotenv,
    load_named,
    print_progress,
)
from retrain.errors import ConfigurationError

if TYPE_CHECKING:
    from retrain.config import TrainConfig
    from retrain.inference_engine.commands import ServerCommand, ServerNeeds

SETTINGS = FLAGS_FOLLOW
_GATE_TOKENS = 512
"""Context that the parity gate needs for its long prompt."""
_MAX_SHARE, _UNPREDICTED = 0.9, 0.05
"""The largest share of a GPU's memory for vLLM, and the part that the learner's allocator may take
above its prediction.
"""


def command(
    context: typer.Context,
    engine: Annotated[
        str, typer.Argument(metavar="ENGINE", help="vllm, sglang or mlx; a file may follow.")
    ],
    run: Annotated[
        bool, typer.Option("--run", help="Start it in this terminal instead of printing it.")
    ] = False,
    python: Annotated[str, typer.Option(help="Python of the server's environment.")] = "python",
    prompt_tokens: Annotated[
        int,
        typer.Option(min=0, help="Tokens of the longest prompt; 0 reads the data and counts them."),
    ] = 0,
) -> None:
    """Print the command that starts an inference server as a configuration needs it: adapters,
    log-probs, context, data types.

    Without a file it reads ./retrain.toml. Any flag of the configuration may follow, such as
    --max-tokens 512.
    """
    from retrain.inference_engine.commands import ServerNeeds
    from retrain.model.text import placed

    overrides = flags_after(context, "serve takes an engine and one file", 1)
    if engine not in startable_engines():
        raise ConfigurationError(
            f"{engine!r} is not a server of these: {', '.join(startable_engines())}."
        )
    load_dotenv()
    config = placed(load_named(overrides))
    # A mistake shows before the command reads the data.
    server_command(engine, config, ServerNeeds("", "", "", 0, 0), python)
    needs = server_needs(config, prompt_tokens)
    found = server_command(engine, config, needs, python)
    if run:
        found.run()
    sys.stdout.write(found.shell())


def startable_engines() -> list[str]:
    """Return the engines whose server `retrain serve` can start."""
    from retrain.inference_engine.base import ENGINES, engine_kind

    return [name for name in ENGINES if engine_kind(name).default_port]


def server_command(
    engine: str, config: "TrainConfig", needs: "ServerNeeds", python: str = "python"
) -> "ServerCommand":
    """Return the command for `engine`, whatever `[inference] engine` says. Raises
    ConfigurationError for a key that this server cannot follow.

    `python` is the interpreter of the server's environment.
    """
    from retrain.backends.declared import declared_backend
    from retrain.inference_engine.base import engine_kind

    if declared_backend(config).sampler:
        raise ConfigurationError(
            f'[backend] backend = "{config.backend.backend}" brings its own servers, since'
            f" {engine} cannot take its weights; start them as its documents say, or set"
            ' backend = "local".'
        )
    return engine_kind(engine).server_command(config, needs, python)


def server_needs(config: "TrainConfig", prompt_tokens: int) -> "ServerNeeds":
    """Return what the model and the data need from a server; with `prompt_tokens` this does not
    read the data.
    """
    from retrain.config.mixture import longest_environment
    from retrain.inference_engine.commands import ServerNeeds
    from retrain.model.budget import (
        context_length,
        kv_bytes_per_token,
        longest_sampled,
        most_new_tokens,
    )
    from retrain.model.devices import choose_device, choose_dtype
    from retrain.model.text import load_model_config, resolve_model

    device = choose_device(config.backend).device
    model = load_model_config(
        config.model.model, config.model.revision, config.model.trust_remote_code
    )
    learner = str(choose_dtype(config.model.dtype, device)).removeprefix("torch.")
    # Every other data type of inference keeps its activations in bfloat16.
    dtype = learner if config.inference.dtype == "auto" else "bfloat16"
    positions = context_length(model)
    prompt_tokens = prompt_tokens or _longest_prompt(config)
    environment = longest_environment(config)
    longest = longest_sampled(
        config.training, config.evaluation, environment, positions, prompt_tokens
    )
    context = min(max(longest, _GATE_TOKENS), positions)
    new_tokens = most_new_tokens(config.training, config.evaluation)
    answers = " and what the environment says between them" if environment.provider else ""
    print_progress(
        f"The longest prompt and {new_tokens} new tokens{answers} fit into a context of {context}"
        " tokens."
    )
    kv_bytes = kv_bytes_per_token(
        model, 4 if dtype == "float32" else 2, config.inference.kv_cache_dtype
    )
    share = None
    if device.type == "cuda" and not device.index:  # A server takes the first GPU too.
        share = left_by_learner(config, prompt_tokens)
    path = resolve_model(config.model.model)
    return ServerNeeds(path, dtype, device.type, context, kv_bytes, share)


def left_by_learner(
    config: "TrainConfig", prompt_tokens: int, memory_gib: float | None = None
) -> float | None:
    """Return the part of the GPU's memory that a server may take in addition to the learner's
    predicted peak; None without a prediction. Raises ConfigurationError if no memory remains.
    """
    from retrain.model.footprint import PredictionError
    from retrain.model.memory import predict_memory

    try:
        memory = predict_memory(config, prompt_tokens=prompt_tokens, memory_gib=memory_gib)
    except PredictionError:
        return None
    peak, whole = memory.peaks[memory.device], memory.machine.memory
    share = min(_MAX_SHARE, 1 - peak / whole - _UNPREDICTED)
    if share <= 0:
        raise ConfigurationError(
            f"The learner's predicted peak is {memory.peak_words}, which leaves no room for a"
            " server: give it another GPU, or lower [training] max_tokens or [model] lora_rank."
        )
    print_progress(
        f"The learner's predicted peak is {memory.peak_words}; next to it the server may take"
        f" {share:.0%} of the GPU's memory."
    )
    return share


def _longest_prompt(config: "TrainConfig") -> int:
    """Return the number of tokens of the longest prompt, over the training and the held-out
    prompts.
    """
    from retrain.run.parts import (
        load_held_out,
        load_mixed_prompts,
        load_sources,
        load_text,
        longest_prompt,
    )

    text = load_text(config.model, print_progress)
    with ExitStack() as opened:
        sources = load_sources(config, text, print_progress, opened)
        prompts = load_mixed_prompts(text, sources, print_progress)
        held_out = load_held_out(config, text, sources, prompts.examples, print_progress)
    return longest_prompt(prompts, held_out)

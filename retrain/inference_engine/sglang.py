"""SGLang's native /generate: token ids in, (log-prob, id) pairs out, log-probs after the
temperature, a seed for every sample.

Written from the documented API and SGLang 0.5.23's source; its tests run against a stand-in, since
no build of it runs on a CPU.
"""

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from retrain.errors import ServerFailure
from retrain.inference_engine.base import Description, EngineCapabilities, SampleRequest
from retrain.inference_engine.commands import (
    ServerCommand,
    ServerNeeds,
    Settings,
    Variable,
    address_flags,
    concurrent_sequences,
    model_flags,
    refuse_four_bits,
    setting_flags,
)
from retrain.inference_engine.http import Json, Refusal, Server
from retrain.inference_engine.served import (
    Dialect,
    ServedAdapter,
    ServedEngine,
    ServedSample,
    check_prompt,
    has_stopped,
)

if TYPE_CHECKING:
    from retrain.config import TrainConfig


_SETTINGS: Settings = {
    "dtype": {"bf16": (), "fp8": ("--quantization", "fp8")},
    "attention_kernel": {
        "flash": ("--attention-backend", "fa3"),
        "triton": ("--attention-backend", "triton"),
        "cutlass": ("--attention-backend", "cutlass_mla"),
    },
    "kv_cache_dtype": {
        "bf16": ("--kv-cache-dtype", "bf16"),
        "fp8": ("--kv-cache-dtype", "fp8_e4m3"),
    },
}


class SGLangDialect(Dialect):
    title = "The sglang server"

    async def look(self, server: Server) -> None:
        base, *_ = (await server.get("/v1/models"))["data"]
        server.facts["context"] = base.get("max_model_len")

    def call(
        self, request: SampleRequest, adapter: ServedAdapter | None, server: Server
    ) -> tuple[str, Json]:
        """Ask for one prompt `count` times, each with its own seed: with one seed for all, a
        deterministic server returns equal samples.
        """
        settings: Json = {
            "max_new_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,  # a server may have other values as its own
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "min_new_tokens": 0,
            "logit_bias": None,
            # It would switch stop_token_ids off too; without it the server's own end-of-sequence
            # tokens count as well.
            "ignore_eos": False,
            "stop_token_ids": self.eos_ids,
        }
        samples = range(request.first_sample, request.first_sample + request.count)
        seeds = [request.noise.seed_of(sample, request.first_position) for sample in samples]
        body: Json = {
            "input_ids": [request.prompt_ids.tolist()] * request.count,
            "sampling_params": [{**settings, "sampling_seed": seed} for seed in seeds],
            "return_logprob": True,
            "logprob_start_len": -1,
        }
        if adapter:
            body["lora_path"] = [adapter.name] * request.count
        return "/generate", body

    def read(self, answer: Any, request: SampleRequest) -> list[ServedSample]:
        return [self._read_one(one, len(request.prompt_ids)) for one in answer]

    def _read_one(self, one: Json, prompt: int) -> ServedSample:
        """Read ids and log-probs from the same pairs, the sampled EOS among them; output_ids may
        lack it. SGLang reports "length" for an EOS at the last permitted position.
        """
        about = one["meta_info"]
        check_prompt(about["prompt_tokens"], prompt)
        pairs = about["output_token_logprobs"]
        ids = [token for _, token, *_ in pairs]
        stopped = has_stopped(about["finish_reason"]["type"])
        at_end = any(token in self.eos_ids for token in ids[-1:])
        return ServedSample(ids, [logprob for logprob, *_ in pairs], stopped or at_end)

    async def load(self, server: Server, adapter: ServedAdapter) -> None:
        try:
            answer = await server.post("/load_lora_adapter", adapter.fields)
        except Refusal as error:
            if "already" in str(error):
                return  # a second try of a load after a lost answer
            raise
        if not answer["success"] or adapter.name not in answer.get(
            "loaded_adapters", {adapter.name: ""}
        ):
            why = answer.get("error_message") or "it does not list it"
            raise ServerFailure(
                f"{self.title} {server.url} did not load the adapter {adapter.name} ({why}); start"
                " it with --enable-lora, --max-lora-rank and --max-loras-per-batch 2."
            )

    async def unload(self, server: Server, adapter: ServedAdapter) -> None:
        """Unload the adapter and its cached prefixes, which nothing asks for any more; a server
        that is busy keeps them for now.
        """
        await server.post("/unload_lora_adapter", {"lora_name": adapter.name})
        with suppress(Refusal):
            await server.post("/flush_cache")


class SGLangEngine(ServedEngine):
    capabilities = EngineCapabilities(
        in_process=False, adapter_reload=True, logprobs="sampled", prefix_cache=True
    )
    about = Description(
        "an SGLang server",
        "contract (0.5.23)",
        ("sglang",),
        install='pip install "sglang[all]", where the server runs',
    )
    default_port = 30000
    dialect_class = SGLangDialect

    @classmethod
    def server_command(
        cls, config: "TrainConfig", needs: ServerNeeds, python: str
    ) -> ServerCommand:
        refuse_four_bits("sglang", config.model)
        inference = config.inference
        key = inference.api_key_env
        return ServerCommand(
            [
                *(python, "-m", "sglang.launch_server", "--model-path", needs.model),
                *address_flags(inference, cls.default_port),
                *(["--api-key", Variable(key)] if key else []),
                *model_flags(config),
                *("--dtype", needs.dtype, "--context-length", str(needs.context)),
                *setting_flags("sglang", inference, _SETTINGS),
                *("--max-running-requests", concurrent_sequences(config.training)),
                *("--enable-lora", "--max-lora-rank", str(config.model.lora_rank)),
                *("--max-loras-per-batch", "2", "--lora-target-modules"),
                *(config.lora.target_modules or ["all"]),
                *([] if inference.prefix_caching else ["--disable-radix-cache"]),
            ]
        )

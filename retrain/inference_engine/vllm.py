"""vLLM: /v1/completions with token ids, and /inference/v1/generate where the kept set of a truncated distribution is asked for."""

from collections.abc import Mapping
from typing import Any

from retrain.errors import ConfigurationError
from retrain.inference_engine.base import VLLM, SampleRequest
from retrain.inference_engine.http import Json, Refused, Server
from retrain.inference_engine.served import Dialect, Sampled, ServedAdapter, ServedEngine

_SAMPLE, _GENERATE = "/v1/completions", "/inference/v1/generate"


class VLLMDialect(Dialect):
    title = "The vllm server"

    def is_dead(self, status: int, text: str) -> bool:
        return status == 500 and ("EngineDead" in text or "EngineCore" in text)

    async def look(self, server: Server) -> None:
        models = (await server.get("/v1/models"))["data"]
        bases = {model["id"]: model for model in models if not model.get("parent")}
        name = self.config.inference.served_model or next(iter(bases), "")
        if name not in bases or (not self.config.inference.served_model and len(bases) > 1):
            raise ConfigurationError(
                f'[inference] served_model = "{self.config.inference.served_model}": {self.title} {server.url} has '
                f"{', '.join(bases) or 'no model'}; name one of them."
            )
        server.facts |= {"base": name, "context": bases[name].get("max_model_len"), "looked": True}

    # -- sampling ------------------------------------------------------------------------------------------------------

    def call(self, request: SampleRequest, adapter: ServedAdapter | None, server: Server) -> tuple[str, Json]:
        model = adapter.name if adapter else server.facts["base"]
        cut = request.truncation
        settings: Json = {
            "n": request.count,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": cut.top_p,
            "top_k": cut.top_k or -1,
            "min_p": cut.min_p,
            "logprobs": 0,
            # Our list of end-of-sequence tokens and no other; the sampled one stays in token_ids. No seed: it kills vLLM on a CPU
            # with many sequences ("CPU Generator does not use offset").
            "ignore_eos": True,
            "stop_token_ids": self.eos_ids,
        }
        prompt = request.prompt_ids.tolist()
        if cut.active and request.temperature > 0:
            return _GENERATE, {"model": model, "token_ids": prompt, "sampling_params": settings}
        return _SAMPLE, {"model": model, "prompt": prompt, "return_token_ids": True, **settings}

    def read(self, answer: Any, request: SampleRequest) -> list[Sampled]:
        return [self._read_one(choice, request) for choice in answer["choices"]]

    def _read_one(self, choice: Json, request: SampleRequest) -> Sampled:
        if choice.get("prompt_token_ids") is not None and choice["prompt_token_ids"] != request.prompt_ids.tolist():
            raise ValueError("the prompt reached the model with other token ids")
        logprobs, mask = choice["logprobs"], choice.get("sampling_mask")
        values = logprobs["token_logprobs"] if "token_logprobs" in logprobs else [token["logprob"] for token in logprobs["content"]]
        kept = None if mask is None else [len(tokens) for tokens in mask]
        return Sampled(choice["token_ids"], values, choice["finish_reason"] == "stop", kept)

    # -- the adapter ---------------------------------------------------------------------------------------------------

    async def load(self, server: Server, adapter: ServedAdapter) -> None:
        try:
            await server.post("/v1/load_lora_adapter", {"lora_name": adapter.name, "lora_path": str(adapter.folder)})
        except Refused as error:
            if "already" in str(error):
                return  # a retry of a load whose answer was lost
            if error.status == 404 and "not found" in str(error).lower() and str(adapter.folder) not in str(error):
                raise ConfigurationError(
                    f"{self.title} {server.url} loads no adapters: start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora."
                ) from error
            raise

    async def unload(self, server: Server, adapter: ServedAdapter) -> None:
        await server.post("/v1/unload_lora_adapter", {"lora_name": adapter.name})

    async def adapters(self, server: Server) -> Mapping[str, str]:
        models = (await server.get("/v1/models"))["data"]
        return {model["id"]: model["root"] for model in models if model.get("parent")}


class VLLMEngine(ServedEngine):
    capabilities = VLLM
    dialect_class = VLLMDialect

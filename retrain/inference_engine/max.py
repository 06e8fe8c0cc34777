"""Modular's MAX: `max serve` over HTTP. Token ids, raw log-probs, a sample per request.

Tests used MAX 26.7.0 on a CPU, which serves the base model only. Adapters need a GPU; their code
here follows MAX's source.
"""

from retrain.inference_engine.base import Description, EngineCapabilities, SampleRequest
from retrain.inference_engine.http import Json, Server
from retrain.inference_engine.served import ServedAdapter, ServedEngine
from retrain.inference_engine.vllm import VLLMDialect


class MAXDialect(VLLMDialect):
    title = "The max server"
    chosen_logprob = 1  # 0 is off
    how_to_load = (
        "it runs without adapters, which MAX serves on a GPU only. Start it there with"
        " --enable-lora, --max-lora-rank, --max-num-loras 2, --no-enable-prefix-caching and"
        ' --prefer-module-v3, or use engine = "pytorch"'
    )

    async def look(self, server: Server) -> None:
        base, *_ = (await server.get("/v1/models"))["data"]
        server.facts |= {
            "base": base["id"],
            "context": base.get("max_model_len"),
            "sleeps": False,
        }

    def call(
        self, request: SampleRequest, adapter: ServedAdapter | None, server: Server
    ) -> tuple[str, Json]:
        path, body = super().call(request, adapter, server)
        del body["n"]  # without effect
        # ignore_eos switches stop_token_ids off too; without it the server's own end-of-sequence
        # tokens count as well.
        return path, body | {
            "ignore_eos": False,
            "seed": request.noise.seed_of(request.first_sample, request.first_position),
        }

    async def why_it_differs(self, server: Server) -> str:
        return ""


class MAXEngine(ServedEngine):
    capabilities = EngineCapabilities(
        in_process=False, adapter_reload=True, logprobs="raw", n=False, prefix_cache=True
    )
    """Adapters, and with them training, on a GPU only; there without the prefix cache."""
    about = Description(
        "a MAX server",
        "max 26.7.0 on a CPU, base model only; adapters: contract",
        ("max",),
        install="uv pip install 'max[serve]'",
    )
    dialect_class = MAXDialect

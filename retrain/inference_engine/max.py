"""Modular's MAX: `max serve` over HTTP. Token ids, raw log-probs, a sample per request.

Observed with MAX 26.7.0 on a CPU, which serves the base model only; adapters need a GPU and are
written from its source.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from retrain.errors import ConfigurationError
from retrain.inference_engine.base import Description, EngineCapabilities, SampleRequest
from retrain.inference_engine.commands import (
    ServerCommand,
    ServerNeeds,
    address_flags,
    concurrent_sequences,
    model_flags,
    refuse_four_bits,
    setting_flags,
)
from retrain.inference_engine.http import Json, Refusal, Server
from retrain.inference_engine.served import ServedAdapter, ServedEngine
from retrain.inference_engine.vllm import VLLMDialect

if TYPE_CHECKING:
    from retrain.config import TrainConfig


class MAXDialect(VLLMDialect):
    title = "The max server"
    chosen_logprob = 1  # 0 is off

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

    async def load(self, server: Server, adapter: ServedAdapter) -> None:
        try:
            await server.post("/v1/load_lora_adapter", adapter.fields)
        except Refusal as error:
            if error.status == 501:
                raise ConfigurationError(
                    f"{self.title} {server.url} was started without adapters, which MAX serves on a"
                    " GPU only; start it there with the command that `retrain serve max FILE`"
                    ' prints, or use engine = "pytorch".'
                ) from error
            if error.status != 409:  # a second try of a load whose answer was lost
                raise
        server.facts.setdefault("adapters", {})[adapter.name] = str(adapter.folder)

    async def adapters(self, server: Server) -> Mapping[str, str]:
        """Its list has names without folders."""
        listed = {model["id"] for model in (await server.get("/v1/models"))["data"]}
        return {
            name: folder
            for name, folder in server.facts.get("adapters", {}).items()
            if name in listed
        }


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
    default_port = 8000
    cpu_note = (
        "MAX applies adapters on a GPU only: on a CPU it serves the base model, which can be"
        " evaluated but not trained."
    )
    dialect_class = MAXDialect

    @classmethod
    def server_command(
        cls, config: "TrainConfig", needs: ServerNeeds, python: str
    ) -> ServerCommand:
        """`max serve` stands beside its Python. It serves adapters on a GPU only, without its
        prefix cache.
        """
        refuse_four_bits("max", config.model)
        folder = os.path.dirname(python)  # noqa: PTH120 - pathlib would make a bare name of ./max, to be looked up on PATH
        program = os.path.join(folder, "max") if folder else "max"  # noqa: PTH118 - for the same reason
        command = ServerCommand(
            [program, "serve", "--model", needs.model], {"MAX_SERVE_DISABLE_TELEMETRY": "1"}
        )
        command.add(*address_flags(config.inference, cls.default_port))
        served_model = config.inference.served_model
        command.add(*model_flags(config.model, served_model, "--huggingface-model-revision"))
        command.add("--no-enable-echo")
        known: dict[str, dict[str, tuple[str, ...]]] = {
            "dtype": {"bf16": ()},
            "attention_kernel": {},
            "kv_cache_dtype": {},
        }
        command.add(*setting_flags("max", config.inference, known))
        command.add("--devices", "cpu" if needs.device == "cpu" else "gpu:0")
        command.add("--quantization-encoding", needs.dtype, "--max-length", str(needs.context))
        command.add("--max-batch-size", str(concurrent_sequences(config.training)))
        if needs.device != "cpu":
            rank = str(config.model.lora_rank)
            # Two adapters: a new version is loaded before the old one goes.
            command.add("--enable-lora", "--max-lora-rank", rank, "--max-num-loras", "2")
            command.add("--no-enable-prefix-caching", "--prefer-module-v3")
        elif config.inference.prefix_caching:
            command.add("--enable-prefix-caching")
        else:
            command.add("--no-enable-prefix-caching")
        return command

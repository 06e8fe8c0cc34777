"""MLX-LM's server: prompts as text, ids and raw log-probs back, one completion per request,
adapters in MLX's own format.

Other engines send prompts as token ids. This engine decodes a prompt, and sends the text only if
the server's tokenizer makes the same ids of it. Encoding the text here and the number of prompt
tokens in the answer check this.
"""

import json
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.errors import ConfigurationError
from retrain.inference_engine.base import Description, EngineCapabilities, SampleRequest
from retrain.inference_engine.commands import (
    ServerCommand,
    ServerNeeds,
    Settings,
    address_flags,
    concurrent_sequences,
    refuse_four_bits,
    setting_flags,
)
from retrain.inference_engine.http import Json, Server
from retrain.inference_engine.served import (
    Dialect,
    ServedAdapter,
    ServedEngine,
    ServedSample,
    check_prompt,
    has_stopped,
    make_readable,
)
from retrain.inference_engine.texts import Texts
from retrain.system import read_object

if TYPE_CHECKING:
    from collections.abc import Sequence

    from retrain.config import TrainConfig

_ROPE_THETA = 10000.0
"""MLX-LM's value where config.json names none."""
_SETTINGS: Settings = {
    "dtype": {"bf16": ()},
    "attention_kernel": {},
    "kv_cache_dtype": {"int8": ("--kv-bits", "8", "--quantized-kv-start", "0")},
}
_CONVERTED = "mlx"
"""The adapter in MLX's format, a folder inside the PEFT folder."""


class MLXDialect(Dialect):
    title = "The mlx server"
    # Python's http.server queues 5 connections. With 32 at once, 17 broke. With this spacing none
    # of 64 broke.
    spacing_s = 0.005

    def __init__(self, config: "TrainConfig", eos_ids: "Sequence[int]") -> None:
        super().__init__(config, eos_ids)
        self.texts = Texts(config.model, self.title)

    async def look(self, server: Server) -> None:
        """Sample one token: it loads the model, and shows that ids come back."""
        answer = await server.post(*self._completion("1", {"max_tokens": 1}))
        self.read_one(answer)

    # -- sampling ----------------------------------------------------------------------------------

    def call(
        self, request: SampleRequest, adapter: ServedAdapter | None, server: Server
    ) -> tuple[str, Json]:
        settings: Json = {
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            # These add to the tokens at which the server ends completions by itself. The request
            # sends no seed, because seeded requests run one after the other.
            "stop": [self.texts.decode([token]) for token in self.eos_ids],
        }
        return self._completion(
            self.texts.of(tuple(request.prompt_ids.tolist())), settings, adapter
        )

    def _completion(
        self, prompt: str, settings: Json, adapter: ServedAdapter | None = None
    ) -> tuple[str, Json]:
        from retrain.model.text import resolve_model

        model = self.config.inference.served_model or resolve_model(self.config.model.model)
        whole = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "logprobs": True}
        body = {"model": model, "prompt": prompt, **whole, **settings}
        if adapter:
            body["adapters"] = str(adapter.folder / _CONVERTED)
        return "/v1/completions", body

    def read(self, answer: Any, request: SampleRequest) -> list[ServedSample]:
        check_prompt(answer["usage"]["prompt_tokens"], len(request.prompt_ids))
        return [self.read_one(answer)]

    def read_one(self, answer: Any) -> ServedSample:
        (choice,) = answer["choices"]
        tokens = choice["logprobs"]["content"]
        return ServedSample(
            [token["id"] for token in tokens],
            [token["logprob"] for token in tokens],
            has_stopped(choice["finish_reason"]),
        )

    async def why_it_differs(self, server: Server) -> str:
        """Detect a folder that transformers 5 wrote: it names rope_theta where the server does not
        look.
        """
        from retrain.model.text import resolve_model

        file = Path(resolve_model(self.config.model.model)) / "config.json"
        if not file.is_file():
            return ""
        settings = read_object(file)
        theta = (settings.get("rope_parameters") or {}).get("rope_theta")
        if theta in (None, _ROPE_THETA, settings.get("rope_theta")):
            return ""
        return (
            f"{file} names rope_theta only in rope_parameters, which MLX-LM does not read."
            f' Write "rope_theta": {theta} next to it, and start the server again'
        )

    # -- the adapter -------------------------------------------------------------------------------

    async def load(self, server: Server, adapter: ServedAdapter) -> None:
        """The server loads an adapter, and with it the model again, at the first request that names
        its folder.
        """
        if not (adapter.folder / _CONVERTED).is_dir():
            to_mlx(adapter.folder, adapter.folder / _CONVERTED)
            make_readable(adapter.folder)
        self.read_one(await server.post(*self._completion("1", {"max_tokens": 1}, adapter)))


class MLXEngine(ServedEngine):
    capabilities = EngineCapabilities(
        in_process=False,
        adapter_reload=True,
        logprobs="raw",
        token_ids_in=False,
        n=False,
        prefix_cache=True,
    )
    about = Description(
        "an MLX-LM server",
        "mlx-lm 0.32.2 on a CPU",
        ("mlx-lm", "mlx"),
        install='pip install mlx-lm ("mlx[cpu]" on Linux)',
    )
    default_port = 8080
    dialect_class = MLXDialect

    @classmethod
    def server_command(
        cls, config: "TrainConfig", needs: ServerNeeds, python: str
    ) -> ServerCommand:
        """Return the command of a server. The server computes in the checkpoint's own dtype, takes
        adapters with each request, and has no limit of its own on the context.
        """
        refuse_four_bits("mlx", config.model)
        if config.model.revision:
            raise ConfigurationError(
                f'[model] revision = "{config.model.revision}": mlx_lm.server takes no'
                " revision. Download this one, and give its folder as [model] model."
            )
        inference = config.inference
        return ServerCommand(
            [
                *(python, "-m", "mlx_lm", "server"),
                *("--model", inference.served_model or needs.model),
                *address_flags(inference, cls.default_port),
                *(["--trust-remote-code"] if config.model.trust_remote_code else []),
                *("--decode-concurrency", concurrent_sequences(config.training)),
                *setting_flags("mlx", inference, _SETTINGS),
                *([] if inference.prefix_caching else ["--prompt-cache-size", "0"]),
            ]
        )


def to_mlx(peft: Path, target: Path) -> None:
    """Write the adapter of a PEFT folder in MLX's format: factors transposed, [in, rank] and [rank,
    out], one scale for all layers.
    """
    from safetensors.numpy import load_file, save_file

    settings = json.loads((peft / "adapter_config.json").read_text(encoding="utf-8"))
    rank, alpha = settings["r"], settings["lora_alpha"]
    weights: Json = {}
    layers, modules = set[int](), set[str]()
    for name, value in load_file(peft / "adapter_model.safetensors").items():
        module, _, factor = (
            name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".lora_")
        )
        weights[f"{module}.lora_{factor.lower()}"] = value.T.copy()
        layer, _, place = module.partition(".layers.")[2].partition(".")
        layers.add(int(layer))
        modules.add(place)
    parameters = {
        "rank": rank,
        "scale": alpha / sqrt(rank) if settings.get("use_rslora") else alpha / rank,
        "dropout": 0.0,
        "keys": sorted(modules),
    }
    target.mkdir()
    save_file(weights, target / "adapters.safetensors")
    described = {
        "fine_tune_type": "lora",
        "num_layers": 1 + max(layers),
        "lora_parameters": parameters,
    }
    (target / "adapter_config.json").write_text(json.dumps(described, indent=2), encoding="utf-8")

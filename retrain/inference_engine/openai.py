"""Any server with OpenAI's /v1/completions. Trained with where it takes token ids and gives the sampled ones back with their log-probs.

OpenAI's own API gives no token ids, so few servers qualify beyond those with an engine of their own; a probe at the start tells. One that
returns text alone serves an evaluation: prompts go as text, and so do completions come. Adapters are loaded as in vLLM, which several
servers copied.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from retrain.errors import ConfigurationError
from retrain.inference_engine.base import OPENAI, SampleRequest
from retrain.inference_engine.http import Json, Refused, Server
from retrain.inference_engine.served import Sampled, ServedAdapter
from retrain.inference_engine.texts import Texts
from retrain.inference_engine.vllm import COMPLETIONS, VLLMDialect, VLLMEngine
from retrain.noise import Stream

if TYPE_CHECKING:
    from retrain.config import TrainConfig

_TOKEN = "token_id:"
_MOST_STOPS = 4
"""What OpenAI's API takes."""


class OpenAIDialect(VLLMDialect):
    title = "The OpenAI-compatible server"
    chosen_logprob = 1  # some take 0 for off

    def __init__(self, config: "TrainConfig", eos_ids: Sequence[int]) -> None:
        super().__init__(config, eos_ids)
        self.texts = Texts(config.model, self.title)

    async def look(self, server: Server) -> None:
        await super().look(server)
        server.facts["text_alone"] = ""
        if lack := await self._lack(server):
            # Without text either, there is nothing: this raises.
            await server.post(COMPLETIONS, {"model": server.facts["base"], "prompt": "1", "max_tokens": 1})
            server.facts["text_alone"] = (
                f"{self.title} {server.url} can be evaluated but not trained with: {lack}, and the loss needs token ids with log-probs. To "
                'train, use the engine made for the server (vllm, sglang, mlx, max); for a judge, [reward] type = "judge" needs text alone.'
            )

    async def _lack(self, server: Server) -> str:
        """Why it cannot be trained with, as a clause; "" if it can."""
        body = {"model": server.facts["base"], "prompt": [1, 2, 3, 4], "max_tokens": 1, "logprobs": 1, "return_token_ids": True}
        try:
            answer = await server.post(COMPLETIONS, body | {"return_tokens_as_token_ids": True})
            ids, _ = self._ids_and_logprobs(answer["choices"][0])
        except Refused as error:
            if error.status in (401, 403):
                raise
            return f"it answers a prompt of token ids with {error.status} ({error})"
        except (LookupError, TypeError, ValueError, AttributeError):
            return "it returns no token ids with log-probs"
        return "" if len(ids) == 1 else f"it returned {len(ids)} token ids for one token"

    # -- sampling ------------------------------------------------------------------------------------------------------

    def call(self, request: SampleRequest, adapter: ServedAdapter | None, server: Server) -> tuple[str, Json]:
        path, body = super().call(request, adapter, server)
        if not server.facts["text_alone"]:
            return path, body | {"return_tokens_as_token_ids": True}
        if request.noise.stream != Stream.EVALUATION:
            raise ConfigurationError(server.facts["text_alone"])
        kept = {name: body[name] for name in ("n", "max_tokens", "temperature", "top_p")}
        if request.truncation.active:
            kept |= {name: body[name] for name in ("top_k", "min_p")}  # which not every server knows
        model = server.facts["base"] if server.facts.get("base_alone") else body["model"]
        stops = [self.texts.decode([token]) for token in self.eos_ids[:_MOST_STOPS]]
        return COMPLETIONS, {"model": model, "prompt": self.texts.of(tuple(request.prompt_ids.tolist())), "stop": stops, **kept}

    def read(self, answer: Any, request: SampleRequest) -> list[Sampled]:
        seen = answer["usage"]["prompt_tokens"] if isinstance(answer.get("usage"), dict) else None
        if seen is not None and seen != len(request.prompt_ids):
            raise ValueError(f"the prompt of {len(request.prompt_ids)} tokens reached the model as {seen}")
        return super().read(answer, request)

    def _read_one(self, choice: Json, request: SampleRequest) -> Sampled:
        try:
            ids, logprobs = self._ids_and_logprobs(choice)
        except (LookupError, TypeError, ValueError):
            if request.noise.stream != Stream.EVALUATION:
                raise
            return self._text_of(choice)
        return super()._read_one(choice | {"token_ids": ids, "logprobs": {"token_logprobs": logprobs}}, request)

    def _text_of(self, choice: Json) -> Sampled:
        text, stopped = choice["text"], choice["finish_reason"] == "stop"
        ids = self.texts.encode(text) + self.eos_ids[:1] * stopped
        return Sampled(ids, np.full(len(ids), np.nan), stopped, text=text)  # type: ignore[arg-type]

    def _ids_and_logprobs(self, choice: Json) -> tuple[list[int], list[float]]:
        """Two forms of the ids: a list of their own, or "token_id:123" in place of the tokens' text."""
        logprobs = choice["logprobs"]
        ids = choice.get("token_ids") or [int(token.removeprefix(_TOKEN)) for token in logprobs["tokens"]]
        values = [float(value) for value in logprobs["token_logprobs"]]
        if len(ids) != len(values):
            raise ValueError(f"{len(ids)} token ids and {len(values)} log-probs")
        return ids, values

    # -- the adapter ---------------------------------------------------------------------------------------------------

    async def load(self, server: Server, adapter: ServedAdapter) -> None:
        """A server of text alone often loads no adapters; an untrained one it need not load, since that changes nothing."""
        try:
            await super().load(server, adapter)
        except (Refused, ConfigurationError):
            if not server.facts["text_alone"] or not _is_untrained(adapter.folder):
                raise
            server.facts["base_alone"] = True

    async def adapters(self, server: Server) -> Mapping[str, str] | None:  # type: ignore[override]
        return None if server.facts.get("base_alone") else await super().adapters(server)


class OpenAIEngine(VLLMEngine):
    capabilities = OPENAI
    dialect_class = OpenAIDialect


def _is_untrained(folder: Path) -> bool:
    """Whether the adapter adds nothing: every lora_B is 0."""
    from safetensors.numpy import load_file

    return not any(value.any() for name, value in load_file(folder / "adapter_model.safetensors").items() if "lora_B" in name)

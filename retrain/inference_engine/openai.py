"""Any server with OpenAI's /v1/completions that takes token ids and gives the sampled ones back with their log-probs.

OpenAI's own API gives no token ids, so few servers qualify beyond those with an engine of their own; a probe at the start tells. Adapters
are loaded as in vLLM, which several servers copied.
"""

from typing import Any

from retrain.errors import ConfigurationError
from retrain.inference_engine.base import OPENAI, SampleRequest
from retrain.inference_engine.http import Json, Refused, Server
from retrain.inference_engine.served import Sampled
from retrain.inference_engine.vllm import VLLMDialect, VLLMEngine

_TOKEN = "token_id:"


class OpenAIDialect(VLLMDialect):
    title = "The OpenAI-compatible server"
    chosen_logprob = 1  # some take 0 for off

    async def look(self, server: Server) -> None:
        await super().look(server)
        body = {"model": server.facts["base"], "prompt": [1, 2, 3, 4], "max_tokens": 1, "logprobs": 1, "return_token_ids": True}
        lacks = f"{self.title} {server.url} cannot be trained with:"
        advice = (
            'the loss needs both; use the engine made for it (vllm, sglang, mlx, max). For a judge, [reward] type = "judge" needs text '
            "alone."
        )
        try:
            answer = await server.post("/v1/completions", body | {"return_tokens_as_token_ids": True})
            found = self._ids_and_logprobs(answer["choices"][0])
        except Refused as error:
            if error.status in (401, 403):
                raise
            raise ConfigurationError(f"{lacks} it answers a prompt of token ids with {error.status} ({error}), and {advice}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(f"{lacks} it returns no token ids with log-probs, and {advice}") from error
        if len(found[0]) != 1:
            raise ConfigurationError(f"{lacks} it returned {len(found[0])} token ids for one token, and {advice}")

    def call(self, request: SampleRequest, adapter: Any, server: Server) -> tuple[str, Json]:
        path, body = super().call(request, adapter, server)
        return path, body | {"return_tokens_as_token_ids": True}

    def _read_one(self, choice: Json, request: SampleRequest) -> Sampled:
        ids, logprobs = self._ids_and_logprobs(choice)
        return super()._read_one(choice | {"token_ids": ids, "logprobs": {"token_logprobs": logprobs}}, request)

    def _ids_and_logprobs(self, choice: Json) -> tuple[list[int], list[float]]:
        """Two forms of the ids: a list of their own, or "token_id:123" in place of the tokens' text."""
        logprobs = choice["logprobs"]
        ids = choice.get("token_ids") or [int(token.removeprefix(_TOKEN)) for token in logprobs["tokens"]]
        values = [float(value) for value in logprobs["token_logprobs"]]
        if len(ids) != len(values):
            raise ValueError(f"{len(ids)} token ids and {len(values)} log-probs")
        return ids, values


class OpenAIEngine(VLLMEngine):
    capabilities = OPENAI
    dialect_class = OpenAIDialect

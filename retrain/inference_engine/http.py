"""Requests to one or several servers over HTTP: connections that stay open, retries, balancing, and
what a failure says.

Requests run in an event loop in a separate thread, so the caller can wait for many requests at once
and drop unwanted requests. If a server does not answer, its requests go to the other servers. The
server returns to use once its health check answers.
"""

import asyncio
import math
import time
from base64 import b64encode
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

import httpx
import stamina

from retrain.errors import ConfigurationError, RetrainError, ServerFailure
from retrain.web import (
    Answer,
    AnswerOverflow,
    EventLoop,
    client_for,
    exchange,
    key_from,
    masked,
)

T = TypeVar("T")
Json = dict[str, Any]

_BUSY = frozenset({429, 502, 503, 504})
"""The server or a proxy before it asks for patience. Every other status from 400 on is an answer,
but 500."""
_BROKEN = 500
_came: ContextVar[Answer | None] = ContextVar("_came", default=None)
"""The answer that a request is reading; each request runs in a task of its own."""
_CONNECT_S = 10.0
_MAX_BYTES = 1 << 30
"""Largest answer: some hundred bytes for each token of the completions of a prompt."""


@dataclass(frozen=True)
class Patience:
    """The limits of retrying a request, with exponential backoff and jitter between `first_s` and
    `max_s`.
    """

    silent_s: float = math.inf
    """Seconds during which retrain repeats a request, at most `[inference] retry_timeout_s`."""
    attempts: int = 10
    """Attempts after an unfit answer: about a minute."""
    word_s: float = 30.0
    """Seconds between two lines on the remaining patience."""
    slow_tries: int = 3
    """Times that a request may outlast `[inference] timeout_s` while its server is healthy."""
    look_attempts: int = 3
    """Attempts at the start, when a user waits for the sentence, and attempts on a server that is
    gone while others go on.
    """
    first_s: float = 0.5
    max_s: float = 15.0
    health_s: float = 5.0
    """Seconds until a server that does not answer a health check counts as silent."""
    recheck_s: float = 10.0
    """Seconds between two checks of a server out of use while others answer."""


class TransientFailure(Exception):
    """A server is busy, unreachable or has lost its engine: the request may succeed later or
    elsewhere.
    """

    def __init__(self, message: str, *, gone: bool) -> None:
        """`gone`: the server must show its health before it gets another request."""
        super().__init__(message)
        self.gone = gone


class BadAnswer(TransientFailure):
    """An answer that another try may improve: status 500, a page of HTML, half a body, or values
    that no completion has.
    """

    def __init__(self, url: str, clause: str, status: int = 200) -> None:
        """`clause` goes on after the server's address; `status` is as sent."""
        super().__init__(f"{url} {clause}", gone=False)
        self.status = status


class AnswerFormError(ValueError):
    """An answer in another form; it becomes BadAnswer. The message continues a sentence that begins
    with the server's address.
    """


class ServerMismatch(Exception):
    """The server cannot serve this run: its prompt had other token ids, for example. The message
    continues a sentence that begins with the server's address.
    """


class Refusal(Exception):
    """An answer that refuses the request, and would again; `status` is as sent, or as an error in
    the body says.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RequestTimeout(Exception):
    """A server did not answer within `[inference] timeout_s`."""


class Unanswered(ServerFailure):
    """Patience with a server, or with all of them, is at its end; the cause is the last failure."""


@dataclass(eq=False)
class Server:
    """One address. Its methods try once, and raise TransientFailure, Refusal or RequestTimeout."""

    url: str
    """The URL as shown: without credentials, a trailing slash or /v1."""
    client: httpx.AsyncClient
    lost: Callable[[int, str], str]
    """Maps (status, text) of an answer to why the server needs preparation again before it can
    serve; "" if it does not.
    """
    timeout_s: float
    """Seconds from the first byte of a request to the last byte of its answer."""
    secrets: tuple[str, ...] = ()
    """Secrets, which no sentence may repeat if the server says them."""
    alive: bool = True
    in_flight: int = 0
    looked_at: float = 0.0
    taking_back: asyncio.Lock = field(default_factory=asyncio.Lock)
    was_slow: bool = False
    """True if a request outlasted its time while the server was healthy, and the log says so."""
    problem: str = ""
    """Why the pool does not use it."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts that a dialect learned about it."""

    async def get(self, path: str, timeout: float | None = None) -> Any:
        return await self._send("GET", path, None, timeout)

    async def post(
        self, path: str, body: Mapping[str, Any] | None = None, timeout: float | None = None
    ) -> Any:
        """Return the answer as JSON, or as text where it is none."""
        return await self._send("POST", path, body, timeout)

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float | None
    ) -> Any:
        self.in_flight += 1
        try:
            seconds = self.timeout_s if timeout is None else timeout
            answer = await exchange(
                self.client, method, path, body, seconds=seconds, max_bytes=_MAX_BYTES
            )
        # A connection that did not come in time is another failure: the request is still unsent.
        except (TimeoutError, httpx.ReadTimeout, httpx.WriteTimeout) as error:
            limit = f"[inference] timeout_s = {seconds:g}" if timeout is None else f"{seconds:g} s"
            raise RequestTimeout(f"{self.url} did not answer a request within {limit}") from error
        except AnswerOverflow as error:
            raise Refusal(
                200,
                f"an answer of more than {_MAX_BYTES >> 20} MiB, which retrain did not read to"
                " the end",
            ) from error
        except httpx.RequestError as error:
            raise TransientFailure(
                f"{self.url}: {masked(_reason(error), *self.secrets)}", gone=True
            ) from error
        finally:
            self.in_flight -= 1
        _came.set(answer)
        return self._content(answer)

    def _content(self, answer: Answer) -> Any:
        """Return the content of a successful answer; for any other raise Refusal or
        TransientFailure.
        """
        status = _status(answer)
        if status < 300:
            return answer.content
        if status < 400:
            raise Refusal(
                status,
                f"it redirects to {answer.redirect_host}; name the address that answers itself",
            )
        said = answer.error_text(*self.secrets) or masked(answer.reason, *self.secrets)
        if reason := self.lost(status, said):
            raise TransientFailure(f"{self.url}: {reason} ({status}: {said})", gone=True)
        if status in _BUSY:
            raise TransientFailure(f"{self.url}: {status} {said}", gone=False)
        if status == _BROKEN:
            raise BadAnswer(self.url, f"answered {status}: {said}", status)
        raise Refusal(status, said)


class ServerKind(Protocol):
    """The part of `served.Dialect` that a pool needs."""

    title: ClassVar[str]
    health: ClassVar[str]
    config: Any

    def lost(self, status: int, text: str) -> str: ...


class ServerPool:
    """The servers of `[inference] url`. Close it to drop the requests under way, which makes a
    server abort them.
    """

    def __init__(
        self,
        dialect: ServerKind,
        *,
        prepare: Callable[[Server], Awaitable[None]] | None = None,
        log: Callable[[str], None] = print,
        patience: Patience = Patience(),
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`prepare` brings a returning server to the state of the others, before it gets requests.

        Another thread calls `log`. Raises ConfigurationError if `[inference] api_key_env` names an
        unset variable.
        """
        inference = dialect.config.inference
        self._dialect, self._key_env = dialect, inference.api_key_env
        self._prepare, self._log = prepare, log
        self._patience = replace(
            patience, silent_s=min(patience.silent_s, inference.retry_timeout_s)
        )
        headers = {}
        if self._key_env:
            key = key_from(self._key_env)
            if not key:
                raise ConfigurationError(
                    f'[inference] api_key_env = "{self._key_env}" names a variable without a'
                    " value; export it or leave the key out."
                )
            headers["Authorization"] = f"Bearer {key}"
        self.servers = [
            _server(url, headers, inference.timeout_s, dialect.lost, transport)
            for url in inference.urls
        ]
        """The last chosen server comes last."""
        self.came_back = False
        """True after a server returned to use; the caller that checks the servers clears it."""
        self._told = -math.inf
        """Time of the last line on patience."""
        self._loop = EventLoop("requests to servers")
        self._looks: set[asyncio.Task[None]] = set()

    # -- for the caller's thread -------------------------------------------------------------------

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return self._loop.start(work)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.start(work).result()

    def close(self) -> None:
        """Close the connections; it is safe to call this twice."""
        self._loop.close(*(server.client.aclose for server in self.servers))

    # -- in the loop -------------------------------------------------------------------------------

    @property
    def alive(self) -> list[Server]:
        return [server for server in self.servers if server.alive]

    async def ask(
        self,
        request: Callable[[Server], Awaitable[T]],
        wanted: Server | None = None,
        most: float = math.inf,
    ) -> T:
        """Make `request` on the `wanted` server, or on the live server with the fewest requests.
        Repeat it, also elsewhere, after a TransientFailure and, a few times, if it is stuck; `most`
        times at most.

        `request` must be safe to make twice. Raises Unanswered in one sentence once patience is at
        its end, and ServerFailure at once for an answer that no repetition changes.
        """
        patience = self._patience
        tried: set[str] = set()
        began = waited_from = time.monotonic()
        tries = slow = unfit = gone = 0

        def is_worth_another(error: Exception) -> bool:
            nonlocal waited_from, slow, unfit, gone
            if isinstance(error, RequestTimeout):
                slow, waited_from = slow + 1, time.monotonic()
                return slow < patience.slow_tries
            if not isinstance(error, TransientFailure):
                return False
            unfit += isinstance(error, BadAnswer)
            gone += error.gone
            # An open connection may close at its next use: uvicorn closes it after an error of its
            # own.
            if error.gone and (wanted is None or gone >= patience.look_attempts):
                self._leave_out(server, str(error))
            others_go_on = wanted and not wanted.alive and self.alive
            return (
                time.monotonic() - waited_from < patience.silent_s
                and unfit < patience.attempts
                and tries < most
                and not others_go_on
            )

        try:
            async for attempt in stamina.retry_context(
                on=is_worth_another,
                attempts=None,
                timeout=None,
                wait_initial=patience.first_s,
                wait_max=patience.max_s,
            ):
                with attempt:
                    tries += 1
                    self._tell_patience(waited_from)
                    server = await self._choose(tried, wanted)
                    tried.add(server.url)
                    return await self._once(server, request)
        except (TransientFailure, RequestTimeout) as error:
            raise self._gave_up(error, _tried(tries, time.monotonic() - began)) from error
        raise AssertionError("stamina returns or raises")

    async def on_each(
        self, request: Callable[[Server], Awaitable[T]], most: float = math.inf
    ) -> dict[str, T]:
        """Make `request` on every live server; returns the answers by URL. If another server
        answers, the pool stops using a server that does not, after a few tries if it is gone.
        Raises as `ask` does if none answers.
        """
        results: dict[str, T] = {}
        failed: list[Unanswered] = []

        async def one(server: Server) -> None:
            try:
                results[server.url] = await self.ask(request, server, most)
            except Unanswered as error:
                failed.append(error)
                self._leave_out(server, str(error.__cause__))

        while not results:
            await asyncio.gather(*map(one, self.alive or self.servers))
            if not results and not self.alive:
                raise failed[-1]
        return results

    async def connect(self, look: Callable[[Server], Awaitable[None]]) -> None:
        """Check the health of every server, then `look`. The pool does not use servers that do not
        answer. Raises Unanswered at once if none does.
        """
        failed: list[TransientFailure] = []

        async def one(server: Server) -> None:
            try:
                await self._once(server, self._check_health)
            except TransientFailure as error:
                failed.append(error)
                self._leave_out(server, str(error))

        await asyncio.gather(*map(one, self.servers))
        if not self.alive:
            raise self._gave_up(failed[-1])
        await self.on_each(look, self._patience.look_attempts)

    def _tell_patience(self, started: float) -> None:
        """Log now and then how long the pool still waits for a silent server."""
        now = time.monotonic()
        left = self._patience.silent_s - (now - started)
        if self.alive or min(now - started, now - self._told) < self._patience.word_s:
            return
        self._told = now
        problems = "; ".join(server.problem for server in self.servers)
        self._log(
            f"{self._dialect.title} does not answer ({problems}); retrain tries for another"
            f" {left:.0f} s ([inference] retry_timeout_s)."
        )

    async def _choose(self, tried: Collection[str], wanted: Server | None) -> Server:
        """Choose the wanted server, or round robin among the least busy servers; the servers in
        `tried` come last.

        A server out of use must first answer a health check again. Raises TransientFailure if none
        does.
        """
        dead = [server for server in self.servers if not server.alive]
        if wanted in dead or len(dead) == len(self.servers):
            for server in dead:
                await self._take_back(server)
        else:
            # Check in the background: the request does not wait for a server that may stay away.
            for server in dead:
                if time.monotonic() - server.looked_at > self._patience.recheck_s:
                    look = asyncio.create_task(self._take_back(server))
                    self._looks.add(look)
                    look.add_done_callback(self._looks.discard)
        able = [server for server in self.alive if wanted in (None, server)]
        if not able:
            raise TransientFailure("; ".join(server.problem for server in dead), gone=False)
        chosen = min(able, key=lambda server: (server.url in tried, server.in_flight))
        self.servers.remove(chosen)
        self.servers.append(chosen)
        return chosen

    async def _take_back(self, server: Server) -> None:
        server.looked_at = time.monotonic()
        async with server.taking_back:
            if server.alive:
                return
            try:
                await self._once(server, self._check_health)
                if self._prepare is not None:
                    await self._once(server, self._prepare)
            except (TransientFailure, RequestTimeout, RetrainError) as error:
                server.problem = str(error)
                return
            server.alive = self.came_back = True
            self._log(f"{self._dialect.title} {server.url} answers again, so retrain uses it.")

    async def _check_health(self, server: Server) -> None:
        path, seconds = self._dialect.health, self._patience.health_s
        try:
            await server.get(path, timeout=seconds)
        except RequestTimeout as error:
            raise TransientFailure(
                f"{server.url}: no answer from {path} within {seconds:g} s", gone=True
            ) from error
        except Refusal as error:
            if error.status in (401, 403) or error.status < 400:
                raise
            if error.status >= 500:
                raise TransientFailure(
                    f"{server.url}: {path} answers {error.status}", gone=True
                ) from error

    def _leave_out(self, server: Server, problem: str) -> None:
        server.problem, server.looked_at = problem, time.monotonic()
        server.facts.pop("looked", None)  # it may come back as another
        if server.alive:
            server.alive = False
            left = "it is tried again"
            if len(self.servers) > 1:
                left = f"{len(self.alive)} of {len(self.servers)} servers left"
            self._log(f"{self._dialect.title} {problem}; {left}.")

    async def _once(self, server: Server, request: Callable[[Server], Awaitable[T]]) -> T:
        """Make a request once; TransientFailure if the server is silent. A dialect reads answers
        inside; where it cannot, the server has answered in an unknown form, which is BadAnswer.
        """
        _came.set(None)
        try:
            return await request(server)
        except RetrainError:
            raise
        except Refusal as error:
            raise self._refusal(error, server) from error
        except ServerMismatch as error:
            raise ServerFailure(f"{self._dialect.title} {server.url} {error}.") from error
        except AnswerFormError as error:
            raise BadAnswer(server.url, str(error)) from error
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            answer = _came.get()
            came = (answer and answer.begins(*server.secrets)) or "nothing"
            raise BadAnswer(
                server.url, f"answered in a form that retrain does not know: {came}"
            ) from error
        except RequestTimeout as error:
            await self._once(server, self._check_health)
            if not server.was_slow:
                server.was_slow = True
                self._log(
                    f"{self._dialect.title} {error}, though it is healthy; retrain repeats such"
                    " requests."
                )
            raise

    def _gave_up(self, error: TransientFailure | RequestTimeout, tries: str = "") -> Unanswered:
        """Return the failure to raise after the last `error`. It keeps the sentence of an unfit
        answer, which says what is wrong.
        """
        title, slow = self._dialect.title, self._patience.slow_tries
        if isinstance(error, RequestTimeout):
            return Unanswered(
                f"{title} {error}, {slow} times in a row, though it is healthy: raise timeout_s, or"
                " lower [training] max_tokens, batch_size or group_size."
            )
        if isinstance(error, BadAnswer):
            return Unanswered(f"{title} {error}{tries and f' ({tries})'}.")
        problems = [server.problem for server in self.servers if not server.alive] or [str(error)]
        found = "; ".join(dict.fromkeys(filter(None, [*problems, tries])))
        how = "start it"
        if "SSL" in found:
            how = (
                "write http:// if it has no https, set SSL_CERT_FILE if its certificate is its own"
            )
        return Unanswered(
            f"{title} does not answer ({found}): {how}, or name another address in [inference] url."
        )

    def _refusal(self, error: Refusal, server: Server) -> ServerFailure:
        where = f"{self._dialect.title} {server.url} answered {error.status}"
        if error.status not in (401, 403):
            return ServerFailure(f"{where}: {error}.")
        how = "it requires a key: name its variable"
        if self._key_env:
            how = f"it rejects the key in {self._key_env}"
        return ServerFailure(f"{where} ({error}): {how} in [inference] api_key_env.")


# -- addresses, keys and answers -------------------------------------------------------------------


def _server(
    url: str,
    headers: dict[str, str],
    timeout_s: float,
    lost: Callable[[int, str], str],
    transport: httpx.AsyncBaseTransport | None,
) -> Server:
    shown, full = addresses(url)
    parts = urlsplit(full)
    if parts.username is not None and headers:
        raise ConfigurationError(
            f"[inference] url {shown} holds a user, and api_key_env a key, and a request takes one;"
            " leave one out."
        )
    client = client_for(
        full,
        base_url=full,
        headers=headers,
        timeout=httpx.Timeout(timeout_s, connect=_CONNECT_S, pool=None),
        # The engine itself bounds the requests that are under way.
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        transport=transport,
    )
    secrets = [headers.get("Authorization", "").removeprefix("Bearer ")]
    if parts.username is not None:
        # A user alone may be a key.
        secret = parts.password or parts.username
        both = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        secrets += [secret, unquote(secret), b64encode(both.encode()).decode()]
    return Server(shown, client, lost, timeout_s, tuple(secrets))


def addresses(url: str) -> tuple[str, str]:
    """Return (without credentials, as connected to); neither has a trailing slash or /v1."""
    parts = urlsplit(url)
    path = parts.path.rstrip("/").removesuffix("/v1")
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, path, "", "")), urlunsplit(
        (parts.scheme, parts.netloc, path, "", "")
    )


def _tried(tries: int, seconds: float) -> str:
    return f"{tries} {'try' if tries == 1 else 'tries'} in {seconds:.0f} s"


def _reason(error: httpx.RequestError) -> str:
    words = "the connection broke"
    if isinstance(error, httpx.ConnectTimeout):
        words = "no connection in time"
    elif isinstance(error, httpx.ConnectError):
        words = "no connection"
    return f"{words} ({str(error).strip() or type(error).__name__})"


def _status(answer: Answer) -> int:
    """Return the response's status. For a 200 whose body is an error, as some proxies send, return
    the error's own status, or 400 if it has none.
    """
    match answer.content:
        case {"error": error, **others} if (
            answer.status == 200 and error and "choices" not in others
        ):
            code = error.get("code") if isinstance(error, dict) else None
            return code if isinstance(code, int) and 400 <= code < 600 else 400
    return answer.status

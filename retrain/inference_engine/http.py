"""Requests to one or several servers over HTTP: connections that stay open, retries, balancing, and
what a failure says.

Requests run in an event loop in a thread of its own, so the caller can wait for many at once and
drop those that it no longer wants. A server that does not answer is left out, its requests go to
the others, and it is taken back once its health answers.
"""

import asyncio
import math
import time
from base64 import b64encode
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar
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
    """Seconds of asking a busy or silent server again: `[inference] patience_s`."""
    total_s: float = 60.0
    """Seconds of asking again for an answer that is unfit, and `attempts` its limit."""
    attempts: int = 10
    word_s: float = 30.0
    """Seconds between two lines on how much patience is left."""
    slow_tries: int = 3
    """Times that a request may outlast `[inference] timeout_s` while its server is healthy."""
    look_attempts: int = 3
    """At the start, where somebody is waiting for the sentence."""
    first_s: float = 0.5
    max_s: float = 15.0
    health_s: float = 5.0
    """Seconds until a server counts as silent when it is asked for its health."""
    recheck_s: float = 10.0
    """Between two looks at a server that was left out while others answer."""


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


@dataclass
class Server:
    """One address. Its methods try once, and raise TransientFailure, Refusal or RequestTimeout."""

    url: str
    """As shown: without credentials, a trailing slash or /v1."""
    client: httpx.AsyncClient
    lost: Callable[[int, str], str] | None
    """(status, text) of an answer to why the server must be prepared again before it can serve; ""
    if it need not."""
    timeout_s: float
    """From the first byte of a request to the last one of its answer."""
    secrets: tuple[str, ...] = ()
    """Secrets, which no sentence may repeat if the server says them."""
    alive: bool = True
    in_flight: int = 0
    turn: int = 0
    """The number of the choice that took it last."""
    looked_at: float = 0.0
    taking_back: asyncio.Lock = field(default_factory=asyncio.Lock)
    was_slow: bool = False
    """A request outlasted its time while it was healthy, which was said."""
    problem: str = ""
    """Why it is left out."""
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
        # A connection that did not come in time is another failure: nothing was asked yet.
        except (TimeoutError, httpx.ReadTimeout, httpx.WriteTimeout) as error:
            limit = f"{seconds:g} s"
            if timeout is None:
                limit = f"[inference] timeout_s = {seconds:g}"
            raise RequestTimeout(f"{self.url} did not answer a request within {limit}") from error
        except AnswerOverflow as error:
            raise Refusal(
                200,
                f"an answer of more than {_MAX_BYTES >> 20} MiB, which was not read to the end",
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
        said = answer.said(*self.secrets) or masked(answer.reason, *self.secrets)
        if self.lost and (reason := self.lost(status, said)):
            raise TransientFailure(f"{self.url}: {reason} ({status}: {said})", gone=True)
        if status in _BUSY:
            raise TransientFailure(f"{self.url}: {status} {said}", gone=False)
        if status == _BROKEN:
            raise BadAnswer(self.url, f"answered {status}: {said}", status)
        raise Refusal(status, said)


class ServerPool:
    """The servers of `[inference] url`. Close it; requests under way are dropped, which makes a
    server abort them.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        what: str,
        timeout_s: float,
        key_env: str = "",
        health: str = "/health",
        lost: Callable[[int, str], str] | None = None,
        prepare: Callable[[Server], Awaitable[None]] | None = None,
        log: Callable[[str], None] = print,
        patience: Patience = Patience(),
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`what` names the servers in sentences. `prepare` makes a server that comes back as the
        others are, before it gets requests.

        `log` is called from another thread. Raises ConfigurationError where `key_env` names a
        variable that is not set.
        """
        self._what, self._timeout_s, self._key_env, self._health = what, timeout_s, key_env, health
        self._prepare, self._log, self._patience = prepare, log, patience
        headers = {}
        if key_env:
            key = key_from(key_env)
            if not key:
                raise ConfigurationError(
                    f'[inference] api_key_env = "{key_env}" names a variable that is not set;'
                    " export it or leave the key out."
                )
            headers["Authorization"] = f"Bearer {key}"
        self.servers = [_server(url, headers, timeout_s, lost, transport) for url in urls]
        self.came_back = False
        """Set when a server was taken back; cleared by the caller that checks the servers."""
        self._turns = 0
        self._told = -math.inf
        """When the last line on patience was said."""
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

    async def ask(self, request: Callable[[Server], Awaitable[T]]) -> T:
        """Make `request` on the live server with the fewest requests, again and elsewhere while it
        is TransientFailure or, a few times, stuck.

        `request` must be one that may be made twice. Raises ServerFailure in one sentence once
        patience is at its end, and at once for an answer that no repetition changes.
        """
        tried: set[str] = set()
        slow = 0
        while True:
            try:
                return await self._ask_patiently(request, tried, time.monotonic())
            except Refusal as error:
                raise self.refusal(error) from error
            except RequestTimeout as error:
                slow += 1
                if slow == self._patience.slow_tries:
                    raise ServerFailure(
                        f"{self._what} {error}, {slow} times in a row, though it is healthy: raise"
                        " timeout_s, or lower [training] max_tokens, batch_size or group_size."
                    ) from error

    async def _ask_patiently(
        self, request: Callable[[Server], Awaitable[T]], tried: set[str], started: float
    ) -> T:
        """Make `request` until it is answered. `tried` collects the servers that did not answer;
        others come first. Patience counts from `started`.

        Raises Refusal, ServerFailure, and RequestTimeout for a healthy server that is too slow.
        """
        tries = 0
        try:
            async for attempt in self._attempts(started):
                with attempt:
                    tries += 1
                    self._tell_patience(started)
                    server = await self._choose(tried)
                    tried.add(server.url)
                    try:
                        with self._understood(server):
                            return await request(server)
                    except RequestTimeout as error:
                        await self._look_after_silence(server, error)
                    except TransientFailure as error:
                        if error.gone:
                            self._leave_out(server, str(error))
                        raise
        except TransientFailure as error:
            raise self._gave_up(
                error,
                f"{tries} {'try' if tries == 1 else 'tries'} in {time.monotonic() - started:.0f} s",
            ) from error
        raise AssertionError("stamina returns or raises")

    async def on_each(self, request: Callable[[Server], Awaitable[T]]) -> dict[str, T]:
        """Make `request` on every live server, by URL; one that does not answer is left out, one
        that is gone after a few tries where there are others. Where none is left it waits for one.
        Raises ServerFailure at the end of patience.
        """
        started = time.monotonic()
        results: dict[str, T] = {}
        problems: list[TransientFailure | RequestTimeout] = []

        async def one(server: Server) -> None:
            try:
                async for attempt in self._attempts(
                    started, self._patience.attempts, has_others=others
                ):
                    with attempt, self._understood(server):
                        results[server.url] = await request(server)
            except (TransientFailure, RequestTimeout) as error:
                problems.append(error)
                self._leave_out(server, str(error))
            except Refusal as error:
                raise self.refusal(error, server) from error

        while not results:
            # Any live server fulfils this: it waits for one.
            if not self.alive:
                await self._ask_patiently(lambda _: asyncio.sleep(0), set(), started)
            others = len(self.alive) > 1
            await asyncio.gather(*(one(server) for server in self.alive))
            is_unfit = bool(problems) and isinstance(problems[-1], BadAnswer)
            if not results and (is_unfit or time.monotonic() - started > self._patience.silent_s):
                raise self._gave_up(problems[-1] if problems else None)
        return results

    async def connect(self, look: Callable[[Server], Awaitable[None]]) -> None:
        """Check the health of every server, then `look`. Those that do not answer are left out;
        ServerFailure at once where none does.
        """
        problems: list[TransientFailure | RequestTimeout] = []

        async def one(server: Server) -> None:
            try:
                await self._check_health(server)
                # A connection kept open may close as it is used again: uvicorn's does after an
                # error of its own.
                async for attempt in self._attempts(time.monotonic(), self._patience.look_attempts):
                    with attempt, self._understood(server):
                        await look(server)
            except (TransientFailure, RequestTimeout) as error:
                problems.append(error)
                server.alive, server.problem = False, str(error)
            except Refusal as error:
                raise self.refusal(error, server) from error

        await asyncio.gather(*(one(server) for server in self.servers))
        if not self.alive:
            raise self._gave_up(problems[-1])
        for server in self.servers:
            if not server.alive:
                self._log(f"{self._what} {server.problem}; left out until it answers.")

    def _attempts(
        self, started: float, attempts: int | None = None, *, has_others: bool = False
    ) -> Any:
        """The tries of one request, whose patience counts from `started`. An unfit answer has
        `attempts`; without that number a server that is busy or silent has until the end of
        patience. One that is gone has few where there are others to go on with.
        """
        patience, first_try, unfit, gone = self._patience, time.monotonic(), 0, 0
        left = patience.silent_s - (first_try - started)

        def is_worth_another(error: Exception) -> bool:
            nonlocal unfit, gone
            if not isinstance(error, TransientFailure):
                return False
            gone += error.gone
            if not isinstance(error, BadAnswer):
                return not has_others or gone < patience.look_attempts
            unfit += 1
            return unfit < patience.attempts and time.monotonic() - first_try < patience.total_s

        return stamina.retry_context(
            on=is_worth_another,
            attempts=attempts,
            timeout=left if attempts is None else min(left, patience.total_s),
            wait_initial=patience.first_s,
            wait_max=patience.max_s,
        )

    def _tell_patience(self, started: float) -> None:
        """Say now and then how long a silent server is still waited for."""
        now = time.monotonic()
        left = self._patience.silent_s - (now - started)
        if self.alive or min(now - started, now - self._told) < self._patience.word_s:
            return
        self._told = now
        problems = "; ".join(server.problem for server in self.servers)
        self._log(
            f"{self._what} does not answer ({problems}); it is asked for another {left:.0f} s"
            " ([inference] patience_s)."
        )

    async def _choose(self, tried: Collection[str] = ()) -> Server:
        """Choose round robin among the least busy servers; servers in `tried` come last.

        If none is alive, choose one that answers a health check again; raise TransientFailure if
        none does.
        """
        now = time.monotonic()
        dead = [server for server in self.servers if not server.alive]
        if len(dead) == len(self.servers):
            for server in dead:
                await self._take_back(server)
            if not self.alive:
                raise TransientFailure("; ".join(server.problem for server in dead), gone=False)
        else:
            # Beside the request, which does not wait for a server that may stay away.
            for server in dead:
                if now - server.looked_at > self._patience.recheck_s:
                    server.looked_at = now
                    look = asyncio.create_task(self._take_back(server))
                    self._looks.add(look)
                    look.add_done_callback(self._looks.discard)
        chosen = min(
            self.alive, key=lambda server: (server.url in tried, server.in_flight, server.turn)
        )
        self._turns += 1
        chosen.turn = self._turns
        return chosen

    async def _take_back(self, server: Server) -> None:
        server.looked_at = time.monotonic()
        async with server.taking_back:
            if server.alive:
                return
            try:
                await self._check_health(server)
                if self._prepare is not None:
                    with self._understood(server):
                        await self._prepare(server)
            except (TransientFailure, RequestTimeout, Refusal, RetrainError) as error:
                server.problem = str(error)
                return
            server.alive = self.came_back = True
            self._log(f"{self._what} {server.url} answers again and is taken back.")

    async def _check_health(self, server: Server) -> None:
        try:
            await server.get(self._health, timeout=self._patience.health_s)
        except RequestTimeout as error:
            raise TransientFailure(
                f"{server.url}: no answer from {self._health} within {self._patience.health_s:g} s",
                gone=True,
            ) from error
        except Refusal as error:
            if error.status in (401, 403) or error.status < 400:
                raise
            if error.status >= 500:
                raise TransientFailure(
                    f"{server.url}: {self._health} answers {error.status}", gone=True
                ) from error

    def _leave_out(self, server: Server, problem: str) -> None:
        server.problem, server.looked_at = problem, time.monotonic()
        server.facts.pop("looked", None)  # it may come back as another
        if server.alive:
            server.alive = False
            left = "it is tried again"
            if len(self.servers) > 1:
                left = f"{len(self.alive)} of {len(self.servers)} servers left"
            self._log(f"{self._what} {problem}; {left}.")

    async def _look_after_silence(self, server: Server, error: RequestTimeout) -> None:
        """Leave a silent server out, and ask a healthy one again. Always raises: TransientFailure,
        or RequestTimeout.
        """
        try:
            await self._check_health(server)
        except TransientFailure as silent:
            self._leave_out(server, str(silent))
            raise
        if not server.was_slow:
            server.was_slow = True
            self._log(f"{self._what} {error}, though it is healthy; such requests are made again.")
        raise error

    @contextmanager
    def _understood(self, server: Server) -> Iterator[None]:
        """A dialect reads answers inside; where it cannot, the server has answered in an unknown
        form, which is BadAnswer.
        """
        _came.set(None)
        try:
            yield
        except RetrainError:
            raise
        except ServerMismatch as error:
            raise ServerFailure(f"{self._what} {server.url} {error}.") from error
        except AnswerFormError as error:
            raise BadAnswer(server.url, str(error)) from error
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            answer = _came.get()
            came = (answer and answer.begins(*server.secrets)) or "nothing"
            raise BadAnswer(
                server.url, f"answered in a form that retrain does not know: {came}"
            ) from error

    def _gave_up(
        self, error: TransientFailure | RequestTimeout | None, tries: str = ""
    ) -> ServerFailure:
        """Return the failure to raise after the last `error`. An unfit answer's own sentence is
        kept, since it says what is wrong.
        """
        after = ""
        if tries:
            after = f" ({tries})"
        if isinstance(error, BadAnswer):
            return ServerFailure(f"{self._what} {error}{after}.")
        found = "; ".join(
            dict.fromkeys(server.problem for server in self.servers if not server.alive)
        ) or str(error)
        if tries:
            found = f"{found}; {tries}"
        how = "start it"
        if "SSL" in found:
            how = (
                "write http:// if it has no https, set SSL_CERT_FILE if its certificate is its own"
            )
        return ServerFailure(
            f"{self._what} does not answer ({found}): {how}, or name another address in"
            " [inference] url."
        )

    def refusal(self, error: Refusal, server: Server | None = None) -> ServerFailure:
        where = ""
        if server:
            where = f" {server.url}"
        if error.status in (401, 403):
            how = "it requires a key: name its variable"
            if self._key_env:
                how = f"the key in {self._key_env} was not accepted"
            return ServerFailure(
                f"{self._what}{where} answered {error.status} ({error}): {how} in [inference]"
                " api_key_env."
            )
        return ServerFailure(f"{self._what}{where} answered {error.status}: {error}.")


# -- addresses, keys and answers -------------------------------------------------------------------


def _server(
    url: str,
    headers: dict[str, str],
    timeout_s: float,
    lost: Callable[[int, str], str] | None,
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


def _reason(error: httpx.RequestError) -> str:
    kinds = {
        httpx.ConnectTimeout: "no connection in time",
        httpx.ConnectError: "no connection",
        httpx.PoolTimeout: "no free connection",
    }
    words = next(
        (words for kind, words in kinds.items() if isinstance(error, kind)), "the connection broke"
    )
    return f"{words} ({str(error).strip() or type(error).__name__})"


def _status(answer: Answer) -> int:
    """Return the response's status. For a 200 whose body is an error, as some proxies send, return
    the error's own status, or 400 if it has none.
    """
    content = answer.content
    if (
        answer.status != 200
        or not isinstance(content, dict)
        or not content.get("error")
        or "choices" in content
    ):
        return answer.status
    if isinstance(content["error"], dict):
        code = content["error"].get("code")
    else:
        code = None
    return code if isinstance(code, int) and 400 <= code < 600 else 400

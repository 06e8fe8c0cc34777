"""Requests to servers: what is retried and what is not, balancing, servers that die and come back,
keys, and the sentences.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from time import monotonic
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from judges import (
    Answer,
    breaking_off,
    closing,
    dripping,
    endless,
    failing,
    first,
    hanging_after_headers,
    hanging_up,
    raw,
    serving,
)
from vllm_double import HASTY

from retrain import web
from retrain.config import config_from_mapping
from retrain.config.schema import Inference
from retrain.errors import ConfigurationError, EnvironmentFailure, ServerFailure
from retrain.inference_engine.http import Patience, Server, ServerPool, addresses

Handler = Callable[[httpx.Request], httpx.Response]
A, B = "http://127.0.0.1:1", "http://127.0.0.1:2"
UNKNOWN_FORM = f"{A} answered in a form that retrain does not know:"


def pool_of(
    *urls: str,
    timeout_s: float = 2,
    key_env: str = "",
    lost: Callable[[int, str], str] = lambda status, text: "",
    patience: Patience = HASTY,
    **settings: Any,
) -> ServerPool:
    inference = Inference(url=list(urls), timeout_s=timeout_s, api_key_env=key_env)
    config = SimpleNamespace(inference=inference)
    dialect: Any = SimpleNamespace(title="The server", health="/health", lost=lost, config=config)
    return ServerPool(dialect, patience=patience, **settings)


class Net:
    """Servers by URL: each an answer, a list of answers of which the last one stays, or a function;
    None is a refused connection.
    """

    def __init__(self, **settings: Any) -> None:
        self.answers: dict[str, Any] = {}
        self.asked: list[httpx.Request] = []
        self.said: list[str] = []
        self.pools: list[ServerPool] = []
        self.settings = settings

    def pool(self, *urls: str, **settings: Any) -> ServerPool:
        transport = httpx.MockTransport(self.answer)
        made = pool_of(*urls, log=self.said.append, transport=transport, **settings)
        self.pools.append(made)
        return made

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        found = self.answers.get(f"{request.url.scheme}://{request.url.netloc.decode()}")
        if found is None:
            raise httpx.ConnectError("refused")
        if request.url.path == "/health":
            return httpx.Response(200)
        if isinstance(found, list):
            found = found.pop(0) if len(found) > 1 else found[0]
        if callable(found):
            found = found(request)
        if isinstance(found, httpx.Response):
            return found
        return httpx.Response(found) if isinstance(found, int) else httpx.Response(200, json=found)

    def posts(self) -> list[str]:
        return [str(request.url) for request in self.asked if request.method == "POST"]


@pytest.fixture
def net() -> Iterator[Net]:
    made = Net()
    yield made
    for pool in made.pools:
        pool.close()


def ask(pool: ServerPool, count: int = 1) -> list[Any]:
    async def one(server: Server) -> Any:
        return await server.post("/work", {"a": 1})

    futures = [pool.start(pool.ask(one)) for _ in range(count)]
    return [future.result(20) for future in futures]


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_busy_server_is_asked_again(net: Net, status: int) -> None:
    net.answers[A] = [status, status, {"done": 1}]
    assert ask(net.pool(A)) == [{"done": 1}]
    assert len(net.posts()) == 3 and net.said == []


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422, 501])
def test_an_answer_that_a_repetition_would_not_change_is_not_asked_for_again(
    net: Net, status: int
) -> None:
    net.answers[A] = [status]
    with pytest.raises(ServerFailure, match=f"answered {status}"):
        ask(net.pool(A))
    assert len(net.posts()) == 1


def test_a_silent_server_has_longer_than_an_unfit_answer_counted_down(net: Net) -> None:
    threading.Timer(1.0, lambda: net.answers.update({A: {"done": 1}})).start()
    patience = replace(HASTY, silent_s=20, attempts=2, word_s=0.3)
    assert ask(net.pool(A, patience=patience)) == [{"done": 1}]
    waits = [line for line in net.said if "retry_timeout_s" in line]
    assert waits and all("retrain tries for another " in line for line in waits)
    assert net.said[-1].endswith("answers again, so retrain uses it.")
    net.answers[A] = 500
    with pytest.raises(ServerFailure, match="2 tries"):
        ask(net.pool(A, patience=patience))


def test_what_an_answer_lacks_is_asked_for_again_and_of_another_server_first(net: Net) -> None:
    """A 500, a page of HTML and half a JSON of one server, beside a sound one."""
    net.answers |= {
        A: [500, "<html>Busy</html>", {"do": "", "half": 1}, {"done": "a"}],
        B: {"done": "b"},
    }

    async def one(server: Server) -> Any:
        return (await server.post("/work"))["done"]

    pool = net.pool(A, B)
    assert pool.run(pool.ask(one)) == "b" and len(net.posts()) == 2
    alone = net.pool(A)
    assert alone.run(alone.ask(one)) == "a" and len(net.posts()) == 5 and net.said == []


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (500, f"{A} answered 500: Internal Server Error"),
        ("<html>\n" + "x" * 200, f'{UNKNOWN_FORM} "<html>\\n{"x" * 71}...'),
        ([1], f"{UNKNOWN_FORM} [1]"),
        (503, f"does not answer ({A}: 503 Service Unavailable; "),
        (None, f"does not answer ({A}: no connection (refused)"),
    ],
)
def test_what_stays_wrong_is_told_with_the_server_and_what_came_in_its_own_words(
    net: Net, answer: Any, told: str
) -> None:
    net.answers[A] = lambda request: answer
    if answer is None:
        del net.answers[A]

    async def one(server: Server) -> Any:
        return (await server.post("/work"))["done"]

    pool = net.pool(A)
    for work in (pool.ask(one), pool.on_each(one)):
        with pytest.raises(ServerFailure) as caught:
            pool.run(work)
        said = str(caught.value)
        assert said.startswith(f"The server {told}")
        assert not any(word in said for word in ("Error:", "str'", "indices", "NoneType"))


def test_requests_are_shared_out(net: Net) -> None:
    net.answers |= {A: {"by": "a"}, B: {"by": "b"}}
    assert Counter(answer["by"] for answer in ask(net.pool(A, B), 10)) == {"a": 5, "b": 5}


def test_a_dead_server_is_left_out_and_taken_back_once_prepared(net: Net) -> None:
    prepared: list[str] = []

    async def prepare(server: Server) -> None:
        prepared.append(server.url)

    net.answers |= {A: {"by": "a"}}
    pool = net.pool(A, B, prepare=prepare)
    assert {answer["by"] for answer in ask(pool, 6)} == {"a"}
    assert net.said == [
        "The server http://127.0.0.1:2: no connection (refused); 1 of 2 servers left."
    ]
    net.answers[B] = {"by": "b"}
    start = monotonic()
    while len(pool.alive) < 2 and monotonic() < start + 10:
        ask(pool)
    assert net.said[1:] == ["The server http://127.0.0.1:2 answers again, so retrain uses it."]
    assert prepared == [B] and pool.came_back
    assert {answer["by"] for answer in ask(pool, 6)} == {"a", "b"}


def test_one_of_two_that_is_gone_does_not_hold_up_what_each_is_asked(net: Net) -> None:
    """As when an adapter is loaded. The only server is asked for longer."""
    net.answers |= {A: {"by": "a"}}
    patience = replace(HASTY, attempts=9, look_attempts=3)

    async def one(server: Server) -> Any:
        return await server.post("/work")

    pool = net.pool(A, B, patience=patience)
    assert pool.run(pool.on_each(one)) == {A: {"by": "a"}}
    assert Counter(net.posts()) == {f"{A}/work": 1, f"{B}/work": 3}
    assert net.said == [f"The server {B}: no connection (refused); 1 of 2 servers left."]
    net.asked.clear()
    alone = net.pool(B, patience=patience)
    with pytest.raises(ServerFailure, match="does not answer"):
        alone.run(alone.on_each(one))
    assert len(net.asked) >= 9


def test_the_only_server_that_was_gone_may_be_busy_when_it_is_back(net: Net) -> None:
    def breaks(_: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("closed")

    net.answers[A] = [breaks, breaks, breaks, 503, {"done": 1}]
    pool = net.pool(A, patience=replace(HASTY, silent_s=9))
    assert pool.run(pool.on_each(lambda server: server.post("/work"))) == {A: {"done": 1}}
    assert [line.rpartition(" ")[2] for line in net.said] == ["again.", "it."]


def test_the_only_server_is_waited_for_and_prepared_before_it_is_asked(net: Net) -> None:
    events: list[str] = []

    async def prepare(server: Server) -> None:
        events.append("prepared")

    def break_once(request: httpx.Request) -> dict[str, int]:
        if not events:
            events.append("broken")
            raise httpx.ReadError("reset")
        events.append("asked")
        return {"done": 1}

    net.answers[A] = break_once
    assert ask(net.pool(A, prepare=prepare)) == [{"done": 1}]
    assert events == ["broken", "prepared", "asked"]


def test_when_all_are_dead_one_sentence_names_them(net: Net) -> None:
    with pytest.raises(ServerFailure) as caught:
        ask(net.pool(A, B))
    found = str(caught.value)
    assert all(part in found for part in (A, B, "tries in", "[inference] url"))
    assert found.count("\n") == 0


def test_an_engine_that_died_behind_its_server_counts_as_gone(net: Net) -> None:
    net.answers |= {A: 500, B: {"by": "b"}}
    pool = net.pool(A, B, lost=lambda status, text: "its engine has died" if status == 500 else "")
    assert {answer["by"] for answer in ask(pool, 4)} == {"b"}
    assert "its engine has died" in net.said[0]


def test_a_healthy_server_that_is_too_slow_stops_the_run_and_names_the_key(net: Net) -> None:
    def never(request: httpx.Request) -> None:
        raise httpx.ReadTimeout("slow")

    net.answers[A] = never
    told = (
        rf"{A} did not answer a request within \[inference\] timeout_s = 2, 3 times in a row,"
        r" though it is healthy: raise timeout_s"
    )
    with pytest.raises(ServerFailure, match=told):
        ask(net.pool(A))
    assert len(net.posts()) == 3 and len(net.said) == 1


def test_one_stuck_request_among_many_is_made_again(net: Net) -> None:
    stuck: list[str] = []

    def sometimes(request: httpx.Request) -> dict[str, int]:
        if len(net.posts()) == 5 and not stuck:
            stuck.append("once")
            raise httpx.ReadTimeout("slow")
        return {"done": 1}

    net.answers[A] = sometimes
    assert ask(net.pool(A), 20) == [{"done": 1}] * 20 and stuck
    assert len(net.said) == 1
    assert "though it is healthy; retrain repeats such requests" in net.said[0]


def test_a_server_that_hangs_is_left_out(net: Net) -> None:
    def never(request: httpx.Request) -> None:
        net.answers[A] = None
        raise httpx.ReadTimeout("slow")

    net.answers |= {A: never, B: {"by": "b"}}
    assert {answer["by"] for answer in ask(net.pool(A, B), 2)} == {"b"}


def test_the_key_comes_from_its_variable_and_stays_out_of_sentences(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_KEY", "very-secret-value")
    net.answers[A] = {"done": 1}
    ask(net.pool(A, key_env="SERVER_KEY"))
    assert net.asked[-1].headers["Authorization"] == "Bearer very-secret-value"
    net.answers[A] = 401
    with pytest.raises(ServerFailure, match="it rejects the key in SERVER_KEY") as caught:
        ask(net.pool(A, key_env="SERVER_KEY"))
    assert "very-secret" not in str(caught.value)
    with pytest.raises(
        ServerFailure, match=r"it requires a key: name its variable in \[inference\] api_key_env"
    ):
        ask(net.pool(A))
    with pytest.raises(
        ConfigurationError, match='api_key_env = "NO_SUCH_KEY" names a variable without a value'
    ):
        net.pool(A, key_env="NO_SUCH_KEY")


@pytest.mark.parametrize(
    "key", ["sk-one\nsk-two", "sk-\u0441\u043b\u043e\u0432\u043e", "\u2019sk-quoted\u2019"]
)
def test_a_key_that_no_request_can_carry_is_named_by_its_variable_alone(
    net: Net, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_KEY", key)
    with pytest.raises(
        EnvironmentFailure, match="SERVER_KEY holds a key with a line break"
    ) as caught:
        net.pool(A, key_env="SERVER_KEY")
    assert "sk-" not in str(caught.value)


def test_a_key_that_a_server_repeats_is_not_shown_in_part_either() -> None:
    for padding in range(260, 310):
        answer = web.Answer(401, {}, f"{'y' * padding} very-secret-value".encode(), "Unauthorized")
        assert "very" not in answer.error_text("very-secret-value")


def test_credentials_in_an_address_are_used_and_not_shown(net: Net) -> None:
    assert addresses("http://me:word@host:8/v1/") == ("http://host:8", "http://me:word@host:8")
    with pytest.raises(ServerFailure) as caught:
        ask(net.pool("http://me:word@127.0.0.1:1/v1"))
    assert "word" not in str(caught.value)
    # A server may repeat the header that it got, and a user alone may be a key.
    for url, header in (("http://me:word@", "bWU6d29yZA=="), ("http://a-key@", "YS1rZXk6")):
        net.answers[A] = lambda request: httpx.Response(400, text=request.headers["Authorization"])
        with pytest.raises(ServerFailure, match=r"answered 400: Basic \*\*\*") as caught:
            ask(net.pool(url + A.removeprefix("http://")))
        assert net.asked[-1].headers["Authorization"] == f"Basic {header}"


# -- servers that misbehave ------------------------------------------------------------------------

KEY = "very-secret-value"


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("ALL_PROXY", "socks5://127.0.0.1:1", "socksio"),
        ("HTTP_PROXY", "ftp://127.0.0.1", "Unknown scheme for proxy"),
        ("HTTP_PROXY", "http://u:pw@h:port", "Invalid port: 'port'"),
        ("SSL_CERT_FILE", "/none", "No such file"),
        ("NO_PROXY", "fd00::/8", r"\); correct or unset NO_PROXY\.$"),
    ],
)
def test_an_unusable_proxy_is_one_sentence_and_this_machine_needs_none(
    net: Net, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, told: str
) -> None:
    for name in web._CONNECTING:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv(variable, value)
    with pytest.raises(EnvironmentFailure, match=f"unusable certificates .*{told}") as caught:
        pool_of("http://10.0.0.1")
    assert "u:pw" not in str(caught.value)
    net.answers["http://0.0.0.0:1"] = {"done": 1}
    assert ask(net.pool("http://0.0.0.0:1")) == [{"done": 1}]


def test_patience_is_counted_once_for_what_each_server_is_asked(net: Net) -> None:
    """What a healthy server breaks off was tried for a time of its own, and then waited for anew."""

    def breaks(_: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("closed")

    net.answers[A] = breaks
    pool = net.pool(A, patience=replace(HASTY, silent_s=1.0, attempts=1000))
    threading.Timer(0.7, net.answers.clear).start()
    began = monotonic()
    with pytest.raises(ServerFailure, match="does not answer"):
        pool.run(pool.on_each(lambda server: server.post("/work")))
    assert 0.9 < monotonic() - began < 1.6


def ask_for_real(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The answer of a server of sockets, asked with a key and half a second of patience per
    request.
    """
    monkeypatch.setenv("SERVER_KEY", KEY)
    with serving(answer) as server:
        pool = pool_of(server.url, timeout_s=0.5, key_env="SERVER_KEY", log=lambda line: None)
        try:
            return ask(pool)
        finally:
            pool.close()


@pytest.mark.parametrize(
    "behavior",
    [closing, first(breaking_off, 1, closing), first(failing(503, Retry_After="1"), 1, closing)],
)
def test_an_old_protocol_half_a_body_and_a_busy_moment_cost_nothing(
    behavior: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask_for_real(behavior, monkeypatch) == [{"done": 1}]


def test_a_connection_that_breaks_while_a_server_is_looked_at_costs_nothing() -> None:
    """As one does that the server had kept open, and closes when the next request comes."""
    said: list[str] = []

    async def look(server: Server) -> None:
        await server.post("/v1/completions", {"prompt": "1"})

    with serving(first(hanging_up, 1, raw(b'{"done": 1}'))) as server:
        pool = pool_of(server.url, timeout_s=5, log=said.append)
        try:
            pool.run(pool.connect(look))
        finally:
            pool.close()
        assert pool.servers[0].alive and not said and len(server.requests) == 2


def test_https_of_a_server_without_it_is_not_answered_with_start_it() -> None:
    async def look(server: Server) -> None:
        await server.get("/v1/models")

    with serving(raw(b"{}")) as server:
        url = server.url.replace("http:", "https:")
        pool = pool_of(url, timeout_s=5)
        try:
            with pytest.raises(ServerFailure, match=r"SSL.*: write http:// if it has no https"):
                pool.run(pool.connect(look))
        finally:
            pool.close()


SLOW = "did not answer a request within .* though it is healthy"
MISBEHAVING: dict[str, tuple[Answer, str]] = {
    "trickle": (
        dripping,
        r"within \[inference\] timeout_s = 0.5, 3 times in a row, though it is healthy",
    ),
    "hang after headers": (hanging_after_headers, SLOW),
    "endless": (endless, "more than 1 MiB, which retrain did not read to the end"),
    "redirect": (
        lambda handler: handler.send(307, b"", Location=f"http://u:{KEY}@10.0.0.1:9/v1"),
        r"answered 307: it redirects to 10\.0\.0\.1:9; name",
    ),
    "redirect to nowhere": (
        lambda handler: handler.send(307, b"", Location="http://a]b/"),
        "answered 307: it redirects to what is not an address; name",
    ),
    "error in a 200": (
        raw(b'{"error": {"message": "no such thing", "code": 404}}'),
        "answered 404: no such thing",
    ),
    "word in a 200": (raw(b'{"error": "out of credit"}'), "answered 400: out of credit"),
    "busy in a 200": (
        raw(b'{"error": {"message": "overloaded", "code": 503}}'),
        r"does not answer .*503 overloaded; \d+ tries",
    ),
    "echo": (failing(400, f"invalid key {KEY}"), r"answered 400: invalid key \*\*\*"),
    "401": (failing(401, f"Bearer {KEY}"), "it rejects the key in SERVER_KEY"),
    "deep": (raw(b"[" * 100_000, 400), "answered 400"),
}


@pytest.mark.parametrize("name", MISBEHAVING)
def test_a_server_that_misbehaves_is_one_sentence_without_the_key(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    behavior, told = MISBEHAVING[name]
    monkeypatch.setattr("retrain.inference_engine.http._MAX_BYTES", 1 << 20)
    began = monotonic()
    with pytest.raises(ServerFailure, match=told) as caught:
        ask_for_real(behavior, monkeypatch)
    said = str(caught.value)
    assert KEY not in said and "\n" not in said and len(said) < 600
    assert monotonic() - began < 20


def test_a_user_in_the_address_and_a_key_are_one_too_many(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_KEY", KEY)
    with pytest.raises(
        ConfigurationError, match="holds a user, and api_key_env a key, and a request takes one"
    ):
        net.pool("http://me:word@127.0.0.1:1", key_env="SERVER_KEY")


def test_requests_that_are_no_longer_wanted_are_dropped(net: Net) -> None:
    pool = net.pool(A)
    dropped: list[bool] = []

    async def hang(server: Server) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            dropped.append(True)
            raise

    net.answers[A] = {}
    future = pool.start(pool.ask(hang))
    pool.run(asyncio.sleep(0.05))
    future.cancel()
    pool.run(asyncio.sleep(0.05))
    assert dropped == [True]
    start = monotonic()
    pool.close()
    assert monotonic() - start < 30, "the request would have taken a minute"


UNREACHABLE = [
    *("localhost:8000", "ftp://host", "http://", ["http://a", "b"], "http://a:b", "http://a:0"),
    *("http://a:99999", "http://a:+80", "http://[::1", "http://a b", " http://a", "http://a:80 "),
    *("http://..:80", "http://a..b", "http://a,b:80", "http://-a", "http://☃.com/v1"),
]


@pytest.mark.parametrize("url", UNREACHABLE)
def test_what_no_request_can_reach_is_refused(url: Any) -> None:
    sentence = " is not the address of a server; write one such as http://127.0.0.1:8000."
    for section, name in [("inference", "url"), ("reward", "judge_base_url")]:
        if name == "url" or isinstance(url, str):
            with pytest.raises(ConfigurationError, match=rf"\[{section}\] {name} = ") as refused:
                config_from_mapping({section: {name: url}})
            assert str(refused.value).endswith(sentence)


def test_the_addresses_of_servers_are_taken() -> None:
    urls = [
        *("http://localhost", "http://127.0.0.1:8000/v1/", "http://[::1]:8000/proxy"),
        *("http://[fe80::1%25eth0]:8000", "http://my_vllm:8000", "http://bücher.example"),
        *("http://host.docker.internal:8000", "https://vllm-0.models.svc.cluster.local."),
        "https://user:secret@API.example.com/prefix/v1",
    ]
    for given in (*urls, urls):
        inference = config_from_mapping({"inference": {"engine": "vllm", "url": given}}).inference
        assert inference.urls == (given if isinstance(given, list) else [given])
    assert config_from_mapping({}).inference.urls == []


def test_an_address_of_ipv6_with_a_path_is_kept_and_one_with_a_query_refused() -> None:
    kept = "http://[::1]:8000/proxy"
    assert addresses(f"{kept}/v1/") == (kept, kept)
    for url in ("http://a/v1?api-version=1", "http://a/v1?", "http://a/v1#"):
        with pytest.raises(ConfigurationError, match=r"has a query or a fragment"):
            config_from_mapping({"inference": {"engine": "vllm", "url": url}})

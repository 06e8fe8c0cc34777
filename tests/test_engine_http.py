"""Requests to servers: what is retried and what is not, balancing, servers that die and come back, keys, and the sentences."""

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import httpx
import pytest
from vllm_double import HASTY

from retrain.config import config_from_mapping
from retrain.errors import ConfigurationError, ServerFailure
from retrain.inference_engine.http import Patience, Server, ServerPool, addresses

Handler = Callable[[httpx.Request], httpx.Response]
A, B = "http://127.0.0.1:1", "http://127.0.0.1:2"


class Net:
    """Servers by URL: each an answer, a list of answers of which the last one stays, or a function; None is a refused connection."""

    def __init__(self, **settings: Any) -> None:
        self.answers: dict[str, Any] = {}
        self.asked: list[httpx.Request] = []
        self.said: list[str] = []
        self.pools: list[ServerPool] = []
        self.settings = settings

    def pool(self, *urls: str, patience: Patience = HASTY, **settings: Any) -> ServerPool:
        transport = httpx.MockTransport(self.answer)
        made = ServerPool(urls, what="The server", timeout_s=2, say=self.said.append, patience=patience, transport=transport, **settings)
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


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_busy_server_is_asked_again(net: Net, status: int) -> None:
    net.answers[A] = [status, status, {"done": 1}]
    assert ask(net.pool(A)) == [{"done": 1}]
    assert len(net.posts()) == 3 and net.said == []


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422, 500])
def test_an_answer_that_a_repetition_would_not_change_is_not_asked_for_again(net: Net, status: int) -> None:
    net.answers[A] = [status]
    with pytest.raises(ServerFailure, match=f"answered {status}"):
        ask(net.pool(A))
    assert len(net.posts()) == 1


def test_a_server_that_stays_busy_is_given_up_with_what_was_tried(net: Net) -> None:
    net.answers[A] = 503
    with pytest.raises(ServerFailure, match=r"does not answer \(http://127.0.0.1:1: 503 Service Unavailable; 4 tries in \d s\): start it"):
        ask(net.pool(A))


def test_the_words_of_a_refusal_are_the_servers(net: Net) -> None:
    net.answers[A] = lambda request: None
    pool = net.pool(A)
    net.answer = lambda request: httpx.Response(400, json={"error": {"message": "Token id 9 is out of vocabulary."}})  # type: ignore[method-assign]
    pool.servers[0].client._transport = httpx.MockTransport(net.answer)
    with pytest.raises(ServerFailure, match=r"answered 400: Token id 9 is out of vocabulary\.$"):
        ask(pool)


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
    assert net.said == ["The server http://127.0.0.1:2: no connection (refused); 1 of 2 servers left."]
    net.answers[B] = {"by": "b"}
    start = monotonic()
    while len(pool.alive) < 2 and monotonic() < start + 10:
        ask(pool)
    assert net.said[1:] == ["The server http://127.0.0.1:2 answers again and is taken back."]
    assert prepared == [B] and pool.came_back
    assert {answer["by"] for answer in ask(pool, 6)} == {"a", "b"}


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
    assert A in found and B in found and "tries in" in found and "[inference] url" in found and found.count("\n") == 0


def test_an_engine_that_died_behind_its_server_counts_as_gone(net: Net) -> None:
    net.answers |= {A: 500, B: {"by": "b"}}
    pool = net.pool(A, B, lost=lambda status, text: "its engine has died" if status == 500 else "")
    assert {answer["by"] for answer in ask(pool, 4)} == {"b"}
    assert "its engine has died" in net.said[0]


def test_a_healthy_server_that_is_too_slow_stops_the_run_and_names_the_key(net: Net) -> None:
    def never(request: httpx.Request) -> None:
        raise httpx.ReadTimeout("slow")

    net.answers[A] = never
    with pytest.raises(ServerFailure, match=r"healthy and did not answer a request within \[inference\] timeout_s = 2:"):
        ask(net.pool(A))
    assert len(net.posts()) == 1, "a second try would take as long"


def test_a_server_that_hangs_is_left_out(net: Net) -> None:
    def never(request: httpx.Request) -> None:
        net.answers[A] = None
        raise httpx.ReadTimeout("slow")

    net.answers |= {A: never, B: {"by": "b"}}
    assert {answer["by"] for answer in ask(net.pool(A, B), 2)} == {"b"}


def test_the_key_comes_from_its_variable_and_stays_out_of_sentences(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", "very-secret-value")
    net.answers[A] = {"done": 1}
    ask(net.pool(A, key_env="SERVER_KEY"))
    assert net.asked[-1].headers["Authorization"] == "Bearer very-secret-value"
    net.answers[A] = 401
    with pytest.raises(ServerFailure, match="the key in SERVER_KEY is not accepted") as caught:
        ask(net.pool(A, key_env="SERVER_KEY"))
    assert "very-secret" not in str(caught.value)
    with pytest.raises(ServerFailure, match=r"it wants a key: name its variable in \[inference\] api_key_env"):
        ask(net.pool(A))
    with pytest.raises(ConfigurationError, match='api_key_env = "NO_SUCH_KEY" names a variable that is not set'):
        net.pool(A, key_env="NO_SUCH_KEY")


def test_credentials_in_an_address_are_used_and_not_shown(net: Net) -> None:
    assert addresses("http://me:word@host:8/v1/") == ("http://host:8", "http://me:word@host:8")
    with pytest.raises(ServerFailure) as caught:
        ask(net.pool("http://me:word@127.0.0.1:1/v1"))
    assert "word" not in str(caught.value)


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


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", ["http://a", "b"]])
def test_an_address_without_a_scheme_is_refused(url: Any) -> None:
    with pytest.raises(ConfigurationError, match=re.escape("is no address of a server")):
        config_from_mapping({"inference": {"engine": "vllm", "url": url}})


def test_one_address_and_several() -> None:
    assert config_from_mapping({"inference": {"url": A}}).inference.urls == [A]
    assert config_from_mapping({"inference": {"url": [A, B]}}).inference.urls == [A, B]
    assert config_from_mapping({}).inference.urls == []

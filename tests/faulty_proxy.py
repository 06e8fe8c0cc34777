"""A proxy on this machine that answers some requests with an error instead of passing them on, and
counts samples that are under way.
"""

import http.client
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host"}


@dataclass
class Fault:
    """Requests whose path ends in `path` get `status`, `times` of them after the first `after`."""

    path: str
    status: int
    times: int = 1_000_000
    after: int = 0


@dataclass
class Traffic:
    faults: list[Fault] = field(default_factory=list)
    injected: Counter[int] = field(default_factory=Counter)
    """Status -> answers that the proxy made itself."""
    sampling: dict[str, str] = field(default_factory=dict)
    """Promise of samples that is not kept yet -> its sampling session."""
    most_sampling: int = 0
    """Sessions at a time."""
    dead: bool = False
    """Connections are dropped without an answer, those that are open already too."""
    text_alone: bool = False
    """As a hosted service: prompts and completions are text, and no adapter is loaded."""
    chat_alone: bool = False
    """As `text_alone`, and prompts are messages."""
    asked: Callable[[str, bytes], bytes] = lambda path, request: request
    """(path, body) -> the body that the server gets."""
    told: Callable[[str, bytes], bytes] = lambda path, answer: answer
    """(path, body) -> the body that the client gets."""
    lock: Any = field(default_factory=threading.Lock)

    def fault_for(self, path: str) -> int:
        with self.lock:
            for fault in self.faults:
                if path.endswith(fault.path):
                    if fault.after > 0:
                        fault.after -= 1
                    elif fault.times > 0:
                        fault.times -= 1
                        self.injected[fault.status] += 1
                        return fault.status
        return 0

    def withheld(self, path: str, request: bytes) -> tuple[int, str] | None:
        """The refusal of a service of text alone."""
        absent = [
            *["_lora_adapter"] * (self.text_alone or self.chat_alone),
            *["/v1/completions"] * self.chat_alone,
        ]
        if path.endswith(tuple(absent)):
            return 404, "Not Found"
        if (
            self.text_alone
            and path.endswith("/completions")
            and isinstance(json.loads(request)["prompt"], list)
        ):
            return 400, "the prompt is not text"
        return None

    def shown(self, path: str, answer: bytes) -> bytes:
        if not (self.text_alone and path.endswith("/completions")):
            return answer
        content = json.loads(answer)
        choices = [
            {name: choice[name] for name in ("index", "text", "finish_reason")}
            for choice in content["choices"]
        ]
        return json.dumps(content | {"choices": choices}).encode()

    def note(self, path: str, request: bytes, status: int, answer: bytes) -> None:
        if status != 200:
            return
        with self.lock:
            if path.endswith("/asample"):
                session = json.loads(request)["sampling_session_id"]
                self.sampling[json.loads(answer)["request_id"]] = session
                self.most_sampling = max(self.most_sampling, len(set(self.sampling.values())))
            elif path.endswith("/retrieve_future") and (
                found := re.search(rb'"request_id"\s*:\s*"([^"]+)"', request)
            ):
                self.sampling.pop(found.group(1).decode(), None)


@contextmanager
def faulty_proxy(upstream: str, *faults: Fault) -> Iterator[tuple[str, Traffic]]:
    """(its address, its traffic). `traffic.faults` may be changed while it runs."""
    traffic, target = Traffic(list(faults)), upstream.removeprefix("http://")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            request = self.rfile.read(int(self.headers.get("content-length", 0)))
            path = self.path.partition("?")[0]
            if traffic.dead:
                self.close_connection = True
                return
            if status := traffic.fault_for(path):
                self.answer(
                    status,
                    [("content-type", "application/json")],
                    json.dumps({"detail": f"injected {status}"}).encode(),
                )
                return
            if refusal := traffic.withheld(path, request):
                self.answer(
                    refusal[0],
                    [("content-type", "application/json")],
                    json.dumps({"detail": refusal[1]}).encode(),
                )
                return
            connection = http.client.HTTPConnection(target, timeout=120)
            headers = {
                name: value for name, value in self.headers.items() if name.lower() not in _HOP
            }
            try:
                connection.request(self.command, self.path, traffic.asked(path, request), headers)
                response = connection.getresponse()
                answer = response.read()
            finally:
                connection.close()
            traffic.note(path, request, response.status, answer)
            self.answer(
                response.status,
                [(n, v) for n, v in response.getheaders() if n.lower() not in _HOP],
                traffic.told(path, traffic.shown(path, answer)),
            )

        def answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
            self.send_response(status)
            for name, value in [*headers, ("content-length", str(len(body)))]:
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_DELETE = forward  # noqa: N815 - the names that http.server calls

        def log_message(self, *_: Any) -> None: ...

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(
            self, *_: Any
        ) -> None: ...  # a client that went away, or an upstream that is dead

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", traffic
    finally:
        traffic.dead = True
        server.shutdown()
        server.server_close()

"""An OpenAI-compatible chat server in this process, whose answers a test scripts, faults among
them.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """One request. `body` is its JSON, `prompt` the one message."""

    protocol_version = "HTTP/1.1"
    server: "JudgeServer"
    body: dict[str, Any]

    def do_POST(self) -> None:
        self.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append((self.path, dict(self.headers), self.body))
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
        try:
            self.server.answer(self)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the client gave up
        finally:
            with self.server.lock:
                self.server.now -= 1

    def do_GET(self) -> None:
        """Healthy."""
        self.send(200, b"")

    @property
    def prompt(self) -> str:
        return str(self.body["messages"][0]["content"])

    def send(self, status: int, content: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def reply(self, text: str | None, **more: Any) -> None:
        usage = {"prompt_tokens": 100, "completion_tokens": 2} | more
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": "stop",
        }
        self.send(200, json.dumps({"choices": [choice], "usage": usage}).encode())

    def error(self, status: int, message: str, param: str = "", **headers: str) -> None:
        self.send(
            status,
            json.dumps({"error": {"message": message, "param": param or None}}).encode(),
            **headers,
        )

    def log_message(self, *_: object) -> None: ...


class JudgeServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.lock = threading.Lock()
        self.now = self.most = 0
        """Requests under way, and the most that ever were."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, *_: object) -> None: ...


@contextmanager
def serving(answer: Answer) -> Iterator[JudgeServer]:
    with JudgeServer(answer) as server:
        thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


# -- answers ---------------------------------------------------------------------------------------


def fair(handler: Handler) -> None:
    """Right if the number after the last "answer is" is the reference."""
    reference = handler.prompt.partition("Reference answer:\n")[2].split("\n")[0]
    answer = handler.prompt.rpartition("answer is ")[2].split(".")[0].split("\n")[0]
    handler.reply("Yes." if answer.strip() == reference else "No")


def saying(text: str | None) -> Answer:
    return lambda handler: handler.reply(text)


def first(fault: Answer, count: int, then: Answer = fair) -> Answer:
    """The fault for the first `count` requests, then another answer."""
    left, lock = iter(range(count)), threading.Lock()

    def answer(handler: Handler) -> None:
        with lock:
            faulty = next(left, None) is not None
        (fault if faulty else then)(handler)

    return answer


def failing(status: int, message: str = "it is broken", param: str = "", **headers: str) -> Answer:
    return lambda handler: handler.error(status, message, param, **headers)


def raw(content: bytes, status: int = 200) -> Answer:
    return lambda handler: handler.send(status, content)


def hanging(seconds: float) -> Answer:
    """Answers after so long that nobody waits."""

    def answer(handler: Handler) -> None:
        time.sleep(seconds)
        handler.reply("Yes")

    return answer


def dripping(handler: Handler) -> None:
    """A byte at a time, each within any limit of reading."""
    handler.send_response(200)
    handler.send_header("Content-Length", "10000")
    handler.end_headers()
    for _ in range(200):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.02)


def hanging_up(handler: Handler) -> None:
    handler.close_connection = True
    handler.connection.close()


def endless(handler: Handler) -> None:
    """A body of chunks that never ends."""
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    while True:
        handler.wfile.write(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")


def hanging_after_headers(handler: Handler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    time.sleep(3)


def closing(handler: Handler) -> None:
    """As HTTP/1.0 does: no length, and the end of the connection is the end of the body."""
    handler.protocol_version, handler.close_connection = "HTTP/1.0", True
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(b'{"done": 1}')


def breaking_off(handler: Handler) -> None:
    """Half of an answer."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    hanging_up(handler)

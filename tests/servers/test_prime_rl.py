"""The prime_rl backend with vLLM's CPU build as its inference server, behind the admin routes that
PRIME-RL's own server adds.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import msgspec
import pytest
from prime_counterpart import FileReceiver, Trainer, ZmqReceiver
from real_servers import RealServer, free_port
from runs import small

from retrain import train
from retrain.backends.local.backend import LocalBackend

pytestmark = [pytest.mark.servers, pytest.mark.timeout(900)]


@contextmanager
def admin_shim(target: str) -> Iterator[str]:
    """Passes everything on, and `/load_lora_adapter` as vLLM's own route with load_inplace, as
    PRIME-RL's server does.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer(httpx.get(target + self.path, trust_env=False))

        def do_POST(self) -> None:
            body: Any = json.loads(
                self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"null"
            )
            path = self.path
            if path == "/load_lora_adapter":
                path, body = "/v1/load_lora_adapter", body | {"load_inplace": True}
            self.answer(httpx.post(target + path, json=body, timeout=300, trust_env=False))

        def answer(self, response: httpx.Response) -> None:
            self.send_response(response.status_code)
            self.send_header("Content-Length", str(len(response.content)))
            self.end_headers()
            self.wfile.write(response.content)

        def log_message(self, *args: Any) -> None:
            pass

    shim = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=shim.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{shim.server_port}"
    shim.shutdown()
    shim.server_close()


class OwnReceiver:
    """PRIME-RL's ZMQ receiver, where its modules import: the batch that it decoded, encoded again."""

    def __init__(self, port: int) -> None:
        own: Any = pytest.importorskip("prime_rl.transports.rollouts.zmq", exc_type=ImportError)
        settings = own.ZMQTransportConfig(host="127.0.0.1", port=port)
        self.wire = own.ZMQMicroBatchReceiver(Path(), 0, 1, settings)

    def receive(self, step: int, stopped: Callable[[], bool]) -> bytes | None:
        while not self.wire.can_receive():
            if stopped():
                return None
            time.sleep(0.01)
        return msgspec.msgpack.encode(self.wire.receive())

    def close(self) -> None:
        self.wire.close()


@pytest.mark.parametrize(
    ("temperature", "receiver"), [(1.0, FileReceiver), (0.7, ZmqReceiver), (0.7, OwnReceiver)]
)
def test_steps_through_a_real_server_are_on_policy(
    tmp_path: Path, vllm: RealServer, temperature: float, receiver: Any
) -> None:
    """What the trainer computes for each batch before its update is what the server sampled with:
    the adapter is the new one each time.
    """
    port, transport = free_port(2), "zmq"
    place: Any = port
    if receiver is FileReceiver:
        place, transport = tmp_path / "shared", "filesystem"
    received = receiver(place)
    training = {
        "max_steps": 4,
        "batch_size": 4,
        "group_size": 4,
        "max_tokens": 48,
        "lr": 3e-3,
        "temperature": temperature,
    }
    learner = LocalBackend(small(tmp_path / "learner", training=training))
    with admin_shim(vllm.url) as url:
        options: dict[str, Any] = {"transport": transport, "zmq_port": port}
        options |= {"output_dir": str(tmp_path / "shared"), "sync_wait_s": 60, "sync_poll_s": 0.02}
        backend = {"backend": "prime_rl", "options": options}
        config = small(tmp_path / "run", training=training, backend=backend, inference={"url": url})
        trainer = Trainer(learner, tmp_path / "shared", received, steps=4)
        trainer.start()
        records = train(config, quiet=True).records()
        trainer.join(timeout=60)
    assert trainer.error is None and len(records) == len(trainer.batches) == 4
    print(
        "largest |sampler - trainer| per batch, nats:",
        ", ".join(f"{value:.1e}" for value in trainer.differences),
    )
    assert max(trainer.differences) < 1e-3

"""PRIME-RL's side of the wire, written from its field lists: a receiver, a trainer that learns and
broadcasts, and an inference server.

Nothing here uses the encoder or the paths of retrain.backends.prime_rl.
"""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from retrain.backends.local.backend import LocalBackend
from retrain.config import TrainConfig
from retrain.inference_engine.base import NoiseKey, SampleRequest
from retrain.types import Row
from tests.faulty_engines import Served

Floats = list[float] | None
FIELDS: list[tuple[Any, ...]] = [
    ("input_ids", list[int]),
    ("loss_mask", list[bool]),
    ("advantages", list[float]),
    ("inference_logprobs", list[float]),
    ("position_ids", list[int]),
    ("sequence_lengths", list[int]),
    ("temperatures", list[float]),
    ("env_names", list[str]),
    ("seq_lens", list[int]),
    ("ref_logprobs", Floats, None),
    ("routed_experts", tuple[bytes, list[int], str] | None, None),
    ("mm_kwargs", dict[str, tuple[str, list[int], bytes]] | None, None),
    ("mm_token_type_ids", list[int] | None, None),
    ("rl_weights", Floats, None),
    ("ce_weights", Floats, None),
    ("ref_kl_weights", Floats, None),
    ("sampling_mask", tuple[bytes, bytes] | None, None),
    ("trace_ids", list[str] | None, None),
    ("branch_indices", list[int] | None, None),
]
"""Of a micro-batch, in the order of the wire."""
V090 = FIELDS[:16]
"""As v0.9.0 knew them."""
PER_TOKEN = ("loss_mask", "advantages", "inference_logprobs", "position_ids")
PER_TOKEN += ("temperatures", "env_names")


def decode(payload: bytes, fields: list[tuple[Any, ...]] = FIELDS) -> list[Any]:
    """The micro-batches of one rank, with every stream as long as the tokens. Raises where a type
    or a length is wrong.
    """
    struct = msgspec.defstruct("MicroBatch", fields, array_like=True)
    batches: list[Any] = msgspec.msgpack.decode(payload, type=list[struct])  # type: ignore[valid-type]
    for batch in batches:
        tokens = len(batch.input_ids)
        assert all(len(getattr(batch, name)) == tokens for name in PER_TOKEN)
        assert sum(batch.sequence_lengths) == sum(batch.seq_lens) == tokens
    return batches


def rows_of(batch: Any) -> Iterator[Row]:
    """The sequences of a packed micro-batch as rows of the local learner; those without an action
    are left out.
    """
    start = 0
    counts = np.frombuffer(batch.sampling_mask[1], "<i4") if batch.sampling_mask else None
    for length in batch.sequence_lengths:
        part = slice(start, start + length)
        mask = np.array(batch.loss_mask[part])
        changes = np.diff(np.concatenate([[False], mask, [False]]).astype(int))
        edges = np.flatnonzero(changes).reshape(-1, 2)
        start += length
        if len(edges):
            yield Row(
                token_ids=np.array(batch.input_ids[part], np.int32),
                spans=tuple((int(first), int(stop)) for first, stop in edges),
                logprobs=np.array(batch.inference_logprobs[part], np.float32)[mask],
                advantages=np.array(batch.advantages[part], np.float32)[mask],
                group=start,
                kept=None if counts is None else counts[part][mask],
            )


# -- receivers -------------------------------------------------------------------------------------


class FileReceiver:
    """`where` is "rollouts" in v0.9.0 and "batches" in later versions."""

    def __init__(self, output_dir: Path, where: str = "rollouts", rank: int = 0) -> None:
        self.folder, self.rank = output_dir / where, rank

    def receive(self, step: int, stopped: Callable[[], bool]) -> bytes | None:
        path = self.folder / f"step_{step}" / f"rank_{self.rank}.bin"
        while not path.exists():
            if stopped():
                return None
            time.sleep(0.01)
        return path.read_bytes()

    def close(self) -> None:
        pass


class ZmqReceiver:
    """Connects, subscribes to its rank's topic, and says once that it is ready."""

    def __init__(self, port: int, rank: int = 0) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.connect(f"tcp://127.0.0.1:{port}")
        self.socket.setsockopt(zmq.SUBSCRIBE, f"data_rank|{rank}|".encode())
        self.greeting = self.context.socket(zmq.PUSH)
        self.greeting.connect(f"tcp://127.0.0.1:{port + 1}")
        self.greeting.send(str(rank).encode())

    def receive(self, step: int, stopped: Callable[[], bool]) -> bytes | None:
        while not self.socket.poll(10):
            if stopped():
                return None
        _, payload = self.socket.recv_multipart()
        return payload

    def close(self) -> None:
        self.socket.close(linger=0)
        self.greeting.close(linger=0)
        self.context.term()


# -- the trainer -----------------------------------------------------------------------------------


class Broadcaster:
    """The sender's side of the handshake."""

    def __init__(self, output_dir: Path, timeout: float = 20) -> None:
        self.folder, self.timeout = output_dir / "broadcasts", timeout

    def broadcast(self, version: int, write: Callable[[Path], None]) -> None:
        folder = self.offer(version)
        deadline = time.monotonic() + self.timeout
        while not (folder / ".receiver_ready").exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no receiver for v{version}")
            time.sleep(0.01)
        (folder / ".started").touch()
        write(folder)
        (folder / ".finished").touch()
        for old in self.folder.glob("step_*"):
            if int(old.name.removeprefix("step_")) < version - 1:
                shutil.rmtree(old)

    def offer(self, version: int) -> Path:
        folder = self.folder / f"step_{version}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / ".sender_ready").touch()
        return folder


class Trainer(threading.Thread):
    """Learns from each batch with the local learner and broadcasts the adapter; an exception ends
    it and is kept in `error`.
    """

    def __init__(
        self, learner: LocalBackend, output_dir: Path, receiver: Any, *, steps: int, first: int = 1
    ) -> None:
        super().__init__(daemon=True)
        self.learner, self.receiver, self.steps, self.first = learner, receiver, steps, first
        self.sender = Broadcaster(output_dir)
        self.batches: dict[int, list[Any]] = {}
        """Batch number -> its micro-batches."""
        self.stopped = False
        self.error: BaseException | None = None
        self.differences: list[float] = []
        """The largest |sampler - learner| log-prob of each batch, in nats, before its optimizer
        step."""

    def run(self) -> None:
        try:
            self.sender.broadcast(self.first - 1, self.learner.save_adapter)
            for step in range(self.first, self.steps + 1):
                payload = self.receiver.receive(step, lambda: self.stopped)
                if payload is None:
                    return
                self.batches[step] = decode(payload)
                rows = [row for batch in self.batches[step] for row in rows_of(batch)]
                if rows:
                    own = np.concatenate(self.learner.logprobs(rows))
                    sampled = np.concatenate([row.logprobs for row in rows])
                    self.differences.append(float(np.abs(own - sampled).max()))
                    self.learner.train(rows, step - 1)
                self.sender.broadcast(step, self.learner.save_adapter)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            self.error = error
        finally:
            self.receiver.close()

    def stop(self) -> None:
        self.stopped = True
        self.join()


# -- the inference server --------------------------------------------------------------------------


class InferenceServer:
    """The lab model behind the routes that PRIME-RL's server has, with a prefix cache that it never
    resets.

    `stale` counts requests whose salt would have found keys and values of another policy.
    """

    def __init__(
        self, config: TrainConfig, learner: LocalBackend, eos_ids: tuple[int, ...]
    ) -> None:
        model = learner._weights.peft_model
        self.engine = Served(config, model=model, eos_ids=eos_ids, device="cpu")
        self.calls: list[tuple[str, Any]] = []
        self.fail: dict[str, int] = {}
        """Path -> status that its next call answers."""
        self.policy, self.stale, self.paused, self.requests = "", 0, False, 0
        self._cache: dict[tuple[str, tuple[int, ...]], str] = {}
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        with self._lock:
            if path != "/inference/v1/generate":
                self.calls.append((path, body))
            if status := self.fail.pop(path.partition("?")[0], 0):
                return status, {"error": {"message": "injected"}}
            route = path.partition("?")[0].strip("/").replace("/", "_")
            found = getattr(self, f"_{route}", None)
            return (200, found(body)) if found else (404, {"detail": "Not Found"})

    def _health(self, body: Any) -> Any:
        return {}

    def _v1_models(self, body: Any) -> Any:
        return {"data": [{"id": "lab", "max_model_len": 512, "parent": None}]}

    def _pause(self, body: Any) -> Any:
        self.paused = True
        return {"status": "paused"}

    def _resume(self, body: Any) -> Any:
        self.paused = False
        return {"status": "resumed"}

    def _update_weights(self, body: Any) -> Any:
        assert self.paused
        self.policy = body["weight_dir"]
        return {"status": "ok"}

    def _load_lora_adapter(self, body: Any) -> Any:
        self.policy = body["lora_path"]
        self.engine.sync(partial(shutil.copytree, self.policy, dirs_exist_ok=True), 0)
        return {"status": "ok"}

    def _inference_v1_generate(self, body: Any) -> Any:
        assert not self.paused
        settings, prompt = body["sampling_params"], tuple(body["token_ids"])
        self.requests += 1
        if settings.get("top_k") == 2:  # the check of the log-probs
            two = [{"token_id": token, "logprob": float(np.log(0.5))} for token in (3, 4)]
            return {"choices": [{"logprobs": {"content": [{"top_logprobs": two}]}}]}
        cached = self._cache.setdefault((body["cache_salt"], prompt), self.policy)
        self.stale += cached != self.policy
        sizes = (settings[name] for name in ("n", "max_tokens", "temperature"))
        noise = NoiseKey(seed=1, stream=0, step=self.requests, prompt=0)
        request = SampleRequest(np.array(prompt, np.int32), *sizes, noise)
        completions = sorted(self.engine.sample([request]), key=lambda item: item.sample)
        return {"request_id": "r", "choices": [*map(self._choice, completions)]}

    def _choice(self, completion: Any) -> Any:
        content = [{"logprob": value} for value in completion.logprobs.tolist()]
        choice = {"index": completion.sample, "token_ids": completion.token_ids.tolist()}
        reason = {"finish_reason": completion.finish_reason.value}
        return {**choice, **reason, "logprobs": {"content": content}}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._reply(None)

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                self._reply(json.loads(self.rfile.read(length) or b"null"))

            def _reply(self, body: Any) -> None:
                status, answer = server.answer(self.path, body)
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: Any) -> None:
                pass

        return Handler

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@contextmanager
def inference_server(config: TrainConfig, learner: LocalBackend) -> Iterator[InferenceServer]:
    server = InferenceServer(config, learner, learner._eos_ids())
    try:
        yield server
    finally:
        server.close()

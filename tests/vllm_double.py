"""A server in this process that answers as vLLM's does, with the lab model behind it, and what can
be wrong with it.

Written from the answers of vLLM 0.32 that docs/inference-engines.md describes; `make test-servers` runs the
same engine against the real one.
"""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import torch
from runs import small

from retrain.inference_engine.base import BASE_MODEL, NoiseKey, SampleRequest, Truncation
from retrain.inference_engine.http import Patience
from retrain.inference_engine.texts import Texts
from retrain.inference_engine.vllm import VLLMEngine
from retrain.model.text import load_tokenizer
from retrain.types import Completion, FinishReason, Row

Answer = tuple[int, Any]
HASTY = Patience(silent_s=0.6, attempts=4, first_s=0.02, max_s=0.04, health_s=3.0, recheck_s=0.1)
"""So that a test need not wait as a run does."""


class HastyVLLM(VLLMEngine):
    patience = HASTY


class SleepyVLLM(HastyVLLM):
    """Its learner is on a GPU."""

    def __init__(self, config: Any, *, model: Any, eos_ids: Sequence[int], device: Any) -> None:
        super().__init__(config, model=model, eos_ids=eos_ids, device="cuda")


@cache
def lab() -> Any:
    """The model of all doubles; its log-probs are of temperature 1."""
    from retrain.backends.local.backend import LocalBackend

    backend: Any = LocalBackend(small(Path("nowhere")))
    backend.shown = None
    """(url, name) of the adapter that its weights are."""
    return backend


@cache
def eos_ids() -> tuple[int, ...]:
    """Those of all doubles. The backend reads its tokenizer's files every time."""
    ids: tuple[int, ...] = lab()._eos_ids()
    return ids


@cache
def texts() -> Texts:
    return Texts(small(Path("nowhere")).model, "The double")


class VLLMDouble:
    """`url` once started. `asked` lists (path, body) of every POST; `faults` answers before
    anything else does.
    """

    lock = threading.Lock()

    def __init__(self, port: int = 0) -> None:
        self.adapters: dict[str, Path] = {}
        self.asked: list[tuple[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.faults: list[Callable[[str, Any], Answer | None]] = []
        """Each may answer a POST, or return None for the usual answer; an answer of status 0 breaks
        the connection."""
        self.replies_text = False
        """It says neither token ids nor log-probs, and loads no adapters, as a hosted service."""
        self.chats = False
        """As `replies_text`, and of messages alone."""
        self.chat_limit = "max_tokens"
        """The name of the limit of a reply that it knows."""
        self.raw = self.base_only = self.text_only = self.token_strings = self.kept_sets = (
            self.sleeps
        ) = False
        self.hangs_up_on_server_info = False
        """As vLLM without pip in its environment, whose error closes the connection."""
        self.forgets_adapters_asleep = self.forgotten = self.asleep = False
        self.refuses: frozenset[str] = frozenset()
        """Fields that it does not know, and answers 400 to."""
        self.permuted: Any = None
        """A permutation of the token ids, as another tokenizer has one."""
        self.context = 2048
        self.calls = 0
        double = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.reply(double.get(self.path.partition("?")[0]))

            def do_POST(self) -> None:
                body = json.loads(
                    self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}"
                )
                double.headers.append(dict(self.headers))
                self.reply(double.post(self.path.partition("?")[0], body))

            def reply(self, answer: Answer) -> None:
                status, content = answer
                if not status:
                    self.close_connection = True
                    return
                text = content if isinstance(content, str) else json.dumps(content)
                self.send_response(status)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                with suppress(OSError):
                    self.wfile.write(text.encode())

            def log_message(self, *_: Any) -> None: ...

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128  # of its five places a busy machine loses connections
            connections: list[Any] = []  # noqa: RUF012

            def process_request(self, request: Any, client_address: Any) -> None:
                double.connections.append(request)
                super().process_request(request, client_address)

        self.connections: list[Any] = []
        self.server = Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    def kill(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(2)

    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]

    # -- answers -----------------------------------------------------------------------------------

    def get(self, path: str) -> Answer:
        if path == "/health":
            return 200, ""
        if path == "/v1/models":
            base = {
                "id": "base",
                "root": "/models/lab",
                "parent": None,
                "max_model_len": self.context,
            }
            return 200, {
                "data": [
                    base,
                    *(
                        {"id": name, "root": str(at), "parent": "base"}
                        for name, at in self.adapters.items()
                    ),
                ]
            }
        if path == "/is_sleeping":
            return 200, {"is_sleeping": self.asleep}
        if path == "/server_info":
            if self.hangs_up_on_server_info:
                return 0, ""
            return 200, {"vllm_config": {"model_config": {"enable_sleep_mode": self.sleeps}}}
        return 404, {"detail": "Not Found"}

    def post(self, path: str, body: Any) -> Answer:
        self.asked.append((path, body))
        for fault in list(self.faults):
            if (answer := fault(path, body)) is not None:
                return answer
        if path == "/v1/load_lora_adapter" and not self.replies_text and not self.chats:
            self.adapters[body["lora_name"]] = Path(body["lora_path"])
            return 200, f"Success: LoRA adapter '{body['lora_name']}' added successfully."
        if path == "/v1/unload_lora_adapter":
            known = self.adapters.pop(body["lora_name"], None)
            return (
                (200, "Success")
                if known
                else error(404, f"The lora adapter '{body['lora_name']}' cannot be found.")
            )
        if path == "/sleep":
            self.asleep, self.forgotten = True, self.forgets_adapters_asleep
            return 200, {"status": "sleeping", "level": 1}
        if path == "/wake_up":
            self.asleep = False
            return 200, {"status": "awake"}
        if path == "/v1/chat/completions" and self.chats:
            return self.refusal(body) or self.chat(body)
        if path in ("/v1/completions", "/inference/v1/generate") and not self.chats:
            settings = body.get("sampling_params", body)
            return self.refusal(settings) or self.complete(
                body, body.get("prompt", body.get("token_ids")), settings
            )
        return 404, {"detail": "Not Found"}

    def refusal(self, settings: Any) -> Answer | None:
        unknown = sorted(self.refuses & settings.keys())
        return (
            error(400, f"Unrecognized request argument supplied: {unknown[0]}") if unknown else None
        )

    def complete(self, body: Any, prompt: Any, settings: Any) -> Answer:
        if body["model"] != "base" and body["model"] not in self.adapters:
            return error(404, f"The model `{body['model']}` does not exist.")
        if isinstance(prompt, list) is (self.text_only or self.replies_text):
            return (
                error(400, "prompt must be a string")
                if isinstance(prompt, list)
                else error(400, "a list of token ids")
            )
        if self.replies_text:
            return self.write(body["model"], prompt, settings)
        with self.lock:
            self.calls += 1
            completions = sorted(
                self.sample(body["model"], prompt, settings), key=lambda one: one.sample
            )
            top = self.top_logprobs(prompt, settings) if settings.get("logprobs") else None
        return 200, {"choices": [self.choice(one, prompt, top) for one in completions]}

    def chat(self, body: Any) -> Answer:
        if unknown := {"max_tokens", "max_completion_tokens"} & body.keys() - {self.chat_limit}:
            return error(
                400, f"Unsupported parameter: {unknown.pop()}. Use '{self.chat_limit}' instead."
            )
        prompt = load_tokenizer("lab").apply_chat_template(
            body["messages"],
            tokenize=False,
            add_generation_prompt=True,
            **body.get("chat_template_kwargs", {}),
        )
        status, answer = self.write(
            body["model"], prompt, body | {"max_tokens": body[self.chat_limit]}
        )
        for choice in answer["choices"]:
            choice["message"] = {"role": "assistant", "content": choice.pop("text") or None}
        answer["usage"]["prompt_tokens"] += 3  # its template may be another
        return status, answer

    def write(self, model: str, prompt: str, settings: Any) -> Answer:
        ids = texts().encode(prompt)
        with self.lock:
            self.calls += 1
            found = sorted(self.sample(model, ids, settings), key=lambda one: one.sample)
        choices = [
            {
                "index": one.sample,
                "text": texts().decode(
                    [token for token in one.token_ids.tolist() if token not in eos_ids()]
                ),
                "finish_reason": "stop" if one.finish_reason is FinishReason.STOP else "length",
                "logprobs": None,
            }
            for one in found
        ]
        return 200, {"choices": choices, "usage": {"prompt_tokens": len(ids)}}

    def sample(self, model: str, prompt: list[int], settings: Any) -> Iterator[Completion]:
        name = "base" if self.base_only or self.forgotten else model
        if name != "base" and lab().shown != (self.url, name):
            lab()._weights.load(self.adapters[name])
            lab().shown = (self.url, name)
        cut = Truncation(
            max(settings.get("top_k", -1), 0),
            settings.get("top_p", 1.0),
            settings.get("min_p", 0.0),
        )
        request = SampleRequest(
            prompt_ids=self.mapped(np.array(prompt, np.int32)),
            count=settings.get("n", 1),
            max_tokens=min(settings["max_tokens"], self.context - len(prompt)),
            temperature=settings.get("temperature", 1.0),
            noise=NoiseKey(7, 0, settings.get("own_seed", self.calls), 0),
            adapter_slot=BASE_MODEL if name == "base" else 0,
            truncation=cut if self.kept_sets else Truncation(),
        )
        for one in lab().engine.sample([request]):
            yield one if not self.raw else self.with_raw_logprobs(one, request)

    def with_raw_logprobs(self, one: Completion, request: SampleRequest) -> Completion:
        ids = np.concatenate([request.prompt_ids, one.token_ids])
        row = Row(ids, ((len(request.prompt_ids), len(ids)),), one.logprobs, 0 * one.logprobs, 0)
        return Completion(
            one.request,
            one.sample,
            one.token_ids,
            lab().logprobs([row])[0],
            None,
            one.finish_reason,
            one.kept,
        )

    def mapped(self, ids: Any) -> Any:
        return ids if self.permuted is None else self.permuted[ids].astype(np.int32)

    def top_logprobs(self, prompt: list[int], settings: Any) -> dict[str, float]:
        """The most probable tokens, and as vLLM does the drawn one, here another in each call. By
        their texts all have one name, as parts of characters have.
        """
        with torch.no_grad():
            logits = lab()._base.model(input_ids=torch.tensor([prompt])).logits[0, -1]
        scores = (logits / (1 if self.raw else settings.get("temperature", 1.0))).log_softmax(-1)
        tokens = [*scores.topk(settings["logprobs"]).indices.tolist(), self.calls % len(scores)]
        by_id = settings.get("return_tokens_as_token_ids")
        return {f"token_id:{one}" if by_id else "\ufffd": float(scores[one]) for one in tokens}

    def choice(self, one: Completion, prompt: list[int], top: Any) -> Any:
        ids = self.mapped(one.token_ids).tolist()
        logprobs = {
            "token_logprobs": one.logprobs.tolist(),
            "tokens": [f"token_id:{token}" for token in ids],
            "top_logprobs": [top],
        }
        mask = None if one.kept is None else [list(range(kept)) for kept in one.kept]
        own = {} if self.token_strings else {"token_ids": ids, "prompt_token_ids": prompt}
        reason = "stop" if one.finish_reason is FinishReason.STOP else "length"
        return {
            "index": one.sample,
            "finish_reason": reason,
            "logprobs": logprobs,
            "sampling_mask": mask,
            **own,
        }


def error(status: int, message: str) -> Answer:
    return status, {"error": {"message": message, "type": "Error", "param": None, "code": status}}


@contextmanager
def doubles(count: int = 1) -> Iterator[list[VLLMDouble]]:
    lab()  # takes seconds at its first use, which no request should wait for
    started = [VLLMDouble() for _ in range(count)]
    try:
        yield started
    finally:
        for one in started:
            one.kill()


def first(
    times: int, answer: Answer, path: str = "/v1/completions", after: int = 0
) -> Callable[[str, Any], Answer | None]:
    """Answers the first `times` requests of a path, from its `after`-th on."""
    seen = 0

    def fault(asked: str, _: Any) -> Answer | None:
        nonlocal seen
        if asked != path:
            return None
        seen += 1
        return answer if after < seen <= after + times else None

    return fault


def scripted(
    answers: dict[int, Answer], path: str = "/v1/completions"
) -> Callable[[str, Any], Answer | None]:
    """Answers some requests of a path, by their number from 1."""
    seen = 0

    def fault(asked: str, _: Any) -> Answer | None:
        nonlocal seen
        seen += asked == path
        return answers.get(seen) if asked == path else None

    return fault


def slow(seconds: float, path: str = "/v1/completions") -> Callable[[str, Any], Answer | None]:
    def fault(asked: str, _: Any) -> Answer | None:
        if asked == path:
            sleep(seconds)
        return None

    return fault

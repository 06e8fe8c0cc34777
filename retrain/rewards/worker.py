"""What a worker process does: load what it was told to, say so, then answer one job after another until it is killed or left alone."""

import importlib
import json
import logging
import os
import resource
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from datetime import date, datetime
from functools import lru_cache
from typing import Any

import numpy as np
from math_verify import LatexExtractionConfig, parse, verify

from retrain.errors import ConfigurationError

logging.getLogger("math_verify").setLevel(logging.ERROR)  # its warning that time-outs are off is the intention here
_CONFIGURATION = [LatexExtractionConfig()]


def _parse(answer: str) -> list[Any]:
    parsed: list[Any] = parse(f"\\boxed{{{answer}}}", _CONFIGURATION, parsing_timeout=None)
    return parsed


_parse_gold = lru_cache(maxsize=4096)(_parse)  # a group asks for the same reference G times


def equal(gold: str, answer: str) -> bool:
    """Whether `answer` equals `gold`. The order matters to math-verify; what it cannot parse is not equal.

    MemoryError, and nothing else, is raised.
    """
    return bool(verify(_parse_gold(gold), _parse(answer), timeout_seconds=None))


for _gold, _answer in (("1", r"\frac{2}{2}"), ("(x+1)^2", "x^2+2x+1"), (r"\{1,2\}", r"\{2,3\}"), ("x>1", "[1,2]"), (r"\sqrt{2}", "1.41")):
    equal(_gold, _answer)  # builds parser tables and imports the lazy half of sympy once, before the workers are forked
_parse_gold.cache_clear()


class _ExceptMemory(tuple[type[Exception], ...]):
    """Every kind of Exception but MemoryError, under the name Exception: an `except` clause takes a tuple, `raise` wants a call."""

    def __call__(self, *arguments: object) -> Exception:
        return RuntimeError(*arguments)


def _let_memory_errors_out() -> None:
    """Both libraries say `except Exception: pass` in two dozen places and have no setting for it.

    An answer for which memory ran out would so be found unequal, and count as wrong where it could not be judged.
    """
    kinds = _ExceptMemory(kind for kind in Exception.__subclasses__() if kind is not MemoryError)
    for name in (
        "math_verify.grader",
        "math_verify.parser",
        "latex2sympy2_extended.latex2sympy2",
        "latex2sympy2_extended.math_normalization",
    ):
        vars(importlib.import_module(name))["Exception"] = kinds


_let_memory_errors_out()  # after the first use: by now all kinds of exceptions are defined


Message = dict[str, Any]
"""One JSON object. NaN and infinities travel as Python's json writes them, lone surrogates escaped."""

_HEADER = struct.Struct("<I")


class ChannelClosed(EOFError):
    """The other side is gone."""


class BadMessage(ValueError):
    """What arrived is no message. Nothing that comes after it can be understood either."""


def encode(message: Message) -> bytes:
    """The message as it travels. numpy values become plain ones; TypeError names any other type that JSON does not know."""
    body = json.dumps(message, default=_plain).encode()
    return _HEADER.pack(len(body)) + body


def _plain(value: object) -> object:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, datetime | date):
        return value.isoformat()
    raise TypeError(f"a value of type {type(value).__name__} cannot be written as JSON")


class Channel:
    """A connected stream socket that carries whole messages, one thread a side."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._received = bytearray()

    def send(self, message: Message) -> None:
        self.send_encoded(encode(message))

    def send_encoded(self, message: bytes) -> None:
        try:
            self._socket.settimeout(None)
            self._socket.sendall(message)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, timeout: float | None, longest: int = 1 << 32) -> Message:
        """The next message, of at most `longest` bytes. BadMessage for anything else.

        TimeoutError where it is not complete after `timeout` seconds; what has arrived is kept for the next call.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while (message := self._take(longest)) is None:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:  # also where bytes drip in for ever
                raise TimeoutError
            self._socket.settimeout(left)
            try:
                chunk = self._socket.recv(1 << 16)
            except TimeoutError:
                raise
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not chunk:
                raise ChannelClosed("end of stream")
            self._received += chunk
        return message

    def _take(self, longest: int) -> Message | None:
        if len(self._received) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._received)
        if length > longest:
            raise BadMessage(f"it claims to have {length} bytes")
        end = _HEADER.size + length
        if len(self._received) < end:
            return None
        try:
            message = json.loads(self._received[_HEADER.size : end])
        except (ValueError, RecursionError) as error:
            raise BadMessage("it is not JSON") from error
        if not isinstance(message, dict):
            raise BadMessage("it is not a JSON object")
        del self._received[:end]
        return message

    def close(self) -> None:
        self._socket.close()


VERIFICATION_MODULE = "retrain.rewards.worker"


def serve(channel: Channel) -> None:
    """The life of a worker. The first message is its set-up; the answer is {"ready": true} or {"refused": sentence}.

    Every reply carries the number of its job.
    """
    own = os.getpid()
    try:
        setup = channel.receive(None)
        try:
            handlers = _handlers(setup)
        except ConfigurationError as error:
            channel.send({"refused": str(error)})
            return
        reply: Message = {"ready": True}
        while os.getpid() == own:  # a child that user code forked and that came back here must not answer
            channel.send(reply)
            job = channel.receive(None)
            reply = handlers[job["handler"]](job) | {"number": job["number"]}
    except ChannelClosed:
        return  # the trainer needs this worker no longer


def _handlers(setup: Message) -> Mapping[str, Callable[[Message], Message]]:
    """One function a kind of job. A reply holds "value" (null: could not judge) and, where it is null, "reason"."""
    _limit_address_space(setup["address_space"])
    handlers: dict[str, Callable[[Message], Message]] = {}
    if setup["verify"]:
        handlers["verify"] = _verify
    if setup["rewards"]:
        from retrain.rewards.custom import load_rewards

        handlers.update(load_rewards(setup["rewards"], setup["params"], setup["plugins"], setup["source"]))
    return handlers


def _limit_address_space(limit: int | None) -> None:
    """Bytes that this process may map. A system that knows no such limit is left as it is: the parent watches too."""
    if limit is None:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    except (ValueError, OSError) as error:
        print(f"reward worker: no limit on memory here ({error})", file=sys.stderr)


def _verify(job: Message) -> Message:
    verification: Any = importlib.import_module(VERIFICATION_MODULE)
    try:
        return {"value": float(verification.equal(job["gold"], job["answer"]))}
    except MemoryError:
        return {"value": None, "reason": "math-verify ran out of memory"}

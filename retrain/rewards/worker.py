"""A reward worker, and its messages over a connected socket to the trainer's process. It loads what
the set-up names, then answers one job after another until the pool kills it or goes away.
"""

import json
import os
import resource
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from datetime import date, datetime
from typing import Any

import numpy as np

from retrain.errors import ConfigurationError
from retrain.records.redact import note_values

# -- messages --------------------------------------------------------------------------------------


Message = dict[str, Any]
"""One JSON object. NaN and infinities have the form of Python's json, unpaired surrogates are
escapes.
"""

_HEADER = struct.Struct("<I")
"""The length of the JSON text that follows, in bytes."""


class ChannelClosed(EOFError):
    """The other side closed the connection or ended."""


class BadMessage(ValueError):
    """The bytes received are not a message. The worker cannot understand later bytes either."""


def encode(message: Message) -> bytes:
    """Encode a message as bytes, header included. numpy values become plain ones; TypeError names
    any other type that JSON lacks.
    """
    body = json.dumps(message, default=_plain).encode()
    return _HEADER.pack(len(body)) + body


def _plain(value: object) -> object:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, datetime | date):
        return value.isoformat()
    raise TypeError(f"a value of type {type(value).__name__} has no JSON form")


class Channel:
    """A connected stream socket that carries messages; one thread on each side."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._received = bytearray()

    def send(self, message: Message, timeout: float | None = None) -> None:
        self.send_encoded(encode(message), timeout)

    def send_encoded(self, message: bytes, timeout: float | None) -> None:
        """Raises TimeoutError if the other side has not taken the whole message after `timeout`
        seconds; the channel is useless then.
        """
        try:
            self._socket.settimeout(timeout)
            self._socket.sendall(message)
        except TimeoutError:
            raise
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, timeout: float | None, longest: int = 1 << 32) -> Message:
        """Return the next message, of at most `longest` bytes. Raises BadMessage for anything else.

        Raises TimeoutError if the message is incomplete after `timeout` seconds; the next call
        continues with what has arrived.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while (message := self._take(longest)) is None:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:  # bytes that drip in must not extend the time
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
        """Remove the first message from the bytes that have arrived; None if it is incomplete."""
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


# -- the worker's life -----------------------------------------------------------------------------


def serve(channel: Channel) -> None:
    """Answer jobs until the other side closes. The first message is the set-up. Its reply is
    `{"ready": true, "group_rewards": [names]}` or `{"refused": sentence}`.

    Every later message is a job, and its reply carries the job's number.
    """
    own = os.getpid()
    try:
        setup = channel.receive(None)
        try:
            handlers = _handlers(setup)
        except ConfigurationError as error:
            channel.send({"refused": str(error)})
            return
        group_rewards = [
            name for name, handler in handlers.items() if getattr(handler, "whole_group", False)
        ]
        reply: Message = {"ready": True, "group_rewards": group_rewards}
        # A child that user code forked returns here too, and must not answer.
        while os.getpid() == own:
            channel.send(reply)
            job = channel.receive(None)
            reply = handlers[job["handler"]](job) | {"number": job["number"]}
    except ChannelClosed:
        return  # the trainer no longer needs this worker


def _handlers(setup: Message) -> Mapping[str, Callable[[Message], Message]]:
    """Return one function per kind of job. A reply holds "value" (null for could not judge) and, if
    it is null, "reason". The reply for a whole group holds one for each of its "members".
    """
    if setup["address_space"] is not None:  # bytes that this process may map
        try:
            resource.setrlimit(
                resource.RLIMIT_AS,
                (setup["address_space"], resource.getrlimit(resource.RLIMIT_AS)[1]),
            )
        # The system has no such limit, so the parent's watch has to do.
        except (ValueError, OSError) as error:
            print(f"reward worker: this machine cannot limit its memory ({error})", file=sys.stderr)
    note_values(setup["secrets"])
    handlers: dict[str, Callable[[Message], Message]] = {}
    if setup["verify"]:
        handlers["verify"] = _verify
    if setup["rewards"]:
        from retrain.rewards.custom import load_rewards

        handlers.update(
            load_rewards(setup["rewards"], setup["params"], setup["plugins"], setup["source"])
        )
    return handlers


def _verify(job: Message) -> Message:
    from retrain.rewards.verification import right  # sympy, which the fork server has imported

    try:
        return {"value": float(right(job["gold"], job["answer"]))}
    except MemoryError:
        return {"value": None, "reason": "math-verify ran out of memory"}
    # The library's own `except Exception` would have ignored this error.
    except Exception as error:  # noqa: BLE001 - of a kind that was defined later, or Exception itself
        return {"value": None, "reason": f"math-verify failed ({type(error).__name__}: {error})"}

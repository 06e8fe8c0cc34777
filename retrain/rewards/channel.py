"""Length-prefixed JSON over a local socket: how the trainer and its worker processes talk."""

import json
import socket
import struct
import time
from datetime import date, datetime
from typing import Any

import numpy as np

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

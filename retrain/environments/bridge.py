"""Turns environments that call the model themselves into episodes that wait for replies.

Their rollout is a coroutine on an event loop of our own. When it asks for a reply it waits there,
and the episode's method returns what it asked with.
"""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from retrain.environments.base import Episode, Observation, Result
from retrain.types import ChatMessage, Example
from retrain.web import EventLoop

_OPENING, _CLOSING = re.compile(r"<tool_call>\s*(?=\{)"), re.compile(r"\s*</tool_call>")
"""The tags that Qwen and Hermes models write around `{"name": ..., "arguments": ...}`."""
_JSON = json.JSONDecoder()


class OutOfTokens(Exception):
    """Raised in a rollout that waits for a reply, when it has no tokens left."""


@dataclass(frozen=True)
class _Question:
    """The rollout waits for a reply to `messages`."""

    observation: Observation
    reply: "asyncio.Future[str]"


class RolloutBridge:
    """Connects one rollout, which calls `ask` on the event loop, with its episode, which reads
    `events` on another thread.
    """

    def __init__(self) -> None:
        self.events: SimpleQueue[_Question | Result | BaseException] = SimpleQueue()

    async def ask(self, messages: list[ChatMessage], tools: list[dict[str, Any]]) -> str:
        """Return the model's reply to the whole conversation `messages`. Raises OutOfTokens if
        there can be none.
        """
        reply: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.events.put(_Question(Observation(messages, rewrites=True, tools=tools), reply))
        return await reply


Rollout = Callable[[RolloutBridge, Example, int], Awaitable[Result]]
"""Plays one episode to its end, asking for replies with `RolloutBridge.ask`, and returns the
result."""


class BridgedEpisode(Episode):
    """A rollout that waits for its replies."""

    def __init__(self, loop: EventLoop, rollout: Rollout) -> None:
        self._loop, self._rollout = loop, rollout
        self._bridge = RolloutBridge()
        self._task: Future[Any] | None = None
        self._waiting: _Question | None = None
        self._result: Result | None = None

    def reset(self, example: Example, seed: int) -> Observation:
        self._task = self._loop.start(self._play(example, seed))
        opening = self._next()
        if opening is None:
            raise RuntimeError("the rollout ended before it asked for a reply")
        return opening

    def step(self, reply: str) -> Observation | None:
        self._answer(lambda waiting: waiting.set_result(reply))
        return self._next()

    def result(self) -> Result:
        while self._result is None:  # a rollout may go on asking without a token left
            self._answer(
                lambda waiting: waiting.set_exception(
                    OutOfTokens("no token remains for another reply")
                )
            )
            self._next()
        return self._result

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _play(self, example: Example, seed: int) -> None:
        try:
            self._bridge.events.put(await self._rollout(self._bridge, example, seed))
        except asyncio.CancelledError as error:
            self._bridge.events.put(error)
            raise
        except BaseException as error:  # noqa: BLE001 - the episode raises it; here a SystemExit would end the loop of all episodes
            self._bridge.events.put(error)

    def _answer(self, give: Callable[["asyncio.Future[str]"], None]) -> None:
        assert self._waiting is not None
        self._loop.loop.call_soon_threadsafe(give, self._waiting.reply)

    def _next(self) -> Observation | None:
        """Wait for the rollout: what it asks, or None at its end. Raises what it raised."""
        event = self._bridge.events.get()
        if isinstance(event, BaseException):
            raise (
                RuntimeError("retrain canceled the rollout")
                if isinstance(event, asyncio.CancelledError)
                else event
            )
        if isinstance(event, Result):
            self._result = event
            return None
        self._waiting = event
        return event.observation


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool in a reply."""

    name: str
    arguments: str
    """A JSON object."""


def tool_calls(reply: str) -> list[ToolCall]:
    """Return the calls in the order of the reply. Anything but a JSON object with a name stays
    text.
    """
    found, end, last = [], 0, reply.rfind("</tool_call>")
    for opening in _OPENING.finditer(reply, 0, last):
        if opening.start() < end:  # inside the call before
            continue
        with suppress(ValueError, RecursionError):
            call, stop = _JSON.raw_decode(reply, opening.end())
            closing = _CLOSING.match(reply, stop)
            if closing and isinstance(call.get("name"), str):
                end = closing.end()
                found.append(ToolCall(call["name"], json.dumps(call.get("arguments", {}))))
    return found

"""SkyRL's Tinker server with one addition: a promise of samples carries `sample_sequence_ids`,
which SDKs from 0.26 on require.

Run in SkyRL's environment: python tinker_sequence_ids.py FLAGS. SkyRL 0.4.0 lacks the ids.
"""

import json
import runpy
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import fastapi

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class SequenceIds:
    """ASGI middleware around /api/v1/asample; every other request passes untouched."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/api/v1/asample":
            await self.app(scope, receive, send)
            return
        body = await _whole(receive)
        answer: list[Message] = []

        async def again() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        async def keep(message: Message) -> None:
            answer.append(message)

        await self.app(scope, again, keep)
        start, content = answer[0], b"".join(message.get("body", b"") for message in answer[1:])
        if start["status"] == 200:
            content = _with_ids(content, int(json.loads(body).get("num_samples", 1)))
        kept = [
            (name, value) for name, value in start["headers"] if name.lower() != b"content-length"
        ]
        await send(start | {"headers": [*kept, (b"content-length", str(len(content)).encode())]})
        await send({"type": "http.response.body", "body": content})


async def _whole(receive: Receive) -> bytes:
    parts, more = [], True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


def _with_ids(promise: bytes, samples: int) -> bytes:
    content = json.loads(promise)
    content.setdefault(
        "sample_sequence_ids",
        [f"{content.get('request_id')}-{number}" for number in range(samples)],
    )
    return json.dumps(content).encode()


class _App(fastapi.FastAPI):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.add_middleware(SequenceIds)


if __name__ == "__main__":
    fastapi.FastAPI = _App  # type: ignore[misc]  # the server makes its application from it when it is imported
    sys.argv[0] = "skyrl.tinker.api"
    runpy.run_module("skyrl.tinker.api", run_name="__main__", alter_sys=True)

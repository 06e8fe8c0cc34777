"""What a worker process does: load what it was told to, say so, then answer one job after another until it is killed or left alone."""

import importlib
import os
import resource
import sys
from collections.abc import Callable, Mapping
from typing import Any

from retrain.errors import ConfigurationError
from retrain.rewards.channel import Channel, ChannelClosed, Message

VERIFICATION_MODULE = "retrain.rewards.verification"


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

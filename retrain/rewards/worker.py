"""The life of a reward worker: load what the set-up names, then answer one job after another until
it is killed or left alone.
"""

import os
import resource
import sys
from collections.abc import Callable, Mapping

from retrain.errors import ConfigurationError
from retrain.records.redact import note_values
from retrain.rewards.channel import Channel, ChannelClosed, Message


def serve(channel: Channel) -> None:
    """Answer jobs until the other side closes. The first message is the set-up; its reply is
    {"ready": true, "group_rewards": [names]} or {"refused": sentence}.

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
    """Return one function per kind of job. A reply holds "value" (null: could not judge) and, if it
    is null, "reason"; that of a whole group holds such a reply for each of its "members".
    """
    if setup["address_space"] is not None:  # bytes that this process may map
        try:
            resource.setrlimit(
                resource.RLIMIT_AS,
                (setup["address_space"], resource.getrlimit(resource.RLIMIT_AS)[1]),
            )
        # The system has no such limit, so the parent's watch has to do.
        except (ValueError, OSError) as error:
            print(f"reward worker: its memory cannot be limited here ({error})", file=sys.stderr)
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
    from retrain.rewards.verification import equal  # sympy, which the fork server has imported

    try:
        return {"value": float(equal(job["gold"], job["answer"]))}
    except MemoryError:
        return {"value": None, "reason": "math-verify ran out of memory"}

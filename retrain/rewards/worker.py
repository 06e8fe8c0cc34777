"""The processes that judge: a fork server, which has imported the libraries, and its workers.

The trainer never forks, since a fork would break its threads and accelerator. It starts the fork
server and sends it jobs, over one socket for each worker (workers.py). The server runs no code of
the user. It forks a worker within milliseconds, and kills one that exceeds the deadline or the
memory limit. It never trusts code inside a worker to stop by itself. It ends when the trainer is
gone, and its workers with it.

multiprocessing, loky and pebble do not serve here (tried with Python 3.11, loky 3 and pebble 5):

- multiprocessing's forkserver runs the user's main module again in each worker. A script that calls
  `train` without a main guard gets a RuntimeError there, and a script from standard input gets a
  FileNotFoundError. A process has one such server, with the imports and the environment of the
  first pool. pebble starts its workers in this way too.
- loky needs no main guard, but a worker killed at its deadline ends the whole pool. The next answer
  takes 6 s, since each worker imports sympy again (a fork here takes 0.03 s).
- pebble's workers share one pipe. 50 bytes that user code writes into it end the pool. The value of
  a child that user code forks counts as the verdict. C code in a loop outlives its deadline by 3 s,
  and a killed trainer for ever. There is no limit of memory.
"""

import asyncio
import json
import math
import os
import resource
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from io import BufferedIOBase
from typing import Any, NoReturn

from retrain.errors import ConfigurationError
from retrain.records.redact import harmless, note_values
from retrain.system import die_with_parent, resident_bytes

STARTUP_LIMIT_S = 120.0
"""Seconds that a worker may take to load what the set-up names."""
ADDRESS_SPACE_LIMIT = 4 << 30
"""Maximum bytes that a verifying worker may map: the second limit, for memory that grows faster
than the server looks."""
_TICK_S = 0.05
"""Interval at which the server checks the memory of a worker that has not answered."""
_PARENT_POLL_S = 1.0
_END_POLL_S = 0.002
_MAX_REPLY = 1 << 16
"""Maximum bytes of a reply; a reward, or the reason for its absence, takes a few hundred."""
_CHANNEL = 3
"""The worker's end of its socket, its only descriptor but the standard ones."""
_MAX_DESCRIPTORS = 4096

# -- messages --------------------------------------------------------------------------------------


Message = dict[str, Any]
"""One JSON object. NaN and infinities have the form of Python's json, unpaired surrogates are
escapes.
"""

_HEADER = struct.Struct("<I")
"""The length of the JSON text that follows, in bytes."""
_JOB = struct.Struct("<QII")
"""Precedes a job: its number, how many completions it judges together (0 for one alone), and its
length. The server reads no more of it.
"""
QUESTION = bytes(_JOB.size)
"""A job without content asks whether a worker started."""


def encode_job(number: int, message: Message) -> bytes:
    """Encode a job as `encode` does, with its number and size before it."""
    job = encode(message | {"number": number})
    return _JOB.pack(number, len(message.get("responses", ())), len(job)) + job


def encode(message: Message) -> bytes:
    """Encode a message as bytes, header included. numpy values become plain ones; TypeError names
    any other type that JSON lacks.
    """
    body = json.dumps(message, default=_plain).encode()
    return _HEADER.pack(len(body)) + body


def _plain(value: Any) -> object:
    for method in ("tolist", "isoformat"):
        if hasattr(value, method):
            return getattr(value, method)()
    raise TypeError(f"a value of type {type(value).__name__} has no JSON form")


def read_message(file: BufferedIOBase) -> Message:
    """Read a message of the other side. Raises EOFError or ValueError if it ends before."""
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise EOFError
    message: Message = json.loads(file.read(*_HEADER.unpack(header)))
    return message


async def _receive(reader: asyncio.StreamReader, longest: int = 1 << 32) -> Message:
    """Read a message of at most `longest` bytes. Raises ValueError for anything else, EOFError and
    OSError.
    """
    (length,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    if length > longest:
        raise ValueError(f"it claims to have {length} bytes")
    body = await reader.readexactly(length)
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(message, dict):
        raise ValueError("it is not a JSON object")
    return message


# -- the fork server -------------------------------------------------------------------------------


def main(parent: str, *descriptors: str) -> None:
    """Run the fork server, with a worker for each socket. It ends with the trainer, whose process
    id is `parent`; the trainer kills what its session still runs.
    """
    keepers = [_Keeper(socket.socket(fileno=int(each))) for each in descriptors]

    async def end_with_parent() -> None:
        while os.getppid() == int(parent):
            await asyncio.sleep(_PARENT_POLL_S)
        for keeper in keepers:
            keeper.kill()
        os._exit(0)

    async def run() -> None:
        await asyncio.gather(end_with_parent(), *(keeper.run() for keeper in keepers))

    asyncio.new_event_loop().run_until_complete(run())


class _Keeper:
    """Keeps one worker alive, and gives it one job at a time."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._setup: Message = {}
        self._pid = 0
        """The worker's process; 0 if there is none."""
        self._started: Message = {}
        """The last worker's first message, or why there is none."""
        self._stopped = ""
        """Why the server killed the worker; empty if it did not."""

    async def run(self) -> None:
        """Answer the trainer's jobs until it is gone. The first message is the set-up."""
        jobs, replies = await asyncio.open_unix_connection(sock=self._line)
        with suppress(EOFError, OSError):
            self._setup = await _receive(jobs)
            if self._setup["verify"]:
                import retrain.rewards.verification
            if self._setup["rewards"]:
                import retrain.rewards.custom  # noqa: F401 - all workers share the imports
            while True:
                await self._start()
                number, size, length = _JOB.unpack(await jobs.readexactly(_JOB.size))
                job = await jobs.readexactly(length)
                replies.write(encode(await self._answer(number, size, job)))

    async def _start(self) -> None:
        """Start a worker if there is none."""
        if self._pid:
            return
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if not pid:
            _be_worker(theirs, self._setup)
        theirs.close()
        self._reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._pid = pid
        self._stopped = ""
        try:
            async with asyncio.timeout(STARTUP_LIMIT_S):
                self._started = await _receive(self._reader, _MAX_REPLY)
        except (EOFError, OSError, ValueError) as error:
            how = f"{type(error).__name__}, {await self._end()}"
            loaded = ", ".join(self._setup["rewards"]) or "math-verify"
            self._started = {"reason": f"retrain cannot start a reward worker for {loaded} ({how})"}
        if "reason" in self._started:
            await self._end()

    async def _answer(self, number: int, size: int, job: bytes) -> Message:
        """Return the worker's answer to a job, or the reason for its absence; without a
        job, the worker's first message.
        """
        if not job or not self._pid:
            return self._started
        loop = asyncio.get_running_loop()
        self._watch(loop, loop.time() + self._setup["deadline_s"])
        try:
            self._writer.write(job)
            try:
                reply = await _receive(self._reader, _MAX_REPLY * max(1, size))
            finally:
                self._timer.cancel()
            answer = _checked(reply, number, size)
            if self._stopped or self._takes_more_than(0.5):
                await self._end()  # sympy's caches only grow
            return answer
        except ValueError as error:
            reason = f"the reward worker's reply is not readable: {error}"
        except (EOFError, OSError):
            reason = self._stopped or f"the reward worker died ({await self._end()})"
        await self._end()
        return {"reason": reason}

    def _watch(
        self, loop: asyncio.AbstractEventLoop, deadline: float, is_second_look: bool = False
    ) -> None:
        """Stop the worker at its deadline or its limit of memory. A pass of the loop between two
        looks at the deadline reads an answer that came in time, though the server stood still.
        """
        now, limit = loop.time(), self._setup["memory_limit"]
        is_late = now >= deadline
        if is_late and is_second_look:
            self._stopped = "the reward took longer than deadline_s ="
            self._stopped += f" {self._setup['deadline_s']:g}, so retrain killed its worker"
        elif self._takes_more_than(1.0):
            self._stopped = f"the reward needed more than {limit / 2**30:g} GiB, so retrain killed"
            self._stopped += " its worker"
        else:
            next_look = deadline if limit is None else min(deadline, now + _TICK_S)
            self._timer = loop.call_at(next_look, self._watch, loop, deadline, is_late)
            return
        self._writer.transport.abort()
        _kill_group(self._pid)

    def _takes_more_than(self, fraction: float) -> bool:
        limit = self._setup["memory_limit"]
        return limit is not None and resident_bytes(self._pid) > fraction * limit

    def kill(self) -> int:
        """Kill the worker, if there is one, with everything it started. Return its process."""
        pid, self._pid = self._pid, 0
        if pid:
            self._writer.transport.abort()
            _kill_group(pid)
        return pid

    async def _end(self) -> str:
        """Kill the worker, if there is one. Return how it ended."""
        pid = self.kill()
        while pid:  # another worker's answer does not wait for this end
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                return f"signal {-code}" if code < 0 else f"exit code {code}"
            await asyncio.sleep(_END_POLL_S)
        return ""


def _checked(reply: Message, number: int, size: int) -> Message:
    """Return a worker's reply in the form that the trainer takes: the value and the reason of the
    completion, or of each of a group. Raises ValueError for another, such as one that user code
    wrote into the socket.
    """
    if reply.get("number") != number:
        raise ValueError("it is not the answer to this completion")
    if not size or ("members" not in reply and reply.get("value") is None):
        return {"parts": [_part(reply)]}
    parts = reply.get("members")
    if not isinstance(parts, list) or len(parts) != size:
        raise ValueError(f"it is not the answer to a group of {size}")
    return {"parts": [_part(part) for part in parts]}


def _part(reply: object) -> tuple[float | None, str]:
    if not isinstance(reply, dict):
        raise ValueError("a member's reply is not a JSON object")
    value = reply.get("value")
    if value is None:
        return None, str(reply.get("reason", ""))
    if not isinstance(value, float) or not math.isfinite(value):
        raise ValueError("its value is not a finite number")
    return value, ""


def _kill_group(pid: int) -> None:
    """Kill the worker and whatever it started. A worker forked a moment ago may not lead its group
    yet.
    """
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


# -- the worker ------------------------------------------------------------------------------------


def _be_worker(channel: socket.socket, setup: Message) -> NoReturn:
    """Run as the forked worker. It must never return into the server's loop, so an exception ends
    the process here.
    """
    status = 1
    try:
        os.setpgid(0, 0)
        die_with_parent(os.getppid())  # without Linux the trainer kills it later
        os.dup2(channel.fileno(), _CHANNEL, inheritable=False)
        os.closerange(_CHANNEL + 1, _MAX_DESCRIPTORS)
        with suppress(EOFError, ConnectionError):  # the server no longer needs this worker
            _serve(socket.socket(fileno=_CHANNEL), setup)
        status = 0
    except BaseException:  # the process ends below without showing any of them
        print(harmless(traceback.format_exc()), file=sys.stderr)
        raise
    finally:
        os._exit(status)


def _serve(channel: socket.socket, setup: Message) -> None:
    """Say that the worker is ready, with the names of the rewards that take a whole group, or why
    its set-up does not load. Then answer jobs until the other side closes; a reply carries the
    job's number.
    """
    own = os.getpid()
    file = channel.makefile("rwb")
    handlers: Mapping[str, Callable[[Message], Message]] = {}
    try:
        handlers = _handlers(setup)
        groups = [name for name in handlers if getattr(handlers[name], "whole_group", False)]
        reply: Message = {"group_rewards": groups}
    except ConfigurationError as error:
        reply = {"is_refused": True, "reason": str(error)}
    # A child that user code forked returns here too, and must not answer.
    while os.getpid() == own:
        file.write(encode(reply))
        file.flush()
        job = read_message(file)
        reply = handlers[job["handler"]](job) | {"number": job["number"]}


def _handlers(setup: Message) -> Mapping[str, Callable[[Message], Message]]:
    """Return one function per kind of job. A reply holds "value" (null for could not judge) and, if
    it is null, "reason". The reply for a whole group holds one for each of its "members".
    """
    if setup["memory_limit"] is not None:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        # A system without such a limit has the server's watch alone.
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_LIMIT, hard))
    note_values(setup["secrets"])
    if not setup["rewards"]:
        return {"verify": _verify}
    from retrain.rewards.custom import load_rewards

    return {"verify": _verify, **load_rewards(setup)}


def _verify(job: Message) -> Message:
    from retrain.rewards.verification import right  # sympy, which the fork server has imported

    try:
        return {"value": float(right(job["gold"], job["answer"]))}
    except MemoryError:
        return {"value": None, "reason": "math-verify ran out of memory"}
    # The library's own `except Exception` would have ignored this error.
    except Exception as error:  # noqa: BLE001 - of a kind that was defined later, or Exception itself
        return {"value": None, "reason": f"math-verify failed ({type(error).__name__}: {error})"}

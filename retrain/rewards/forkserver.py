"""A fork server: one process that has imported the libraries, and forks a reward worker within
milliseconds when asked.

This process forks the workers. The trainer never does, because a fork would break its threads and
accelerator. The server ends when the trainer is gone, and its workers with it.

multiprocessing and loky do not serve here (tried with Python 3.11 and loky 3):

- multiprocessing's forkserver runs the user's main module again in each worker. A script that calls
  `train` without a main guard gets a RuntimeError there, and a script from standard input gets a
  FileNotFoundError. Each worker then ends with exit code 1. multiprocessing's `kill` leaves
  processes that user code started. A process has one such server, with the imports and the
  environment of the first pool.
- loky needs no main guard, but a worker killed at its deadline ends the whole pool. The other jobs
  raise TerminatedWorkerError. The next answer takes 6 s, since each worker imports sympy again (a
  fork here takes 0.03 s).
"""

import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import NoReturn

from retrain.rewards.worker import Channel
from retrain.system import die_with_parent

STARTUP_LIMIT_S = 120.0
"""Seconds that a server may take to import its libraries."""

_REQUEST = struct.Struct("<ci")
"""A request: operation and process id."""
_REPLY = struct.Struct("<i")
"""A reply: the process id of the new worker, or the exit code of the ended one."""
_SPAWN, _END = b"s", b"e"
_PARENT_POLL_S = 1.0
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from retrain.rewards.forkserver"
    " import main; main(sys.argv[2:])"
)


class ForkServerLost(RuntimeError):
    """The server's process is gone or does not answer."""


# ---- the trainer's side --------------------------------------------------------------------------


class ForkServer:
    """The trainer's side of the server. Any thread may call it."""

    def __init__(self, preload: Sequence[str]) -> None:
        """Start the server and return at once; it imports the modules in `preload`, which all
        workers share, in the meantime.
        """
        self._preload = tuple(preload)
        self._lock = threading.Lock()
        self._closed = False
        self._start()

    def spawn(self) -> tuple[int, Channel]:
        """Fork a worker and return its process id and the channel to it. It restarts a lost server
        once, then raises ForkServerLost.
        """
        with self._lock:
            try:
                return self._spawn()
            except ForkServerLost:
                if self._closed:
                    raise
                self._stop()
                self._start()
                return self._spawn()

    def end(self, pid: int) -> int | None:
        """Kill a worker with everything it started, and return its exit code (negative for a
        signal), or None for a lost server.
        """
        with self._lock:
            try:
                return self._ask(_END, pid, None)
            except ForkServerLost:
                return None  # its workers die with it

    def close(self) -> None:
        """End the server and all its workers, without waiting for imports."""
        self._closed = True
        if not self._ready:
            self._process.kill()
        with self._lock:
            self._stop()

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        self._control.settimeout(STARTUP_LIMIT_S)
        self._ready = False
        command = [
            sys.executable,
            "-P",  # `json` is not a file of that name in the current folder
            "-u",
            "-c",
            _BOOT,
            json.dumps(sys.path),
            str(theirs.fileno()),
            str(os.getpid()),
            *self._preload,
        ]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=2,  # user code prints progress, but standard output is the run's result
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            env={"OMP_NUM_THREADS": "1"} | os.environ,
        )
        theirs.close()

    def _stop(self) -> None:
        self._control.close()
        try:
            self._process.wait(timeout=2 * _PARENT_POLL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _spawn(self) -> tuple[int, Channel]:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                return self._ask(_SPAWN, 0, theirs), Channel(ours)
            except ForkServerLost:
                ours.close()
                raise

    def _ask(self, operation: bytes, pid: int, passed: socket.socket | None) -> int:
        try:
            if not self._ready:
                self._read_reply()
                self._ready = True
            socket.send_fds(
                self._control, [_REQUEST.pack(operation, pid)], [passed.fileno()] if passed else []
            )
            return self._read_reply()
        except OSError as error:
            # A late reply would count as the answer to the next request.
            self._control.close()
            raise ForkServerLost(str(error)) from error

    def _read_reply(self) -> int:
        reply = self._control.recv(_REPLY.size, socket.MSG_WAITALL)
        if len(reply) < _REPLY.size:
            raise ForkServerLost("the process that starts reward workers ended")
        (value,) = _REPLY.unpack(reply)
        return int(value)


# ---- the server's process ------------------------------------------------------------------------


def main(arguments: list[str]) -> None:
    """Run the server: import, report that it is ready, then fork and kill on request until the
    trainer is gone.
    """
    descriptor, parent, *preload = arguments
    control = socket.socket(fileno=int(descriptor))
    for name in preload:
        importlib.import_module(name)
    children: set[int] = set()
    try:
        control.sendall(_REPLY.pack(0))
        while os.getppid() == int(parent):
            readable, _, _ = select.select([control], [], [], _PARENT_POLL_S)
            if readable and not _answer(control, children):
                break
    except (BrokenPipeError, ConnectionResetError):
        pass  # the trainer is gone
    finally:
        for pid in children:
            _kill_session(pid)


def _answer(control: socket.socket, children: set[int]) -> bool:
    """Serve one request; False when the trainer closed the connection."""
    request, descriptors, _, _ = socket.recv_fds(control, _REQUEST.size, 1)
    if not request:
        return False
    operation, pid = _REQUEST.unpack(request)
    if operation == _SPAWN:
        server = os.getpid()
        reply = os.fork()
        if reply == 0:
            _worker_main(control, descriptors[0], server)
        os.close(descriptors[0])
        children.add(reply)
    else:
        _kill_session(pid)
        reply = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        children.discard(pid)
    control.sendall(_REPLY.pack(reply))
    return True


def _worker_main(control: socket.socket, descriptor: int, server: int) -> NoReturn:
    """Run as the forked worker. It must never return into the server's loop, so an exception ends
    the process here.
    """
    status = 1
    try:
        control.close()
        os.setsid()
        die_with_parent(server)  # without Linux the server kills its workers on its way out
        from retrain.rewards.worker import serve

        serve(Channel(socket.socket(fileno=descriptor)))
        status = 0
    except BaseException:  # the process ends below without showing any of them
        from retrain.records.redact import harmless

        print(harmless(traceback.format_exc()), file=sys.stderr)
        raise
    finally:
        os._exit(status)


def _kill_session(pid: int) -> None:
    """Kill the worker and whatever it started. A worker forked a moment ago may not lead its
    session yet.
    """
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue

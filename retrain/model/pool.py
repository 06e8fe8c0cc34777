"""Worker processes that compute the pieces of a step, each with one thread, and meet once per step.

Intra-op threads synchronize at every operator, so one preempted thread stalls them all. On two busy
cores a lab step with workers takes 0.13 of the time with two threads (0.10 to 0.18,
benchmarks/results/versions-workers-lab-4x8x64-2026-11-28.md). Here a rule that knows nothing of the
workers cuts the rows of a step into pieces. An idle worker takes the next piece, so a preempted
worker computes fewer. A piece's result has the same bytes in every process.

This process forks workers at their first use. They share its frozen weights, read the trained
weights in memory that this process writes, leave signals to it, and die with it.
"""

import gc
import mmap
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from retrain.errors import ResumableFailure, RetrainError
from retrain.system import die_with_parent

Piece = TypeVar("Piece")
Result = TypeVar("Result")

Work = Callable[[Piece], Iterable[Result]]
Shared = Callable[[Iterable[Piece]], Iterator[tuple[int, Result]]]
"""Maps pieces to pairs (number of a piece, one result) in order of arrival."""

_ALIGNMENT = 64
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def can_fork() -> bool:
    """Return True if this process can fork workers; macOS forks too, but its linear algebra does
    not survive it.
    """
    return sys.platform == "linux"


class Pool:
    """`workers` processes. A single worker is this process itself, which computes a piece when the
    caller asks for its results.
    """

    def __init__(self, workers: int = 1, changing: Sequence[Tensor] = ()) -> None:
        """`changing`: what this process changes between two calls and the works read. With several
        workers it moves to shared memory.
        """
        self.workers = workers
        self.in_worker = False
        """True in a worker: the other processes see the results of a work, and none of its side
        effects."""
        self._changing = list(changing)
        self._works: list[Work[Any, Any]] = []
        self._team: list[_Fork] = []
        if workers == 1:
            return
        # Anonymous memory, which no /dev/shm limit applies to; freed with the last tensor and
        # worker.
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in self._changing]
        memory = mmap.mmap(-1, max(1, sum(sizes)))
        for tensor, size, end in zip(self._changing, sizes, accumulate(sizes), strict=True):
            place = torch.frombuffer(
                memory, dtype=tensor.dtype, count=tensor.numel(), offset=end - size
            ).view(tensor.shape)
            tensor.data = place.copy_(tensor.data)

    def shared(self, work: Work[Piece, Result]) -> Shared[Piece, Result]:
        """Return `work` as a function that hands its pieces to idle workers. Call it before the
        first piece.
        """
        number = len(self._works)
        self._works.append(work)

        def compute(pieces: Iterable[Piece]) -> Iterator[tuple[int, Result]]:
            if self.workers == 1:
                return (
                    (index, result) for index, piece in enumerate(pieces) for result in work(piece)
                )
            return self._hand_out(number, pieces)

        return compute

    def _hand_out(self, work: int, pieces: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """Yield results in order, one piece at a time per worker. If the caller stops listening,
        the pieces under way finish, and the pool drops their results.
        """
        if not self._team:
            self._team = [_Fork(self._serve) for _ in range(self.workers)]
        version = tuple(tensor._version for tensor in self._changing)
        waiting, asked = enumerate(pieces), set[_Fork]()
        following = next(waiting, None)
        while following or any(worker.busy for worker in asked):
            for worker in self._team:
                if following and not worker.busy:
                    worker.give(_Task(work, version, *following))
                    asked.add(worker)
                    following = next(waiting, None)
            busy = {worker.pipe: worker for worker in self._team if worker.busy}
            for pipe in wait(busy):
                worker = busy[pipe]  # type: ignore[index]  # wait returns some of its keys
                message = worker.receive()
                # It was at work for an earlier call, whose caller stopped listening.
                if worker not in asked:
                    continue
                if isinstance(message, Exception):
                    raise message
                yield from message

    def _serve(self, pipe: Connection) -> None:
        """Run the loop of a worker: receive a task, send its results."""
        self.in_worker = True
        torch.set_num_threads(1)
        version: tuple[int, ...] = ()
        while True:
            task: _Task = pickle.loads(pipe.recv_bytes())
            if task.version != version:
                # Versions mark derived values as outdated, and each process counts versions for
                # itself.
                torch.autograd.graph.increment_version(self._changing)
                version = task.version
            try:
                for result in self._works[task.work](task.piece):
                    pipe.send_bytes(pickle.dumps([(task.number, result)]))
                pipe.send_bytes(pickle.dumps(_DONE))
            except Exception as error:  # noqa: BLE001 - it is raised again in the parent
                told = (
                    error
                    if isinstance(error, RetrainError)
                    else RuntimeError(f"{type(error).__name__}: {error}")
                )
                told.add_note("In a worker process:\n" + "".join(traceback.format_exception(error)))
                pipe.send_bytes(pickle.dumps(told))

    def close(self) -> None:
        """End the workers; safe to call twice."""
        for worker in self._team:
            worker.end()
        self._team = []


_DONE: list[Any] = []
"""Marks the end of a piece's results."""


@dataclass(frozen=True)
class _Task:
    work: int
    version: tuple[int, ...]
    """Versions of the changing tensors."""
    number: int
    piece: Any


class _Fork:
    """A forked process and the pipe to it."""

    def __init__(self, serve: Callable[[Connection], None]) -> None:
        self.pipe, theirs = Pipe()
        self.busy = False
        parent = os.getpid()
        # Python 3.12 warns of other threads, whose locks the worker does not need.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            self._live(serve, theirs, parent)
        theirs.close()

    def _live(self, serve: Callable[[Connection], None], pipe: Connection, parent: int) -> NoReturn:
        """Serve until the parent closes the pipe; never returns into the parent's code."""
        status = 1
        try:
            os.setsid()
            for number in _IGNORED:
                signal.signal(number, signal.SIG_IGN)
            die_with_parent(parent)
            # A collection would write to the pages shared with the parent, and so copy them.
            gc.freeze()
            serve(pipe)
        except EOFError:
            status = 0  # the parent closed the pipe
        except BaseException:  # noqa: BLE001 - a forked process ends here, whatever happened
            traceback.print_exc()
        finally:
            os._exit(status)

    def give(self, task: _Task) -> None:
        self.busy = True
        try:
            self.pipe.send_bytes(pickle.dumps(task))
        except OSError as error:
            raise self._lost() from error

    def receive(self) -> list[tuple[int, Any]] | Exception:
        """Return results of the piece under way, or what the worker raised."""
        try:
            message: list[tuple[int, Any]] | Exception = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._lost() from error
        self.busy = message != _DONE and not isinstance(message, Exception)
        return message

    def _lost(self) -> ResumableFailure:
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        self.pid = 0
        if code < 0:
            how = f"died of signal {-code} (memory may have run out)"
        else:
            how = f"ended with exit code {code}"
        return ResumableFailure(
            f"A worker process of this run {how}; close other programs, or set OMP_NUM_THREADS=1 to"
            " compute in one process."
        )

    def end(self) -> None:
        self.pipe.close()
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0


def in_order(results: Iterable[tuple[int, Result]]) -> Iterator[Result]:
    """Yield the results in the order of their pieces, one per piece."""
    early: dict[int, Result] = {}
    following = 0
    for number, result in results:
        early[number] = result
        while following in early:
            yield early.pop(following)
            following += 1

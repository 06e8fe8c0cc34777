"""The parent process of a campaign's workers, which it forks: `python -m retrain.campaign.parent`,
started by `launch`.

It loads what the runs of one base model have in common: libraries, tokenizer, prompts, base weights
and the packed head. A worker has this memory until it writes there, and starts in the time of a
fork.

Nothing that is done here may reach a run:

- Threads do not survive a fork, and OpenMP waits for the threads of a parallel region that its
  parent has run. So products have one thread here, tokenizers none of their own, and no worker is
  forked beside a thread. A worker gets its own number of threads, and OpenMP makes its own pool.
- Generators of random numbers, which a process seeds at its start, are seeded anew in each worker.
- Code that a run names (plugins, rewards, a model's own) is loaded by the run alone.
- Files and sockets are closed in a worker, but for its log and its answer.

A worker is refused with the reason where this cannot be kept; it is then a process of its own.
"""

import atexit
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import warnings
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from retrain.system import die_with_parent, prepare_torch

REQUEST_BYTES = 1 << 20
_POLL_S = 0.05
_TOKENIZER_THREADS = "TOKENIZERS_PARALLELISM"


class Parent:
    """Prepares runs and forks their workers until the campaign is gone."""

    def __init__(self, control: socket.socket) -> None:
        import numpy as np  # noqa: F401 - whose own threads stop around a fork
        import torch

        self._control = control
        self._workers: dict[int, socket.socket] = {}
        """By process id; each socket takes signals for it and gives its exit code."""
        self._mask: set[int] = set()
        """The signals that were blocked before the last fork."""
        self._own_threads = _count_threads()
        self._threads = torch.get_num_threads()
        """torch's threads in one run."""
        torch.set_num_threads(1)
        self._asked = os.environ.get(_TOKENIZER_THREADS)
        os.environ[_TOKENIZER_THREADS] = "false"

    def serve(self) -> tuple[dict[str, str], int] | None:
        """Return, in each worker, its request and the descriptor that takes its answer; None here
        when the campaign is gone.
        """
        while True:
            links = {link: pid for pid, link in self._workers.items()}
            # The wait has an end, since a worker's end makes no descriptor readable.
            for ready in select.select([self._control, *links], [], [], _POLL_S)[0]:
                if ready is self._control:
                    text, descriptors, _, _ = socket.recv_fds(ready, REQUEST_BYTES, 3)
                    if not text:
                        for pid in self._workers:
                            os.kill(pid, signal.SIGKILL)
                        return None
                    link, answer, log = descriptors
                    request = json.loads(text)
                    if self._fork(request, link, answer, log):
                        return request, answer
                elif number := ready.recv(1):
                    os.kill(links[ready], number[0])
                else:  # the campaign has dropped the run
                    os.kill(links[ready], signal.SIGKILL)
            self._reap()

    def _reap(self) -> None:
        """Tell the campaign of the workers that have ended."""
        for pid in [*self._workers]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with self._workers.pop(pid) as link, suppress(ConnectionError):
                    link.send(json.dumps({"code": os.waitstatus_to_exitcode(status)}).encode())

    def _fork(self, request: dict[str, str], link: int, answer: int, log: int) -> bool:
        """Fork the worker of a request; True in the worker."""
        # A warning of the preparation is the run's.
        for number in (1, 2):
            os.dup2(log, number)
        os.close(log)
        channel = socket.socket(fileno=link)
        reason = self._reason_against(request)
        if reason:
            with suppress(ConnectionError):
                channel.send(json.dumps({"refused": reason}).encode())
            channel.close()
            os.close(answer)
            return False
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        # Python forgets the signals that reach a new process before its first line, so they wait;
        # in the worker until `main` can answer them.
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        # From Python 3.12 on a fork warns of numpy's threads.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid:
            self.take_signals()
            os.close(answer)
            self._workers[pid] = channel
            with suppress(ConnectionError):
                channel.send(json.dumps({"forked": pid}).encode())
            return False
        os.setsid()
        die_with_parent(parent)
        for other in (self._control, channel, *self._workers.values()):
            other.close()
        self._forget()
        return True

    def take_signals(self) -> None:
        """Let the signals through that wait since the last fork."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _reason_against(self, request: dict[str, str]) -> str:
        """Prepare the run. Return why no worker can be forked for it, or ""."""
        import torch

        try:
            prepare(request)
        except Exception as error:  # noqa: BLE001 - the run meets it in a process of its own, and says it
            return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        gc.collect()
        gc.freeze()  # a collection in a worker would write to all that it has in common
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch does not annotate it
            return "CUDA is in use"
        more = _count_threads() - self._own_threads
        if more > 0:
            return f"loading it left {more} threads"
        return ""

    def _forget(self) -> None:
        """In a worker: be as a process that has just started."""
        import numpy as np
        import torch

        torch.set_num_threads(self._threads)
        del os.environ[_TOKENIZER_THREADS]
        if self._asked is not None:
            os.environ[_TOKENIZER_THREADS] = self._asked
        np.random.seed()  # Python's own generator is seeded at every fork
        torch.default_generator.seed()
        del sys.argv[1:]


def _count_threads() -> int:
    return len([*Path("/proc/self/task").iterdir()])


def prepare(request: dict[str, str]) -> None:
    """Load what the run has in common with others, into the stores that `main` opened. What the run
    itself would refuse is left to it.
    """
    from retrain.backends.base import backend_kind
    from retrain.config import config_from_toml
    from retrain.data.prompts import each_source, examples_key
    from retrain.errors import RetrainError
    from retrain.run import loop  # noqa: F401 - imported for the workers
    from retrain.run.parts import (
        load_held_out,
        load_prompts,
        load_text,
        prompts_of,
        say_memory,
    )

    path = request["path"]
    config = config_from_toml(request["config"], Path(path) if path else None)
    if config.model.trust_remote_code:
        return
    with suppress(RetrainError):
        text = load_text(config.model, _unsaid)
        keys = [examples_key(config, "train")]
        if config.evaluation.asked_for:
            keys += [examples_key(own, "heldout") for own in each_source(config)]
        # a user's source would be asked for nothing, and one that hangs would hold all runs
        if not config.environment.provider and None not in keys:
            prompts, held_out = load_prompts(config, text, None, _unsaid), None
            if config.evaluation.asked_for:
                held_out = load_held_out(config, text, None, prompts, _unsaid)
            say_memory(config, None, prompts, prompts_of(held_out), _unsaid)
        backend_kind(config.backend.backend).prepare(config)


def _unsaid(line: str) -> None:
    """The run itself prints this line."""


def main() -> None:
    """Serve the campaign; in a worker train the run, answer with its outcome, and end as a process
    of its own would.
    """
    descriptor, campaign = map(int, sys.argv[1:])
    die_with_parent(campaign)
    prepare_torch()
    from retrain.model.load import shared_models
    from retrain.model.packed import shared_packs
    from retrain.run.sharing import shared_parts

    with shared_parts(), shared_models(), shared_packs():
        parent = Parent(socket.socket(fileno=descriptor))
        served = parent.serve()
        if served is None:
            return
        request, descriptor = served
        from retrain.campaign.worker import INTERRUPTED, answer

        with os.fdopen(descriptor, "w", encoding="utf-8") as pipe:
            try:
                parent.take_signals()
                answer(request, pipe)
            except KeyboardInterrupt:
                json.dump(INTERRUPTED, pipe)
    _end()


def _end() -> NoReturn:
    """End a worker as an interpreter ends, but for taking its modules apart, which would write to
    all memory that it has in common.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, before what they may need ends
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

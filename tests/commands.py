"""Command lines of Python in processes that are forked from a server which has imported what a run
imports.

`run` and `Command` stand for `subprocess.run` and `subprocess.Popen` where a command imports torch,
which takes seconds: a process of its own, with its own environment, folder, output, signals and
exit code. What libraries read from the environment when they are imported is what the server found;
a test whose subject that is, or the start of Python itself, starts Python.
"""

import atexit
import faulthandler
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

# Nothing here may start a thread, which a fork would lose: no operation of torch, no pandas (its
# allocator has one).
IMPORTED = [
    "tests.commands", "tests.stops", "retrain.cli.run", "retrain.run.loop", "retrain.campaign",
    "retrain.backends.local.backend",
    "retrain.inference_engine.torch_engine", "transformers",
    "transformers.models.qwen3.modeling_qwen3", "peft",
]  # fmt: skip
_READ_AT_IMPORT = ("HF_", "TRANSFORMERS_", "PYTORCH_", "TORCH_", "TRITON_", "PYTHON")


def forked(target: Callable[..., None], *arguments: Any) -> Any:
    """A started process that calls `target`, forked from the server. It is killed if it outlives
    the tests.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    process = context.Process(target=target, args=arguments)
    process.start()
    atexit.register(process.kill)
    return process


def serve_from_here() -> None:
    """Fork the server from this process, which has imported what a run imports and has no thread
    of torch yet, instead of starting a Python that would import it all again.
    """
    from multiprocessing import forkserver, resource_tracker, util

    def fork(_python: str, arguments: Sequence[str], kept: Sequence[int]) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                _become_server(arguments[-1], kept)
            finally:
                os._exit(1)
        return pid

    forkserver.set_forkserver_preload(["tests.preloaded"])
    resource_tracker.ensure_running()  # else it would start as a fork too
    with patch.object(util, "spawnv_passfds", fork):
        forkserver.ensure_running()


class Command:
    """A started `python -m MODULE ...` or `python FILE ...`. Its output is kept in files, so that
    it never waits for a reader.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stderr: int = subprocess.PIPE,
        start_new_session: bool = False,
        terminal: int | None = None,
    ) -> None:
        """`stderr`: PIPE or STDOUT. `terminal`: the descriptor of a terminal, which the process
        gets for its own in place of the files.
        """
        assert arguments[0] == sys.executable, "a command line of Python"
        environment = dict(os.environ if env is None else env)
        changed = {
            name
            for name, value in {*environment.items()} ^ {*os.environ.items()}
            if name.startswith(_READ_AT_IMPORT)
        }
        assert not changed, f"{changed} are read when libraries are imported; start Python"
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the command
        self._error = self._output if stderr == subprocess.STDOUT else tempfile.TemporaryFile()  # noqa: SIM115
        files = (self._output.fileno(), self._error.fileno()) if terminal is None else (terminal,)
        session = start_new_session
        self._process = forked(
            _become,
            list(arguments[1:]),
            environment,
            os.fspath(cwd or Path.cwd()),
            session,
            _Passed(files),
        )
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    poll = returncode.fget

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked command", timeout or 0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All that the process wrote, once it has ended: standard output and standard error, which
        is empty if it went to the former.
        """
        self.wait(timeout)
        return _all_of(self._output), "" if self._error is self._output else _all_of(self._error)

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(
    arguments: Sequence[str], *, timeout: float = 240, check: bool = False, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """Run a command line to its end and capture its output; one that takes longer than `timeout`
    seconds is killed.
    """
    command = Command(arguments, **options)
    try:
        output, error = command.communicate(timeout)
    finally:
        command.kill()
    done = subprocess.CompletedProcess(list(arguments), command.wait(), output, error)
    if check and done.returncode:
        raise AssertionError(f"exit code {done.returncode}: {output}{error}")
    return done


class Ranks:
    """The processes of a shared run that torchrun would start with `--standalone`; they meet at a
    store of this process.
    """

    def __init__(self, arguments: Sequence[str], count: int = 2) -> None:
        from torch.distributed import TCPStore

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        meeting = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "WORLD_SIZE": str(count),
        }
        meeting |= {
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "OMP_NUM_THREADS": "1",
        }
        self._ranks = [
            Command(
                arguments,
                env=os.environ | meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stderr=subprocess.STDOUT,
            )
            for rank in range(count)
        ]

    def codes(self) -> list[int | None]:
        """Of every process its exit code, or None while it runs."""
        return [rank.poll() for rank in self._ranks]

    def communicate(self, timeout: float) -> tuple[str, list[int | None]]:
        """Output and exit codes, once all have ended or the time is up, when those that run are
        killed.
        """
        deadline = time.monotonic() + timeout
        while None in self.codes() and time.monotonic() < deadline:
            time.sleep(0.02)
        for rank in self._ranks:
            rank.kill()
        return "".join(rank.communicate()[0] for rank in self._ranks), self.codes()


def _all_of(file: Any) -> str:
    file.seek(0)
    return file.read().decode()


class _Passed:
    """Descriptors on their way to a forked process."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self._descriptors = descriptors

    def __reduce__(self) -> Any:
        return _received, tuple(DupFd(descriptor) for descriptor in self._descriptors)


def _received(*passed: Any) -> list[int]:
    return [one.detach() for one in passed]


# ---- in the forked processes ---------------------------------------------------------------------


def _become_server(source: str, kept: Sequence[int]) -> None:
    """Run multiprocessing's server without what pytest and xdist have of this process: files, the
    loader that rewrites assertions, the handler of crashes.
    """
    from multiprocessing import forkserver

    ends = [2, *sorted(kept), os.sysconf("SC_OPEN_MAX")]
    for before, after in pairwise(ends):
        os.closerange(before + 1, after)
    faulthandler.disable()
    sys.meta_path[:] = [
        finder for finder in sys.meta_path if not type(finder).__module__.startswith("_pytest.")
    ]
    forkserver._forkserver.__init__()  # the lock of this copy would never be released
    exec(source, {})


def _become(
    arguments: list[str], environment: dict[str, str], folder: str, session: bool, files: list[int]
) -> None:
    """Do what `python ARGUMENTS` does, from the environment to the exit code."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    _redirect(files, session)
    import torch

    cores = os.cpu_count() or 1
    torch.set_num_threads(
        min(int(environment.get("OMP_NUM_THREADS", cores)), cores)
    )  # its library read the server's variable
    try:
        _call(arguments)
    except SystemExit:
        raise  # multiprocessing makes of it what Python makes of it
    except BaseException:  # noqa: BLE001  # as Python itself does
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:
        _end()


def _redirect(files: list[int], session: bool) -> None:
    if session:
        os.setsid()
    if len(files) == 1:
        signal.signal(
            signal.SIGHUP, signal.SIG_DFL
        )  # tests that nohup started would pass on that hangups are ignored
        os.login_tty(files[0])
    else:
        for standard, file in zip((1, 2), files, strict=True):
            os.dup2(file, standard)
    # The server's streams remember what kind of file they had.
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(  # noqa: SIM115
        2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False
    )


def _call(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = arguments
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")


def _end() -> None:
    """As Python ends: its threads first, then what was registered for the exit, which a process of
    multiprocessing leaves out.
    """
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()


def is_alive(pid: int) -> bool:
    """A zombie, which nobody has waited for yet, is not."""
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def wait_until_dead(pids: Collection[int], within_s: float = 60) -> None:
    limit = time.monotonic() + within_s
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < limit, f"still alive: {alive}"
        time.sleep(0.01)

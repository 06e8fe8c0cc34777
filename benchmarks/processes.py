"""Measured processes. Each peer runs in its own process, with its own Python; peers take turns, and
a waiting one is stopped by SIGSTOP.
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from retrain.system import die_with_parent

WORKERS = Path(__file__).parent / "workers"
_TAIL = 2000


class WorkerFailed(RuntimeError):
    """The process ended instead of answering; the message is the end of its standard error."""

    @property
    def out_of_memory(self) -> bool:
        return any(
            sign in str(self)
            for sign in (
                "can't allocate memory",
                "not enough memory",
                "out of memory",
                "MemoryError",
                "signal 9",
            )
        )

    @property
    def sentence(self) -> str:
        """The reason in a few words, for a table."""
        return "not enough memory" if self.out_of_memory else last_line(self).rstrip(".")


def last_line(error: Exception) -> str:
    """The last line of an error's message."""
    return (str(error).strip().splitlines() or ["no message"])[-1]


def memory_limit_gib(share: float = 0.9) -> float:
    """`share` of the memory that is available now."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 / 2**30 * share
    raise RuntimeError("/proc/meminfo has no MemAvailable")


def start_child(command: list[str], **options: Any) -> subprocess.Popen[str]:
    """Start a process that ends with this one: at once if this one is killed, and by `close` if
    this one is terminated.
    """
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(
            signal.SIGTERM, lambda number, _: sys.exit(128 + number)
        )  # unwinds every `with`
    return subprocess.Popen(
        command,
        text=True,
        preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - no threads here
        **options,
    )


class ProcessGroup:
    """A process and its children in their own session, paused, resumed and ended together."""

    def __init__(self, command: list[str], environment: Mapping[str, str], **streams: Any) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in `close`
        self.process = start_child(
            command,
            env={**os.environ, **environment},
            start_new_session=True,
            **{"stdout": self.log, "stderr": self.log, **streams},
        )

    def pause(self) -> None:
        os.killpg(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)

    def log_tail(self) -> str:
        self.log.seek(0)
        return self.log.read()[-_TAIL:]

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGCONT)
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self.log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Worker(ProcessGroup):
    """A script of workers/. It gets its settings at the start, then answers requests, each one line
    of JSON.
    """

    def __init__(
        self,
        python: str,
        script: str,
        settings: Mapping[str, Any],
        *,
        seconds: float | None = None,
        root: Path | None = None,
    ) -> None:
        """`seconds` limits the start and all answers together; after that WorkerFailed is raised
        and the process is ended. `root` is another checkout, whose script and package are run.
        """
        self.script, self._seconds = script, seconds
        self._deadline = None if seconds is None else time.monotonic() + seconds
        threads = str(settings["threads"])
        folder, path = WORKERS, dict[str, str]()
        if root is not None:
            folder, path = root / "benchmarks" / "workers", {"PYTHONPATH": str(root)}
        super().__init__(
            [
                python,
                str(folder / script),
                json.dumps({"memory_limit_gib": memory_limit_gib(), **settings}),
            ],
            {
                "OMP_NUM_THREADS": threads,
                "MKL_NUM_THREADS": threads,
                "TOKENIZERS_PARALLELISM": "false",
                **path,
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            self.versions: dict[str, str] = self._answer()["versions"]
        except BaseException:
            self.close()
            raise

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        if not select.select([self.process.stdout], [], [], left)[
            0
        ]:  # answers come one by one, so none waits in Python's buffer
            raise WorkerFailed(f"stopped at its limit of {self._seconds:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            raise self._failure()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failure(self) -> WorkerFailed:
        code = self.process.wait()
        ended = f"ended by signal {-code}" if code < 0 else f"ended with {code}"
        return WorkerFailed(f"{self.script} {ended}:\n{self.log_tail()}")

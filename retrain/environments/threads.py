"""Threads for code that may hang: a job that takes too long is left behind, and another thread takes its place."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from time import monotonic
from typing import Any


class Job:
    """One call on a thread of the pool."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call
        self.future: Future[Any] = Future()
        self.started: float | None = None
        """Monotonic seconds; None while it waits for a thread."""
        self.seconds = 0.0
        """The time that it took."""

    def run(self) -> None:
        self.started = monotonic()
        try:
            result = self.call()
        except BaseException as error:  # noqa: BLE001 - whoever waits for the job is told
            self.seconds = monotonic() - self.started
            self.future.set_exception(error)
        else:
            self.seconds = monotonic() - self.started
            self.future.set_result(result)


class DaemonThreads:
    """At most `most` threads that take jobs, started as they are needed. They are daemons: a hung one does not keep the process alive."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = 0

    def submit(self, call: Callable[[], Any]) -> Job:
        job = Job(call)
        with self._lock:
            self._jobs.put(job)
            if self._idle < self._jobs.qsize() and self._threads < self._most:
                self._start()
        return job

    def abandon(self, job: Job) -> None:
        """Give up on a job that runs: its thread no longer counts, and what it returns is dropped."""
        with self._lock:
            self._most += 1
            if self._threads < self._most and self._jobs.qsize():
                self._start()

    def spawn(self, call: Callable[[], Any]) -> Job:
        """Run a call on a thread of its own, so that it takes no place from the others where it hangs."""
        job = Job(call)
        threading.Thread(target=job.run, name=f"{self._name}-spawned", daemon=True).start()
        return job

    def close(self) -> None:
        """Let the idle threads end."""
        with self._lock:
            for _ in range(self._threads):
                self._jobs.put(None)

    def _start(self) -> None:
        self._threads += 1
        threading.Thread(target=self._work, name=f"{self._name}-{self._threads}", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            job = self._jobs.get()
            with self._lock:
                self._idle -= 1
            if job is None:
                return
            job.run()

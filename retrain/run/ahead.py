"""Split mode: the next step is sampled on one device, by weights one step old, while the learner works on another."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

from retrain.errors import Interrupted
from retrain.run.rollout import Rollout, Watcher


class _Dropped(Exception):
    """The rollout under way is not wanted any more."""


class Ahead:
    """At most one rollout under way, in a thread of its own."""

    def __init__(self, check: Callable[[], None]) -> None:
        """`check` raises when the run was asked to stop; the error comes out of `take`."""
        self._check = check
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="sampler")
        self._unwanted = Event()
        self._under_way: Future[Rollout] | None = None

    def start(self, draw: Callable[[Watcher], Rollout]) -> None:
        self._unwanted.clear()
        self._under_way = self._pool.submit(draw, Watcher(check=self._go_on, completion=lambda _: None))

    def take(self) -> Rollout | None:
        """The rollout that was started, waited for; None if there was none."""
        future, self._under_way = self._under_way, None
        return future.result() if future else None

    def drop(self) -> None:
        """Give up the rollout under way, so that the next one is drawn by the weights of its own time."""
        self._unwanted.set()
        future, self._under_way = self._under_way, None
        if future and (error := future.exception()) and not isinstance(error, _Dropped | Interrupted):
            raise error

    def close(self) -> None:
        self._unwanted.set()
        self._pool.shutdown()

    def _go_on(self) -> None:
        if self._unwanted.is_set():
            raise _Dropped
        self._check()

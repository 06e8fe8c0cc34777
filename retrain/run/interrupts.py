"""Signals of a run: Ctrl-C, SIGTERM or SIGHUP once stops at the next safe point with the state saved; SIGUSR1 saves and goes on.

A second Ctrl-C or SIGTERM stops at once, and nothing is saved. A second SIGHUP does not: a terminal that closes may send several.
"""

import signal
import threading
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Self

from retrain.errors import Interrupted, StoppedAtOnce

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Turns signals into flags that the loop looks at. Outside the main thread it changes nothing and never fires."""

    def __init__(self) -> None:
        self._stop: int | None = None
        self._save = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _STOPPING:
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue  # nohup: the run outlives its terminal
                self._previous[number] = signal.signal(number, self._on_stop)
            self._previous[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._on_save)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal itself returned
        self._previous.clear()

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        if self._stop is None:
            self._stop = number
        elif number != signal.SIGHUP:
            raise StoppedAtOnce(number)

    def _on_save(self, number: int, frame: FrameType | None) -> None:
        self._save = True

    @property
    def stopped_by(self) -> int | None:
        """The number of the signal that asked for a stop."""
        return self._stop

    def adopt(self, signals: Sequence[int | None]) -> None:
        """Stop for a signal that another process of the run got."""
        self._stop = next((number for number in signals if number is not None), None)

    def check(self) -> None:
        """Raise Interrupted if a stop was asked for."""
        if self._stop is not None:
            raise Interrupted(f"Interrupted by {signal.Signals(self._stop).name}.", self._stop)

    def take_save_request(self) -> bool:
        """True once after each SIGUSR1."""
        asked, self._save = self._save, False
        return asked

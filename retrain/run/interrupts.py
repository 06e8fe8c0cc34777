"""Handle the signals of a run. Ctrl-C, SIGTERM or SIGHUP stops it at the next safe point and saves
its state; SIGUSR1 saves and continues.

A second Ctrl-C or SIGTERM stops at once and saves nothing. A second SIGHUP has no effect, since a
closing terminal may send several.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Self

from retrain.errors import Interrupted, StoppedAtOnce

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Turns signals into flags that the loop reads. Outside the main thread, where Python sets no
    handlers, it has no effect.
    """

    def __init__(self) -> None:
        self.stopped_by: int | None = None
        """The number of the signal that asked for a stop; None if there was none."""
        self._save = False
        self._at_once = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _STOPPING:
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue  # Under nohup the run outlives its terminal.
                self._previous[number] = signal.signal(number, self._handle)
            self._previous[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._handle)
            heard, self._told = os.pipe()
            os.set_blocking(self._told, False)
            self._woken = signal.set_wakeup_fd(self._told)
            threading.Thread(target=_acknowledge, args=(heard,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous:
            signal.set_wakeup_fd(self._woken)  # Another loop may use it, for example in a notebook.
            os.close(self._told)
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal itself returned
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self._save = True
        elif self.stopped_by is None:
            self.stopped_by = number
            if self._at_once:
                self.check()
        elif number != signal.SIGHUP:
            raise StoppedAtOnce(number)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Stop immediately inside: the run has no state to save yet, and the current call may
        take long.
        """
        self._at_once = True
        try:
            self.check()
            yield
        finally:
            self._at_once = False
            self.check()  # Also where a library made another error of Interrupted.

    def adopt(self, signals: Sequence[int | None]) -> None:
        """Stop for a signal that any process of the run got; `signals` has one entry per rank."""
        self.stopped_by = next((number for number in signals if number is not None), None)

    def check(self) -> None:
        """Raise Interrupted if a signal asked for a stop."""
        number = self.stopped_by
        if number is not None:
            raise Interrupted(f"Interrupted by {signal.Signals(number).name}.", number)

    def take_save_request(self) -> bool:
        """Return True once after each SIGUSR1."""
        asked, self._save = self._save, False
        return asked


def _acknowledge(heard: int) -> None:
    """Print a line at the first signal that stops, until the other end of the pipe `heard` closes.

    Python writes the number of each signal into the pipe as it arrives. Its handler waits for the
    main thread, which may be in a long call.
    """
    with open(heard, "rb", buffering=0) as numbers:
        while number := numbers.read(1):
            if number[0] in _STOPPING:
                print(
                    "retrain: Stopping at the next safe point. A second signal stops at once.",
                    file=sys.stderr,
                )
                numbers.readall()  # Later signals need no line.

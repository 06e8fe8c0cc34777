"""A tracker in a thread of its own, so that one that fails or hangs costs a run neither its result nor its time.

Events wait in a queue of bounded length. What goes wrong is said once, from the run's own thread, and the run goes on: its files
hold everything that a tracker may miss.
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from retrain.records.entries import EvaluationResult, GenerationRecord, RunSummary, SqueezeResult, StepRecord
from retrain.tracking.base import Tracker
from retrain.tracking.external import ExternalTracker

Event = Callable[[], None]


class Background(Tracker):
    """Hands each event to `sink` in another thread. Neither an event nor its failure ever reaches the caller."""

    capacity = 1000
    """Events that may wait: minutes of an unreachable server, and some megabytes."""
    patience_s = 30.0
    """How long the end of a run waits for a tracker: time to upload the last steps, not the time of a server that is down."""

    def __init__(self, name: str, sink: ExternalTracker, say: Callable[[str], None], files: Path) -> None:
        """`files` is the folder that is named as holding what the tracker misses."""
        self._name = name
        self._sink = sink
        self._say = say
        self._files = files
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._complained = False
        self._closed = False

    # -- the caller's thread -----------------------------------------------------------------------------------------------

    def start(self, device: str) -> None:
        # A daemon: a tracker that hangs for ever must not keep the process alive either.
        self._thread = threading.Thread(target=self._work, name=f"tracker-{self._name}", daemon=True)
        self._thread.start()
        self._hand_over(lambda: self._sink.start(device))

    def generations(self, step: int, records: Sequence[GenerationRecord]) -> None:
        if kept := self._sink.kept_generations(step, records):  # before the queue, which would hold a whole step's texts
            self._hand_over(lambda: self._sink.generations(step, kept))

    def step(self, record: StepRecord) -> None:
        self._hand_over(lambda: self._sink.step(record))

    def evaluation(self, result: EvaluationResult) -> None:
        self._hand_over(lambda: self._sink.evaluation(result))

    def squeeze(self, result: SqueezeResult) -> None:
        self._hand_over(lambda: self._sink.squeeze(result))

    def finish(self, summary: RunSummary) -> None:
        self._hand_over(lambda: self._sink.finish(summary))

    def close(self) -> None:
        """Wait until the sink has taken everything, and not for ever."""
        if self._thread is None or self._closed:
            return
        self._closed = True
        self._events.put(None)
        self._thread.join(self.patience_s)
        self._tell_news()
        if self._thread.is_alive():
            self._complain(f"{self._name} has not ended after {self.patience_s:g} s and is left behind")
        if self._thread.is_alive() or self._failure is not None:
            self._sink.abandon()

    def state(self) -> dict[str, str]:
        return self._sink.state()

    def _hand_over(self, event: Event) -> None:
        self._tell_news()
        if self._thread is None or self._closed or self._failure is not None:
            return
        if self._events.qsize() < self.capacity:
            self._events.put(event)
        else:
            self._complain(f"{self._name} is {self.capacity} events behind and loses what comes while it is")

    def _tell_news(self) -> None:
        while not self._sink.outbox.empty():
            self._say(self._sink.outbox.get())
        if self._failure is not None:
            reason = " ".join(str(self._failure).split()) or "no reason given"
            self._complain(f"{self._name} failed and gets no more of this run ({type(self._failure).__name__}: {reason.rstrip('.')})")

    def _complain(self, what: str) -> None:
        if not self._complained:
            self._complained = True
            self._say(f"{what}; the run goes on, and {self._files} holds all of it.")

    # -- the tracker's thread ----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while (event := self._events.get()) is not None:
                event()
            self._sink.close()
        except Exception as error:  # whatever a library raises, it is not the run's end
            self._failure = error
            with contextlib.suppress(Exception):  # one failure is said, and a second one says nothing new
                self._sink.close()

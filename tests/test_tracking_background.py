"""A tracker that raises or hangs: the run goes on at its own pace, and the person at the screen is
told once.
"""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from runs import lines, small

from retrain.config import TrainConfig
from retrain.records.entries import StepRecord
from retrain.records.redact import Redactor
from retrain.records.run_folder import RunFolder
from retrain.tracking.base import Event, StartEvent
from retrain.tracking.external import Background, ExternalSettings, ExternalTracker
from tests.runs import small_run
from tests.trackers import keep_here


class Recorder(ExternalTracker):
    """Keeps the steps that it is told, after `hindrance` has let it."""

    def __init__(self, folder: Path, hindrance: Callable[[], object] = lambda: None) -> None:
        super().__init__(
            ExternalSettings(TrainConfig(), RunFolder(folder), "grpo+none", Redactor({}), {}, 0)
        )
        self.hindrance = hindrance
        self.steps: list[int] = []
        self.closed = 0

    def emit(self, event: Event) -> None:
        if isinstance(event, StepRecord):
            self.hindrance()
            self.steps.append(event.step)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def never() -> Iterator[threading.Event]:
    """Waiting for it takes until the test is over."""
    event = threading.Event()
    yield event
    event.set()


def started(sink: Recorder, folder: Path) -> tuple[Background, list[str]]:
    said: list[str] = []
    tracker = Background("recorder", sink, said.append, folder)
    tracker.emit(StartEvent("cpu"))
    return tracker, said


def tell(tracker: Background, steps: int) -> None:
    for step in range(steps):
        tracker.emit(StepRecord(step=step, condition="grpo+none"))


def fail() -> None:
    raise ZeroDivisionError("no such server.")


def test_every_event_arrives_in_its_order_before_the_end(tmp_path: Path) -> None:
    sink = Recorder(tmp_path, lambda: time.sleep(0.001))
    tracker, said = started(sink, tmp_path)
    tell(tracker, 50)
    tracker.close()
    tracker.close()
    assert (sink.steps, sink.closed, said) == (list(range(50)), 1, [])


def test_a_tracker_that_raises_is_said_once_and_closed(tmp_path: Path) -> None:
    sink = Recorder(tmp_path, fail)
    tracker, said = started(sink, tmp_path)
    for _ in range(3):
        tell(tracker, 2)
        time.sleep(0.05)
    tracker.close()
    assert sink.closed == 1
    cause = "recorder failed and receives nothing more from this run (ZeroDivisionError: no such"
    assert said == [f"{cause} server); the run continues, and {tmp_path} holds all of it."]


def test_a_tracker_that_hangs_takes_no_time_and_no_more_memory_than_its_queue(
    tmp_path: Path, never: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Background, "capacity", 10)
    monkeypatch.setattr(Background, "patience_s", 0.2)
    sink = Recorder(tmp_path, never.wait)
    tracker, said = started(sink, tmp_path)
    began = time.monotonic()
    tell(tracker, 10_000)
    tracker.close()
    assert time.monotonic() - began < 30, "the tracker hangs for ever"
    assert tracker._events.qsize() <= 11 and sink.steps == []
    cause = "recorder is 10 events behind and drops new ones until it catches up"
    assert said == [f"{cause}; the run continues, and {tmp_path} holds all of it."]


def test_the_end_of_a_run_waits_for_a_tracker_no_longer_than_its_patience(
    tmp_path: Path, never: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Background, "patience_s", 0.2)
    tracker, said = started(Recorder(tmp_path, never.wait), tmp_path)
    tell(tracker, 1)
    began = time.monotonic()
    tracker.close()
    assert 0.1 < time.monotonic() - began < 30
    assert [line.partition(";")[0] for line in said] == [
        "recorder did not end within 0.2 s, so retrain stops waiting for it"
    ]


def test_a_tracker_that_was_never_started_is_closed_at_once(tmp_path: Path) -> None:
    sink = Recorder(tmp_path)
    Background("recorder", sink, print, tmp_path).close()
    assert sink.closed == 0


@pytest.mark.parametrize("kind", ["raises", "hangs"])
def test_a_run_does_not_notice_what_becomes_of_its_tracker(
    kind: str,
    tmp_path: Path,
    never: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def init(**settings: Any) -> None:
        never.wait() if kind == "hangs" else fail()

    keep_here(tmp_path / "home", monkeypatch)
    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(Background, "patience_s", 0.2)
    run = small_run(
        small(tmp_path / "run", training={"max_steps": 2}, logging={"wandb_project": "p"})
    )
    out = capsys.readouterr().out
    assert [line["step"] for line in lines(run.folder / "metrics.jsonl")] == [0, 1]
    assert out.count("the run continues, and") == 1
    assert ("ZeroDivisionError" in out) == (kind == "raises")

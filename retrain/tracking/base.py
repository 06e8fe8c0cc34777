"""Emit one event to many sinks: the trainer emits each event, and every sink takes the events that
it uses.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from typing import Any

from retrain.records.entries import GenerationRecord, SftRecord, StepRecord
from retrain.records.evaluation import Evaluation
from retrain.records.summary import RunSummary, SqueezeSummary
from retrain.records.token_table import TokenTable


class Verbosity(IntEnum):
    """The amount of text that a run prints."""

    SILENT = 0
    QUIET = 1
    """The start, the evaluations and the end."""
    NORMAL = 2
    """On a terminal a row per step; elsewhere every line."""
    VERBOSE = 3
    """Every line on a terminal too."""


@dataclass(frozen=True)
class StartEvent:
    """The run holds its folder and is about to take its first step."""

    device: str
    """The device in use: cpu, mps or cuda:N."""


@dataclass(frozen=True)
class Message:
    """A line for the person at the screen: a terminal shows the short form of a `LogLine`, and the
    bar a `Doing`.
    """

    line: str


@dataclass(frozen=True)
class GroupScore:
    """The rewards of one group."""

    correct: int
    judged: int
    reference: str


@dataclass(frozen=True)
class GroupScores:
    """The reward has scored the groups of the current step."""

    groups: Sequence[GroupScore]


@dataclass(frozen=True)
class Generations:
    """All completions of one step; a sink keeps as many as `[logging]` says."""

    step: int
    records: Sequence[GenerationRecord]


@dataclass(frozen=True)
class Tokens:
    """The token table of one step; emitted only if some sink wants it."""

    step: int
    table: TokenTable


Event = (
    StartEvent
    | Message
    | GroupScores
    | Generations
    | Tokens
    | SftRecord
    | StepRecord
    | Evaluation
    | SqueezeSummary
    | RunSummary
)
"""A `StepRecord` ends a step. A `RunSummary` ends the run, with the status done, interrupted or
failed.
"""


def is_due(every: int, step: int) -> bool:
    """Return True at every `every`-th step, step 0 included; 0 means never."""
    return every > 0 and step % every == 0


class Tracker:
    """A sink for events. This base class ignores every event; a subclass matches on the events that
    it wants.
    """

    def emit(self, event: Event) -> None: ...

    def message(self, line: str) -> None:
        """Emit a `Message`; other parts take this method as their `log`."""
        self.emit(Message(line))

    def wants_tokens(self, step: int) -> bool:
        """Return True if the sink will keep this step's token table, which is costly to build."""
        return False

    def close(self) -> None:
        """Release files and connections; safe to call twice, and called after a failure too."""

    def state(self) -> dict[str, str]:
        """Return what a resumed run needs to continue in the same places, as part of the
        checkpoint.
        """
        return {}

    @property
    def is_behind(self) -> bool:
        """True if the disk refused something that is still to write, so that a sync is due."""
        return False

    def sync(self) -> dict[str, dict[str, Any]]:
        """Flush everything emitted so far to the disk, and return the extent of each of the run's
        files. Raises OSError.
        """
        return {}


class Trackers(Tracker):
    """Hands every event to each of several sinks, in their order."""

    def __init__(self, sinks: Sequence[Tracker]) -> None:
        self.sinks = tuple(sinks)

    def emit(self, event: Event) -> None:
        for sink in self.sinks:
            sink.emit(event)

    def wants_tokens(self, step: int) -> bool:
        return any(sink.wants_tokens(step) for sink in self.sinks)

    def close(self) -> None:
        with ExitStack() as closing:  # Close every sink, even if another fails.
            for sink in self.sinks:
                closing.callback(sink.close)

    def state(self) -> dict[str, str]:
        return dict(chain.from_iterable(sink.state().items() for sink in self.sinks))

    @property
    def is_behind(self) -> bool:
        return any(sink.is_behind for sink in self.sinks)

    def sync(self) -> dict[str, dict[str, Any]]:
        return dict(chain.from_iterable(sink.sync().items() for sink in self.sinks))

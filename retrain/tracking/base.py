"""One event, many sinks. The trainer tells a `Tracker` what happens; every sink takes what it has a use for."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from retrain.errors import ConfigurationError
from retrain.records.entries import EvaluationResult, GenerationRecord, RunSummary, SqueezeResult, StepRecord
from retrain.records.run_folder import RunFolder

if TYPE_CHECKING:
    from retrain.config import TrainConfig
    from retrain.records.redact import Redactor
    from retrain.records.token_table import TokenTable
    from retrain.tracking.external import ExternalSettings, ExternalTracker


class Tracker:
    """The events of a run, in the order of a run. Each does nothing here, so a sink overrides what it wants."""

    def start(self, device: str) -> None:
        """The run's folder is ours and step 0 is near. `device` is the one in use: cpu, mps, cuda:0."""

    def message(self, line: str) -> None:
        """A line for the person at the screen."""

    def group(self, correct: int, judged: int, reference: str) -> None:
        """One scored group of the current step."""

    def progress(self, label: str, done: int, total: int) -> None:
        """How far a long step is; called as often as one likes."""

    def generations(self, step: int, records: Sequence[GenerationRecord]) -> None:
        """The completions of one step, all of them: a sink keeps as many as it was told to."""

    def wants_tokens(self, step: int) -> bool:
        """Whether any sink keeps this step's token table, which is costly to build."""
        return False

    def tokens(self, step: int, table: "TokenTable") -> None: ...

    def step(self, record: StepRecord) -> None:
        """A step is over."""

    def evaluation(self, result: EvaluationResult) -> None: ...

    def squeeze(self, result: SqueezeResult) -> None:
        """The analysis of an adapter, in a tracker of its own."""

    def finish(self, summary: RunSummary) -> None:
        """The run is done, was interrupted, or has failed."""

    def close(self) -> None:
        """Release files and connections; safe to call twice, and called after a failure too."""

    def state(self) -> dict[str, str]:
        """What a resumed run needs to go on in the same places; goes into the checkpoint."""
        return {}

    @property
    def is_behind(self) -> bool:
        """Whether the disk refused something that is still to be written: a sync is due."""
        return False

    def sync(self) -> dict[str, dict[str, Any]]:
        """Put on the disk what was told so far, and return how far each of the run's files reaches. Raises OSError."""
        return {}


class Trackers(Tracker):
    """Hands every event to each of several sinks, in their order."""

    def __init__(self, sinks: Sequence[Tracker]) -> None:
        self.sinks = tuple(sinks)

    def start(self, device: str) -> None:
        for sink in self.sinks:
            sink.start(device)

    def message(self, line: str) -> None:
        for sink in self.sinks:
            sink.message(line)

    def group(self, correct: int, judged: int, reference: str) -> None:
        for sink in self.sinks:
            sink.group(correct, judged, reference)

    def progress(self, label: str, done: int, total: int) -> None:
        for sink in self.sinks:
            sink.progress(label, done, total)

    def generations(self, step: int, records: Sequence[GenerationRecord]) -> None:
        for sink in self.sinks:
            sink.generations(step, records)

    def wants_tokens(self, step: int) -> bool:
        return any(sink.wants_tokens(step) for sink in self.sinks)

    def tokens(self, step: int, table: "TokenTable") -> None:
        for sink in self.sinks:
            sink.tokens(step, table)

    def step(self, record: StepRecord) -> None:
        for sink in self.sinks:
            sink.step(record)

    def evaluation(self, result: EvaluationResult) -> None:
        for sink in self.sinks:
            sink.evaluation(result)

    def squeeze(self, result: SqueezeResult) -> None:
        for sink in self.sinks:
            sink.squeeze(result)

    def finish(self, summary: RunSummary) -> None:
        for sink in self.sinks:
            sink.finish(summary)

    def close(self) -> None:
        with ExitStack() as closing:  # every sink is closed, even if one of them fails to
            for sink in self.sinks:
                closing.callback(sink.close)

    def state(self) -> dict[str, str]:
        merged: dict[str, str] = {}
        for sink in self.sinks:
            merged |= sink.state()
        return merged

    @property
    def is_behind(self) -> bool:
        return any(sink.is_behind for sink in self.sinks)

    def sync(self) -> dict[str, dict[str, Any]]:
        merged: dict[str, dict[str, Any]] = {}
        for sink in self.sinks:
            merged |= sink.sync()
        return merged


def build_tracker(
    config: "TrainConfig",
    folder: RunFolder,
    *,
    condition: str,
    quiet: bool = False,
    resumed: Mapping[str, str] | None = None,
    first_step: int = 0,
) -> Tracker:
    """The sinks that the configuration asks for. `resumed` is the `state` of the run's earlier session, which ended before `first_step`.

    Raises EnvironmentFailure, naming the extra, for a tracker whose package is not installed.
    """
    from retrain.records.redact import Redactor
    from retrain.tracking.console import Console
    from retrain.tracking.files import RunFiles

    redactor = Redactor()
    console = Console(quiet=quiet, redactor=redactor, folder=folder.path)
    run_name = redactor.text(config.logging.wandb_run_name or condition)
    others = _external_trackers(config, folder, run_name, redactor, console.message, resumed or {}, first_step)
    return Trackers([console, RunFiles(config, folder, redactor), *others])


SQUEEZE_RUN = "squeeze-analysis"


def track_squeeze(config: "TrainConfig", folder: RunFolder, result: SqueezeResult, say: Callable[[str], None]) -> None:
    """Send the analysis of an adapter to the trackers that the configuration asks for, as a run `squeeze-analysis` of its own.

    What the trackers keep on disk goes below `folder`. Raises EnvironmentFailure for a tracker whose package is not installed.
    """
    from retrain.records.redact import Redactor

    sinks = _external_trackers(config, folder, SQUEEZE_RUN, Redactor(), say, {}, 0)
    if not sinks:
        return
    folder.path.mkdir(parents=True, exist_ok=True)
    tracker = Trackers(sinks)
    try:
        tracker.start(config.squeeze.device)
        tracker.squeeze(result)
        tracker.finish(RunSummary("done", SQUEEZE_RUN, config.training.seed, 0, 0.0, 0, None, None, None, ""))
    finally:
        tracker.close()


def _external_trackers(
    config: "TrainConfig",
    folder: RunFolder,
    run_name: str,
    redactor: "Redactor",
    say: Callable[[str], None],
    resumed: Mapping[str, str],
    first_step: int,
) -> list[Tracker]:
    """Each in a thread of its own, so that what happens in it is not the run's affair."""
    names = tracker_names(config)
    if not names:
        return []
    from retrain.tracking.external import Background, ExternalSettings

    settings = ExternalSettings(config, folder, run_name, redactor, resumed, first_step)
    return [Background(name, _external(name, settings), say, folder.path) for name in names]


def tracker_names(config: "TrainConfig") -> list[str]:
    """`[logging] trackers`; a wandb_project adds wandb."""
    names: list[str] = list(dict.fromkeys(config.logging.trackers))
    return [*names, "wandb"] if config.logging.wandb_project and "wandb" not in names else names


def _external(name: str, settings: "ExternalSettings") -> "ExternalTracker":
    match name:
        case "wandb":
            from retrain.tracking.wandb import WandbTracker

            return WandbTracker(settings)
        case "trackio":
            from retrain.tracking.trackio import TrackioTracker

            return TrackioTracker(settings)
        case "tensorboard":
            from retrain.tracking.tensorboard import TensorboardTracker

            return TensorboardTracker(settings)
    raise ConfigurationError(f"[logging] trackers = {name!r} is not known; allowed are wandb, trackio, tensorboard.")

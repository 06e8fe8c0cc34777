"""The sinks that a configuration asks for: the screen, the run's folder, and the trackers of
`[logging] trackers`.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from retrain.records.redact import Redactor
from retrain.records.run_folder import RunFolder
from retrain.records.summary import RunSummary, SqueezeSummary
from retrain.tracking.base import StartEvent, Tracker, Trackers, Verbosity
from retrain.tracking.console import Console
from retrain.tracking.external import (
    FOLDER,
    Background,
    ExternalSettings,
    ExternalTracker,
    check_extra,
)
from retrain.tracking.files import RunFiles
from retrain.tracking.screen import title_of
from retrain.tracking.tensorboard import TensorboardTracker
from retrain.tracking.trackio import TrackioTracker
from retrain.tracking.wandb import WandbTracker

if TYPE_CHECKING:
    from retrain.config import TrainConfig
    from retrain.config.schema import Logging

_EXTERNAL: dict[str, type[ExternalTracker]] = {
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
    "tensorboard": TensorboardTracker,
}
"""Name -> tracker class; its constructor imports the library."""

SQUEEZE_RUN = "squeeze-analysis"


def build_tracker(
    config: "TrainConfig",
    folder: RunFolder,
    *,
    condition: str,
    verbosity: Verbosity = Verbosity.NORMAL,
    resumed: Mapping[str, str] | None = None,
    first_step: int = 0,
) -> Tracker:
    """Build the sinks of a run. `resumed` is the `state` of the run's earlier session, which ended
    before `first_step`.

    Raises EnvironmentFailure, naming the extra, for a tracker without its package.
    """
    redactor = Redactor()
    console = Console(
        verbosity,
        title=title_of(config, condition),
        max_steps=config.training.max_steps,
        all_groups=config.logging.groups,
        redactor=redactor,
        folder=folder.path,
    )
    run_name = redactor.text(config.logging.wandb_run_name or condition)
    resumed = resumed or {}
    first = RunFolder(Path(resumed.get(FOLDER, folder.path)))
    moved = first.path.resolve() != folder.path.resolve()
    if moved and tracker_names(config.logging) and os.access(first.config, os.R_OK):
        console.message(
            f"{folder.path} is a copy of {first.path}, so its trackers begin runs of their own."
        )
        resumed = {}
    settings = ExternalSettings(config, folder, run_name, redactor, resumed, first_step)
    return Trackers(
        [
            console,
            RunFiles(config, folder, redactor, first_step),
            *_external_trackers(settings, console.message),
        ]
    )


def track_squeeze(
    config: "TrainConfig", folder: RunFolder, summary: SqueezeSummary, log: Callable[[str], None]
) -> None:
    """Send the analysis of an adapter to the trackers that the configuration asks for, as a run
    `squeeze-analysis` of its own.

    The trackers keep their files below `folder`. Raises EnvironmentFailure for a tracker without
    its package.
    """
    tracker = Trackers(
        _external_trackers(ExternalSettings(config, folder, SQUEEZE_RUN, Redactor(), {}, 0), log)
    )
    if not tracker.sinks:
        return
    folder.path.mkdir(parents=True, exist_ok=True)
    try:
        tracker.emit(StartEvent(config.squeeze.device))
        tracker.emit(summary)
        tracker.emit(
            RunSummary("done", SQUEEZE_RUN, config.training.seed, 0, 0.0, 0, None, None, None, "")
        )
    finally:
        tracker.close()


def _external_trackers(settings: ExternalSettings, log: Callable[[str], None]) -> list[Tracker]:
    """Make each tracker with a separate thread, so that its failures and delays do not reach the
    run.
    """
    return [
        Background(name, _EXTERNAL[name](settings), log, settings.folder.path)
        for name in tracker_names(settings.config.logging)
    ]


def check_packages(settings: "Logging") -> None:
    """Raise EnvironmentFailure for the first tracker of `[logging]` without its package."""
    for name in tracker_names(settings):
        check_extra(name, "" if name == "wandb" else name)


def tracker_names(settings: "Logging") -> list[str]:
    """Return `[logging] trackers`, and wandb if the configuration sets a wandb_project."""
    names: list[str] = list(dict.fromkeys(settings.trackers))
    if settings.wandb_project and "wandb" not in names:
        return [*names, "wandb"]
    return names

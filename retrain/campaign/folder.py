"""A campaign's folder: its name, who writes it, and the manifest in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from retrain.campaign.manifest import MANIFEST, TIMESTAMP, Manifest
from retrain.campaign.plan import Plan, plan_campaign
from retrain.config import TrainConfig
from retrain.errors import ConfigurationError, EnvironmentFailure
from retrain.records.run_folder import RunFolder, mark
from retrain.run.opening import writer_lock

LOGS = Path("logs")


@contextmanager
def open_campaign(config: TrainConfig, now: datetime) -> Iterator[tuple[Plan, Manifest]]:
    """The campaign's plan and its manifest, written; one writer a campaign for as long as the context lasts.

    `[resume] from` names a campaign to go on with; `[logging] log_dir`, if it is given, a folder for a new one; else it is
    `logs/campaign_YYYYMMDD_HHMMSS`. Raises ConfigurationError for a folder that may not be used.
    """
    resumed = bool(config.resume.from_)
    folder = Path(config.resume.from_) if resumed else _new_folder(config, now)
    if resumed and not (folder / MANIFEST).is_file():
        raise ConfigurationError(f"--resume {folder} holds no campaign (no {MANIFEST}); name a campaign's folder.")
    plan = plan_campaign(config, folder)
    mark(folder, "campaign")
    with writer_lock(RunFolder(folder)):
        if resumed:
            manifest = Manifest.read(folder)
            manifest.resumed_with(plan)
        else:
            manifest = Manifest.of_plan(plan, now)
        manifest.write()
        yield plan, manifest


def _new_folder(config: TrainConfig, now: datetime) -> Path:
    if not config.is_set("logging.log_dir"):
        return _timestamped(now)
    folder = Path(config.logging.log_dir)
    if (folder / MANIFEST).is_file():
        raise ConfigurationError(
            f"{folder} already holds a campaign: go on with it by --resume {folder}, or choose another [logging] log_dir."
        )
    if RunFolder(folder).holds_run():
        raise ConfigurationError(f"{folder} holds a run; choose another [logging] log_dir for the campaign, or leave it out.")
    return folder


def _timestamped(now: datetime) -> Path:
    """logs/campaign_<local time>, with -2, -3, ... where that is taken; made here, so that of two starters each gets its own."""
    name = f"campaign_{now.strftime(TIMESTAMP)}"
    number = 1
    while True:
        folder = LOGS / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        except OSError as error:
            raise EnvironmentFailure(f"{folder} cannot be made: {error.strerror}; choose another [logging] log_dir.") from error
        else:
            return folder

"""Devices of the workers of a parallel campaign."""

from collections.abc import Sequence
from dataclasses import replace

from retrain.campaign.plan import CampaignPlan, CampaignRun
from retrain.config import replaced
from retrain.config.schema import Campaign
from retrain.errors import ConfigurationError

Devices = tuple[str, ...]
"""Names as torch has them, for example ("cuda:0",); empty leaves the run's configuration unchanged."""


def share_devices(plan: CampaignPlan) -> list[Devices]:
    """The devices of each worker: groups of `devices_per_run` GPUs, assigned in turn.

    The GPUs are those named by `[backend] devices`, or all of the machine. Without a GPU only `max_workers` limits the workers (0: one for
    each run). Raises ConfigurationError for more workers than the GPUs can hold.
    """
    settings = plan.settings
    pool = _pool(plan)
    room = room_on_gpus(plan)
    if room is None:
        return [()] * (settings.max_workers or len(plan.runs))
    groups = _groups(pool, settings)
    workers = settings.max_workers or min(room, len(plan.runs))
    if workers > room:
        raise ConfigurationError(
            f"[campaign] max_workers = {workers} exceeds the {room} runs that fit on {len(pool)} GPUs (devices_per_run = "
            f"{settings.devices_per_run}, workers_per_device = {settings.workers_per_device}); lower it, or set workers_per_device = "
            f"{-(-workers // len(groups))} if the memory of one GPU is enough for that."
        )
    return [groups[number % len(groups)] for number in range(workers)]


def room_on_gpus(plan: CampaignPlan) -> int | None:
    """Number of runs that fit on the GPUs at once; None without a GPU. Raises ConfigurationError if not even one fits."""
    pool = _pool(plan)
    return len(_groups(pool, plan.settings)) * plan.settings.workers_per_device if pool else None


def on_devices(run: CampaignRun, devices: Devices) -> CampaignRun:
    """Return `run` with these devices in its configuration."""
    if not devices:
        return run
    config = replaced(run.config, {"backend.devices": ",".join(devices)}, origin="file")
    return replace(run, config=config)


def _pool(plan: CampaignPlan) -> Devices:
    if plan.config.is_set("backend.devices"):
        named = plan.config.backend.device_list
        return named if all(name.startswith("cuda") for name in named) else ()
    if plan.config.backend.backend != "local":
        return ()
    import torch

    return tuple(f"cuda:{index}" for index in range(torch.cuda.device_count()))


def _groups(pool: Devices, settings: Campaign) -> Sequence[Devices]:
    size = settings.devices_per_run
    groups = [pool[start : start + size] for start in range(0, len(pool) - size + 1, size)]
    if not groups:
        raise ConfigurationError(f"[campaign] devices_per_run = {size} exceeds the number of devices ({', '.join(pool)}); lower it.")
    return groups

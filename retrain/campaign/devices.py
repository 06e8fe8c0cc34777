"""Which devices the runs of a parallel campaign take, in turn."""

from collections.abc import Sequence

from retrain.campaign.plan import CampaignPlan, CampaignRun
from retrain.config import replaced
from retrain.config.schema import Campaign
from retrain.errors import ConfigurationError

Devices = tuple[str, ...]
"""torch's names; empty leaves the run's configuration as it is."""


def share_devices(plan: CampaignPlan) -> list[Devices]:
    """The devices of each worker, one entry a worker. Raises ConfigurationError for more workers than the GPUs have room for.

    The devices are those that `[backend] devices` names, else all GPUs of the machine. Without a GPU there is no limit but max_workers:
    0 is a worker for every run.
    """
    settings = plan.settings
    pool = _pool(plan)
    room = room_on_gpus(plan)
    if room is None:
        return [()] * (settings.max_workers or len(plan.runs))
    groups = _groups(pool, settings)
    workers = settings.max_workers or min(room, len(plan.runs))
    if workers > room:
        raise ConfigurationError(_too_many(workers, room, pool, len(groups), settings))
    return [groups[number % len(groups)] for number in range(workers)]


def room_on_gpus(plan: CampaignPlan) -> int | None:
    """Runs that the GPUs hold at once; None without a GPU. Raises ConfigurationError where they do not hold one."""
    pool = _pool(plan)
    return len(_groups(pool, plan.settings)) * plan.settings.workers_per_device if pool else None


def on_devices(run: CampaignRun, devices: Devices) -> CampaignRun:
    if not devices:
        return run
    config = replaced(run.config, {"backend.devices": ",".join(devices)}, origin="file")
    return CampaignRun(run.name, run.condition, run.seed, config)


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
        raise ConfigurationError(f"[campaign] devices_per_run = {size} is more than the devices there are ({', '.join(pool)}); lower it.")
    return groups


def _too_many(workers: int, room: int, pool: Devices, groups: int, settings: Campaign) -> str:
    needed = -(-workers // groups)
    return (
        f"[campaign] max_workers = {workers} is more than the {room} runs that {len(pool)} GPUs have room for (devices_per_run = "
        f"{settings.devices_per_run}, workers_per_device = {settings.workers_per_device}); lower it, or set workers_per_device = {needed} "
        "if their memory holds so many."
    )

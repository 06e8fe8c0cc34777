"""The duration of a step, from earlier runs or from one step measured now, and of a whole run or
campaign.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from retrain.backends.base import backend_kind
from retrain.campaign.launch import room_on_gpus, share_devices
from retrain.errors import ConfigurationError
from retrain.records.terminal import counted
from retrain.system import Json, usable_cores

if TYPE_CHECKING:
    from retrain.campaign.plan import CampaignPlan
    from retrain.config import TrainConfig
    from retrain.model.memory import Memory


_NO_TRACE: dict[str, object] = {
    "evaluation.every": 0,
    "evaluation.at_start": False,
    "evaluation.at_end": False,
    "logging.trackers": [],
    "logging.wandb_project": "",
    "backend.adapter_path": "",
    "resume.from": "",
    "sft.steps": 0,
    "sft.epochs": 0.0,
    "training.max_steps": 1,
}
"""Settings with which a measured step evaluates nothing and writes only into its own folder."""


@dataclass(frozen=True)
class StepTime:
    seconds: float
    source: str
    """The kind of measurement, in words."""
    peak_memory_gib: float | None = None
    """Measured peak: of the device on CUDA, of the whole process elsewhere."""


def from_pilot(folder: Path) -> StepTime:
    """Take the median step time over all runs in or below `folder`. Raises ConfigurationError
    without a run or a step.
    """
    from retrain.analysis.runs import find_runs
    from retrain.records.entries import StepRecord

    runs = find_runs(folder)
    times = [
        record.step_time_s
        for run in runs
        for record in StepRecord.read(run.folder.metrics)
        if record.step_time_s is not None
    ]
    if not times:
        raise ConfigurationError(
            f"--pilot {folder} has no step yet, so it has no time; wait for one, or use --probe."
        )
    where = f"{len(runs)} runs in {folder}" if len(runs) > 1 else str(folder)
    return StepTime(median(times), f"median of {counted(len(times), 'step')}, {where}")


def pilot_differences(folder: Path, config: "TrainConfig") -> Iterator[str]:
    """Yield one sentence per key that affects the time of a step and differs in the pilot."""
    from retrain.analysis.runs import find_runs
    from retrain.config.keys import all_keys
    from retrain.system import toml_value

    pilots = [run.config for run in find_runs(folder)]
    for path in [key.path for key in all_keys() if key.traits.sets_step_time]:
        values = list(dict.fromkeys(toml_value(pilot.value(path)) for pilot in pilots))
        if values != [toml_value(config.value(path))]:
            section, _, name = path.partition(".")
            yield (
                f"The pilot ran with [{section}] {name} = {' and '.join(values)}; here it is"
                f" {toml_value(config.value(path))}."
            )


def from_probe(config: "TrainConfig", say: Callable[[str], None]) -> StepTime:
    """Load everything, take the first step of `config` (a single run) in a temporary folder, and
    measure it.

    Raises what a run raises up to the end of its first step.
    """
    from retrain.config.load import replaced
    from retrain.records.entries import StepRecord
    from retrain.run.loop import take_step
    from retrain.run.session import Session
    from retrain.tracking.base import Verbosity

    with tempfile.TemporaryDirectory(prefix="retrain-probe-") as folder:
        say(f"Measuring one step of {config.condition_label} ...")
        probe = replaced(config, _NO_TRACE | {"logging.log_dir": str(Path(folder) / "run")})
        with Session.open(probe, overwrite=False, verbosity=Verbosity.SILENT) as session:
            take_step(session)
        (record,) = StepRecord.read(session.folder.metrics)
    assert record.step_time_s is not None
    return StepTime(record.step_time_s, "one measured step, the first", record.peak_memory_gib)


@dataclass(frozen=True)
class Workers:
    """The number of runs that a campaign could make at once, and its limit."""

    count: int
    because: str


@dataclass(frozen=True)
class Schedule:
    total_runs: int
    steps_per_run: int
    steps_done: int
    """Steps that earlier sessions took, over all runs, when a run or campaign resumes."""
    effective_parallelism: int
    recommended: Workers | None
    """The number of workers that the machine suggests; None for a single run."""
    devices: int
    """Devices in use at the same time."""
    step_time: StepTime | None
    """Seconds for one step of one run; None without a measurement."""
    price_per_hour: float
    """Price of one device hour; 0 if it is unknown."""

    @property
    def total_campaign_steps(self) -> int:
        return self.total_runs * self.steps_per_run

    @property
    def steps_left(self) -> int:
        return max(0, self.total_campaign_steps - self.steps_done)

    @property
    def estimated_wall_time_s(self) -> float | None:
        """The seconds for the remaining steps, without evaluations, loading and waiting."""
        if self.step_time is None:
            return None
        return self.steps_left * self.step_time.seconds / self.effective_parallelism

    @property
    def device_hours(self) -> float | None:
        seconds = self.estimated_wall_time_s
        if seconds is None:
            return None
        return seconds * self.devices / 3600

    @property
    def cost(self) -> float | None:
        """The cost of the remaining steps in the currency of the price; None without a price or a
        step time.
        """
        if self.device_hours is not None and self.price_per_hour:
            return self.device_hours * self.price_per_hour
        return None

    def to_json(self) -> Json:
        return {
            "total_runs": self.total_runs,
            "steps_per_run": self.steps_per_run,
            "steps_done": self.steps_done,
            "total_campaign_steps": self.total_campaign_steps,
            "effective_parallelism": self.effective_parallelism,
            "recommended_max_workers": self.recommended.count if self.recommended else None,
            "median_step_time_s": self.step_time.seconds if self.step_time else None,
            "step_time_source": self.step_time.source if self.step_time else None,
            "estimated_wall_time_s": self.estimated_wall_time_s,
            "device_hours": self.device_hours,
            "price_per_hour": self.price_per_hour or None,
            "cost": self.cost,
        }


def schedule_campaign(
    plan: "CampaignPlan",
    steps_done: int,
    memory: "Memory | None",
    step_time: StepTime | None,
    price_per_hour: float | None,
) -> Schedule:
    """Predict the time and cost of a campaign; `price_per_hour` overrides `[campaign]
    price_per_hour`. Raises ConfigurationError for more workers than the GPUs have room for.
    """
    settings = plan.settings
    parallelism = min(_workers(plan), len(plan.runs))
    processor = memory is not None and memory.machine.device_type == "cpu"
    return Schedule(
        total_runs=len(plan.runs),
        steps_per_run=plan.max_steps,
        steps_done=steps_done,
        effective_parallelism=parallelism,
        recommended=recommended_workers(plan, memory),
        devices=(
            1
            if processor
            else ceil(parallelism / settings.workers_per_device) * settings.devices_per_run
        ),
        step_time=step_time,
        price_per_hour=settings.price_per_hour if price_per_hour is None else price_per_hour,
    )


def _workers(plan: "CampaignPlan") -> int:
    settings = plan.settings
    if settings.launcher == "ray":
        return settings.max_workers or len(plan.runs)
    if settings.parallel:
        return len(share_devices(plan))
    return 1


def recommended_workers(plan: "CampaignPlan", memory: "Memory | None") -> Workers:
    """Count the runs that can each have a device, a core or a concurrent call of their own, and
    enough memory.
    """
    settings, backend = plan.settings, plan.config.backend
    bounds = [Workers(len(plan.runs), "all runs at once")]
    # A Ray cluster elsewhere starts as many as it has room for.
    if settings.ray_address:
        return bounds[0]
    if backend_kind(backend.backend).throttled:
        bounds.append(
            Workers(backend.max_concurrent, "more would wait for [backend] max_concurrent")
        )
    room = room_on_gpus(plan)
    if room is not None:
        bounds.append(
            Workers(
                room,
                "what the GPUs have room for, with workers_per_device ="
                f" {settings.workers_per_device}",
            )
        )
    elif memory is not None and memory.machine.device_type == "cpu":
        cores = usable_cores()
        bounds.append(
            Workers(
                cores,
                "one core here" if cores == 1 else f"{cores} cores here, and a run keeps one busy",
            )
        )
        bounds.append(Workers(memory.machine.usable // memory.peak, "what memory has room for"))
    tightest = min(bounds, key=lambda bound: bound.count)
    return Workers(max(1, tightest.count), tightest.because)

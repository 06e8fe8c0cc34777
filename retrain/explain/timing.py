"""How long a step takes: from runs that were made before, or from one step that is made now."""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from retrain.errors import ConfigurationError

if TYPE_CHECKING:
    from retrain.config import TrainConfig

_SAME = (
    "model.model", "model.lora_rank", "model.dtype", "training.batch_size", "training.group_size", "training.max_tokens",
    "training.updates_per_batch", "backend.devices", "inference.engine",
)  # fmt: skip
"""What a step's time hangs on most."""
_NO_TRACE: dict[str, object] = {
    "evaluation.every": 0,
    "evaluation.at_start": False,
    "evaluation.at_end": False,
    "logging.trackers": [],
    "logging.wandb_project": "",
    "backend.adapter_path": "",
    "resume.from": "",
}
"""A measured step evaluates nothing and writes nowhere but into its own folder."""


@dataclass(frozen=True)
class StepTime:
    seconds: float
    source: str
    """In words."""
    peak_memory_gib: float | None = None
    """As measured; of the device on CUDA, of the whole process elsewhere."""


def from_pilot(folder: Path) -> StepTime:
    """The median over all steps of all runs in or below `folder`. Raises ConfigurationError where there is no run or no step."""
    from retrain.analysis.runs import find_runs, read_metrics

    runs = find_runs(folder)
    times = [
        time for run in runs for time in read_metrics(run.folder.metrics, ("step_time_s",))["step_time_s"].to_pylist() if time is not None
    ]
    if not times:
        raise ConfigurationError(f"--pilot {folder} holds no step yet, so no time was measured; wait for one, or use --probe.")
    where = f"{len(runs)} runs in {folder}" if len(runs) > 1 else str(folder)
    return StepTime(median(times), f"median of {len(times):,} steps, {where}")


def pilot_differences(folder: Path, config: "TrainConfig") -> Iterator[str]:
    """One sentence for each key that a step's time hangs on and that the pilot had otherwise."""
    from retrain.analysis.runs import find_runs
    from retrain.config.toml import toml_value

    pilots = [run.config for run in find_runs(folder)]
    for path in _SAME:
        values = list(dict.fromkeys(toml_value(pilot.value(path)) for pilot in pilots))
        if values != [toml_value(config.value(path))]:
            section, _, name = path.partition(".")
            yield f"The pilot ran with [{section}] {name} = {' and '.join(values)}, and this is {toml_value(config.value(path))}."


def from_probe(config: "TrainConfig", say: Callable[[str], None]) -> StepTime:
    """Load everything, make the first step of `config` (a single run) in a folder of its own, and measure it.

    Raises what a run raises before its first step.
    """
    from retrain.config.load import replaced
    from retrain.run.loop import take_step
    from retrain.run.session import Session
    from retrain.tracking import StepRecord, read_jsonl

    with tempfile.TemporaryDirectory(prefix="retrain-probe-") as folder:
        say(f"Measuring one step of {config.condition_label} ...")
        probe = replaced(config, _NO_TRACE | {"logging.log_dir": str(Path(folder) / "run")})
        with Session.open(probe, overwrite=False, quiet=True) as session:
            take_step(session)
        (line,) = read_jsonl(session.folder.metrics)
        record = StepRecord.from_json(line)
    assert record.step_time_s is not None
    return StepTime(record.step_time_s, "one measured step, the first", record.peak_memory_gib)

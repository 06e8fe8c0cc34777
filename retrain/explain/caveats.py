"""What may go otherwise than a campaign expects: seeds that cannot conclude, workers without a device, memory that is shared."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.analysis.power import minimal_detectable_effect
from retrain.analysis.statistics import seeds_to_reach
from retrain.errors import ConfigurationError

if TYPE_CHECKING:
    from retrain.config import TrainConfig
    from retrain.explain.timing import Schedule
    from retrain.model.memory import Memory

ALPHA, POWER = 0.05, 0.8
"""Those that `compare` and `power` have by default."""


@dataclass(frozen=True)
class Power:
    """What the seeds of a campaign can find, every condition compared with the first."""

    seeds: int
    comparisons: int
    seeds_needed: int
    """The fewest with which anything can be significant."""
    detectable: float | None
    """Smallest mean difference found with a probability of 80%; in standard deviations of the paired differences, or in the
    metric's own unit where a pilot shows the spread. None where nothing can be significant."""
    metric: str | None
    """The pilot's; None without its spread."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"alpha": ALPHA, "power": POWER}


def power_of(config: "TrainConfig", pilot: Path | None) -> Power | None:
    """None where there is nothing to compare."""
    if config.campaign is None or len(config.conditions) < 2:
        return None
    seeds, comparisons = len(config.campaign.seeds), len(config.conditions) - 1
    sd, metric = _spread(pilot)
    detectable = minimal_detectable_effect(seeds, sd, ALPHA, POWER, comparisons)
    return Power(seeds, comparisons, max(2, seeds_to_reach(ALPHA, comparisons)), detectable, metric)


def _spread(pilot: Path | None) -> tuple[float, str | None]:
    """Of the pilot's differences, and in what; the unit where the pilot has too few runs to show it."""
    if pilot is None:
        return 1.0, None
    from retrain.analysis.power import read_pilot

    try:
        found = read_pilot(pilot)
    except ConfigurationError:
        return 1.0, None
    return found.sd, found.metric.name


def campaign_caveats(config: "TrainConfig", schedule: "Schedule | None", memory: "Memory | None", power: Power | None) -> Iterator[str]:
    """Of the campaign as a whole."""
    if config.campaign is None:
        return
    if power and power.detectable is None:
        yield (
            f"{_counted(power.seeds, 'seed')} can conclude nothing over {_counted(power.comparisons, 'comparison')}: the smallest p that "
            f"sign flips can give is {_smallest_p(power):.2g} after Holm; {power.seeds_needed} seeds are the fewest that reach {ALPHA:g}."
        )
    if config.is_set("evaluation.at_end") and not config.evaluation.asked_for:
        yield "No held-out evaluation ([evaluation] at_end = false), so conditions are compared by their training correct rate."
    if schedule is not None:
        yield from _workers(schedule)
        yield from _shared_memory(config, schedule, memory)


def _workers(schedule: "Schedule") -> Iterator[str]:
    best = schedule.recommended
    if best is not None and schedule.effective_parallelism > best.count:
        yield f"{schedule.effective_parallelism} runs at once are more than the recommended {best.count}: {best.because}."


def _shared_memory(config: "TrainConfig", schedule: "Schedule", memory: "Memory | None") -> Iterator[str]:
    """Every run sizes its budgets as if the device were its own."""
    campaign = config.campaign
    if memory is None or campaign is None or memory.machine.device_type != "cuda" or schedule.effective_parallelism < 2:
        return
    from retrain.model.memory import size_words

    sharing = campaign.workers_per_device
    if sharing > 1 and sharing * memory.peak > memory.machine.memory:
        yield (
            f"[campaign] workers_per_device = {sharing}: so many runs take up to {size_words(sharing * memory.peak)} of "
            f"{size_words(memory.machine.memory)} on one device, since each sizes its KV cache as if it were alone."
        )


def _smallest_p(power: Power) -> float:
    from retrain.analysis.statistics import smallest_p

    return min(1.0, power.comparisons * smallest_p(power.seeds))


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"

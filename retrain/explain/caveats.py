"""Warnings about a campaign: too few seeds to conclude anything, more workers than recommended,
shared device memory.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.analysis.design import Design, cheapest
from retrain.analysis.power import (
    Correction,
    design_line,
    minimal_detectable_effect,
    seeds_to_conclude,
)
from retrain.campaign.plan import planned_seeds
from retrain.errors import ConfigurationError

if TYPE_CHECKING:
    from retrain.analysis.pilot import Pilot
    from retrain.config import TrainConfig
    from retrain.config.schema import Campaign
    from retrain.explain.timing import Schedule
    from retrain.model.memory import Memory

ALPHA, POWER = 0.05, 0.8
"""The defaults of `compare` and `power`."""


@dataclass(frozen=True)
class Power:
    """The effects that a campaign's seeds can detect if every condition is compared with the
    first.
    """

    seeds: int
    comparisons: int
    seeds_needed: int
    """The fewest seeds with which anything can be significant."""
    detectable: float | None
    """The smallest mean difference found with a probability of POWER, in the pilot's metric, or
    without a pilot in standard deviations of the paired differences. None if nothing can be
    significant."""
    metric: str | None
    """The metric of the pilot; None without a pilot that shows the spread."""
    cheapest: Design | None = None
    """The seeds, problems and samples that find the same difference in the least time; None where
    the pilot does not show it."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"alpha": ALPHA, "power": POWER}


def campaign_power(
    campaign: "Campaign | None", conditions: int, pilot: Path | None
) -> Power | None:
    """Compute what a campaign can detect; None unless it has two conditions or more."""
    if campaign is None or conditions < 2:
        return None
    seeds, comparisons = len(planned_seeds(campaign)), conditions - 1
    correction: Correction = "evidence" if campaign.stop == "evidence" else "maxt"
    found: Pilot | None = None
    if pilot is not None:
        from retrain.analysis.pilot import read_pilot

        with suppress(ConfigurationError):  # it has too few runs
            found = read_pilot(pilot)
        found = (
            found if found and found.sd > 0 else None
        )  # differences that are all equal show no spread
    detectable = minimal_detectable_effect(
        seeds, found.sd if found else 1.0, ALPHA, POWER, comparisons, correction
    )
    design = None
    if found and found.spread and detectable and correction == "maxt":
        design = cheapest(found.spread, detectable, comparisons, ALPHA, POWER)
    fewest = max(2, seeds_to_conclude(ALPHA, comparisons, correction))
    return Power(
        seeds, comparisons, fewest, detectable, found.metric.name if found else None, design
    )


def campaign_caveats(
    config: "TrainConfig", schedule: "Schedule | None", memory: "Memory | None", power: Power | None
) -> Iterator[str]:
    if config.campaign is None:
        return
    if power and power.detectable is None:
        correction: Correction = "evidence" if config.campaign.stop == "evidence" else "maxt"
        yield design_line(power.seeds, power.comparisons, 0, 1, ALPHA, POWER, correction)
    if config.is_set("evaluation.at_end") and not config.evaluation.asked_for:
        yield (
            "No held-out evaluation ([evaluation] at_end = false), so conditions are compared by"
            " their training correct rate."
        )
    if schedule is None:
        return
    best = schedule.recommended
    if best is not None and schedule.effective_parallelism > best.count:
        yield (
            f"{schedule.effective_parallelism} runs at once are more than the recommended"
            f" {best.count}: {best.because}."
        )
    sharing = config.campaign.workers_per_device
    if (
        memory is None
        or memory.machine.device_type != "cuda"
        or schedule.effective_parallelism < 2
        or sharing < 2
    ):
        return
    from retrain.model.memory import byte_words

    if sharing * memory.peak > memory.machine.memory:
        yield (
            f"[campaign] workers_per_device = {sharing}: together they take up to"
            f" {byte_words(sharing * memory.peak)} of {byte_words(memory.machine.memory)} on one"
            " device, since each run sizes its KV cache for the whole device."
        )

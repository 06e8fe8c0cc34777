"""The controller on simulated machines whose law is known."""

from statistics import median
from typing import Any

import backpressure_simulation as simulation
import pytest

from retrain.config.schema import Backpressure

SETTINGS = Backpressure(enabled=True)
SEEDS = range(6)


def outcomes(machine: int, noise: float) -> list[Any]:
    one = simulation.MACHINES[machine]
    seeds = SEEDS if noise else SEEDS[:1]
    return [
        simulation.outcome(one, simulation.simulate(one, noise, seed, SETTINGS), SETTINGS)
        for seed in seeds
    ]


@pytest.mark.parametrize("machine", [0, 1, 2])
def test_without_noise_the_batch_reaches_the_target_by_step_24_and_stays(machine: int) -> None:
    (found,) = outcomes(machine, 0.0)
    assert found.settled <= 24 and found.off <= 0.05 and found.share > 0.99


@pytest.mark.parametrize("machine", [0, 1, 2])
def test_with_noise_it_settles_near_the_best_and_does_not_oscillate(machine: int) -> None:
    found = outcomes(machine, 0.05)
    assert median(one.settled for one in found) <= 60 and max(one.changes for one in found) <= 5
    assert min(one.share for one in found) > 0.9 and median(one.share for one in found) > 0.97


@pytest.mark.parametrize("machine", [3, 4], ids=["no coherency penalty", "superlinear"])
def test_a_machine_without_an_optimum_is_survived(machine: int) -> None:
    for found in (*outcomes(machine, 0.0), *outcomes(machine, 0.05)):
        assert found.share > 0.9 and found.changes <= 9

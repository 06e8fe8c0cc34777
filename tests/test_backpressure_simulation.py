"""The controller on simulated machines: the figures of docs/backpressure.md, from the benchmark
that prints them.
"""

from pathlib import Path
from statistics import median
from typing import Any

import pytest

from retrain.config.schema import Backpressure

SETTINGS = Backpressure(enabled=True)
SEEDS = range(6)


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "benchmarks"))
    import backpressure_simulation

    return backpressure_simulation


def outcomes(simulation: Any, machine: int, noise: float) -> list[Any]:
    one = simulation.MACHINES[machine]
    seeds = SEEDS if noise else SEEDS[:1]
    return [
        simulation.outcome(one, simulation.simulate(one, noise, seed, SETTINGS), SETTINGS)
        for seed in seeds
    ]


@pytest.mark.parametrize("machine", [0, 1, 2])
def test_without_noise_the_batch_reaches_the_target_by_step_24_and_stays(
    simulation: Any, machine: int
) -> None:
    (found,) = outcomes(simulation, machine, 0.0)
    assert found.settled <= 24 and found.off <= 0.05 and found.share > 0.99


@pytest.mark.parametrize("machine", [0, 1, 2])
def test_with_noise_it_settles_near_the_best_and_does_not_oscillate(
    simulation: Any, machine: int
) -> None:
    found = outcomes(simulation, machine, 0.05)
    assert median(one.settled for one in found) <= 60 and max(one.changes for one in found) <= 5
    assert min(one.share for one in found) > 0.9 and median(one.share for one in found) > 0.97


@pytest.mark.parametrize("machine", [3, 4], ids=["no coherency penalty", "superlinear"])
def test_a_machine_without_an_optimum_is_survived(simulation: Any, machine: int) -> None:
    for found in (*outcomes(simulation, machine, 0.0), *outcomes(simulation, machine, 0.05)):
        assert found.share > 0.9 and found.changes <= 9

"""The back-pressure controller on simulated machines whose law and noise are known: how soon it is
at 0.85 p*, and whether it stays.

Throughput is X(p) (1 + noise), with X of the universal scalability law and normal noise. The
controller holds every size between `increase_margin` of the target and the target, so a run may
stay below 0.85 p* where throughput is flat.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from retrain.backpressure import BackpressureController, Decision, ScalingLaw, target_batch
from retrain.config.schema import Backpressure

GROUP, STEPS = 16, 200


@dataclass(frozen=True)
class Machine:
    name: str
    throughput: Callable[[int], float]
    law: ScalingLaw | None
    """None where no law of this form describes it."""


def of_law(name: str, sigma: float, kappa: float) -> Machine:
    law = ScalingLaw(50.0, sigma, kappa)
    return Machine(name, law.throughput, law)


MACHINES = (
    of_law("sigma 0.02, kappa 1e-5 (p* 313)", 0.02, 1e-5),
    of_law("sigma 0.05, kappa 1e-4 (p* 97)", 0.05, 1e-4),
    of_law("sigma 0.2, kappa 2e-6 (p* 632)", 0.2, 2e-6),
    of_law("sigma 0.05, kappa 0 (p* infinite)", 0.05, 0.0),
    Machine("superlinear up to 256, then flat", lambda p: 50.0 * min(p, 256) ** 1.1, None),
)


def simulate(
    machine: Machine, noise: float, seed: int, settings: Backpressure, steps: int = STEPS
) -> list[Decision]:
    """The decisions of a run that starts from 8 prompts per step."""
    draws = np.random.default_rng(seed)
    controller = BackpressureController(settings, 8, GROUP)
    decisions = []
    for _ in range(steps):
        p = controller.batch_size * GROUP
        rate = machine.throughput(p) * max(0.05, 1 + noise * draws.standard_normal())
        decisions.append(controller.observe(tokens=1000 * p, seconds=1000 * p / rate))
    return decisions


@dataclass(frozen=True)
class Outcome:
    settled: int
    """The step after the last change of size."""
    changes: int
    """After the sweep."""
    off: float
    """Distance of the last size from the target as a fraction of it; an infinite p* has the largest
    size as its target."""
    share: float
    """Throughput at the last size as a share of the best within the limits."""


def outcome(machine: Machine, decisions: list[Decision], settings: Backpressure) -> Outcome:
    sizes = [decision.next_batch_size for decision in decisions]
    sweep = sum(decision.regime == "warmup" for decision in decisions)
    changed = [
        number + 1
        for number in range(sweep - 1, len(sizes) - 1)
        if sizes[number] != sizes[number + 1]
    ]
    limits = settings.min_batch_size, settings.max_batch_size
    target = target_batch(
        machine.law.optimum if machine.law else math.inf, GROUP, settings.throttle_margin, *limits
    )
    best = max(machine.throughput(size * GROUP) for size in range(limits[0], limits[1] + 1))
    return Outcome(
        settled=changed[-1] + 1 if changed else sweep,
        changes=len(changed),
        off=abs(sizes[-1] - target) / target,
        share=machine.throughput(sizes[-1] * GROUP) / best,
    )

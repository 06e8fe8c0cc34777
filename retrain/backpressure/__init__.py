"""Back pressure: the batch size follows measured throughput by the universal scalability law, with a hint from the roofline."""

from retrain.backpressure.controller import Action, BackpressureController, Decision, Regime, target_batch
from retrain.backpressure.roofline import Roofline, roofline
from retrain.backpressure.scaling_law import Fit, ScalingLaw, capacity, fit_scaling_law, optimal_concurrency

__all__ = [
    "Action",
    "BackpressureController",
    "Decision",
    "Fit",
    "Regime",
    "Roofline",
    "ScalingLaw",
    "capacity",
    "fit_scaling_law",
    "optimal_concurrency",
    "roofline",
    "target_batch",
]

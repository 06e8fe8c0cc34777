"""Back pressure: the batch size follows measured throughput by the universal scalability law, with
a hint from the roofline.
"""

from retrain.backpressure.controller import (
    Action,
    BackpressureController,
    Decision,
    Regime,
    target_batch,
)
from retrain.backpressure.throughput import (
    Fit,
    Roofline,
    ScalingLaw,
    capacity,
    fit_scaling_law,
    optimal_concurrency,
    roofline,
)

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

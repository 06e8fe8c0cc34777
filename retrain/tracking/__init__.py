"""A run's messages to the outside: one event, many sinks.

`base` holds the events and `Tracker`, which takes them. `build` puts the configured sinks together.
The sinks are the screen (`console`), the run's folder (`files`), and Weights & Biases, Trackio and
TensorBoard. Each external tracker has a module, above their shared part (`external`). Only a run
that asks for a tracker imports its library. `retrain.records` defines the contents of the files.
"""

from retrain.tracking.base import Tracker
from retrain.tracking.build import build_tracker

__all__ = ["Tracker", "build_tracker"]

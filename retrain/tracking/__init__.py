"""A run's messages to the outside: one event, many sinks.

`base` holds the events and `Tracker`, which takes them; `build` puts the configured sinks together.
The sinks are the screen (`console`), the run's folder (`files`), and Weights & Biases, Trackio and
TensorBoard, each in a module of its own above what they share (`external`). A tracker's library is
imported only by the run that asks for it. What stands in the files is defined in `retrain.records`.
"""

from retrain.tracking.base import Tracker
from retrain.tracking.build import build_tracker

__all__ = ["Tracker", "build_tracker"]

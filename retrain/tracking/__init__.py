"""What a run tells the outside: one event, many sinks.

`base` holds the events and puts the configured sinks together. The sinks are the screen (`console`), the run's folder (`files`), and
Weights & Biases, Trackio and TensorBoard, each in a module of its own above what they share (`external`); these three are imported only
by the run that asks for them. What stands in the files is defined in `retrain.records`.
"""

from retrain.tracking.base import Tracker, build_tracker

__all__ = ["Tracker", "build_tracker"]

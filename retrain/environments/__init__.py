"""Environments: problems that answer the model's replies, possibly over several turns, and judge
them at the end.
"""

from retrain.environments.base import Environment, Episode, Observation, Result

__all__ = ["Environment", "Episode", "Observation", "Result"]

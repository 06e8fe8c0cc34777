"""Environments: problems whose replies are answered, possibly over several turns, and judged at the
end.
"""

from retrain.environments.base import Environment, Episode, Observation, Result

__all__ = ["Environment", "Episode", "Observation", "Result"]

"""Predictions for a configuration, before anything starts: runs, settings, memory, time and
cost.
"""

from retrain.explain.explanation import Explanation, explain

__all__ = ["Explanation", "explain"]

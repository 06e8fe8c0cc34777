"""What a configuration would do: runs, settings, memory, time and cost, before anything is started."""

from retrain.explain.explanation import Explanation, explain

__all__ = ["Explanation", "explain"]

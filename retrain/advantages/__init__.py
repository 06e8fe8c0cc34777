"""Credit assignment: from the rewards of a step's completions to an advantage for every token."""

from retrain.advantages.algorithms import (
    AdvantageContext,
    AlgorithmContext,
    AlgorithmOutput,
    UncertaintyContext,
)
from retrain.advantages.transforms import TransformContext, TransformOutput, TransformSpec

__all__ = [
    "AdvantageContext",
    "AlgorithmContext",
    "AlgorithmOutput",
    "TransformContext",
    "TransformOutput",
    "TransformSpec",
    "UncertaintyContext",
]

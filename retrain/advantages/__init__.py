"""Credit assignment: from the rewards of a step's completions to an advantage for every token."""

from retrain.advantages.algorithms import (
    AdvantageContext,
    AlgorithmContext,
    AlgorithmOutput,
    StepAdvantageContext,
    UncertaintyContext,
)
from retrain.advantages.transforms import TransformContext, TransformOutput, TransformSpec

__all__ = [
    "AdvantageContext",
    "AlgorithmContext",
    "AlgorithmOutput",
    "StepAdvantageContext",
    "TransformContext",
    "TransformOutput",
    "TransformSpec",
    "UncertaintyContext",
]

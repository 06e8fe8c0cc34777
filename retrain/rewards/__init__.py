"""Rewards: of one completion or of a whole group, and weighted sums of them. Importing this imports
no symbolic mathematics.
"""

from retrain.rewards.answers import extract_boxed, hendrycks_is_equiv
from retrain.rewards.pairs import score_answers
from retrain.rewards.score import ScoreRequest
from retrain.rewards.scoring import (
    FailureGuard,
    ScoreGroup,
    Scorer,
    box_reader,
    boxed_reference,
    build_scorer,
    unpaid_answer,
)

__all__ = [
    "FailureGuard",
    "ScoreGroup",
    "ScoreRequest",
    "Scorer",
    "box_reader",
    "boxed_reference",
    "build_scorer",
    "extract_boxed",
    "hendrycks_is_equiv",
    "score_answers",
    "unpaid_answer",
]

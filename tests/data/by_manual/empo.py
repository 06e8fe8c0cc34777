"""EMPO (arXiv 2504.05812): a completion is worth the share of its group that means the same."""

from collections import Counter
from math import log

from retrain.rewards import extract_boxed


def empo(responses: list[str], reference: str, params: dict[str, float]) -> list[float]:
    """[G] the answer's share; 0 for a group whose semantic entropy lies out of bounds."""
    answers = [extract_boxed(response) for response in responses]
    shares = {answer: n / len(answers) for answer, n in Counter(answers).items()}
    entropy = -sum(share * log(share) for share in shares.values())
    if not params["low"] < entropy < params["high"]:
        return [0.0] * len(answers)
    return [0.0 if answer is None else shares[answer] for answer in answers]

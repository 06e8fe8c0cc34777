"""The majority's vote, and the normalization of a reward within its group."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from retrain.rewards.answers import Normalization, canonical_answer

_EPS = 1e-6


def majority(boxes: Sequence[str | None], normalize: Normalization) -> list[float]:
    """Return 1 for the completions with the group's most frequent answer, else 0; TTRL, arXiv
    2504.16084. If several answers are equally frequent, the answer of the first sample counts.

    A completion without an answer has no vote.
    """
    answers = [canonical_answer(box or "", normalize) for box in boxes]
    votes = Counter(filter(None, answers)).most_common(1)
    return [float(bool(votes) and answer == votes[0][0]) for answer in answers]


def normalized(rewards: Sequence[float]) -> list[float]:
    """Return (r - mean) / (std + 1e-6) within the group, with n - 1 in the std's denominator. Equal
    rewards give exactly 0.
    """
    if len(set(rewards)) <= 1:
        return [0.0] * len(rewards)
    r = np.array(rewards, np.float64)
    scaled: list[float] = ((r - r.mean()) / (r.std(ddof=1) + _EPS)).tolist()
    return scaled

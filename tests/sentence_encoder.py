"""An encoder of sentences that counts words."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

PLANS = ("think", "check", "wait", "plan", "idea", "try", "consider", "verify")


class Counter:
    """A stub: the first component counts words that plan, the second numbers and equations."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def __call__(self, sentences: Sequence[str]) -> npt.NDArray[np.float32]:
        self.calls.append(list(sentences))
        rows = []
        for sentence in sentences:
            words = sentence.lower().split()
            plans = sum(any(stem in word for stem in PLANS) for word in words)
            computes = sum(any(character in "0123456789=" for character in word) for word in words)
            rows.append([plans + 0.01, computes + 0.01, 0.3])
        vectors = np.array(rows, np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

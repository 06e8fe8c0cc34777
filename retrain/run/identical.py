"""Find completions of a prompt that are identical although their own log-probs say that they cannot
be.

The causes are one seed for all completions of a request, greedy decoding, or an engine that ignores
the temperature. The method of drawing tokens does not matter.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from retrain.types import Float32Array, Int32Array

MIN_TOKENS = 16
"""Shorter completions of a step allow no conclusion. Answers that a policy is sure of are equal,
and a rounded log-prob near 0 says little about how sure.
"""


def chance_of_identical(
    groups: Iterable[Sequence[tuple[Int32Array, Float32Array]]], min_tokens: int = MIN_TOKENS
) -> float:
    """Return an upper bound on the probability of as many identical completions in a group, if the
    engine samples them independently. A completion comes as token ids and log-probs [T]; a
    completion below `min_tokens` allows no conclusion.

    A completion equals an earlier one with a probability of at most Q, the sum of exp(sum log p)
    over the different earlier completions. For any w, take the product over m such trials of 1 - w
    + w [it does] / Q. Its mean is at most 1. It exceeds x with a probability of at most 1/x
    (Markov). The bound takes the mean of two w: 1/m for a few equal ones among many, 1/2 for most
    of them.
    """
    evidence, trials = list[float](), 0
    for group in groups:
        earlier: dict[bytes, float] = {}
        for number, (ids, logprobs) in enumerate(group):
            trials += number > 0
            if len(ids) < min_tokens:
                continue
            if ids.tobytes() in earlier:
                evidence.append(-float(np.logaddexp.reduce(list(earlier.values()))))
            else:
                earlier[ids.tobytes()] = float(logprobs.sum(dtype=np.float64))
    if not evidence:
        return 1.0
    products = []
    for weight in (1 / (1 + trials), 0.5):
        equal = np.logaddexp(np.log1p(-weight), np.log(weight) + np.array(evidence)).sum()
        products.append(equal + (trials - len(evidence)) * np.log1p(-weight))
    return float(np.exp(min(0.0, np.log(2) - np.logaddexp(*products))))

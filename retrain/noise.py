"""Counter-based noise: every random number of a run is a pure function of its coordinates, so
nothing has state.

Philox4x32-10 (Salmon et al., SC 2011) with key (seed, stream) and a counter of four 32-bit words.
The same seed gives every condition the same prompts and the same noise, whatever else is in the
batch, and resuming needs no generator state.
"""

from enum import IntEnum

import numpy as np
import numpy.typing as npt

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # golden ratio and sqrt(3) - 1
_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


class Stream(IntEnum):
    """Independent uses of one seed."""

    SAMPLING = 0
    """Counter (step, prompt slot, sample, position)."""
    EVALUATION = 1
    """Counter (0, example index, sample, position): every evaluation of a run sees the same
    noise."""
    PARITY = 2
    REWARD = 3
    """Counter (step, prompt slot, sample, 0)."""
    DATA_ORDER = 4
    """Counter (epoch, 0, 0, index)."""
    DROPOUT = 5
    """Counter (step, row, layer, element)."""
    ADAPTER = 6
    """Counter (0, 0, module, element): the adapter's initial weights."""
    MINIBATCH = 7
    """Counter (step, pass, 0, row)."""
    ENVIRONMENT = 8
    """Counter (step, prompt slot, stream of the sampling, 0): the seed of a group's episodes."""

    PROMPT_CHOICE = 9
    """Counter (step, 0, 0, index): what a sampler of prompts draws with."""
    COMPLETION_CHOICE = 10
    """Counter (step, prompt slot, sample, 0): the choice of completions to score."""
    TRACE_ORDER = 11
    """Counter (epoch, 0, 0, index): the order of the supervised stage."""


Counter = int | npt.NDArray[np.integer]


def philox(
    seed: int, stream: int, counter: tuple[Counter, Counter, Counter, Counter]
) -> npt.NDArray[np.uint64]:
    """Run ten rounds of Philox4x32. The counter's words broadcast against each other; returns [4,
    ...] words below 2**32.
    """
    words = np.broadcast_arrays(*(np.asarray(word, dtype=np.uint64) & _MASK for word in counter))
    x0, x1, x2, x3 = (word.copy() for word in words)
    key = [seed & 0xFFFFFFFF, int(stream) & 0xFFFFFFFF]
    for _ in range(10):
        product0, product1 = _MULTIPLIERS[0] * x0, _MULTIPLIERS[1] * x2
        x0, x1, x2, x3 = (
            (product1 >> _SHIFT) ^ x1 ^ np.uint64(key[0]),
            product1 & _MASK,
            (product0 >> _SHIFT) ^ x3 ^ np.uint64(key[1]),
            product0 & _MASK,
        )
        key = [(word + step) & 0xFFFFFFFF for word, step in zip(key, _KEY_STEPS, strict=True)]
    return np.stack([x0, x1, x2, x3])


def uniform(
    seed: int, stream: int, a: Counter, b: Counter, c: Counter, d: Counter
) -> npt.NDArray[np.float64]:
    """Return uniforms in (0, 1) with 53 random bits, one per broadcast element of the counter (a,
    b, c, d).
    """
    words = philox(seed, stream, (a, b, c, d))
    high, low = words[0] >> np.uint64(5), words[1] >> np.uint64(6)
    # 27 bits and 26 bits; the half keeps 0 and 1 out.
    bits = (high.astype(np.float64) * 67108864.0) + low.astype(np.float64)
    draws: npt.NDArray[np.float64] = (bits + 0.5) / 9007199254740992.0
    return draws

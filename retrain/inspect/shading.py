"""The shade of a token: a signed or unsigned quantity in a few levels, the same in the terminal and
on the page.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from retrain.inspect import Quantity
from retrain.inspect.credit import CompletionCredit, StepCredit

LEVELS = 5
"""Shades on each side of 0; the eye could not separate more."""
_STRONGEST = 0.98
"""Quantile that gets the strongest shade; with the maximum, one token of tiny probability would
make all others pale."""
Values = npt.NDArray[np.floating] | None


def values_of(completion: CompletionCredit, quantity: Quantity, label: str) -> Values:
    """Return the quantity [T]; None if the token file lacks it for the completion."""
    match quantity:
        case Quantity.ADVANTAGE:
            return completion.advantages(label)
        case Quantity.SURPRISAL:
            return completion.surprisals
        case Quantity.ENTROPY:
            return completion.entropies
        case Quantity.LOG_RATIO:
            return completion.log_ratios


def scale_of(credit: StepCredit, quantity: Quantity) -> float:
    """Return the size that gives a token the strongest shade; few of the step's tokens exceed it
    under any condition.
    """
    table = credit.table
    arrays: dict[Quantity, Sequence[Values]] = {
        Quantity.ADVANTAGE: list(credit.finals().values()),
        Quantity.SURPRISAL: [table.logprobs],
        Quantity.ENTROPY: [table.entropies],
        Quantity.LOG_RATIO: [table.log_ratios],
    }
    known = [array for array in arrays[quantity] if array is not None]
    sizes = np.abs(np.concatenate([np.zeros(0), *known]))
    seen = sizes[np.isfinite(sizes) & (sizes > 0)]
    return float(np.quantile(seen, _STRONGEST)) if len(seen) else 1.0


def levels(values: Values, scale: float, count: int) -> list[int]:
    """Return [T] from -LEVELS to LEVELS; 0 only if the value is exactly 0 or unknown, so a small
    advantage still shows its sign.
    """
    if values is None:
        return [0] * count
    sizes = np.ceil(np.abs(values) / scale * LEVELS - 1e-9)
    signed = np.sign(values) * np.clip(sizes, 1, LEVELS)
    return [int(level) for level in np.where(values == 0, 0, signed)]

"""Flat ragged arrays: the tokens of a step's completions laid end to end, so that credit is a few
passes over one array.

Shape letters: N completions, n tokens of all of them together.
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Scalar = TypeVar("Scalar", bound=np.generic)


class Segments:
    """The place of each completion in the flat arrays; completions may be empty."""

    def __init__(self, lengths: Iterable[int]) -> None:
        self.lengths: Int64Array = np.fromiter(lengths, dtype=np.int64)
        """[N]"""
        self.offsets: Int64Array = np.concatenate(
            [np.zeros(1, dtype=np.int64), np.cumsum(self.lengths)]
        )
        """[N + 1], from 0 to n."""
        self._filled = np.flatnonzero(
            self.lengths
        )  # reduceat reads a foreign element where a segment is empty
        self._starts = self.offsets[self._filled]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def total(self) -> int:
        return int(self.offsets[-1])

    def sums(self, values: Float64Array) -> Float64Array:
        """Sum over each completion, [n] -> [N]; 0 if it is empty."""
        return self._reduce(np.add, values)

    def minima(self, values: Float64Array) -> Float64Array:
        """Take the minimum of each completion, [n] -> [N]; 0 if it is empty."""
        return self._reduce(np.minimum, values)

    def maxima(self, values: Float64Array) -> Float64Array:
        """Take the maximum of each completion, [n] -> [N]; 0 if it is empty."""
        return self._reduce(np.maximum, values)

    def means(self, values: Float64Array) -> Float64Array:
        """Average over each completion, [n] -> [N]; 0 if it is empty. A constant completion's mean
        is that constant to the last bit.
        """
        means = self.sums(values) / np.maximum(self.lengths, 1)
        low, high = self.minima(values), self.maxima(values)
        return np.where(low == high, low, means)

    def spread(self, per_segment: Float64Array) -> Float64Array:
        """Repeat each value over its completion's tokens, [N] -> [n]."""
        return np.repeat(per_segment, self.lengths)

    def split(self, values: npt.NDArray[Scalar]) -> list[npt.NDArray[Scalar]]:
        """Return the N views of [n] values, one per completion."""
        return [
            values[start:stop]
            for start, stop in zip(self.offsets[:-1], self.offsets[1:], strict=True)
        ]

    def locate(self, position: int) -> tuple[int, int]:
        """Return the completion of a flat position, and the position within it."""
        segment = int(np.searchsorted(self.offsets, position, side="right")) - 1
        return segment, position - int(self.offsets[segment])

    def _reduce(self, operation: np.ufunc, values: Float64Array) -> Float64Array:
        reduced = np.zeros(len(self), dtype=np.float64)
        if len(self._filled):
            reduced[self._filled] = operation.reduceat(values, self._starts)
        return reduced


def flatten(rows: Iterable[Sequence[float] | npt.NDArray[np.floating]]) -> Float64Array:
    """Join N sequences into one float64 array [n]."""
    arrays = [np.asarray(row, dtype=np.float64) for row in rows]
    if arrays:
        return np.concatenate(arrays)
    return np.zeros(0, dtype=np.float64)

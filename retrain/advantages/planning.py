"""Which tokens belong to a planning phrase ("let me check"): the mask that HICRA and SEPA read.

Matching happens on decoded text with character offsets, never on vocabulary strings, so that how a phrase is cut into tokens cannot
matter. Words of a gram may be separated by white space, commas, semicolons, colons, hyphens and dashes, but not by the end of a sentence.
"""

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import numpy as np
import numpy.typing as npt

from retrain.advantages.ragged import BoolArray

DEFAULT_GRAMS: Final = (
    "wait let me",
    "let me think",
    "on second thought",
    "let me check",
    "let me verify",
    "is this right",
    "double check",
    "try another approach",
    "go back and",
    "start over",
    "that's not right",
    "that doesn't work",
    "another way to",
    "or we could",
    "what if we",
    "notice that",
    "the key is",
    "the key insight",
)  # word for word the phrases that earlier work on HICRA used, so that results compare

_GAP = re.compile(r"[\s,;:\-\u2010-\u2015]+")
_APOSTROPHES = {0x2019: "'", 0x02BC: "'"}
_SPACE = 32
_PLANE = 0x10000  # beyond it Unicode has no white space and no dash


def _table(pattern: str) -> BoolArray:
    """[65536] which code points of the basic plane match a one-character pattern."""
    matcher = re.compile(pattern)
    return np.fromiter((matcher.match(chr(code)) is not None for code in range(_PLANE)), dtype=np.bool_, count=_PLANE)


_IS_GAP = _table(r"[\s,;:\-\u2010-\u2015]")
_IS_SPACE = _table(r"\s")


def normalised(text: str) -> str:
    """Lower case with straight apostrophes, each character in its place: offsets in the result are offsets in `text`."""
    text = text.translate(_APOSTROPHES) if not text.isascii() else text
    lowered = text.lower()
    if len(lowered) == len(text):
        return lowered
    return "".join(low if len(low := character.lower()) == 1 else character for character in text)


def _literal(gram: str) -> str:
    """A gram as it stands in a text whose gaps are single spaces."""
    return _GAP.sub(" ", normalised(gram)).strip()


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"  # what \w means in re


class RegexDetector:
    """Marks the tokens that overlap a planning phrase.

    As a regular expression a gram is (?<!\\w) words joined by [\\s,;:\\-U+2010-U+2015]+ (?!\\w), ignoring case. Here the text's gaps are
    collapsed to single spaces once, with a map back to the offsets, and each gram is then found as a literal: all matches of all
    grams count, overlapping ones too.
    """

    def __init__(self, grams: Sequence[str] = ()) -> None:
        """No grams at all means the default ones. Raises ValueError for a gram without a word character."""
        self.grams = tuple(grams) or DEFAULT_GRAMS
        for gram in self.grams:
            if not re.search(r"\w", gram):
                raise ValueError(f"planning gram {gram!r} has no word character")
        self._literals = list(dict.fromkeys(_literal(gram) for gram in self.grams))

    def detect(self, pieces: Sequence[str]) -> npt.NDArray[np.uint8]:
        """[T] decoded pieces of one completion -> [T] mask.

        A token is 1 if one of its characters other than white space lies in a match; an empty piece (a special token, an incomplete
        code point) is 0.
        """
        mask = np.zeros(len(pieces), dtype=np.uint8)
        text = normalised("".join(pieces))
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        plane = np.minimum(codes, _PLANE - 1)  # U+FFFF is neither space nor gap
        gap = _IS_GAP[plane]
        positions = np.flatnonzero(~gap | np.concatenate([[True], ~gap[:-1]])) if len(gap) else np.zeros(0, dtype=np.int64)
        collapsed = np.where(gap, _SPACE, codes)[positions].astype(np.uint32).tobytes().decode("utf-32-le", "surrogatepass")
        matches = self._matches(collapsed)
        if not matches:
            return mask
        inside = np.zeros(len(codes), dtype=np.bool_)
        for start, stop in matches:
            inside[positions[start] : positions[stop - 1] + 1] = True
        hits = np.concatenate([[0], np.cumsum(inside & ~_IS_SPACE[plane])])
        ends = np.fromiter(accumulate(map(len, pieces)), dtype=np.int64, count=len(pieces))
        counts = np.diff(hits[ends], prepend=0)
        mask[counts > 0] = 1
        return mask

    def _matches(self, text: str) -> list[tuple[int, int]]:
        """Half-open ranges in the collapsed text."""
        found = []
        for literal in self._literals:
            start = text.find(literal)
            while start >= 0:
                stop = start + len(literal)
                bounded = (start == 0 or not _is_word(text[start - 1])) and (stop == len(text) or not _is_word(text[stop]))
                if bounded:
                    found.append((start, stop))
                start = text.find(literal, start + 1)
        return found

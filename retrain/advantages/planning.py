"""Which tokens belong to a planning phrase ("let me check"): the mask that HICRA and SEPA read.

Matching happens on decoded text with character offsets, never on vocabulary strings, so that how a
phrase is cut into tokens cannot matter. Words of a gram may be separated by white space, commas,
semicolons, colons, hyphens and dashes, but not by the end of a sentence.
"""

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import numpy as np
import numpy.typing as npt

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

_DASHES = "-\u2010\u2011\u2012\u2013\u2014\u2015"
_SEPARATORS = ",;:" + _DASHES
_GAP = rf"[\s{re.escape(_SEPARATORS)}]+"
_APOSTROPHES = ("\u2019", "\u02bc")


def normalised(text: str) -> str:
    """Lower the case and straighten apostrophes, character by character: offsets in the result are
    offsets in `text`.
    """
    for apostrophe in _APOSTROPHES:
        text = text.replace(apostrophe, "'")
    lowered = text.lower()
    if len(lowered) == len(text):
        return lowered
    # A character whose lower case is two would move every offset after it, so it stays.
    return "".join(each.lower() if len(each.lower()) == 1 else each for each in text)


def _collapsed(text: str) -> str:
    """Put single spaces in place of a text's gaps, and none at its ends."""
    for separator in _SEPARATORS:
        text = text.replace(separator, " ")
    return " ".join(text.split())  # split() knows the same white space as \s


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"  # what \w means in re


class RegexDetector:
    r"""Marks the tokens that overlap a planning phrase.

    As a regular expression a gram is (?<!\w), its words joined by gaps, (?!\w), ignoring case,
    where a gap is one or more of white space, comma, semicolon, colon, hyphen and U+2010 to U+2015.
    All matches of all grams count, overlapping ones too. Which grams occur at all is first seen on
    the text with collapsed gaps, where a gram is a literal: a search of the whole text for each of
    them would cost most of the time.
    """

    def __init__(self, grams: Sequence[str] = ()) -> None:
        """No grams at all means the default ones. Raises ValueError for a gram without a word
        character.
        """
        self.grams = tuple(grams) or DEFAULT_GRAMS
        for gram in self.grams:
            if not re.search(r"\w", gram):
                raise ValueError(f"planning gram {gram!r} has no word character")
        literals = dict.fromkeys(_collapsed(normalised(gram)) for gram in self.grams)
        self._patterns = {
            literal: re.compile(_GAP.join(map(re.escape, literal.split(" "))))
            for literal in literals
        }

    def detect(self, pieces: Sequence[str]) -> npt.NDArray[np.uint8]:
        """[T] decoded pieces of one completion -> [T] mask.

        A token is 1 if one of its characters other than white space lies in a match; an empty piece
        (a special token, an incomplete code point) is 0.
        """
        mask = np.zeros(len(pieces), dtype=np.uint8)
        text = normalised("".join(pieces))
        matches = self._matches(text)
        if not matches:
            return mask
        ends = np.fromiter(accumulate(map(len, pieces)), dtype=np.int64, count=len(pieces))
        starts, stops = np.array(matches, dtype=np.int64).T
        firsts, lasts = (
            np.searchsorted(ends, starts, side="right").tolist(),
            np.searchsorted(ends, stops - 1, side="right").tolist(),
        )
        for (start, stop), first, last in zip(matches, firsts, lasts, strict=True):
            for token in range(first, last + 1):
                end = int(ends[token])
                overlap = text[max(start, end - len(pieces[token])) : min(stop, end)]
                if overlap and not overlap.isspace():
                    mask[token] = 1
        return mask

    def detect_all(self, completions: Sequence[Sequence[str]]) -> list[npt.NDArray[np.uint8]]:
        """Return the masks of several completions."""
        return [self.detect(pieces) for pieces in completions]

    def _matches(self, text: str) -> list[tuple[int, int]]:
        """Return the half-open ranges of characters that match."""
        collapsed, found = _collapsed(text), []
        for literal, pattern in self._patterns.items():
            if literal not in collapsed:
                continue
            match = pattern.search(text)
            while match:
                start, stop = match.span()
                if (start == 0 or not _is_word(text[start - 1])) and (
                    stop == len(text) or not _is_word(text[stop])
                ):
                    found.append((start, stop))
                match = pattern.search(text, start + 1)
        return found

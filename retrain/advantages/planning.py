"""The tokens of planning phrases ("let me check"), as the mask that HICRA and SEPA read. Two
detectors find them: by strategic grams, and by the meaning of windows of words.

Both read decoded text with character offsets, never vocabulary strings, so the tokenization of a
phrase cannot matter. White space, commas, semicolons, colons, hyphens and dashes may separate the
words of a gram, but the end of a sentence may not.

The semantic detector embeds sentences as unit vectors. It compares each window with two centroids,
of phrases that plan and of phrases that execute. A window plans iff cos(w, planning) > cos(w,
execution) + threshold and cos(w, planning) > min_similarity. Windows have 12 words and a stride of
6 words. The detector marks all tokens of a planning window.
"""

import re
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from retrain.advantages.step import BoolArray

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


def normalized(text: str) -> str:
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
    """Replace each gap of a text with a single space, and strip its ends."""
    for separator in _SEPARATORS:
        text = text.replace(separator, " ")
    return " ".join(text.split())  # split() knows the same white space as \s


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"  # the meaning of \w in re


class RegexDetector:
    r"""Marks the tokens that overlap a planning phrase.

    The regular expression of a gram is (?<!\w), its words joined by gaps, (?!\w), ignoring case. A
    gap is one or more of white space, comma, semicolon, colon, hyphen and U+2010 to U+2015. All
    matches of all grams count, overlapping ones too. The detector first looks for each gram as a
    literal in the text with collapsed gaps. A regular expression search for every gram would take
    most of the time.
    """

    def __init__(self, grams: Sequence[str] = ()) -> None:
        """An empty `grams` means the default grams. Raises ValueError for a gram without a word
        character.
        """
        self.grams = tuple(grams) or DEFAULT_GRAMS
        for gram in self.grams:
            if not re.search(r"\w", gram):
                raise ValueError(f"planning gram {gram!r} has no word character")
        literals = dict.fromkeys(_collapsed(normalized(gram)) for gram in self.grams)
        self._patterns = {
            literal: re.compile(_GAP.join(map(re.escape, literal.split(" "))))
            for literal in literals
        }

    def detect(self, pieces: Sequence[str]) -> npt.NDArray[np.uint8]:
        """[T] decoded pieces of one completion -> [T] mask.

        The mask is 1 for a token with a character inside a match, white space aside. It is 0 for an
        empty piece (a special token, an incomplete code point).
        """
        mask = np.zeros(len(pieces), dtype=np.uint8)
        text = normalized("".join(pieces))
        matches = self._matches(text)
        if not matches:
            return mask
        ends = np.fromiter(accumulate(map(len, pieces)), dtype=np.int64, count=len(pieces))
        starts, stops = np.array(matches, dtype=np.int64).T
        # A character belongs to the first token that ends past it.
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


# -- the semantic detector -------------------------------------------------------------------------


WINDOW_WORDS: Final = 12
STRIDE_WORDS: Final = 6
MIN_WORDS: Final = 3
"""A shorter completion plans nothing."""

PLANNING_ANCHORS: Final = (
    "Let me think about how to approach this problem.",
    "Hold on, something is off here.",
    "Wait, I should look at that step again.",
    "I am not sure that this is right, so let me verify it.",
    "Let us step back and consider the whole problem.",
    "Maybe there is an easier way to do it.",
    "That does not work, so I need another idea.",
    "First I will find a strategy, then carry it out.",
    "What if I try it from the other direction?",
    "The main idea is to reduce it to a simpler case.",
    "Let me check the result by another method.",
    "It would help to look for a pattern.",
    "My plan is to split the problem into two cases.",
    "I made a mistake earlier, so I will start again.",
    "Alternatively, we could work backwards from the answer.",
    "Before computing, let me understand what is asked.",
    "Does this answer make sense?",
    "It is important to notice the symmetry here.",
    "I wonder whether this assumption holds.",
    "Let me reconsider which approach is best.",
)
EXECUTION_ANCHORS: Final = (
    "Adding 12 and 30 gives 42.",
    "Substitute x = 3 into the equation to get 2x + 1 = 7.",
    "Multiply both sides by 4.",
    "The area is 5 times 8, which equals 40.",
    "So 17 - 9 = 8.",
    "Dividing by 2 we obtain y = 6.",
    "Expanding the product gives x^2 + 5x + 6.",
    "The derivative of x^3 is 3x^2.",
    "Therefore the sum is 100.",
    "Each of them costs 3 dollars, so 7 of them cost 21 dollars.",
    "Simplifying the fraction 6/8 yields 3/4.",
    "The final answer is 15.",
    "Subtract 5 from both sides of the equation.",
    "There are 24 hours in a day and 60 minutes in an hour.",
    "Taking the square root of 49 gives 7.",
)

_WORD = re.compile(r"\S+")


class Encoder(Protocol):
    def __call__(self, sentences: Sequence[str], /) -> npt.NDArray[np.floating]:
        """Map [n] sentences to [n, d] vectors of length 1."""


class SemanticDetector:
    """Marks the tokens of the windows that plan. Its state is the encoder alone, so equal steps
    have equal masks.
    """

    def __init__(
        self, encode: Encoder, threshold: float = 0.02, min_similarity: float = 0.25
    ) -> None:
        self._encode = encode
        self._threshold = threshold
        self._min_similarity = min_similarity
        means = [
            np.asarray(encode(anchors), np.float64).mean(axis=0)
            for anchors in (PLANNING_ANCHORS, EXECUTION_ANCHORS)
        ]
        self._centroids = np.stack([mean / np.linalg.norm(mean) for mean in means], axis=1)
        """[d, 2] planning, execution; each of length 1."""

    def detect(self, pieces: Sequence[str]) -> npt.NDArray[np.uint8]:
        """[T] decoded pieces of one completion -> [T] mask."""
        return self.detect_all([pieces])[0]

    def detect_all(self, completions: Sequence[Sequence[str]]) -> list[npt.NDArray[np.uint8]]:
        """Return the masks of several completions. One call encodes their windows, each different
        text once.

        The detector keeps no vectors for a later call. A window's vector depends in its last bits
        on its batch, and a resumed run must see the same batches.
        """
        texts = ["".join(pieces) for pieces in completions]
        spans = [[match.span() for match in _WORD.finditer(text)] for text in texts]
        windows = [_starts(len(words)) for words in spans]
        sentences = [
            _sentences(text, words, starts)
            for text, words, starts in zip(texts, spans, windows, strict=True)
        ]
        plans: dict[str, bool] = {}
        different = list(dict.fromkeys(chain.from_iterable(sentences)))
        if different:
            to_planning, to_execution = (
                np.asarray(self._encode(different), np.float64) @ self._centroids
            ).T
            planning = (to_planning > to_execution + self._threshold) & (
                to_planning > self._min_similarity
            )
            plans = dict(zip(different, planning.tolist(), strict=True))
        masks = []
        for pieces, text, words, starts, own in zip(
            completions, texts, spans, windows, sentences, strict=True
        ):
            marked = np.zeros(len(words), dtype=np.bool_)
            for start, sentence in zip(starts, own, strict=True):
                marked[start : start + WINDOW_WORDS] |= plans[sentence]
            masks.append(_token_mask(pieces, len(text), words, marked))
        return masks


def _starts(words: int) -> range:
    """Return the first word of each window in a text of so many words."""
    if words < MIN_WORDS:
        return range(0)
    # The last window reaches the last word and has at least 7 words, unless the text has fewer.
    return range(0, max(words - WINDOW_WORDS + STRIDE_WORDS, 1), STRIDE_WORDS)


def _sentences(text: str, words: Sequence[tuple[int, int]], starts: range) -> list[str]:
    last = len(words) - 1
    pieces = (
        text[words[start][0] : words[min(start + WINDOW_WORDS - 1, last)][1]] for start in starts
    )
    return [" ".join(piece.split()) for piece in pieces]


def _token_mask(
    pieces: Sequence[str], length: int, words: Sequence[tuple[int, int]], planning: BoolArray
) -> npt.NDArray[np.uint8]:
    """Return [T], 1 where a token has a character of a planning word. `length` counts the text's
    characters; `planning` is [W].
    """
    edges = np.zeros(length + 1, dtype=np.int64)
    for start, stop in (
        span for span, plans in zip(words, planning.tolist(), strict=True) if plans
    ):
        edges[start] += 1
        edges[stop] -= 1
    # [length + 1] marked characters before each place.
    marked = np.concatenate([[0], np.cumsum(np.cumsum(edges)[:length])])
    ends = np.cumsum([0, *map(len, pieces)])
    return np.asarray(np.diff(marked[ends]) > 0, dtype=np.uint8)

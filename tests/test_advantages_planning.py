"""Which tokens are planning: matching on decoded text with character offsets."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.advantages.planning import DEFAULT_GRAMS, RegexDetector, normalized

GAP = r"[\s,;:\-‐-―]+"


def marked(pieces: list[str], grams: tuple[str, ...] = ()) -> list[str]:
    """The pieces that were marked."""
    return [
        piece
        for piece, mark in zip(pieces, RegexDetector(grams).detect(pieces), strict=True)
        if mark
    ]


def brute_force(pieces: list[str], grams: tuple[str, ...]) -> list[int]:
    """Every gram as a regular expression, tried at every character; a token is marked through any
    character that is not white space.
    """
    text = normalized("".join(pieces))
    inside = set()
    for gram in grams:
        words = [re.escape(word) for word in re.split(GAP, normalized(gram)) if word]
        pattern = re.compile(r"(?<!\w)" + GAP.join(words) + r"(?!\w)")
        for start in range(len(text)):
            match = pattern.match(text, start)
            if match:
                inside.update(range(*match.span()))
    marks, start = [], 0
    for piece in pieces:
        span = range(start, start + len(piece))
        marks.append(
            int(any(position in inside and not text[position].isspace() for position in span))
        )
        start += len(piece)
    return marks


ALPHABET = [
    "wait",
    "let",
    "me",
    "the",
    "key",
    "is",
    "insight",
    "land",
    "that's",
    "that’s",
    "not",
    "Right",
    "double",
    "a",
]
SEPARATORS = [" ", "  ", ", ", "-", "–", "\n", ".", "? ", "", "\u00a0", "; "]
GRAMS = (
    "wait let me",
    "the key is",
    "the key insight",
    "that's not right",
    "double-check",
    "a a",
    "let me",
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(ALPHABET), st.sampled_from(SEPARATORS)), max_size=14),
    st.randoms(use_true_random=False),
)
def test_planning_equals_the_brute_force_reference(words, random) -> None:  # type: ignore[no-untyped-def]
    text = "".join(word + separator for word, separator in words)
    cuts = sorted(random.sample(range(len(text) + 1), k=min(len(text), random.randint(0, 12))))
    pieces = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert RegexDetector(GRAMS).detect(pieces).tolist() == brute_force(pieces, GRAMS)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet=st.sampled_from("waitletme keyhs’İIΣß-,.\n1"), max_size=60))
def test_any_text_equals_the_brute_force_reference(text: str) -> None:
    pieces = [text[start : start + 3] for start in range(0, len(text), 3)]
    assert RegexDetector(("let me", "the key", "i")).detect(pieces).tolist() == brute_force(
        pieces, ("let me", "the key", "i")
    )


@pytest.mark.parametrize(
    "pieces",
    [["the", " key", " is", "land"], ["out", "let", " me", " think"], ["let", "me", "think"]],
)
def test_a_phrase_must_end_at_word_boundaries(pieces: list[str]) -> None:
    assert marked(pieces) == []


@pytest.mark.parametrize(
    "text", ["double-check", "Double – check", "double\ncheck", "DOUBLE, check", "double :; check"]
)
def test_gaps_may_hold_spaces_commas_colons_and_dashes(text: str) -> None:
    assert marked([text]) == [text]


@pytest.mark.parametrize(
    "text", ["wait. let me", "wait? let me", "wait! let me", "wait/let me", "wait_let me"]
)
def test_the_end_of_a_sentence_parts_a_phrase(text: str) -> None:
    assert marked([text]) == []


def test_straight_and_curly_apostrophes_are_the_same() -> None:
    for apostrophe in ("'", "’", "ʼ"):
        assert marked(
            ["that", f"{apostrophe}s", " not", " right"], (f"that{apostrophe}s not right",)
        )
        assert marked(["that", f"{apostrophe}s", " not", " right"], ("that's not right",))


def test_no_token_gives_an_empty_mask() -> None:
    assert RegexDetector().detect([]).tolist() == []
    assert RegexDetector().detect(["", ""]).tolist() == [0, 0]


def test_lone_surrogates_are_text_like_any_other() -> None:
    assert marked(["\udc80 ", "let", " me", " think"]) == ["let", " me", " think"]


def test_every_default_gram_is_found() -> None:
    assert len(DEFAULT_GRAMS) == 18
    for gram in DEFAULT_GRAMS:
        assert marked([f"x {gram.upper()} y"])


def test_a_gram_without_a_word_is_refused() -> None:
    with pytest.raises(ValueError, match="no word character"):
        RegexDetector(("...",))

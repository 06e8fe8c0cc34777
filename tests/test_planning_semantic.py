"""The semantic detector with a small encoder that counts words: windows, offsets, thresholds,
batches.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.advantages.planning import (
    EXECUTION_ANCHORS,
    MIN_WORDS,
    PLANNING_ANCHORS,
    STRIDE_WORDS,
    WINDOW_WORDS,
    RegexDetector,
    SemanticDetector,
)
from tests.sentence_encoder import Counter


def pieces_of(text: str, size: int = 3) -> list[str]:
    """Pieces that ignore where words begin, as a byte-level tokenizer's may."""
    return [text[start : start + size] for start in range(0, len(text), size)]


def marked(text: str, pieces: Sequence[str], mask: npt.NDArray[np.uint8]) -> str:
    """The text with a dash for every character of a token that is not marked."""
    assert "".join(pieces) == text and len(mask) == len(pieces)
    return "".join(
        piece if mark else "-" * len(piece)
        for piece, mark in zip(pieces, mask.tolist(), strict=True)
    )


COMPUTES = "3 + 4 = 7 and 7 + 5 = 12 so 12 = 3 * 4 "
PLANNING = "wait let me think and check the plan with another idea and try it "


def test_the_tokens_of_a_planning_window_are_marked_and_no_others() -> None:
    text = COMPUTES * 3 + PLANNING + COMPUTES * 3
    pieces = pieces_of(text)
    shown = marked(text, pieces, SemanticDetector(Counter()).detect(pieces))
    planning = text.index("wait"), text.index("try it")
    assert "-" not in shown[planning[0] : planning[1]]
    spread = (WINDOW_WORDS - 1) * 5  # a window that plans may begin or end outside of the phrase
    assert set(shown[: planning[0] - spread]) <= {"-"}
    assert set(shown[planning[1] + spread :]) <= {"-"}


def test_how_words_are_cut_into_tokens_does_not_matter() -> None:
    text = COMPUTES + PLANNING + COMPUTES
    by_character = SemanticDetector(Counter()).detect(list(text))
    characters = {place for place, mark in enumerate(by_character.tolist()) if mark}
    for size in (2, 5, 11):
        pieces, start = pieces_of(text, size), 0
        for piece, mark in zip(
            pieces, SemanticDetector(Counter()).detect(pieces).tolist(), strict=True
        ):
            assert bool(mark) == any(
                place in characters for place in range(start, start + len(piece))
            )
            start += len(piece)


def test_white_space_and_empty_pieces_are_never_marked() -> None:
    pieces = ["think", " ", "", "plan", "\n\n", "check", " wait"]
    assert SemanticDetector(Counter()).detect(pieces).tolist() == [1, 0, 0, 1, 0, 1, 1]


@pytest.mark.parametrize(
    ("words", "planned"), [(0, False), (MIN_WORDS - 1, False), (MIN_WORDS, True)]
)
def test_fewer_than_three_words_plan_nothing(words: int, planned: bool) -> None:
    encoder = Counter()
    assert SemanticDetector(encoder).detect(["think "] * words).any() == planned
    assert len(encoder.calls) == 2 + planned  # the anchors, and the windows where there are any


@given(st.integers(MIN_WORDS, 200))
def test_windows_cover_every_word_and_the_last_one_is_long(count: int) -> None:
    encoder = Counter()
    detector = SemanticDetector(encoder)
    detector.detect([f"w{index} " for index in range(count)])
    windows = [[int(word[1:]) for word in sentence.split()] for sentence in encoder.calls[-1]]
    assert {word for window in windows for word in window} == set(range(count))
    assert all(second[0] - first[0] == STRIDE_WORDS for first, second in pairwise(windows))
    assert all(len(window) == WINDOW_WORDS for window in windows[:-1])
    assert len(windows[-1]) > STRIDE_WORDS or count <= STRIDE_WORDS


def test_a_step_is_one_call_in_which_each_text_occurs_once() -> None:
    encoder = Counter()
    detector = SemanticDetector(encoder)
    computes = pieces_of(COMPUTES * 4)
    completions = [computes, pieces_of(PLANNING * 4, 5), computes, ["a"], []]
    masks = detector.detect_all(completions)
    assert len(encoder.calls) == 3 and len(set(encoder.calls[-1])) == len(encoder.calls[-1])
    for completion, mask in zip(completions, masks, strict=True):
        assert mask.tolist() == SemanticDetector(Counter()).detect(completion).tolist()


def test_the_threshold_is_a_margin_over_execution_and_min_similarity_a_floor() -> None:
    pieces = [f"{word} " for word in PLANNING.split()]
    assert SemanticDetector(Counter()).detect(pieces).all()
    assert not SemanticDetector(Counter(), threshold=2.0).detect(pieces).any()
    assert not SemanticDetector(Counter(), min_similarity=1.0).detect(pieces).any()
    computes = [f"{word} " for word in COMPUTES.split()]
    assert not SemanticDetector(Counter()).detect(computes).any()
    assert SemanticDetector(Counter(), threshold=-2.0, min_similarity=-1.0).detect(computes).all()


def test_the_anchors_are_two_different_lists() -> None:
    assert (len(set(PLANNING_ANCHORS)), len(set(EXECUTION_ANCHORS))) == (20, 15)
    assert not set(PLANNING_ANCHORS) & set(EXECUTION_ANCHORS)


def test_regex_masks_of_a_step_are_those_of_its_completions() -> None:
    detector = RegexDetector()
    completions = [["let me", " think"], [], ["no"]]
    assert [mask.tolist() for mask in detector.detect_all(completions)] == [[1, 1], [], [0]]

"""What tokens contribute to a text: pieces, their concatenation, and agreement with the tokenizer's
own decoder.
"""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_for_tests import (
    CHATML,
    KINDS,
    LINES,
    SPECIAL,
    byte_level,
    sentencepiece,
    word_pieces,
    words,
)

from retrain.model.vocabulary import VocabularyTable

TABLES = {kind: VocabularyTable(build()) for kind, build in KINDS.items()}


def decode(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def any_ids(kind):
    """Ids of the table, special ones and ones that no token has among them."""
    return st.lists(st.integers(min_value=0, max_value=len(TABLES[kind]) + 2), max_size=40)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_pieces_are_one_per_token_and_concatenate_to_the_text(kind, data):
    ids = data.draw(any_ids(kind))
    pieces = TABLES[kind].pieces(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == TABLES[kind].text(ids)


@given(ids=st.lists(st.integers(min_value=0, max_value=len(TABLES["byte_level"]) - 1), max_size=40))
@settings(max_examples=300, deadline=None)
def test_byte_level_text_is_the_tokenizers_own_even_for_broken_utf8(ids):
    assert TABLES["byte_level"].text(ids) == decode(byte_level(), ids)


@pytest.mark.parametrize("kind", ["unigram", "characters", "words"])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_text_is_the_tokenizers_own_but_for_the_first_space(kind, data):
    ids = data.draw(
        st.lists(st.integers(min_value=0, max_value=len(TABLES[kind]) - 1), max_size=40)
    )
    own = decode(KINDS[kind](), ids)
    assert TABLES[kind].text(ids) in (own, f" {own}")


@given(text=st.text(max_size=30))
@settings(max_examples=100, deadline=None)
def test_byte_fallback_gives_back_any_text(text):
    tokenizer = sentencepiece()
    text = text.replace("▁", "").encode("utf-8", "replace").decode()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    special = set(tokenizer.all_special_ids)
    if not special & set(ids):
        assert TABLES["sentencepiece"].text(ids) == text


def test_a_broken_run_of_byte_tokens_keeps_its_valid_part():
    tokenizer = sentencepiece()
    euro = tokenizer.convert_tokens_to_ids(["<0xE2>", "<0x82>", "<0xAC>", "<0xFF>"])
    assert TABLES["sentencepiece"].text(euro) == "€\ufffd"


def test_the_space_before_the_first_word_of_a_completion_is_kept():
    tokenizer = sentencepiece()
    ids = tokenizer(" quick", add_special_tokens=False)["input_ids"]
    assert TABLES["sentencepiece"].text(ids) == " quick"
    assert decode(tokenizer, ids) == "quick"


def test_a_split_code_point_belongs_to_the_token_that_completes_it():
    tokenizer = byte_level()
    ids = tokenizer("x龍y", add_special_tokens=False)["input_ids"]
    assert TABLES["byte_level"].pieces(ids) == ["x", "", "", "龍", "y"]


def test_a_special_token_inside_a_code_point_does_not_break_it():
    tokenizer = byte_level()
    ids = tokenizer("龍", add_special_tokens=False)["input_ids"]
    assert len(ids) == 3
    pieces = TABLES["byte_level"].pieces([ids[0], tokenizer.eos_token_id, *ids[1:]])
    assert pieces == ["", "", "", "龍"]


def test_a_code_point_left_open_stands_in_the_last_token_that_wrote_a_byte():
    tokenizer = byte_level()
    ids = tokenizer("x龍", add_special_tokens=False)["input_ids"][:-1]
    assert TABLES["byte_level"].pieces([*ids, tokenizer.eos_token_id]) == ["x", "", "\ufffd", ""]


def test_special_tokens_are_empty_and_added_ones_are_not():
    tokenizer = byte_level()
    ids = tokenizer("<|im_start|>a<think>two words<|im_end|>", add_special_tokens=False)[
        "input_ids"
    ]
    assert TABLES["byte_level"].pieces(ids) == ["", "a", "<think>", "two words", ""]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("hm</think>42<|im_end|>", "hm</think>42"),
        ("<|im_end|>[THINK]a[/THINK]b<|call|><|endoftext|>", "[THINK]a[/THINK]b"),
        (
            "<|channel|>analysis<|message|>a<|im_start|>assistant<|channel|>final<|message|>b",
            "<|channel|>analysis<|message|>aassistant<|channel|>final<|message|>b",
        ),
        ("<tool_call>f()<|role_end|>", "<tool_call>f()"),
    ],
)
def test_special_tokens_are_text_but_for_ends_and_the_marks_of_a_turn(written, read):
    tokenizer = byte_level.__wrapped__()
    names = "</think> [THINK] [/THINK] <|channel|> <|message|> <|call|> <tool_call> <|role_end|>"
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL, *names.split()]})
    tokenizer.chat_template = "<|role_end|><|message|>[/THINK]" + CHATML
    ids = tokenizer(written, add_special_tokens=False)["input_ids"]
    table = VocabularyTable(tokenizer, eos_ids=tokenizer.convert_tokens_to_ids(["<|call|>"]))
    assert table.text(ids) == read


def test_words_without_a_decoder_are_joined_with_spaces():
    ids = words()("let me check 42", add_special_tokens=False)["input_ids"]
    pieces = TABLES["words"].pieces([words().eos_token_id, *ids])
    assert pieces == ["", "let", " me", " check", " 42"]


def test_a_decoder_that_is_not_read_is_asked_what_each_token_adds():
    ids = word_pieces().convert_tokens_to_ids(["let", "##ting", "me", "check", "##ed"])
    assert TABLES["word_pieces"].pieces(ids) == [" let", "ting", " me", " check", "ed"]
    assert decode(word_pieces(), ids) == "letting me checked"


def test_rows_of_the_model_beyond_the_tokenizer_are_counted_and_empty():
    table = VocabularyTable(byte_level(), size=512)
    assert len(table) == 512
    assert table.pieces(np.array([511, 10**9, -1], dtype=np.int64)) == ["", "", ""]


def test_pieces_take_a_million_tokens_in_a_few_seconds():
    ids = np.array((byte_level()("".join(LINES))["input_ids"] * 10_000)[:1_000_000], dtype=np.int32)
    start = time.process_time()
    assert len(TABLES["byte_level"].pieces(ids)) == len(ids)
    assert (
        time.process_time() - start < 5
    )  # measured: 0.6 s; the bound only catches a decoder called token by token

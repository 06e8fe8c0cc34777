"""The order of the prompts is a pure function of (seed, cursor), and every prompt fits the
model.
"""

import copy
from collections import Counter
from dataclasses import replace
from functools import cache
from operator import ge

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers
from tokenizers_for_tests import byte_level, render_prompt, sentencepiece

from retrain.config import TrainConfig
from retrain.data import Example, PromptSet, ReadResult, encode_prompts
from retrain.data.chat import count_tokens, token_bounds
from retrain.data.prompts import fingerprint
from retrain.data.sources import Reason
from retrain.errors import ConfigurationError
from retrain.model.budget import NO_LIMIT
from retrain.model.text import TextModel, load_tokenizer
from retrain.model.vocabulary import VocabularyTable

CONFIG = TrainConfig.model_validate({"data": {"source": "lab"}, "training": {"max_tokens": 16}})
seeds = st.integers(min_value=0, max_value=2**32 - 1)
sizes = st.integers(min_value=1, max_value=40)
cursors = st.integers(min_value=0, max_value=200)


def loaded(*prompts: str, **said) -> ReadResult:
    return ReadResult(
        CONFIG.data,
        [Example(prompt, "1", example_id=f"e{i}") for i, prompt in enumerate(prompts)],
        **said,
    )


def text_model(context: int = NO_LIMIT) -> TextModel:
    tokenizer = byte_level()
    return TextModel("", tokenizer, VocabularyTable(tokenizer), (tokenizer.eos_token_id,), context)


TEXT = text_model()


@cache
def prompt_set(size: int) -> PromptSet:
    return encode_prompts(CONFIG.training, TEXT, loaded(*(f"p{i}" for i in range(size))))


def ids(prompts):
    return [prompt.prompt_id for prompt in prompts]


# ---- order


@given(size=sizes, seed=seeds, epoch=st.integers(min_value=0, max_value=5))
@settings(max_examples=60, deadline=None)
def test_every_epoch_visits_each_prompt_once(size, seed, epoch):
    visited = ids(prompt_set(size).batch(epoch * size, size, seed))
    assert sorted(visited) == sorted(ids(prompt_set(size).prompts))


@given(
    size=sizes,
    seed=seeds,
    cursor=cursors,
    counts=st.lists(st.integers(min_value=0, max_value=9), max_size=6),
)
@settings(max_examples=60, deadline=None)
def test_batches_are_the_single_steps_strung_together_whatever_their_size(
    size, seed, cursor, counts
):
    prompts = prompt_set(size)
    in_batches, place = [], cursor
    for count in counts:
        in_batches += prompts.batch(place, count, seed)
        place += count
    one_by_one = [prompts.batch(position, 1, seed)[0] for position in range(cursor, place)]
    assert ids(in_batches) == ids(one_by_one) == ids(prompts.batch(cursor, sum(counts), seed))


def test_epochs_and_seeds_are_shuffled_differently():
    prompts = prompt_set(30)
    orders = {
        tuple(ids(prompts.batch(epoch * 30, 30, seed))) for epoch in range(3) for seed in range(3)
    }
    assert len(orders) == 9
    assert tuple(ids(prompts.prompts)) not in orders


def test_the_order_is_the_same_on_every_machine():
    assert ids(prompt_set(8).batch(0, 8, 42)) == ["e7", "e6", "e3", "e5", "e0", "e1", "e2", "e4"]


def test_the_first_place_of_an_epoch_is_taken_by_each_prompt_alike():
    firsts = Counter(
        prompt.prompt_id for seed in range(2000) for prompt in prompt_set(4).batch(0, 1, seed)
    )
    assert all(400 < count < 600 for count in firsts.values())


# ---- encoding


def test_prompts_are_encoded_as_one_prompt_alone_would_be():
    tokenizer = byte_level()
    examples = loaded("1+1=?", "Größe 🎉", "a much longer prompt than the others")
    for prompt in encode_prompts(CONFIG.training, text_model(), examples).prompts:
        text, token_ids = render_prompt(tokenizer, prompt.example, CONFIG.data)
        assert prompt.text == text
        assert prompt.token_ids.tolist() == token_ids.tolist()


class Spy:
    """A tokenizer that remembers the texts that it encoded."""

    def __init__(self, tokenizer) -> None:
        self._tokenizer, self.encoded = tokenizer, []

    def __call__(self, texts, **options):
        self.encoded += texts
        return self._tokenizer(texts, **options)

    def __getattr__(self, name: str):
        return getattr(self._tokenizer, name)


def test_only_the_prompts_of_a_step_are_encoded_and_once():
    tokenizer = Spy(TEXT.tokenizer)
    prompts = encode_prompts(
        CONFIG.training,
        replace(TEXT, tokenizer=tokenizer, context=128),
        loaded(*(f"{i} + 1 = ?" for i in range(40))),
    )
    assert tokenizer.encoded == []
    step = prompts.batch(0, 8, seed=1)
    assert tokenizer.encoded == [prompt.text for prompt in step]
    assert prompts.batch(0, 8, seed=1) == step and len(tokenizer.encoded) == 8


def with_normal_form():
    """Qwen's kind."""
    tokenizer = copy.deepcopy(byte_level())
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    return tokenizer


_TOKENIZERS = {
    "byte_level": byte_level(),
    "lab": load_tokenizer("lab"),
    "normal_form": with_normal_form(),
    "sentencepiece": sentencepiece(),
}


PIECES = ("a", "1", " ", "é", "\u0344", "\U0001d160", "🎉", "<", "<|im_start|>", "two words")


@pytest.mark.parametrize("tokenizer", _TOKENIZERS.values(), ids=_TOKENIZERS)
@given(texts=st.lists(st.lists(st.sampled_from(PIECES), max_size=20).map("".join), min_size=1))
@settings(max_examples=40, deadline=None)
def test_no_prompt_has_more_tokens_than_its_bound(tokenizer, texts):
    counts = count_tokens(tokenizer, texts)
    assert all(map(ge, token_bounds(tokenizer, texts), counts))


@given(texts=st.lists(st.lists(st.sampled_from(PIECES), max_size=20).map("".join), min_size=1))
@settings(max_examples=20, deadline=None)
def test_the_longest_prompt_is_found(texts):
    prompts = encode_prompts(CONFIG.training, TEXT, loaded(*texts))
    assert prompts.longest == max(len(prompt.token_ids) for prompt in prompts.prompts)


def test_a_prompt_needs_room_for_one_token_in_the_context():
    texts = ("short", "a much longer prompt")
    short, long = encode_prompts(CONFIG.training, text_model(), loaded(*texts)).prompts
    size = len(long.token_ids)
    prompts = encode_prompts(CONFIG.training, text_model(context=size), loaded(*texts))
    assert ids(prompts.prompts) == ids([short])
    told = f"Dropped prompts: 1 longer than the context (e1 with {size} of {size} tokens)"
    assert told in prompts.notes
    assert len(encode_prompts(CONFIG.training, text_model(context=size + 1), loaded(*texts))) == 2


def test_no_prompt_left_is_fatal():
    told = r"has no usable prompt \(2 longer than the context \(first: e0 with "
    with pytest.raises(ConfigurationError, match=told):
        encode_prompts(CONFIG.training, text_model(context=2), loaded("a", "b"))


def test_completions_that_the_context_cuts_short_are_said():
    (prompt,) = encode_prompts(CONFIG.training, text_model(), loaded("a")).prompts
    size = len(prompt.token_ids)
    assert encode_prompts(CONFIG.training, text_model(context=size + 16), loaded("a")).notes == []
    (note,) = encode_prompts(CONFIG.training, text_model(context=size + 15), loaded("a")).notes
    assert "max_tokens = 16" in note and "for 1 of 1 prompts" in note
    assert "after 15 tokens or more" in note


def test_the_notes_of_the_source_are_said_once():
    notes = ["Dropped rows: 2 without an answer"]
    first = {Reason.NO_ANSWER: "x"}
    examples = loaded("a", dropped={Reason.NO_ANSWER: 2}, first=first, notes=list(notes))
    assert encode_prompts(CONFIG.training, text_model(), examples).notes == notes


# ---- the hash


def test_the_data_hash_knows_id_prompt_reference_and_order():
    a, b = Example("p", "1", example_id="a"), Example("q", "2", example_id="b")
    changed = [
        [b, a],
        [a],
        [Example("p", "3", example_id="a"), b],
        [Example("r", "1", example_id="a"), b],
        [Example("p", "1", example_id="c"), b],
        [Example([{"role": "user", "content": "p"}], "1", example_id="a"), b],
    ]
    hashes = {fingerprint([a, b]), *(fingerprint(examples) for examples in changed)}
    assert len(hashes) == 1 + len(changed)
    assert fingerprint([a, b]) == fingerprint(
        [Example("p", "1", info={"level": 3}, example_id="a"), b]
    )

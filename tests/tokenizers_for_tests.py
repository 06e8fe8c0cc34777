"""Small real tokenizers of every kind that VocabularyTable reads, trained on a few lines in
milliseconds.
"""

from functools import cache

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from retrain.config.schema import Data
from retrain.data.chat import encode_texts, render_text
from retrain.types import Example, Int32Array

LINES = [
    "The quick brown fox jumps over the lazy dog, and then the dog thinks: why not?",
    "Let me check: 12+30=42, so the answer is \\boxed{42}. Wait, let me verify that.",
    "Größe, naïve café, 東京の天気, Ελληνικά, 🎉🙂 emoji — dashes and “quotes”.",
] * 4

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] +"
    " '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%"
    " if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{%"
    " endif %}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@cache
def byte_level(chat: bool = True, eos: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """GPT-2's kind, with an added token that is not special and holds a space."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        LINES,
        trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet),
    )
    tokenizer.add_tokens(
        [AddedToken("<think>", normalized=False), AddedToken("two words", normalized=False)]
    )
    template = CHATML if chat else None
    return _wrapped(tokenizer, eos_token=eos, pad_token="<|endoftext|>", chat_template=template)


@cache
def sentencepiece() -> PreTrainedTokenizerFast:
    """Llama 2's kind: spaces as U+2581, bytes for characters outside the vocabulary, BOS put in
    front.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    special = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    ascii_lines = [line for line in LINES if line.isascii()]
    tokenizer.train_from_iterator(
        ascii_lines, trainers.BpeTrainer(vocab_size=400, special_tokens=special)
    )
    vocabulary = {token: index for index, token in enumerate([*special, *byte_tokens])}
    for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        vocabulary.setdefault(token, len(vocabulary))
    tokenizer.model = models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return _wrapped(tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@cache
def unigram() -> PreTrainedTokenizerFast:
    """T5's kind: a Metaspace decoder."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        LINES,
        trainers.UnigramTrainer(
            vocab_size=150, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
        ),
    )
    return _wrapped(tokenizer, eos_token="</s>", unk_token="<unk>")


@cache
def characters() -> PreTrainedTokenizerFast:
    """The lab's kind: a token a character."""
    alphabet = sorted({character for line in LINES for character in line})
    vocabulary = {token: index for index, token in enumerate(["<unk>", "<eos>", *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return _wrapped(tokenizer, eos_token="<eos>", unk_token="<unk>")


@cache
def words() -> PreTrainedTokenizerFast:
    """Whole words and no decoder: spaces stand between tokens, not in them."""
    vocabulary = {
        token: index for index, token in enumerate(["<unk>", "<eos>", "let", "me", "check", "42"])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return _wrapped(tokenizer, eos_token="<eos>", unk_token="<unk>")


@cache
def word_pieces() -> PreTrainedTokenizerFast:
    """BERT's kind, whose decoder the table does not read itself."""
    vocabulary = {
        token: index
        for index, token in enumerate(
            ["[UNK]", "[SEP]", "a", "let", "##ting", "me", "check", "##ed"]
        )
    }
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return _wrapped(tokenizer, eos_token="[SEP]", unk_token="[UNK]")


KINDS = {
    "byte_level": byte_level,
    "sentencepiece": sentencepiece,
    "unigram": unigram,
    "characters": characters,
    "words": words,
    "word_pieces": word_pieces,
}


def _wrapped(
    tokenizer: Tokenizer, chat_template: str | None = None, **tokens: str
) -> PreTrainedTokenizerFast:
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **tokens
    )
    wrapped.add_special_tokens(
        {"additional_special_tokens": [token for token in SPECIAL if token in wrapped.get_vocab()]}
    )
    wrapped.chat_template = chat_template
    return wrapped


def render_prompt(
    tokenizer: PreTrainedTokenizerFast, example: Example, data: Data
) -> tuple[str, Int32Array]:
    """One prompt alone: its text, and its token ids [P]."""
    text = render_text(tokenizer, example, data)
    return text, encode_texts(tokenizer, [text])[0]

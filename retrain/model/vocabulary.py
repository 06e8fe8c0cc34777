"""From token ids to text, without the tokenizer's own decoder: what each token contributes to a
completion.

A token stands for bytes. A table of these bytes gives the text of a completion and its pieces, at a
million tokens per second. Pieces say which token wrote which characters, which planning detection
needs. Tokens for padding, for the beginning and end of a text, and the tokens that a chat template
writes around a turn contribute nothing. Other special tokens, such as a thought's tags, are text.

The bytes come from the decoder that tokenizer.json declares. Known decoders are ByteLevel (GPT-2,
Llama 3, Qwen, SmolLM), Metaspace or Replace + ByteFallback (sentencepiece: Llama 2, Gemma,
Mistral). Fuse (characters) and none (words joined with spaces) are known too. For other decoders,
and for tokenizers without a tokenizer.json, the table asks token by token what the tokenizer adds
to a text.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from retrain.types import THOUGHT_TAGS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TokenIds = Sequence[int] | npt.NDArray[np.integer]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_BYTE_ALPHABET = {chr(byte): byte for byte in _PRINTABLE}
_BYTE_ALPHABET |= {
    chr(256 + i): byte for i, byte in enumerate(sorted({*range(256)}.difference(_PRINTABLE)))
}
"""GPT-2's printable stand-ins for the 256 bytes: printable Latin-1 stands for itself, the rest lies
past U+0100.
"""


class VocabularyTable:
    """The text that every token id contributes.

    `pieces` splits a completion over its tokens. If several tokens form a code point, it belongs to
    the token that completes it, and the earlier tokens get "". Bytes that are not UTF-8 become
    U+FFFD. Bytes left open at the end become U+FFFD in the last token's piece. Concatenated, the
    pieces are `text`. Apart from special tokens that are text, it equals the tokenizer's own
    `decode(ids, skip_special_tokens=True)` with two exceptions. In sentencepiece-like vocabularies
    it keeps the space before a completion's first word, and the valid part of a run of broken byte
    tokens.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", size: int = 0, eos_ids: Iterable[int] = ()
    ) -> None:
        """`size` is the model's vocab_size: the sampler can draw rows beyond the tokenizer's own
        entries, and their text is empty. `eos_ids`: the model's own ends of a completion.
        """
        tokens: dict[int, str] = {index: token for token, index in tokenizer.get_vocab().items()}
        silent = {*eos_ids, *_silent_ids(tokenizer)}
        self._size = max(size, len(tokenizer), max(tokens, default=-1) + 1)
        to_bytes, self._spaced = _token_reader(tokenizer)
        self._bytes = [b""] * (self._size + 1)  # the last entry answers for ids outside the table
        for index, token in tokens.items():
            if index not in silent:
                self._bytes[index] = to_bytes(index, token)

    def __len__(self) -> int:
        return self._size

    def token_bytes(self, token_id: int) -> bytes:
        """Return the text of one token; empty for ends, turns' marks and ids without a token."""
        return self._bytes[token_id] if 0 <= token_id < self._size else b""

    def text(self, token_ids: TokenIds) -> str:
        """Return the text of a completion; broken UTF-8 becomes U+FFFD."""
        joined = b"".join([self._bytes[index] for index in self._known(token_ids)])
        return joined.decode("utf-8", errors="replace")[int(self._spaced) :]

    def pieces(self, token_ids: TokenIds) -> list[str]:
        """Return one string per token; their concatenation is `text(token_ids)`."""
        pieces = _join_code_points([self._bytes[index] for index in self._known(token_ids)])
        if self._spaced and any(pieces):  # the space in front of the first word is not text
            first = next(position for position, piece in enumerate(pieces) if piece)
            pieces[first] = pieces[first][1:]
        return pieces

    def _known(self, token_ids: TokenIds) -> list[int]:
        ids = np.asarray(token_ids, dtype=np.int64)
        known: list[int] = np.where((ids >= 0) & (ids < self._size), ids, self._size).tolist()
        return known


def _join_code_points(token_bytes: Sequence[bytes]) -> list[str]:
    """Decode UTF-8 over tokens. The last token with a byte gets the bytes left open at the end."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pieces = [decoder.decode(raw) for raw in token_bytes]
    written = [position for position, raw in enumerate(token_bytes) if raw]
    if written:
        pieces[written[-1]] += decoder.decode(b"", final=True)
    return pieces


ANSWER = "retrain-marks-this-turn"
"""Stands for an assistant's turn, to find what a chat template writes around it."""


def rendered_turns(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return a question and ANSWER in the chat template; "" without one, or where it refuses
    them.
    """
    from jinja2 import TemplateError

    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": ANSWER}]
    with suppress(TemplateError):
        if tokenizer.chat_template:
            return str(tokenizer.apply_chat_template(turns, tokenize=False))
    return ""


def _silent_ids(tokenizer: "PreTrainedTokenizerBase") -> Iterator[int]:
    """Yield the special tokens that are not text: those with a role, and the marks of a turn."""
    roles = tokenizer.special_tokens_map.values()
    marks = rendered_turns(tokenizer) + " ".join(role for role in roles if isinstance(role, str))
    tags = " ".join(chain.from_iterable(THOUGHT_TAGS))
    for index, token in tokenizer.added_tokens_decoder.items():
        if token.special and token.content in marks and token.content not in tags:
            yield index


# ---- from a token's string to its bytes ----------------------------------------------------------

TokenReader = Callable[[int, str], bytes]


def _token_reader(tokenizer: "PreTrainedTokenizerBase") -> tuple[TokenReader, bool]:
    """Return a function that reads one token, and True if tokens are words with a space in front of
    each.
    """
    if not tokenizer.is_fast:
        return _probe(tokenizer), False
    decoder = tokenizer.backend_tokenizer.decoder
    if decoder is None:  # tokenizers joins the words with spaces
        return lambda _, token: f" {token}".encode(), True
    steps = _steps(json.loads(decoder.__getstate__()))
    if steps is None:
        return _probe(tokenizer), False

    def read(_: int, token: str) -> bytes:
        for step in steps:
            after = step(token)
            if isinstance(after, bytes):
                return after
            token = after
        return token.encode("utf-8")

    return read, False


def _steps(decoder: dict[str, Any]) -> list[Callable[[str], str | bytes]] | None:
    """Return the steps of a tokenizer.json decoder for a single token, in order; None for a decoder
    unknown here.
    """
    match decoder:
        case {"type": "Sequence", "decoders": list(decoders)}:
            parts = [_steps(part) for part in decoders]
            known = [part for part in parts if part is not None]
            if len(known) == len(parts):
                return list(chain.from_iterable(known))
        case {"type": "ByteLevel"}:
            return [_byte_level]
        case {"type": "ByteFallback"}:
            return [_byte_of_name]
        case {"type": "Metaspace", "replacement": str(mark)}:
            return [lambda token: token.replace(mark, " ")]
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return [lambda token: token.replace(old, new)]
        case {"type": "BPEDecoder", "suffix": str(suffix)}:
            return [lambda token: token.replace(suffix, " ")]
        case {"type": "Fuse" | "Strip"}:
            # Strip removes the space that opens a text, but a completion goes on after its prompt.
            return []
    return None


def _byte_of_name(token: str) -> str | bytes:
    """Return the byte that a token such as <0x0A> names; any other token as it is."""
    found = _BYTE_TOKEN.fullmatch(token)
    if found:
        return bytes([int(found[1], 16)])
    return token


def _byte_level(token: str) -> str | bytes:
    """Return the token's bytes. An added token with a character outside the alphabet, such as a
    space, stands for itself.
    """
    try:
        return bytes([_BYTE_ALPHABET[character] for character in token])
    except KeyError:
        return token


def _probe(tokenizer: "PreTrainedTokenizerBase") -> TokenReader:
    """Ask the tokenizer what a token adds to a text that has begun."""
    start = tokenizer("a", add_special_tokens=False)["input_ids"]
    text = decode(tokenizer, start)

    def read(index: int, _: str) -> bytes:
        return decode(tokenizer, [*start, index]).removeprefix(text).encode("utf-8")

    return read


def decode(tokenizer: "PreTrainedTokenizerBase", token_ids: list[int]) -> str:
    """Return the tokenizer's own text of token ids, with the names of special tokens."""
    return str(
        tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )

"""Text from a model or a data set, made harmless for a terminal or a page."""

import re
from collections.abc import Sequence
from itertools import accumulate

_ESCAPE_SEQUENCES = re.compile(
    r"""
    (?:\x1b\[|\x9b) [0-?]* [ -/]* [@-~]                     # CSI: colours, cursor
  | (?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])                 # OSC, DCS, SOS, PM, APC up to their end; without one, what follows is text
    (?: [^\x07\x1b\x90\x98\x9c-\x9f]*+ (?:\x07|\x1b\\|\x9c) )?
  | \x1b [ -/]* [0-~]?                                      # every other escape
    """,
    re.VERBOSE,
)
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_BIDI = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def clean(text: str) -> str:
    """A sentence or a table as it may be printed or stored, whoever wrote the names and messages in it.

    Escape sequences and controls are dropped, direction marks shown as <U+202E>; line breaks and tabs stay.
    """
    return _BIDI.sub(_named, _CONTROLS.sub("", _ESCAPE_SEQUENCES.sub("", text)))


def one_line(text: str, limit: int = 120) -> str:
    r"""`text` on one line of at most `limit` characters: escape sequences dropped, line breaks as \n, direction marks as <U+202E>."""
    text = clean(text[: 4 * limit]).replace("\n", "\\n").replace("\t", " ")
    return text if len(text) <= limit else text[: limit - 1] + "…"


def without_escapes(pieces: Sequence[str]) -> list[str]:
    """The pieces of one text without its escape sequences, each of which may run over several pieces."""
    text = _ESCAPE_SEQUENCES.sub(lambda sequence: "\0" * len(sequence.group()), "".join(pieces))
    ends = accumulate(map(len, pieces))
    return [text[end - len(piece) : end].replace("\0", "") for piece, end in zip(pieces, ends, strict=True)]


def visible(text: str) -> str:
    """`text` with everything that acts unseen written out: controls as their pictures, direction marks and the rest as <U+202E>.

    Line breaks and tabs stay. For a page: what a terminal would take for an escape sequence is shown there.
    """
    return _BIDI.sub(_named, _HIDDEN.sub(_picture, text))


def _named(character: re.Match[str]) -> str:
    return f"<U+{ord(character.group()):04X}>"


def _picture(character: re.Match[str]) -> str:
    code = ord(character.group())
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else _named(character)


def encodable(text: str, encoding: str) -> str:
    """`text` with what a stream's encoding cannot hold, lone surrogates included, written as an escape."""
    return text.encode(encoding, "backslashreplace").decode(encoding)

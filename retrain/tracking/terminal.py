"""Text from a model or a data set, made harmless for a terminal."""

import re

_ESCAPE_SEQUENCES = re.compile(
    r"""
    (?:\x1b\[|\x9b) [0-?]* [ -/]* [@-~]                     # CSI: colours, cursor
  | (?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f]) [^\x07\x1b\x9c]* (?:\x07|\x1b\\|\x9c)?   # OSC, DCS, SOS, PM, APC up to their end
  | \x1b [ -/]* [0-~]?                                      # every other escape
    """,
    re.VERBOSE,
)
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_BIDI = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def one_line(text: str, limit: int = 120) -> str:
    """`text` on one line of at most `limit` characters: escape sequences dropped, line breaks as \\n, direction marks as <U+202E>."""
    text = _ESCAPE_SEQUENCES.sub("", text[: 4 * limit])
    text = text.replace("\n", "\\n").replace("\t", " ")
    text = _CONTROLS.sub("", text)
    text = _BIDI.sub(lambda mark: f"<U+{ord(mark.group()):04X}>", text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def encodable(text: str, encoding: str) -> str:
    """`text` with what a stream's encoding cannot hold, lone surrogates included, written as an escape."""
    return text.encode(encoding, "backslashreplace").decode(encoding)

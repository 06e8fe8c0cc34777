"""Whether tests/servers/sentences.md quotes a sentence that a test has just met."""

import html
import re
from pathlib import Path

_PAGE = Path(__file__).resolve().parent / "servers" / "sentences.md"
_QUOTE = re.compile(r"^- \*\*[^*]+\*\*: (.+(?:\n  .+)*)", re.MULTILINE)
_VARIES = re.compile(r"https?://[\w.]+:\d+|[\w.-]*(?:/[\w.-]+)+|\d+(?:\.\d+)?")
"""Addresses, paths, numbers."""


def is_quoted(sentence: str) -> bool:
    """True if a bullet of that file, "- **case**: sentence", is the sentence but for what varies;
    "..." stands for anything.
    """
    found = _masked(sentence)
    quotes = _QUOTE.findall(html.unescape(_PAGE.read_text(encoding="utf-8")))
    return any(
        re.fullmatch(re.escape(_masked(quote)).replace(r"\.\.\.", ".*"), found) for quote in quotes
    )


def _masked(text: str) -> str:
    return " ".join(_VARIES.sub("N", text).split())

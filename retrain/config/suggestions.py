"""Guess the meaning of an unknown name: the nearest known one, or the key that has this name in
other trainers.
"""

import tomllib
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

_DATA = tomllib.loads(Path(__file__).with_name("synonyms.toml").read_text(encoding="utf-8"))
SYNONYMS: dict[str, str] = _DATA["synonyms"]
"""Names in other trainers and short forms -> the key that does the same or takes its place.
"section.name" is what the name means in that section alone."""

PREFIXES = {"bp_": "backpressure", "optim_": "optimizer", "tinker_": "backend"}
"""How flags begin in an earlier project of this name -> the section of the key that the rest
names."""

ABSENT: dict[str, str] = {
    name: group["instead"] for group in _DATA["absent"] for name in group["names"]
}
"""Names in other trainers that no key takes the place of, or with "_" how such names begin -> what
is done instead, as a clause."""

NAME_CUTOFF = 0.75
"""Minimum similarity between a mistyped name and a key. Below it, most guesses name a key that was
not meant."""


def nearest(word: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The candidate closest to a mistyped word, or None when none is close. Case is ignored."""
    names = {name.lower(): name for name in candidates}
    close = get_close_matches(word[:_MAX_CHARACTERS].lower(), names, n=1, cutoff=cutoff)
    return names[close[0]] if close else None


_MAX_CHARACTERS = 100
"""Characters that are compared: no name is longer, and comparing takes quadratic time."""


def synonym(name: str, section: str = "") -> str | None:
    """The "section.key" for a name in another trainer, None for any other name; dashes count as
    underscores.
    """
    word = _word(name)
    prefixed = (
        f"{home}.{word.removeprefix(prefix)}"
        for prefix, home in PREFIXES.items()
        if word.startswith(prefix) and not section
    )
    return SYNONYMS.get(f"{section}.{word}") or SYNONYMS.get(word) or next(prefixed, None)


def instead(name: str) -> str:
    """Say, as a clause, what is done in place of another trainer's setting that has no key here; ""
    for any other name.
    """
    word = _word(name)
    return ABSENT.get(word) or ABSENT.get(f"{word.partition('_')[0]}_", "")


def _word(name: str) -> str:
    return name.lower().replace("-", "_")

r"""The final answer of a completion, and its comparison with the reference as a string.

The answer is the content of the last `\boxed{...}` or `\fbox{...}` that is not empty. A box inside
another one is a part of its content. The last box decides even if it is incomplete: a completion
that ends inside its box has given no answer. The comparison takes strings as a reader sees them, or
after the normalization of the MATH paper (Hendrycks et al. 2021, `is_equiv`).
"""

import re
import unicodedata
from collections.abc import Iterator
from typing import Literal

from retrain.types import THOUGHT_TAGS

Normalization = Literal["none", "hendrycks"]

SAME_CHARACTERS: dict[int, str] = {
    **dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff\u00ad"), ""),
    **dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe63\uff0d"), "-"),
    **dict.fromkeys(map(ord, "\u00a0\u2002\u2003\u2007\u2009\u200a\u202f\u3000"), " "),
}
"""Characters that look like an ASCII character, or like nothing."""

_SLASH_FRACTION = re.compile(r"(0|-?[1-9][0-9]*)/(0|-?[1-9][0-9]*)")
_UNITS = r"\text{ "
_MARKER = re.compile(
    r"""
    \\(?:boxed|fbox)\s*+(?P<brace>\{)       # \boxed{...}, \fbox {...}
    | \\boxed\ (?=[^\S\n]*+[^\s$])           # Hendrycks' second form: \boxed 5, up to the next $ or the end of the line
    """,
    re.VERBOSE,
)
_PLAIN_BOX = re.compile(r"(?<![\w^}])\\(?:boxed|fbox)\s*+\{([^{}]*)\}(?!\w)")
_LINE_END = re.compile(r"[$\n]")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""A brace, or an escape to skip: an escaped brace, a line break, the first letter of a command."""
_MATH_MODE = re.compile(r"\A\$+([^$]+)\$+\Z")
_WHOLE = re.compile(r"\A([-+]?[\d,]+)\.0+\Z")
MAX_ANSWER = 1 << 16
"""Maximum characters of a box; a longer box counts as broken."""


def extract_boxed(text: str, after_think: bool = True) -> str | None:
    r"""Return the stripped content of the last box that is not empty, or "" if all are empty.
    Return None without a box, or if the last box has unbalanced braces.

    `\{` and `\}` are characters, not braces. With `after_think` only what follows the last thought
    counts, and nothing counts in a thought that never ends.
    """
    if after_think:
        text = after_thought(text)
    closing, boxes, done = dict(_groups(text)), [], 0
    for marker in _MARKER.finditer(text):
        start, end = marker.end(), closing.get(marker.end() - 1)
        if start < done:
            continue
        if end is not None:
            content = text[start:end]
            inner = _MARKER.match(text, end - len(content.lstrip()))
            if inner and closing.get(inner.end() - 1) == start + len(content.rstrip()) - 1:
                continue  # the box inside holds it all
            done = end
        boxes.append((marker, end))
    for marker, closed in reversed(boxes):
        start, end = marker.end(), closed
        if not marker["brace"]:
            end = start + len(_LINE_END.split(text[start : start + MAX_ANSWER], 1)[0])
        if end is None or end - start > MAX_ANSWER:
            return None
        content = _PLAIN_BOX.sub(r"\1", text[start:end])
        if answer := _MARKER.sub(lambda box: box["brace"] or "", content).strip():
            return answer
    return "" if boxes else None


def closing_brace(text: str, start: int) -> int | None:
    """Return the index of the brace that closes the group whose content starts at `start`, or
    None.
    """
    return next((end for opened, end in _groups(text, start - 1) if opened == start - 1), None)


def _groups(text: str, start: int = 0) -> Iterator[tuple[int, int]]:
    """Yield the positions of an opening brace and its partner, as they close."""
    opened: list[int] = []
    for brace in _BRACE.finditer(text, start):
        if brace[0] == "{":
            opened.append(brace.start())
        elif brace[0] == "}" and opened:
            yield opened.pop(), brace.start()


def after_thought(text: str, prompt: str = "", think_end_token: str = "") -> str:
    """Return what follows the last thought: "" if a thought never ends, the whole text if there is
    none.

    The end of `prompt` may open the thought, or end it. If a `think_end_token` is missing at the
    end of the prompt and in the text, the result is "".
    """
    prompt, start = prompt.rstrip(), 0
    tags = THOUGHT_TAGS
    if think_end_token:
        tags = (*tags, ("", think_end_token))
    for opening, closing in tags:
        end = text.rfind(closing)
        if end < 0 and prompt.endswith(closing) and not (opening and opening in text):
            continue  # it ended before the text
        if text.rfind(opening or closing) > end or (end < 0 and prompt.endswith(opening)):
            return ""
        if end >= 0:
            start = max(start, end + len(closing))
    return text[start:]


def bare_answer(reference: str) -> str:
    """Return what a completion would put into its box for a longer reference. Such references have
    a solution with `####`, several lines, math mode, or the fraction .0 of an integer.
    """
    text = reference.rpartition("####")[2].strip()
    if r"\begin" not in text:
        text = text.rpartition("\n")[2]
    for wrapped in (_MATH_MODE, _WHOLE):
        text = wrapped.sub(r"\1", text.strip())
    return text.strip()


# -- the comparison --------------------------------------------------------------------------------


def canonical_answer(answer: str, normalize: Normalization) -> str:
    """Return the form that equal answers share; "" for none."""
    if normalize == "none":
        return same_characters(answer)
    answer = answer.strip()
    try:
        return hendrycks_normalize(answer)
    except ValueError:
        return answer


def answers_match(answer: str, reference: str, normalize: Normalization) -> bool:
    """Return True if two answers are the same to a reader. An empty reference matches nothing."""
    answer, reference = answer.strip(), reference.strip()
    if not reference:
        return False
    known = canonical_answer(reference, normalize)
    return answer == reference or canonical_answer(answer, normalize) == known != ""


def same_characters(text: str) -> str:
    """Return the text with ASCII digits, dashes and spaces, and without invisible characters, outer
    white space and a final full stop.
    """
    if not text.isascii():
        text = "".join(
            unicodedata.normalize("NFKC", character) if character.isdecimal() else character
            for character in text
        ).translate(SAME_CHARACTERS)
    text = text.strip()
    return text if text.endswith("..") else text.removesuffix(".").rstrip()


def hendrycks_is_equiv(a: str | None, b: str | None) -> bool:
    """Compare after `hendrycks_normalize`, or as they stand if either side has no normal form. None
    equals nothing.
    """
    if a is None or b is None:
        return False
    return canonical_answer(a, "hendrycks") == canonical_answer(b, "hendrycks")


def hendrycks_normalize(text: str) -> str:
    """Apply the steps of the original in its order, since later steps rely on earlier ones.

    Raises ValueError where the original fails: two units, a root or fraction without an argument.
    """
    text = text.replace("\n", "").replace(r"\!", "").replace("\\\\", "\\")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac")
    text = text.replace(r"\left", "").replace(r"\right", "")
    text = text.replace(r"^{\circ}", "").replace(r"^\circ", "")
    text = text.replace(r"\$", "")
    # A unit at the end, such as `5\text{ cm}`: a space right after `\text{` marks it.
    text, *units = text.split(_UNITS)
    if len(units) > 1:
        raise ValueError(text)
    text = text.replace(r"\%", "")
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = "0" + text
    left, *right = text.split("=")
    if len(right) == 1 and len(left) <= 2:  # `x = 5` is 5, `a+b=5` stays
        text = right[0]
    first, *radicands = text.split(r"\sqrt")
    # `\sqrt3` is `\sqrt{3}`.
    text = r"\sqrt".join([first, *map(_braced_first, radicands)])
    text = text.replace(" ", "")
    text = _brace_fractions(text)
    if text == "0.5":
        text = r"\frac{1}{2}"
    if _SLASH_FRACTION.fullmatch(text):
        return _SLASH_FRACTION.sub(r"\\frac{\1}{\2}", text)
    return text


def _braced_first(text: str) -> str:
    if not text:
        raise ValueError(text)
    if text[0] == "{":
        return text
    return "{" + text[0] + "}" + text[1:]


def _brace_fractions(text: str) -> str:
    r"""Write `\frac12` and `\frac1{2}` as `\frac{1}{2}`. A fraction before a single last character
    leaves the whole string unchanged.
    """
    first, *rest = text.split(r"\frac")
    done = [first]
    for tail in rest:
        if not tail:
            raise ValueError(text)
        if tail[0] == "{":
            done.append(r"\frac" + tail)
        elif len(tail) == 1:
            return text
        else:
            done.append(r"\frac{" + tail[0] + "}" + _braced_first(tail[1:]))
    return "".join(done)

r"""String comparison of answers: exact, or after the normalisation of the MATH paper (Hendrycks et al. 2021, `is_equiv`)."""

import re
from contextlib import suppress
from typing import Literal

Normalization = Literal["none", "hendrycks"]

_SLASH_FRACTION = re.compile(r"(0|-?[1-9][0-9]*)/(0|-?[1-9][0-9]*)")
_UNITS = r"\text{ "


class _NotNormalizable(ValueError):
    """The normalisation is not defined for this string, which is then compared as it stands."""


def answers_match(answer: str, reference: str, normalize: Normalization) -> bool:
    """Return True if two answers are the same, apart from surrounding white space. An empty reference matches nothing."""
    answer, reference = answer.strip(), reference.strip()
    if not reference:
        return False
    if answer == reference:
        return True
    if normalize == "none":
        return False
    with suppress(_NotNormalizable):
        if not hendrycks_normalize(reference):
            return False
    return hendrycks_is_equiv(answer, reference)


def hendrycks_is_equiv(a: str | None, b: str | None) -> bool:
    """Compare after `hendrycks_normalize`, or as they stand if either side cannot be normalised. None equals nothing."""
    if a is None or b is None:
        return False
    try:
        return hendrycks_normalize(a) == hendrycks_normalize(b)
    except _NotNormalizable:
        return a == b


def hendrycks_normalize(text: str) -> str:
    """Apply the steps of the original in its order, since later steps rely on earlier ones.

    Raises ValueError where the original fails: two units, a root or fraction without an argument.
    """
    text = text.replace("\n", "").replace(r"\!", "").replace("\\\\", "\\")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac")
    text = text.replace(r"\left", "").replace(r"\right", "")
    text = text.replace(r"^{\circ}", "").replace(r"^\circ", "")
    text = text.replace(r"\$", "")
    text, *units = text.split(_UNITS)  # a unit at the end, such as `5\text{ cm}`: a space right after `\text{` marks it
    if len(units) > 1:
        raise _NotNormalizable(text)
    text = text.replace(r"\%", "")
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = "0" + text
    left, *right = text.split("=")
    if len(right) == 1 and len(left) <= 2:  # `x = 5` is 5, `a+b=5` stays
        text = right[0]
    first, *radicands = text.split(r"\sqrt")
    text = first + "".join(r"\sqrt" + _braced_first(radicand) for radicand in radicands)  # `\sqrt3` is `\sqrt{3}`
    text = text.replace(" ", "")
    text = _brace_fractions(text)
    if text == "0.5":
        text = r"\frac{1}{2}"
    return _SLASH_FRACTION.sub(r"\\frac{\1}{\2}", text) if _SLASH_FRACTION.fullmatch(text) else text


def _braced_first(text: str) -> str:
    if not text:
        raise _NotNormalizable(text)
    return text if text[0] == "{" else "{" + text[0] + "}" + text[1:]


def _brace_fractions(text: str) -> str:
    r"""`\frac12` and `\frac1{2}` are `\frac{1}{2}`. A fraction with a single character left leaves the whole string as it is."""
    first, *rest = text.split(r"\frac")
    done = [first]
    for tail in rest:
        if not tail:
            raise _NotNormalizable(text)
        if tail[0] == "{":
            done.append(r"\frac" + tail)
        elif len(tail) == 1:
            return text
        else:
            done.append(r"\frac{" + tail[0] + "}" + _braced_first(tail[1:]))
    return "".join(done)

r"""The final answer of a completion, its comparison with the reference as a string, and the answers
that the `math` reward refuses before sympy sees them.

The answer is the content of the last `\boxed{...}` or `\fbox{...}`. The last marker decides, even
if it is broken: a completion that was cut inside its box has given no answer. Answers are compared
exactly, or after the normalisation of the MATH paper (Hendrycks et al. 2021, `is_equiv`).

Most answers of the `math` reward are integers or repeat the reference letter by letter, and are
decided in the trainer's process. The others go to math-verify in a worker, unless sympy could not
evaluate them in any time: `9^{9^{9^9}}`, `(10^9)!`, forty nested fractions. Those are wrong
answers. The limits leave room: among the 5,000 answers of the MATH test set the longest has 81
characters, the deepest nests 3 brackets, the largest exponent and the largest factorial have 4
digits, none has a power of numbers as its exponent, the one power of a sum is a square, and none is
left as an integral, a sum or a product.
"""

import math
import re
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Literal

Normalization = Literal["none", "hendrycks"]

_SLASH_FRACTION = re.compile(r"(0|-?[1-9][0-9]*)/(0|-?[1-9][0-9]*)")
_UNITS = r"\text{ "
_MARKER = re.compile(
    r"""
    \\(?:boxed|fbox)\s*+(?P<brace>\{)       # \boxed{...}, \fbox {...}
    | \\boxed\ (?=[^\S\n]*+[^\s$])           # Hendrycks' second form: \boxed 5, up to the next $ or the end of the line
    """,
    re.VERBOSE,
)
_BARE = re.compile(r"[^$\n]*+")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""A brace, or an escape, which is skipped: an escaped brace, a line break, the first letter of a
command."""
MAX_ANSWER = 1 << 16
"""Maximum characters of a box; a longer one counts as broken and is not read to its end."""
_END_OF_THOUGHT = "</think>"


def extract_boxed(text: str, after_think: bool = True) -> str | None:
    r"""Return the stripped content of the last box: "" for an empty box, None without a box or with
    unbalanced braces.

    `\{` and `\}` are characters, not braces. With `after_think` only what follows the last
    `</think>` counts, if there is one.
    """
    if after_think:
        text = after_thought(text)
    markers = deque(_MARKER.finditer(text), maxlen=1)
    if not markers:
        return None
    last = markers[0]
    start, limit = last.end(), last.end() + MAX_ANSWER
    if last["brace"]:
        end = closing_brace(text[:limit], start)
        if end is None:
            return None
        return text[start:end].strip()
    bare = _BARE.match(text, start, limit)
    return bare.group().strip() if bare else None


def after_thought(text: str) -> str:
    """Return the text after the last `</think>`, or the whole text if there is none."""
    return text.rpartition(_END_OF_THOUGHT)[2]


def closing_brace(text: str, start: int) -> int | None:
    """Return the index of the brace that closes the group whose content starts at `start`; None if
    the text ends first.
    """
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return brace.start()
    return None


# -- the comparison --------------------------------------------------------------------------------


class _NotNormalizable(ValueError):
    """The normalisation is not defined for this string, which is then compared as it stands."""


def canonical_answer(answer: str, normalize: Normalization) -> str:
    """Return the form that equal answers share; "" for none."""
    answer = answer.strip()
    if normalize == "none":
        return answer
    try:
        return hendrycks_normalize(answer)
    except _NotNormalizable:
        return answer


def answers_match(answer: str, reference: str, normalize: Normalization) -> bool:
    """Return True if two answers are the same, apart from surrounding white space. An empty
    reference matches nothing.
    """
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
    """Compare after `hendrycks_normalize`, or as they stand if either side cannot be normalised.
    None equals nothing.
    """
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
    # A unit at the end, such as `5\text{ cm}`: a space right after `\text{` marks it.
    text, *units = text.split(_UNITS)
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
        raise _NotNormalizable(text)
    if text[0] == "{":
        return text
    return "{" + text[0] + "}" + text[1:]


def _brace_fractions(text: str) -> str:
    r"""`\frac12` and `\frac1{2}` are `\frac{1}{2}`. A fraction with a single character left leaves
    the whole string as it is.
    """
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


# -- answers refused before sympy ------------------------------------------------------------------


MAX_LENGTH = 1000
MAX_NESTING = 8
"""Levels of brackets and functions together. Each level doubles the time of math-verify's parser:
12 braces take 2.6 s, 12 `\\sin(` 3.6 s, 6 `\\sin^2` 12 s. With 8 levels no form that we found takes
more than 1.3 s."""
MAX_BARS = 16
"""Maximum number of `|` signs: each may open or close, and the parser tries both."""
MAX_DIGITS = 4
"""Maximum number of digits of a number in an exponent, before a factorial sign or in a binomial coefficient."""
MAX_TERMS = 150
"""Terms of the powers of sums in an answer when they are multiplied out: sympy takes 0.4 s for
`(x+2)^{100}`, 5 s for `(x+y+z+1)^{15}`."""

_INTEGER = re.compile(r"([+-]?)([0-9]++)")
_SPACING = re.compile(
    r"\\[!,]|\\left(?![a-zA-Z])|\\right(?![a-zA-Z])|(?<![a-zA-Z0-9\s])\s++|(?<!\s)\s++(?![a-zA-Z0-9])"
)
"""The possessive quantifiers match a run of white space from its first character only, so the time
is linear on any text."""
_LONG_NUMBER = re.compile(rf"(?<![\d.])\d{{{MAX_DIGITS + 1}}}")
_EXPONENT = re.compile(r"\^(?:(?P<open>[{(])|(?P<number>-?[\d.]+)(?P<tower>\^)?)")
_BINOMIAL = re.compile(r"\\[dt]?binom(?=\{)")
_POWER = re.compile(r"[)\]}]\^(?:\{-?(\d++)\}|-?(\d++))")
_ADDED = re.compile(r"(?<=[^({\[^_,=])[+-]")
_LETTER = re.compile(r"[a-zA-Z]")
_UNEVALUATED = re.compile(r"\\(?:o?int|sum|prod)(?![a-zA-Z])")
_FACTORIAL = re.compile(r"(?:(?P<close>[)}\]])|(?P<number>\d+))!")
_VARIABLE = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]")
_TOKEN = re.compile(r"\\[a-zA-Z]+|\\?.", re.DOTALL)
_FUNCTION = re.compile(
    r"\\(?:(?:arc|ar|a)?(?:sin|cos|tan|csc|sec|cot)h?|log|ln|lg|exp|o?int|sum|prod|lim|det|max|min|gcd|lcm|binom)"
)
_BEFORE_BRACES = frozenset({r"\frac", r"\sqrt"})
_CLOSING = {"{": "}", "(": ")", "[": "]"}


def decide_by_strings(answer: str, reference: str) -> bool | None:
    """Return right or wrong if the strings alone decide; None if the expressions have to be
    compared.
    """
    answer, reference = canonical_latex(answer), canonical_latex(reference)
    if not answer or not reference:
        return False
    if answer == reference:
        return True
    ours, theirs = _INTEGER.fullmatch(answer), _INTEGER.fullmatch(reference)
    if ours and theirs:
        return _signed(ours) == _signed(theirs)
    left_open = _UNEVALUATED.search(answer) and not _UNEVALUATED.search(reference)
    return False if left_open or is_refused(answer) else None


def bare(answer: str) -> str:
    """Remove surrounding white space, dollars and a final full stop (math-verify finds "5." unequal
    to "5").
    """
    answer = answer.strip().removesuffix(".")
    if not answer.startswith("$"):
        return answer
    opened = answer.lstrip("$")
    inside = opened.rstrip("$")
    if inside.endswith("\\"):
        inside = opened[: len(inside) + 1]  # this dollar is escaped
    closed = len(inside) < len(opened) or (not opened and len(answer) > 1)
    if closed:
        return inside.strip()
    return answer


def canonical_latex(answer: str) -> str:
    r"""Remove markup that never changes a value from the bare answer: spacing, `\left` and
    `\right`, the size of fractions.
    """
    return _SPACING.sub("", bare(answer).replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac"))


def _signed(integer: "re.Match[str]") -> tuple[bool, str]:
    """Split off the sign, so that integers of any length can be compared: Python's int refuses more
    than 4,300 digits.
    """
    digits = integer[2].lstrip("0")
    return integer[1] == "-" and bool(digits), digits


def is_refused(answer: str) -> bool:
    """Return True if a canonical answer exceeds a static limit or has unbalanced braces, so that it
    is wrong without being evaluated.
    """
    if (
        len(answer) > MAX_LENGTH
        or answer.count("|") > MAX_BARS
        or closing_brace(answer + "}", 0) != len(answer)
    ):
        return True
    plain = answer.replace("{,}", "").replace(",", "")
    if _nesting(plain) > MAX_NESTING:
        return True
    partner = _partners(plain)
    for argument in _large_arguments(plain, partner):
        # A power or a factorial is a long number unless a variable is in it.
        makes_numbers = "^" in argument or "!" in argument
        if _LONG_NUMBER.search(argument) or (makes_numbers and not _VARIABLE.search(argument)):
            return True
    return _expanded_terms(plain, partner) > MAX_TERMS


def _nesting(text: str) -> int:
    r"""How deep the expression nests. A bracket is a level, and so is a function that waits for its
    argument: `\sin\sin x` has two.

    An exponent of such a function is another level, since `\sin^2\sin^2` costs the parser as much
    as `\sin(\sin(`.
    """
    deepest = outside = waiting = 0
    is_script = False  # the next operand is the exponent or index of a function, not its argument
    stack: list[tuple[int, int, bool]] = []
    for token in _TOKEN.findall(text):
        if token in _CLOSING or token == r"\{":
            stack.append((outside, waiting, is_script))
            outside, waiting, is_script = outside + waiting + 1, 0, False
        elif token in _CLOSING.values() or token == r"\}":
            if stack:
                outside, waiting, was_script = stack.pop()
            else:
                outside, waiting, was_script = (0, 0, False)
            waiting, is_script = waiting if was_script else 0, False
        elif token in ("^", "_"):
            waiting += token == "^" and waiting > 0
            is_script = waiting > 0
        elif _FUNCTION.fullmatch(token):
            waiting += 1
        elif is_script:
            is_script = False
        # The awaited argument.
        elif token.isalnum() or (token[0] == "\\" and token not in _BEFORE_BRACES):
            waiting = 0
        deepest = max(deepest, outside + waiting)
    return deepest


def _expanded_terms(text: str, partner: dict[int, int]) -> int:
    """Count the terms after all powers of sums are multiplied out: a sum of k terms to the power n
    has C(n + k - 1, k - 1).
    """
    terms = 1
    for power in _POWER.finditer(text):
        inside = text[partner.get(power.start(), power.start()) + 1 : power.start()]
        added, exponent = len(_ADDED.findall(inside)), int((power[1] or power[2])[: MAX_DIGITS + 1])
        if added and _LETTER.search(inside):
            terms *= math.comb(exponent + added, added)
    return terms


def _large_arguments(text: str, partner: dict[int, int]) -> Iterator[str]:
    """Yield every exponent, and every argument of a factorial or a binomial coefficient."""
    for match in _BINOMIAL.finditer(text):
        top = partner.get(match.end(), len(text))
        yield text[match.end() + 1 : top]
        yield text[top + 2 : partner.get(top + 1, len(text))]
    for match in _EXPONENT.finditer(text):
        if match["open"]:
            yield text[match.end() : partner.get(match.start("open"), len(text))]
        else:
            yield match["number"] + (match["tower"] or "")
    for match in _FACTORIAL.finditer(text):
        yield match["number"] or text[partner.get(match.start("close"), 0) : match.start("close")]


def _partners(text: str) -> dict[int, int]:
    """Map the position of each bracket to its partner's, in both directions. `(0,1]` is a pair
    too.
    """
    partner: dict[int, int] = {}
    stack: list[int] = []
    for position, character in enumerate(text):
        if character in _CLOSING:
            stack.append(position)
        elif character in _CLOSING.values() and stack:
            opening = stack.pop()
            partner[opening], partner[position] = position, opening
    return partner

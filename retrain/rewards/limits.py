r"""The answers that the `math` reward calls wrong before sympy sees them, because sympy could never
finish them: `9^{9^{9^9}}`, `(10^9)!`, forty nested fractions.

The limits leave room. Among the 5,000 answers of the MATH test set the longest has 81 characters,
and the deepest nests 3 brackets. The largest exponent and the largest factorial have 4 digits. They
have no power of numbers as an exponent, and the only power of a sum is a square.
"""

import math
import re
from collections.abc import Iterator

from retrain.rewards.answers import closing_brace

MAX_LENGTH = 1000
MAX_NESTING = 8
"""Levels of brackets and functions together. Each level doubles the time of math-verify's parser:
12 braces take 2.6 s, 12 `\\sin(` 3.6 s, 6 `\\sin^2` 12 s. With 8 levels no form that we found takes
more than 1.3 s."""
MAX_BARS = 16
"""Maximum number of `|` signs: each may open or close, and the parser tries both."""
MAX_DIGITS = 4
"""Maximum digits of a number in an exponent, before a factorial sign or in a binomial."""
MAX_TERMS = 150
"""Terms of the multiplied-out powers of sums in an answer: sympy takes 0.4 s for `(x+2)^{100}`, 5 s
for `(x+y+z+1)^{15}`.
"""

_LONG_NUMBER = re.compile(rf"(?<![\d.])\d{{{MAX_DIGITS + 1}}}")
_EXPONENT = re.compile(r"\^(?:(?P<open>[{(])|(?P<number>-?[\d.]+)(?P<tower>\^)?)")
_BINOMIAL = re.compile(r"\\[dt]?binom(?=\{)")
_POWER = re.compile(r"[)\]}]\^(?:\{-?(\d++)\}|-?(\d++))")
_ADDED = re.compile(r"(?<=[^({\[^_,=])[+-]")
_LETTER = re.compile(r"[a-zA-Z]")
_FACTORIAL = re.compile(r"(?:(?P<close>[)}\]])|(?P<number>\d+))!")
_VARIABLE = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]")
_TOKEN = re.compile(r"\\[a-zA-Z]+|\\?.", re.DOTALL)
_FUNCTION = re.compile(
    r"\\(?:(?:arc|ar|a)?(?:sin|cos|tan|csc|sec|cot)h?|log|ln|lg|exp|o?int|sum|prod|lim|det|max|min|gcd|lcm|binom)"
)
_BEFORE_BRACES = frozenset({r"\frac", r"\sqrt"})
_CLOSING = {"{": "}", "(": ")", "[": "]"}


def is_refused(answer: str) -> bool:
    """Return True if a normalized answer exceeds a static limit or has unbalanced braces.

    Such an answer counts as wrong without an evaluation.
    """
    if (
        len(answer) > MAX_LENGTH
        or answer.count("|") > MAX_BARS
        or closing_brace(f"{{{answer}}}", 1) != len(answer) + 1
    ):
        return True
    plain = answer.replace(",", "")
    if _nesting(plain) > MAX_NESTING:
        return True
    partner = partners(plain)
    for argument in _large_arguments(plain, partner):
        # A power or a factorial is a long number unless a variable is in it.
        makes_numbers = "^" in argument or "!" in argument
        if _LONG_NUMBER.search(argument) or (makes_numbers and not _VARIABLE.search(argument)):
            return True
    return _expanded_terms(plain, partner) > MAX_TERMS


def _nesting(text: str) -> int:
    r"""Return the nesting depth of the expression. A bracket is a level, and so is a function that
    waits for its argument: `\sin\sin x` has two.

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
            outside, waiting, was_script = stack.pop() if stack else (0, 0, False)
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
    """Count the terms of the multiplied-out powers of sums. A sum of k terms to the power n has C(n
    + k - 1, k - 1).
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


def partners(text: str) -> dict[int, int]:
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

r"""The `math` reward's half in the trainer: what is settled without sympy, and what is refused before it gets there.

Most answers are integers or repeat the reference letter by letter. The rest go to math-verify in a worker, unless they are of a
kind that sympy cannot evaluate in any time: `9^{9^{9^9}}`, `(10^9)!`, forty nested fractions. Those are wrong answers. The limits
leave room: of the 5,000 answers of the MATH test set the longest has 81 characters, the deepest nests 3 brackets, the largest
exponent and the largest factorial have 4 digits, and none has a power of numbers as its exponent.
"""

import re
from collections.abc import Iterator

from retrain.rewards.boxed import closing_brace

MAX_LENGTH = 1000
MAX_NESTING = 8
"""Of brackets and functions together. Each further level doubles the time of math-verify's parser: 12 braces take it 2.6 s, 12 `\\sin(`
3.6 s, 6 `\\sin^2` 12 s; of 8 levels, no form that
we found takes more than 1.3 s, integrals aside, which sympy evaluates."""
MAX_BARS = 16
"""Each `|` may open or close, and the parser tries both."""
MAX_DIGITS = 4
"""Digits of a number in an exponent or before a factorial sign."""

_INTEGER = re.compile(r"([+-]?)([0-9]++)")
_SPACING = re.compile(r"\\[!,]|\\left(?![a-zA-Z])|\\right(?![a-zA-Z])|(?<![a-zA-Z0-9\s])\s++|(?<!\s)\s++(?![a-zA-Z0-9])")
"""A run of white space is looked at from its first character only, and never given back: linear on any text."""
_LONG_NUMBER = re.compile(rf"(?<![\d.])\d{{{MAX_DIGITS + 1}}}")
_EXPONENT = re.compile(r"\^(?:(?P<open>[{(])|(?P<number>-?[\d.]+)(?P<tower>\^)?)")
_FACTORIAL = re.compile(r"(?:(?P<close>[)}\]])|(?P<number>\d+))!")
_VARIABLE = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]")
_TOKEN = re.compile(r"\\[a-zA-Z]+|\\?.", re.DOTALL)
_FUNCTION = re.compile(r"\\(?:(?:arc|ar|a)?(?:sin|cos|tan|csc|sec|cot)h?|log|ln|lg|exp|o?int|sum|prod|lim|det|max|min|gcd|lcm|binom)")
_BEFORE_BRACES = frozenset({r"\frac", r"\sqrt"})
_CLOSING = {"{": "}", "(": ")", "[": "]"}


def settled(answer: str, reference: str) -> bool | None:
    """Right or wrong where strings alone decide; None where the expressions have to be compared."""
    answer, reference = tidy(answer), tidy(reference)
    if not answer or not reference:
        return False
    if answer == reference:
        return True
    ours, theirs = _INTEGER.fullmatch(answer), _INTEGER.fullmatch(reference)
    if ours and theirs:
        return _signed(ours) == _signed(theirs)
    return False if is_refused(answer) else None


def bare(answer: str) -> str:
    """The answer without what stands around it: white space, dollars, a final full stop (math-verify finds "5." unequal to "5")."""
    answer = answer.strip().removesuffix(".")
    if not answer.startswith("$"):
        return answer
    opened = answer.lstrip("$")
    inside = opened.rstrip("$")
    if inside.endswith("\\"):
        inside = opened[: len(inside) + 1]  # this dollar is a character
    closed = len(inside) < len(opened) or (not opened and len(answer) > 1)
    return inside.strip() if closed else answer


def tidy(answer: str) -> str:
    r"""The bare answer without what never changes its value: spacing, `\left` and `\right`, the size of fractions."""
    return _SPACING.sub("", bare(answer).replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac"))


def _signed(integer: "re.Match[str]") -> tuple[bool, str]:
    """Comparable at any length: Python's int refuses more than 4,300 digits."""
    digits = integer[2].lstrip("0")
    return integer[1] == "-" and bool(digits), digits


def is_refused(answer: str) -> bool:
    """Whether a tidy answer is over a static limit, or its braces do not close, and so is wrong without being evaluated."""
    if len(answer) > MAX_LENGTH or answer.count("|") > MAX_BARS or closing_brace(answer + "}", 0) != len(answer):
        return True
    plain = answer.replace("{,}", "").replace(",", "")
    if _nesting(plain) > MAX_NESTING:
        return True
    partner = _partners(plain)
    return any(map(_is_huge, _exponents(plain, partner))) or any(map(_is_huge, _factorials(plain, partner)))


def _nesting(text: str) -> int:
    r"""How deep the expression nests. A bracket is a level, and so is a function that waits for its argument: `\sin\sin x` is two.

    An exponent of such a function is one more, since `\sin^2\sin^2` costs the parser as much as `\sin(\sin(`.
    """
    deepest = outside = waiting = 0
    is_script = False  # an operand here belongs to the function before it, and is not its argument
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
        elif token.isalnum() or (token[0] == "\\" and token not in _BEFORE_BRACES):  # an operand: the argument that was waited for
            waiting = 0
        deepest = max(deepest, outside + waiting)
    return deepest


def _is_huge(argument: str) -> bool:
    """An exponent, or what stands before a factorial sign: a long number, or numbers that power or factorial make long."""
    makes_numbers = "^" in argument or "!" in argument
    return bool(_LONG_NUMBER.search(argument)) or (makes_numbers and not _VARIABLE.search(argument))


def _exponents(text: str, partner: dict[int, int]) -> Iterator[str]:
    for match in _EXPONENT.finditer(text):
        if match["open"]:
            yield text[match.end() : partner.get(match.start("open"), len(text))]
        else:
            yield match["number"] + (match["tower"] or "")


def _factorials(text: str, partner: dict[int, int]) -> Iterator[str]:
    for match in _FACTORIAL.finditer(text):
        yield match["number"] or text[partner.get(match.start("close"), 0) : match.start("close")]


def _partners(text: str) -> dict[int, int]:
    """Where each bracket's partner stands, in both directions. `(0,1]` is a pair too."""
    partner: dict[int, int] = {}
    stack: list[int] = []
    for position, character in enumerate(text):
        if character in _CLOSING:
            stack.append(position)
        elif character in _CLOSING.values() and stack:
            opening = stack.pop()
            partner[opening], partner[position] = position, opening
    return partner

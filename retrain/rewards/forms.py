r"""The structure of a normalized answer (normalize.py): a list, a set, a point, an interval, a
matrix, a congruence, or a value. `x<3` is the interval from minus infinity to 3, and `\pm 2` is a
list of two.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from retrain.rewards.limits import partners
from retrain.rewards.normalize import LEADING_PLUS
from retrain.rewards.quantities import SYMBOL, rational

Kind = Literal["list", "set", "tuple", "interval", "matrix", "congruence", "value"]


@dataclass(frozen=True)
class Form:
    """One answer, taken apart."""

    kind: Kind
    text: str = ""
    """The value; the brackets of a tuple or an interval."""
    items: "tuple[Form, ...]" = ()
    variable: str = ""
    """The variable of an inequality, or of a membership."""


_TOKEN = re.compile(r"\\[{}]|\\[a-zA-Z]+\s?|\\.|.", re.DOTALL)
_DEEPER, _SHALLOWER = ("(", "[", "{", r"\{"), (")", "]", "}", r"\}")

_SEPARATOR = re.compile(r",|;|\\text\{(?:and|or)\}|\\cup(?![a-zA-Z])")
_COMMA, _AND, _ROW_END = re.compile("[,;]"), re.compile("&"), re.compile(r"\\\\")
_RELATION = re.compile(r"<|>|\\le(?![a-zA-Z])|\\ge(?![a-zA-Z])")
_FLIPPED = {">": "<", r"\ge": r"\le", "<": ">", r"\le": r"\ge"}

_MEMBER = re.compile(rf"({SYMBOL})\s*\\in\s*(.+)", re.DOTALL)
_CONDITION = re.compile(
    rf"(?:{SYMBOL}|\({SYMBOL}(?:,{SYMBOL})+\))(?:\\in\s*\\mathbb\{{R\}})?[|:](.+)", re.DOTALL
)
_ALL_BUT = re.compile(
    rf"({SYMBOL})\\ne\s*(.+)|\\mathbb\{{R\}}(?:\\setminus\s*|\\backslash\s*|-)\\\{{(.+)\\\}}"
)
_REAL = re.compile(
    rf"{SYMBOL}\\in\s*\\mathbb\{{R\}}[,;]\s*(?={SYMBOL}\s*(?:[<>]|\\[lgn]e))"
)  # `x\in\mathbb{R},x>3` is `x>3`.
_BARS = {
    re.compile(rf"^{side}$"): written
    for side, written in (
        (r"\|([a-vxy])\|(<|\\le) ?([^-+,;<>|]+)", r"-\3\2 \1\2 \3"),
        (r"\|([a-vxy])\|(>|\\ge) ?([^-+,;<>|]+)", r"\1\2 \3,-\3\2 \1"),
        (r"([^-+,;<>|]+)(>|\\ge) ?\|([a-vxy])\|", r"\1\2 \3\2 -\1"),
        (r"([^-+,;<>|]+)(<|\\le) ?\|([a-vxy])\|", r"\1\2 \3,\3\2 -\1"),
    )
}
"""`|x|<3` and `|x|>3`. The letters z and w often are complex numbers."""
_CONGRUENCE = re.compile(r"(.+?)\\equiv((?:(?!\\equiv).)+)\\pmod\{(.+?)\}")
_MATRIX = re.compile(
    r"\\begin\{pmatrix\}((?:(?!\\end\{pmatrix\}=).)*)\\end\{pmatrix\}(\^\{?(?:T|\\top)\}?)?",
    re.DOTALL,
)
_EVERYTHING = re.compile(r"\\mathbb\{R\}|\\text\{(?:all )?(?:reals?|real numbers)\}", re.IGNORECASE)
_NOTHING = re.compile(r"\\emptyset|\\text\{(?:(?:the )?empty set|no solutions?)\}", re.IGNORECASE)
_PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![a-zA-Z])\s*")


def split(text: str, separator: re.Pattern[str]) -> list[str]:
    """Split outside of all brackets."""
    parts, depth, start, position = [], 0, 0, 0
    while token := _TOKEN.match(text, position):
        found = separator.match(text, position) if depth == 0 else None
        if found:
            parts.append(text[start:position])
            start = position = found.end()
            continue
        depth += token[0] in _DEEPER
        depth -= token[0] in _SHALLOWER and depth > 0
        position = token.end()
    return [part.strip() for part in [*parts, text[start:]]]


@lru_cache(maxsize=4096)
def read(text: str) -> Form:
    """Return the structure of a normalized answer or of a part of one."""
    if congruence := _CONGRUENCE.fullmatch(text):
        left, residues, modulus = congruence.groups()
        return _listed(_congruence(left, each.text, modulus) for each in _items(read(residues)))
    text = _REAL.sub("", text)
    for bars, written in _BARS.items():
        text = bars.sub(written, text)
    pieces = split(text, _SEPARATOR)
    parts = list(filter(None, pieces))
    if len(parts) > 1:
        forms = list(map(read, parts))
        both = _both(*forms) if len(pieces) == 2 and r"\text{and}" in text else None
        return both or _listed(item for form in forms for item in _items(form))
    text = parts[0] if parts else text
    if member := _MEMBER.fullmatch(text):
        inside = read(member[2])
        return Form(inside.kind, inside.text, inside.items, member[1])
    return _plus_minus(text) or _bracketed(text) or _inequality(text) or Form("value", text)


def _both(lower: Form, upper: Form) -> Form | None:
    """Return the interval of two bounds of one variable, such as `x>1` and `x<3`."""
    if lower.items[1:] != _values(r"\infty"):
        lower, upper = upper, lower
    bounds = lower.items[1:] + upper.items[:1]
    if bounds != _values(r"\infty", r"-\infty") or not lower.variable == upper.variable != "":
        return None
    low, high = lower.items[0].text, upper.items[1].text
    return _interval(lower.text[0] + upper.text[1], low, high, lower.variable)


def _items(form: Form) -> tuple[Form, ...]:
    return form.items if form.kind == "list" else (form,)


def _listed(forms: Iterable[Form]) -> Form:
    items = tuple(forms)
    return items[0] if len(items) == 1 else Form("list", items=items)


def _values(*texts: str) -> tuple[Form, ...]:
    return tuple(Form("value", text) for text in texts)


def _congruence(left: str, residue: str, modulus: str) -> Form:
    number, divisor = rational(residue), rational(modulus)
    if number is not None and divisor:
        residue = str(number % divisor)
    return Form("congruence", items=_values(left, residue, modulus))


def _plus_minus(text: str) -> Form | None:
    if len(_PLUS_MINUS.findall(text)) != 1 or text.startswith(r"\{"):
        return None
    return _listed(read(re.sub(LEADING_PLUS, "", _PLUS_MINUS.sub(sign, text))) for sign in "+-")


def _bracketed(text: str) -> Form | None:
    if _EVERYTHING.fullmatch(text):
        return _interval("()", r"-\infty", r"\infty")
    if _NOTHING.fullmatch(text):
        return Form("set")
    if matrix := _MATRIX.fullmatch(text):
        return _matrix(matrix[1], is_transposed=bool(matrix[2]))
    is_set = text.startswith(r"\{") and text.endswith(r"\}")
    if (is_set or text[:1] in ("(", "[")) and partners(text).get(int(is_set)) == len(text) - 1:
        return _set(text[2:-2].strip()) if is_set else _tuple(text)
    return None


def _matrix(body: str, *, is_transposed: bool) -> Form:
    rows = [split(row, _AND) for row in split(body, _ROW_END) if row]
    if is_transposed:
        rows = [list(column) for column in zip(*rows, strict=False)]
    return Form("matrix", items=tuple(Form("tuple", items=tuple(map(read, row))) for row in rows))


def _set(inside: str) -> Form:
    condition = _CONDITION.fullmatch(inside)
    return read(condition[1]) if condition else Form("set", items=_items(read(inside)))


def _tuple(text: str) -> Form | None:
    brackets, items = text[0] + text[-1], split(text[1:-1], _COMMA)
    if len(items) == 2 and (brackets != "()" or r"\infty" in text):
        return _interval(brackets, *items)
    return Form("tuple", brackets, tuple(map(read, items))) if len(items) > 1 else None


def _interval(brackets: str, low: str, high: str, variable: str = "") -> Form:
    first, last = rational(low), rational(high)
    if variable and first is not None and last is not None and first > last:
        return Form("set", variable=variable.strip())  # `3<x<1`
    return Form("interval", brackets, _values(low, high), variable.strip())


def _inequality(text: str) -> Form | None:
    r"""Read `1<x\le 2`, `x>3` and `x\ne 3` as intervals; other relations stay values."""
    if all_but := _ALL_BUT.fullmatch(text):
        point, variable = all_but[2] or all_but[3], all_but[1] or ""
        ends = ((r"-\infty", point), (point, r"\infty"))
        return _listed(_interval("()", low, high, variable) for low, high in ends)
    sides = split(text, _RELATION)
    signs = [match[0] for match in _RELATION.finditer(text)]
    if len(sides) != len(signs) + 1 or not all(sides):
        return None
    if signs and signs[0] in (">", r"\ge"):
        sides, signs = sides[::-1], [_FLIPPED[sign] for sign in signs[::-1]]
    if not set(signs) <= {"<", r"\le"}:
        return None
    if (span := _ends(sides)) is None:
        return None
    low, variable, high = span
    opening = "[" if signs[0] == r"\le" and low != r"-\infty" else "("
    closing = "]" if signs[-1] == r"\le" and high != r"\infty" else ")"
    return _interval(opening + closing, low, high, variable)


def _ends(sides: list[str]) -> tuple[str, str, str] | None:
    """Return the lower end, the variable and the upper end; None if no side is a variable alone."""
    symbols = [bool(re.fullmatch(SYMBOL, side)) for side in sides]
    if len(sides) == 3 and symbols[1]:
        return sides[0], sides[1], sides[2]
    if symbols == [True, False]:
        return r"-\infty", sides[0], sides[1]
    if symbols == [False, True]:
        return sides[0], sides[1], r"\infty"
    return None

r"""The comparison of the `math` reward: structures item by item (forms.py), equations by their left
side, words and units next to the value (quantities.py). The comparison of fractions and decimals is
exact. Other expressions go to `equal`, which is math-verify in a worker.
"""

import re
from collections.abc import Callable, Sequence

from retrain.rewards.answers import same_characters
from retrain.rewards.forms import Form, read, split
from retrain.rewards.limits import MAX_LENGTH, is_refused
from retrain.rewards.normalize import normalize
from retrain.rewards.quantities import (
    GREEK,
    SYMBOL,
    Quantity,
    letters,
    quantity,
    rational,
    same_words,
)

Equal = Callable[[str, str], bool]
r"""Compares two expressions without words, the reference first. `\simeq 0.33` equals every
number less than one unit of its last place away.
"""

# -- what strings decide ---------------------------------------------------------------------------

_INTEGER = re.compile(r"(?:\+|-(?=0+\Z)|(-))?(?=[0-9])0*+([0-9]*+)")
"""Sign and digits: Python's int refuses more than 4,300 of them."""


class _UndecidedError(Exception):
    """The strings alone do not decide."""


def decide_by_strings(answer: str, reference: str) -> bool | None:
    """Return right or wrong if the strings decide; None if only a comparison of expressions can."""
    answer, reference = same_characters(answer), same_characters(reference)
    if not answer or not reference:
        return False
    if answer == reference:
        return True
    ours, theirs = _INTEGER.fullmatch(answer), _INTEGER.fullmatch(reference)
    if ours and theirs:
        return ours.groups() == theirs.groups()
    if max(len(answer), len(reference)) > MAX_LENGTH:
        return False
    gold, given = normalize(reference), normalize(answer)
    if gold != given and is_refused(given):
        return False
    try:
        return same_answer(gold, given, _undecided)
    except _UndecidedError:
        return None


def _undecided(_gold: str, _answer: str) -> bool:
    raise _UndecidedError


# -- structures ------------------------------------------------------------------------------------

_COMBINATIONS = re.compile(
    r"((?<=[\d)}]))?(?<![\\a-zA-Z])C\((\d+),(\d+)\)((?=[\d(]|\\(?:frac|binom)))?"
)
_ROUNDED = re.compile(r"\\simeq ?(-?\d+(?:\.\d+)?)(?=$|\\text)")


def same_answer(gold: str, answer: str, equal: Equal) -> bool:
    """Return True if two normalized answers are the same."""
    if not gold or not answer:
        return False
    if gold == answer:
        return True
    if "C(" not in gold:  # In a reference it may be a point.
        answer = _COMBINATIONS.sub(_binomial, answer)
    theirs, ours = (read(_ROUNDED.sub("", side)) for side in (gold, answer))
    if {theirs.kind, ours.kind} == {"set", "value"}:  # `\{5\}` for 5
        theirs, ours = (form.items[0] if len(form.items) == 1 else form for form in (theirs, ours))
    exact, *decimals = _ROUNDED.split(answer)
    return _same(theirs, ours, equal) and (
        not decimals or equal(split(exact, _EQUALS)[-1], rf"\simeq {decimals[0]}")
    )


def _binomial(choice: re.Match[str]) -> str:
    before, after = (r"\cdot" * (choice[group] is not None) for group in (1, 4))
    return rf"{before}\binom{{{choice[2]}}}{{{choice[3]}}}{after}"


def _same(gold: Form, answer: Form, equal: Equal) -> bool:
    if gold.variable and answer.variable and gold.variable != answer.variable:
        return False
    match sorted((gold.kind, answer.kind)):
        case ["value", "value"]:
            return _same_value(gold.text, answer.text, equal)
        case ["list" | "set", "list" | "set"]:
            return _any_order(gold.items, answer.items, equal)
        case ["list", "tuple"]:
            return _pairwise(_by_name(gold), _by_name(answer), equal)
        case [one, other] if one == other or [one, other] == ["interval", "tuple"]:
            return gold.text == answer.text and _pairwise(gold.items, answer.items, equal)
    if answer.kind == "value":
        inside = _within(answer)
        return inside is not None and _same(gold, inside, equal)
    inside = _within(gold) if gold.kind == "value" else None
    return inside is not None and _same(inside, answer, equal)


def _by_name(form: Form) -> Sequence[Form]:
    """Return the items; named items such as `y=1,x=2` have the order of their names."""
    named = form.kind == "list" and all("=" in item.text for item in form.items)
    return sorted(form.items, key=lambda item: item.text) if named else form.items


def _pairwise(golds: Sequence[Form], answers: Sequence[Form], equal: Equal) -> bool:
    return len(golds) == len(answers) and all(
        _same(gold, answer, equal) for gold, answer in zip(golds, answers, strict=True)
    )


def _any_order(golds: Sequence[Form], answers: Sequence[Form], equal: Equal) -> bool:
    left = list(answers)
    if len(golds) != len(left):
        return False
    for gold in golds:
        found = next((answer for answer in left if _same(gold, answer, equal)), None)
        if found is None:
            return False
        left.remove(found)
    return True


def _within(value: Form) -> Form | None:
    r"""Return the structure with a name or a unit, as in `(x,y)=(1,2)` and `A=\{1,2\}`; None
    without one.
    """
    sides, parts = split(value.text, _EQUALS), quantity(value.text)
    inside = value
    if len(sides) == 2 and _is_named(sides[0]):
        inside = read(sides[1])
    elif parts.value and same_words("", parts.words):
        inside = read(parts.value)
    return None if inside.kind == "value" else inside


# -- equations -------------------------------------------------------------------------------------

_EQUALS = re.compile(r"(?<![<>!])=")
_ANY_RELATION = re.compile(r"[<>]|\\(?:le|ge|ne)(?![a-zA-Z])")
_CALL = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]'*\([^()]*\)|\\frac\{d[a-z]\}")
_PART = rf"(?:d?{SYMBOL}|[A-Z]{{2}})"
_NAMED = re.compile(
    r"(?:\\text\{[^{}]*\}|(?:m\s?)?\\(?:angle|triangle|overline|vec|hat|bar|mathbb|mathcal|det)\s*)*"
    rf"(?:{SYMBOL}|[A-Z]{{2,5}}|\{{[A-Za-z]{{1,4}}\}}|\|?[A-Z]{{1,3}}\|?|\[[A-Z]{{3,6}}\]"
    rf"|{SYMBOL}(?:\^\{{?-1\}}?)?\([^()]*\)|\({SYMBOL}(?:,{SYMBOL})+\)|{SYMBOL}(?::{SYMBOL})+"
    rf"|{_PART}/{_PART}|\\frac\{{{_PART}\}}\{{{_PART}\}}"
    rf"|\\text\{{[^{{}}]*\}}|\|\{{?{SYMBOL}\}}?\|"
    rf"|\\begin\{{pmatrix\}}{SYMBOL}(?:\\\\{SYMBOL})+\\end\{{pmatrix\}})"
)
"""A left side that names what the right side is: `x`, `AB`, `f(3)`, `(x,y)`, `x:y`, a vector."""


def _is_named(side: str) -> bool:
    return bool(_NAMED.fullmatch(_without_words(side)))


def _without_words(side: str) -> str:
    parts = quantity(side)
    return parts.value.replace(" ", "") or rf"\text{{{parts.words}}}"


def _same_value(gold: str, answer: str, equal: Equal) -> bool:
    """Compare two values that may be equations."""
    golds, answers = split(gold, _EQUALS), split(answer, _EQUALS)
    if len(golds) > 1 and len(answers) > 1:
        return _same_equation(golds, answers, equal)
    if len(answers) > 1:
        return _states(answers, gold, equal)
    if len(golds) > 1:
        return _is_named(golds[0]) and _same(read(golds[-1]), read(answer), equal)
    return _same_plain(gold, answer, equal)


def _same_equation(golds: list[str], answers: list[str], equal: Equal) -> bool:
    """Compare two equations: by the right side where one name stands at the left."""
    names = [_without_words(sides[0]) for sides in (golds, answers)]
    if _is_named(golds[0]) and names[0] == names[1]:
        return _is_consistent(answers, equal) and _same(read(golds[-1]), read(answers[-1]), equal)
    gold, answer = "=".join(golds), "=".join(answers)
    if _compact(gold) == _compact(answer):
        return True
    if not _has_variables(gold) and not _has_variables(answer):
        return all(_same_plain(golds[end], answers[end], equal) for end in (0, -1))
    calls = _CALL.search(gold + answer) or r"\text" in gold + answer
    if calls or len(answers) != 2 or not _same_expression(gold, answer, equal):
        return False
    is_identity = _same_expression(answers[0], answers[1], equal)
    return not is_identity or any(_same_expression(golds[0], side, equal) for side in answers)


def _states(chain: list[str], gold: str, equal: Equal) -> bool:
    """True if an equation gives the plain value `gold`: its left side is a symbol, a named quantity
    or numbers that evaluate to it.
    """
    first, last = chain[0], chain[-1]
    if _is_named(last) and not _has_variables(first):
        first, last = last, first
    label = quantity(first)
    if _is_named(first) and (not label.value or same_words("", label.words)):
        return (
            not _same_plain(first, last, equal)  # `x=x`
            and _is_consistent(chain, equal)
            and _same(read(gold), read(last), equal)
        )
    return (
        not _has_variables(first)
        and _same_plain(gold, last, equal)
        and _same_plain(gold, label.value, equal)
        and _is_consistent(chain, equal)
    )


def _is_consistent(chain: list[str], equal: Equal) -> bool:
    """True if the sides between first and last are expressions whose numbers equal the last."""
    between = chain[1:-1]
    if any(_ANY_RELATION.search(side) or not _is_readable(side) for side in between):
        return False
    numbers = [side for side in between if not _has_variables(side)]
    last = chain[-1]
    # Both orders: `7-5` is a range as a reference, and arithmetic as an answer.
    return all(_same_plain(last, one, equal) or _same_plain(one, last, equal) for one in numbers)


def _has_variables(text: str) -> bool:
    return bool(letters(quantity(text).value))


# -- plain values ----------------------------------------------------------------------------------

_CHOICE = re.compile(r"(?:[(\[]([A-J])[)\]]|([A-J])(?:\)|[.:](?!\d*:)|$))\s*(.*)", re.DOTALL)
_BASE = re.compile(r"\(?0*([0-9A-F]+)\)?_\{?(\d+)\}?")
_COLON = re.compile(":")
_LITERAL = re.compile(
    r"\\(?:pmod|equiv|ldots|sum|prod|o?int|angle|triangle|cancel)(?![a-zA-Z])|!!"
    # A repeating decimal, a part's number, a cycle: math-verify would multiply or add.
    r"|\d\.\d*[.(]\d|(?:(?<![a-zA-Z}])|(?<=\\cdot))\((?:-?\d+\)\(|\d+\)\d)|\d\[\d"
    # A base, minutes: it would drop or multiply.
    r"|(?<![\^\d])\d+_|(?<![_\d])\d+'|\\circ ?\d"
    # An inverse function, a product of vectors: it would take them for numbers.
    r"|(?<![\\a-zA-Z])[fghFGH]\^\{-1\}\(|\\vec\{\w\}\\times"
)
"""Expressions to compare letter by letter: math-verify would evaluate or drop these."""
_NUMBERS = re.compile(r"\d+(?:(?:-\d+)+|(?:/\d+){2,})")
"""A date, a range or a telephone number: no arithmetic."""
_ZEROS = re.compile(r"\b0+(?=\d)")
_UNIT = re.compile(r"(?<=\d) *(?:\\text\{ *([^{}]*)\}|(?=[a-zA-Z]))")
_QUOTIENT = re.compile(r"^([\d.]+)?\\frac\{(?(1)|([\d.]+))([a-z]+)\}\{([a-z]+(?:\^\d)?)\}$")
_UNIT_SIGNS = re.compile(r"\^\{?\\circ\}?|\\\$|[()\s]")
_OPEN_RELATION = re.compile(r"[<>]|\\(?:ne|le|ge|sim|neg)(?![a-zA-Z])")
_NO_SPACE = re.compile(r"(\\[a-zA-Z]+) (?![a-zA-Z])|(?<![a-zA-Z0-9)}\]]) ")
_TWO_NUMBERS = re.compile(r"(?<!_)[\d)\]] +\d")
_READABLE = re.compile(
    r"(?:\\(?:frac|sqrt|pi|infty|cdot|times|div|binom|log|ln|lg|exp|(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?"
    r"|max|min|gcd|lcm|det|[lr](?:floor|ceil)|circ|mathbb|emptyset|cup|cap|setminus|in|le|ge|ne|bar|hat|vec"
    rf"|overline|begin|end|\\|{GREEK})(?![a-zA-Z])|[\w\s+\-*/^(){{}}\[\]|.,!<>=&'])*",
    re.ASCII,
)
_CHOICE_MARK = re.compile(r"[(\[][A-J][)\]]|(?<![A-Za-z])[A-J]\)")
_ONE_SCRIPT = re.compile(r"([\^_])\{(\w)\}")


def _same_plain(gold: str, answer: str, equal: Equal) -> bool:
    if _joined_unit(gold) == _joined_unit(answer):
        return True
    (letter, text), (our_letter, our_text) = _choice(gold), _choice(answer)
    if letter or our_letter:
        if not text or not our_text:
            return letter == our_letter
        # The text of the choice alone answers `(A) 13`.
        one_letter = letter == our_letter or not (letter and our_letter)
        return one_letter and _same(read(text), read(our_text), equal)
    return _same_quantity(quantity(gold), quantity(answer), equal)


def _joined_unit(text: str) -> str:
    r"""Write `5 m/s`, `5\text{ m/s}` and `\frac{5m}{s}` as `5m/s`."""
    joined = _UNIT.sub(lambda unit: (unit[1] or "").replace(" per ", "/"), text)
    return _compact(_QUOTIENT.sub(r"\1\2\3/\4", joined))


def _same_quantity(theirs: Quantity, ours: Quantity, equal: Equal) -> bool:
    if not ours.value or not theirs.value:  # `\text{ABC}` for `ABC`
        words, our_words = (f"{side.value}{side.words}".casefold() for side in (theirs, ours))
        return words == our_words != ""
    if not same_words(theirs.words, ours.words):
        return False
    number, our_number = rational(theirs.value), rational(ours.value)
    if number is None or our_number is None:
        return _same_expression(theirs.value, ours.value, equal)
    if theirs.is_percent == ours.is_percent:
        return number == our_number
    percent, plain = (number, our_number) if theirs.is_percent else (our_number, number)
    # The sign may be a unit, but `0.5\%` is not `0.5`.
    is_unit = plain == percent and (theirs.is_percent or abs(plain) >= 1)
    return is_unit or plain == percent / 100


def _choice(text: str) -> tuple[str, str]:
    """Return the letter of `(A) 13` and the other text; "" for the letter if the text has none or
    several.
    """
    match = _CHOICE.fullmatch(text)
    if not match or _CHOICE_MARK.search(match[3]):
        return "", text
    return match[1] or match[2], match[3]


def _same_expression(gold: str, answer: str, equal: Equal) -> bool:
    """Compare two expressions without words."""
    if _compact(gold) == _compact(answer):
        return True
    base, our_base = _BASE.fullmatch(gold), _BASE.fullmatch(answer)
    if base or our_base:
        return bool(base and our_base and base.groups() == our_base.groups())
    ratio, our_ratio = split(gold, _COLON), split(answer, _COLON)
    if len(ratio) > 1 or len(our_ratio) > 1:
        return _pairwise(list(map(read, ratio)), list(map(read, our_ratio)), equal)
    if _NUMBERS.fullmatch(gold):
        return _ZEROS.sub("", gold) == _ZEROS.sub("", _UNIT_SIGNS.sub("", answer))
    if not _LITERAL.search(gold):  # A product; as a reference it is the cycles of a permutation.
        answer = answer.replace(")(", r")\cdot(")
    if _LITERAL.search(f"{gold} {answer}") or letters(gold) != letters(answer):
        return False
    readable = all(_is_readable(side) for side in (gold, answer))
    return readable and not _OPEN_RELATION.match(answer) and equal(gold, answer)


def _is_readable(expression: str) -> bool:
    """True if math-verify knows every sign: it would read only what follows an unknown one."""
    odd = _TWO_NUMBERS.search(expression) or expression.count("|") % 2
    return not odd and bool(_READABLE.fullmatch(expression))


def _compact(text: str) -> str:
    """Return the text without the spaces and braces that show nothing."""
    return _ONE_SCRIPT.sub(r"\1\2", _NO_SPACE.sub(r"\1", text))

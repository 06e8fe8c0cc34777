r"""The parts of a value in a normalized answer (normalize.py): the number or expression, its words
and units, and its letters.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from retrain.rewards.normalize import DENIALS, NUMBERS

# -- numbers ---------------------------------------------------------------------------------------

_DECIMAL = r"\d+(?:\.\d*)?"
_RATIONAL = re.compile(
    rf"(?P<sign>[+-]?)(?:(?P<whole>\d+)?\\frac\{{(?P<top>-?{_DECIMAL})\}}\{{(?P<bottom>-?{_DECIMAL})\}}"
    rf"|(?P<number>{_DECIMAL})(?:/(?P<below>-?\d+))?)"
    r"(?:(?:\\times|\\cdot)\s*10\^\{(?P<power>-?\d{1,3})\})?"
)
_LONGEST = 400


def rational(text: str) -> Fraction | None:
    """Return the value of an integer, a decimal, a fraction, a mixed number or scientific notation;
    None for anything else.
    """
    match = _RATIONAL.fullmatch(text)
    if not match or len(text) > _LONGEST:
        return None
    below = Fraction(match["bottom"] or match["below"] or 1)
    if not below:
        return None
    value = Fraction(match["whole"] or 0) + Fraction(match["top"] or match["number"]) / below
    value *= Fraction(10) ** int(match["power"] or 0)
    return -value if match["sign"] == "-" else value


# -- words and units -------------------------------------------------------------------------------

_UNITS = {
    name: unit
    for unit, *names in map(
        str.split,
        (
            "cm centimeter centimetre",
            "mm millimeter millimetre",
            "m meter metre",
            "km kilometer kilometre",
            "kg kilogram kilo",
            "g gram gm",
            "mg milligram",
            "l liter litre",
            "ml milliliter millilitre",
            "inch inches in",
            "foot feet ft",
            "yard yd",
            "mile mi",
            "pound lb",
            "ounce oz",
            "hour hr h",
            "minute min",
            "second sec s",
            "dollar usd buck",
            "degree deg",
            "square sq",
        ),
    )
    for name in (unit, *names)
}
_NOT_UNITS = frozenset(
    (
        "about above after ago almost approximately are around at base before below between"
        " beyond billion binary bn but by cannot centi conjugate crore cube cubed debt deci"
        " deficit derivative digit divisor double doubled down dozen east eighth else exceed"
        " exceeding exceeds except excluded factorial false fewer fifth fourth giga greater gross"
        " half halved halves higher hundred hundredth if impossible incorrect inverse is lakh"
        " larger least left less lower mega micro mil mille milli million millionth minus mn more"
        " most multiple myriad nano negative neither never ninth no none nor north not onward"
        " onwards opposite or other outside over overdrawn permille pico plus possible power ppb"
        " ppm ppt quadrillion quarter quintillion reciprocal recurring remainder repeating right"
        " root score seventh sine sixth smaller south squared sum tenth tera than then third"
        " thousand thousandth thrice times to too trillion triple tripled true twice under unless"
        " up west wrong"
    ).split()
)
"""Words that change the meaning of the number next to them."""
_BEFORE_NUMBERS = frozenset("dollar euro pound yen rs total".split())
_SILENT = frozenset("the a an of and only exactly precisely".split())
_LEAD_IN = re.compile(rf"(?!.*\b(?:{DENIALS})\b).*\b(?:is|are|equals)\b\s*", re.IGNORECASE)
_NUMBER = re.compile(rf"\b(?:{NUMBERS})$")
_WORDS = re.compile(r"\\text\{([^{}]*)\}(?:\^\{?(-?\d)\}?)?(?!\})")
_ARC_MINUTES = re.compile(r"(?<=\d)('+)$")
_DEGREES = re.compile(r"\^\\circ\s*(?:([CF])(?![a-zA-Z]))?$")
_OPEN_SLASH = re.compile(r"(?<=[\w}])\s*/\s+$")
_POWER_OF_UNIT = re.compile(r"\b(square|cubic) (\w+)|\b(\w+) (squared|cubed)\b")


@dataclass(frozen=True)
class Quantity:
    """A value, taken apart."""

    value: str
    """The expression without words, unit and percent sign."""
    words: str
    """Words and units in canonical form, in their order."""
    is_percent: bool


@lru_cache(maxsize=4096)
def quantity(text: str) -> Quantity:
    """Take a value apart."""
    words: list[str] = []

    def take(match: re.Match[str]) -> str:
        is_first = not match.string[: match.start()].strip()
        said, rest = match[1], match.string[match.end() :].strip()
        if is_first:
            said = _LEAD_IN.sub("", said)
        if said and rest.startswith("("):
            return match[0]  # A function: `\text{Re}(z)`.
        if is_first and rest and not set(_canonical(said).split()) <= _BEFORE_NUMBERS:
            said = f"is {said}"
        words.append(f"{said} power{match[2]}" if match[2] and match[2] != "1" else said)
        return " "

    text = _ARC_MINUTES.sub(lambda match: rf"\text{{prime{len(match[1])}}}", text)
    value = _OPEN_SLASH.sub("", _WORDS.sub(take, text)).strip()
    if degrees := _DEGREES.search(value):
        value = value[: degrees.start()]
        words.insert(0, f"degree {degrees[1] or ''}")
    plain = value.removesuffix(r"\%")
    return Quantity(plain.strip(" .,;:"), _canonical(" ".join(words)), plain != value)


def _canonical(text: str) -> str:
    words = re.findall(r"[^\W_]+(?:'[^\W_]+)*", text.casefold())
    found = " ".join(_unit(word) for word in words if word not in _SILENT)
    found = _POWER_OF_UNIT.sub(
        lambda match: f"{match[2] or match[3]} power{3 if 'cub' in match[0] else 2}",
        found,
    )
    return "mph" if found == "mile per hour" else found


def _unit(word: str) -> str:
    if word.endswith("n't"):
        return "not"
    if word in _NOT_UNITS or word in _UNITS or word.endswith("ss"):
        return _UNITS.get(word, word)
    single = word.removesuffix("s")
    return _UNITS.get(single, single if len(word) > 3 else word)


def same_words(gold: str, answer: str) -> bool:
    """True if both sides have the same words, or if only one side has words, and these name a unit
    or the counted things.
    """
    if gold == answer or (gold and answer):
        return gold == answer
    words = gold or answer
    return not (_NUMBER.search(words) or set(words.split()) & _NOT_UNITS)


# -- letters ---------------------------------------------------------------------------------------

GREEK = (
    "alpha|beta|gamma|delta|epsilon|varepsilon|zeta|eta|theta|kappa|lambda|mu|nu|xi|rho|sigma|tau|phi"
    "|varphi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Sigma|Phi|Psi|Omega|ell"
)
SYMBOL = rf"(?:[A-Za-z]|\\(?:{GREEK})(?![a-zA-Z]))\s*'*(?:_(?:\w|\{{[^{{}}]*\}}))?'*"
"""A variable, as a regular expression: `x`, `a_n`, `x_{12}'`, a Greek letter."""
_VARIABLE = re.compile(rf"[a-zA-Z]+'*|\\(?:{GREEK})")
_LETTER = re.compile(r"\\(?:begin|end)\{\w+\}|\\[a-zA-Z]+|[A-Z]{2,}(?![a-z])|[a-zA-Z]'*")
_CONSTANTS = frozenset("ei")


def letters(expression: str) -> frozenset[str]:
    """Return the variables and the names of points, in their case."""
    found = frozenset(_LETTER.findall(expression)) - _CONSTANTS
    return frozenset(filter(_VARIABLE.fullmatch, found))

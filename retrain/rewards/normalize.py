r"""One LaTeX for the forms in which people and models write an answer: unicode, style commands,
words, units, thousands, `\frac` without braces. The `math` reward normalizes both sides before it
compares them (equality.py). Pure strings; no rule changes a value.

Afterwards words and units occur only in `\text{...}`, and the answer has no other style.
"""

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache

from retrain.rewards.answers import SAME_CHARACTERS, closing_brace

Rule = tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]


def _rules(*rules: tuple[str, str | Callable[[re.Match[str]], str]]) -> list[Rule]:
    return [(re.compile(pattern), replacement) for pattern, replacement in rules]


def _apply(rules: list[Rule], text: str) -> str:
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text


@lru_cache(maxsize=4096)  # A group asks for the same reference G times.
def normalize(answer: str) -> str:
    """Return the answer in the normal form that equality.py reads."""
    text = answer if answer.isascii() else _plain_characters(answer)
    if "\\begin" not in text:
        text = text.replace("\\\\", "\\")
    text = _environments(_apply(_MARKUP, text))
    text = _with_arguments(_decoded(text))
    text = _apply(_NUMBERS, _unwrapped(text))
    return _apply(_SPACES, _joined_thousands(text)).lstrip("=:, ").rstrip(".,;:= ")


# -- characters ------------------------------------------------------------------------------------

_NAMES = (
    "×=times ⋅=cdot ·=cdot ∙=cdot •=cdot ≤=le ⩽=le ≥=ge ⩾=ge ≠=ne ∞=infty √=sqrt ±=pm ∓=mp ∈=in"
    " ∪=cup ∩=cap ∅=emptyset ∠=angle …=ldots ⋯=ldots ≈=approx ≡=equiv ∖=setminus △=triangle α=alpha"
    " β=beta γ=gamma δ=delta ε=epsilon ζ=zeta η=eta θ=theta κ=kappa λ=lambda μ=mu µ=mu ν=nu ξ=xi"
    " π=pi ρ=rho σ=sigma τ=tau φ=phi ϕ=phi χ=chi ψ=psi ω=omega Γ=Gamma Δ=Delta Θ=Theta Λ=Lambda"
    " Σ=Sigma Φ=Phi Ψ=Psi Ω=Omega ℝ=mathbb{R} ℤ=mathbb{Z} ℕ=mathbb{N} ℚ=mathbb{Q} ℂ=mathbb{C} °=degree º=degree"
    " ˚=degree €=text{euro} £=text{pound} ¥=text{yen} ¢=text{cent} ∛=sqrt[3] ∶=colon ∣=mid ⟨=langle"
    " ⟩=rangle"
)
_COMMANDS = {
    **SAME_CHARACTERS,
    **{ord(pair[0]): f"\\{pair[2:]} " for pair in _NAMES.split()},
    **dict.fromkeys(map(ord, "“”„«»"), ""),
    **dict.fromkeys(map(ord, "‘’′"), "'"),
    **dict.fromkeys(map(ord, "÷⁄∕"), "/"),
}


def _plain_characters(text: str) -> str:
    text = _apply(_CHARACTERS, text).translate(_COMMANDS)
    return unicodedata.normalize("NFKC", text)


def _fraction_character(match: re.Match[str]) -> str:
    above, below = unicodedata.normalize("NFKC", match[1]).split("\u2044")
    return rf"\frac{{{above}}}{{{below}}}"


def _script(sign: str) -> Callable[[re.Match[str]], str]:
    return lambda match: f"{sign}{{{unicodedata.normalize('NFKC', match[0])}}}"


_CHARACTERS = _rules(
    ("([¼-¾⅐-⅞])", _fraction_character),
    ("[⁰¹²³⁴-⁹⁺⁻ⁿⁱ]+", _script("^")),
    ("[₀-₉]+", _script("_")),
    (r"([√∛])\s*([\d.]+)", r"\1{\2}"),
)

# -- markup ----------------------------------------------------------------------------------------

_NOT_MORE = r"(?![a-zA-Z])"
_SEPARATOR = r"\s*(?:,\\!|\{,\}|\\[,;:! ]|~)\s*"
_SWITCHES = (
    "bf|rm|it|sf|tt|em|(?:normal|foot)?size|small|[lL]arge|LARGE|[hH]uge|bfseries|boldmath"
    "|(?:display|text|script)style|(?:no)?limits|hfill|therefore|quad|qquad"
)
_STYLES = "boldsymbol|math(?:bf|sf|it|tt|normal)|bm|pmb|u(?:nder)?line|boxed|fbox|ensuremath"
_SAME_COMMANDS = dict(
    pair.split("~")
    for pair in (
        r"\langle~( \rangle~) \lbrace~\{ \rbrace~\} \vert~| \lvert~| \rvert~| \mid~| \colon~: \lt~< \gt~>"
        r" \leq~\le \leqq~\le \leqslant~\le <=~\le \geq~\ge \geqq~\ge \geqslant~\ge >=~\ge \neq~\ne !=~\ne"
        r" :=~= ==~= \approx~= \dots~\ldots \cdots~\ldots \dotsc~\ldots \dotsb~\ldots \dotsm~\ldots"
        r" \dotsi~\ldots \hdots~\ldots ...~\ldots ..~\ldots \lor~\text{or} \varnothing~\emptyset"
        r" \degree~^\circ \lg~\log_{10}"
    ).split()
)
_OTHER_NAME = rf"(?:{'|'.join(map(re.escape, _SAME_COMMANDS))})(?:(?<![a-z])|{_NOT_MORE})"
_EXACT = r"\\(?:[dt]?frac|sqrt|pi|cdot|times|ln|log)(?![a-zA-Z])|/"
_ROUNDED = (
    rf"((?:^|=)[\d\s{{}}()+*.^-]*(?:{_EXACT})(?:{_EXACT}|[\d\s{{}}()\[\]+*.^_-])*)"
    r"\\approx(?=\s*-?\d*\.?\d+\s*(?:\.?$|\\text))"
)
r"""An exact number before its decimals, as in `x=\frac13\approx0.33`: equality.py compares them."""
_MARKUP = _rules(
    (r"(\d)" + _SEPARATOR + r"(?=\d{3}(?!\d))", r"\1"),
    (r"^\s*(\*\*|__|[*_`])(.+?)\1\s*$", r"\2"),
    (r"(?<=[\w)])\*\*(?=[\w({])", "^"),
    (r"\\\$", r"\\text{ dollar }"),
    (r"\$|(?<!\\)\\[()\[\]]", ""),
    (rf"\\(?:left|right|middle)\s*\.|\\(?:left|right|middle|[bB]igg?[lrm]?){_NOT_MORE}", ""),
    (r"\\simeq(?=\s*-?\.?\d)", r"\\approx"),
    (_ROUNDED, r"\1\\simeq "),
    (_OTHER_NAME, lambda match: f"{_SAME_COMMANDS[match[0]]} "),
    (r"\\(?:[dtc]|nice|s|x)(frac|binom)", r"\\\1"),
    (r"(?<![\\a-zA-Z])sqrt *(\d+(?:\.\d+)?)", r"\\sqrt{\1}"),
    (r"\\(?:(?:text)?color|[hv]?phantom|[hv]space\*?)\s*\{[^{}]*\}", ""),
    (rf"\\(?:{_STYLES})\s*(?=\{{)", ""),
    (rf"\\(?:{_SWITCHES}|{_STYLES}){_NOT_MORE}\s*", " "),
    (
        r"\\(?:[hm]box|text(?:rm|normal|bf|it|sf|tt|sc|up|md)?|emph|mathrm|operatorname\*?)\s*(?=\{)",
        r"\\text",
    ),
    (r"\\(?:mathrm|text)\s+(?=\w)", ""),
    (r"\\\{\s*\\\}", r"\\emptyset "),
    (rf"\^\s*\{{\s*\\circ\s*\}}|\^\s*\\circ{_NOT_MORE}", r"^\\circ "),
    (r"(?<!\\)%", r"\\%"),
    (r"(?:(?<!\\)\\[,;:!> ]|[~\s])+", " "),
    (r"(\\[a-zA-Z]+)\s+(?=\{)", r"\1"),
    (
        r"\\(angle|triangle)\{([A-Z ]+)\}",
        lambda match: f"\\{match[1]} {match[2].replace(' ', '')}",
    ),
    (r"\\(hat|vec|bar|overline|mathbb)\s+([a-zA-Z])", r"\\\1{\2}"),
    (r"\^\{?\s*\\prime\s*(\\prime)?\s*\}?", lambda match: "''" if match[1] else "'"),
    (r"``(.*?)''|\"", r"\1"),
    (r"\{?(\w+)\s*\\choose\s*(\w+)\}?", r"\\binom{\1}{\2}"),
    (r"\\(max|min|gcd)\s*\\\{(.*?)\\\}", r"\\\1(\2)"),
    (r"\\dot\{(\d+)\}(\d*)\\dot\{(\d+)\}", r"\\overline{\1\2\3}"),
    (r"^\](?=.*,)", "("),
    (r"(?<=[\w}])\[$", ")"),
    (r"(?<=\d) ?((?:km|cm|mi|ft|(?<= )m)/(?:s|h|hr))(?=(?:\^\{?\d\}?)?$)", r"\\text{ \1}"),
)
_ALIGNED = re.compile(
    r"\\begin\{(aligned|align\*?|gathered|split|array|cases|eqnarray\*?|equation\*?)\}(?:\{[^{}]*\})?"
    r"(.*?)\\end\{\1\}",
    re.DOTALL,
)
_IN_BRACKETS = re.compile(
    r"[(\[]\s*\\begin\{(array|(?:small)?matrix)\}(?:\{[^{}]*\})?(.*?)\\end\{\1\}\s*[)\]]", re.DOTALL
)


def _environments(text: str) -> str:
    r"""Write the rows of an aligned formula as a list, one that begins with `=` as a continuation;
    brackets around a matrix do not matter.
    """
    if "\\begin" not in text:
        return text
    text = re.sub(r"\\\\\s*\[[^\]]*\]", r"\\\\", text)
    text = _IN_BRACKETS.sub(r"\\begin{pmatrix}\2\\end{pmatrix}", text)
    if "&" in text:  # A function by cases is a table.
        text = re.sub(r",\s*&\s*(?:\\text\{\s*(?:if|for|when)\s*\})?", "&", text)
        text = re.sub(r"(begin|end)\{cases\}", r"\1{pmatrix}", text)
    text = re.sub(r"(begin|end)\{(?:b|B|small)matrix\}", r"\1{pmatrix}", text)

    def rows(match: re.Match[str]) -> str:
        lines = (line.replace("&", " ").strip() for line in match[2].split(r"\\"))
        return re.sub(r",\s*=", "=", ",".join(line for line in lines if line))

    return _ALIGNED.sub(rows, text)


# -- words -----------------------------------------------------------------------------------------

_FUNCTIONS = frozenset(
    "arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh sin cos tan cot sec csc log ln exp lg gcd lcm min max det"
    " deg dim ker sqrt pi infty theta alpha beta gamma lambda".split()
)
_ALSO_UNITS = frozenset("min sec deg".split())
_LETTER_UNITS = frozenset("msghlLJNWVAKCFtd")
_INFINITY = frozenset("infinity infty inf".split())
_SHORT_UNITS = frozenset(
    "cm mm km kg gm mg ml mL ft lb oz hr yd mi in am pm AM PM BC AD CE kW kN kJ Hz Pa Rs sq cu".split()
)
_SHORT_WORDS = _SHORT_UNITS | frozenset("or no No is to of at by if so we an it on as".split())
_LITTLE_WORDS = frozenset("or no No to is of".split())
_RUN = re.compile(r"\\(?:begin|end)\{\w+\}|\\[a-zA-Z]+|[a-z]+n't|[A-Za-z]+(?:[-'][A-Za-z]{2,})*")
_TEXT = re.compile(r"\\text\s*\{")
_DIGITS = re.compile(r"[\dA-F]+")
_DOTTED = re.compile(r"(?<![a-zA-Z])(?:[aApP]\.\s?[mM]|B\.\s?C|A\.\s?D)(?:\.(?:E\.)?|(?![a-zA-Z]))")
_AFTER_NUMBER = re.compile(r"[\d}\])]\s*/?\s*$")
_WORD = re.compile(
    # Other capitals are points: `AB`, `ABC`.
    r"(?:USD|EUR|YES|TRUE|FALSE|NONE|mph|lbs|pct|day)$"
    r"|(?![A-Z'-]{3,5}$)(?:.*[eiouEIOU]|(?=.*[aA]).*[^abcdxyz])"
)
_MERGED = re.compile(r"(\\text\{[^{}]*)\}(\s*/\s*|\s*)\\text\{")


def _decoded(text: str) -> str:
    r"""Put words and units into `\text{...}`, and all else out of it."""
    done, position = "", 0
    for match in _TEXT.finditer(text):
        if match.start() < position:
            continue
        end = closing_brace(text, match.end())
        if end is None:
            break
        done += _marked(text[position : match.start()], done, in_text=False)
        inner = _TEXT.sub("{", text[match.end() : end])
        if text[end + 1 : end + 2] == "_" and _DIGITS.fullmatch(inner):
            done, position = done + inner, end + 1
            continue
        done += " " + _marked(inner.replace("{", " ").replace("}", " "), done, in_text=True) + " "
        position = end + 1
    done += _marked(text[position:], done, in_text=False)
    while (
        merged := _MERGED.sub(lambda match: match[1] + (" per " if "/" in match[2] else " "), done)
    ) != done:
        done = merged
    return done


def _marked(text: str, before: str, *, in_text: bool) -> str:
    text = _DOTTED.sub(lambda match: match[0].replace(".", "").replace(" ", ""), text)
    runs = set(_RUN.findall(text)) - _FUNCTIONS
    prose = any(len(run) > 2 and run[0] != "\\" for run in runs)

    def mark(match: re.Match[str]) -> str:
        run = match[0]
        if run[0] == "\\":
            return run
        if run.lower() in _INFINITY:
            return r"\infty "
        so_far = before + text[: match.start()]
        numbered = bool(_AFTER_NUMBER.search(so_far)) or (in_text and so_far.endswith("/"))
        if run in _FUNCTIONS and not (in_text and numbered and run in _ALSO_UNITS):
            return f"\\{run} "
        if not in_text:
            return rf"\text{{{run}}}" if _is_word(run, numbered) else run
        bracketed = so_far.endswith("(") and text.startswith(")", match.end())
        # A digit of a number in base 16, or the letter of a choice.
        kept = (so_far[-1:].isdigit() and run.isupper()) or (bracketed and len(run) == 1)
        known = len(run) > 2 or run in _SHORT_WORDS or (numbered and run in _LETTER_UNITS)
        return rf"\text{{{run}}}" if (known or prose) and not kept else run

    return _RUN.sub(mark, text)


def _is_word(run: str, after_number: bool) -> bool:
    r"""True if letters outside of `\text` are a word or a unit, not a product of variables."""
    if len(run) < 3:
        return run in _LITTLE_WORDS or (after_number and run in _SHORT_UNITS)
    return bool(_WORD.match(run))


# -- groups ----------------------------------------------------------------------------------------

_TAKES_ARGUMENTS = re.compile(rf"\\(frac|binom|sqrt){_NOT_MORE}")
_ARGUMENT = re.compile(r"\s*(?:\(([^()]*)\)|(\\[a-zA-Z]+|[^\s}\\]))")
_SUPERFLUOUS = re.compile(r"(?<![a-zA-Z}\]^_\\])\{((?:[^{}\\]|\\.|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
_ONE_TOKEN = re.compile(r"[\w.\\% :{}^]*|.*[,;=].*|\([^()]*\)|\\text.*")


def _with_arguments(text: str) -> str:
    r"""Put the arguments of `\frac`, `\binom` and `\sqrt` into braces, from the last one on."""
    for match in reversed(list(_TAKES_ARGUMENTS.finditer(text))):
        position, written = match.end(), match[0]
        if match[1] == "sqrt" and (root := re.match(r"\s*\[[^\]]*\]", text[position:])):
            position, written = position + root.end(), written + root[0].strip()
        for _ in range(1 if match[1] == "sqrt" else 2):
            argument, position = _argument(text, position)
            written += f"{{{argument}}}"
        text = text[: match.start()] + written + text[position:]
    return text


def _argument(text: str, position: int) -> tuple[str, int]:
    token = _ARGUMENT.match(text, position)
    if token is None:
        return "", position
    argument, position = token[1] or token[2] or "", token.end()
    if argument == "{":
        end = closing_brace(text, position)
        return (text[position:end], end + 1) if end else ("", position - 1)
    if _TAKES_ARGUMENTS.fullmatch(argument):  # Its own arguments have braces already.
        while text.startswith("{", position) and (end := closing_brace(text, position + 1)):
            argument, position = argument + text[position : end + 1], end + 1
    return argument, position


def _unwrapped(text: str) -> str:
    """Remove braces that group nothing; a sum inside them gets parentheses."""

    def unwrap(match: re.Match[str]) -> str:
        inner, glued = match[1], match.string[match.start() - 1 : match.start()].isdigit()
        alone = _ONE_TOKEN.fullmatch(inner) and not (glued and inner[:1].isdigit())
        return inner if alone or match[0] == match.string else f"({inner})"

    while (shorter := _SUPERFLUOUS.sub(unwrap, text)) != text:
        text = shorter
    return text


# -- numbers ---------------------------------------------------------------------------------------

_POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_BASES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
    " sixteen".split()
)
DENIALS = "not|no|neither|never|none|nor|false|wrong|incorrect|impossible|cannot|[a-z]+n't"
"""Words before an answer that is none."""
NUMBERS = (
    "one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|[a-z]+teen"
    "|(?:twen|thir|for|fif|six|seven|eigh|nine)ty"
)


def _repeating(match: re.Match[str]) -> str:
    whole, fixed, period = match.groups()
    nines = 10 ** len(fixed) * (10 ** len(period) - 1)
    value = Fraction(int(whole + fixed + period) - int(whole + fixed), nines)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _named(match: re.Match[str]) -> str:
    """Drop the name of a number behind it: `4 (four)`."""
    digits, unit, name = match.groups()
    is_other = name in _BASES and digits != str(_BASES.index(name))
    return match[0] if is_other else digits + unit


def _base(match: re.Match[str]) -> str:
    base = match[1].lower()
    return f"_{{{_BASES.index(base) if base in _BASES else base}}}"


_TRIGONOMETRIC = r"\\(?:sin|cos|tan|cot|sec|csc)(?:\^\{?\d\}?)?"
_DEGREES = r"([\d.]*(?:\d|[a-z]|\\[a-z]+))\^\\circ"
_NUMBERS = _rules(
    (" {3,}", "  "),  # Two spaces part numbers: `107\text{ }108`.
    (r"(?<![\d])\.(?=\d|\\overline)", "0."),
    (r"(\d+)\.(\d*)\\(?:overline|dot|bar)\{(\d+)\}", _repeating),
    (
        r"(?<![\w.\\}])(\d+(?:\.\d*)?|\.\d+)[eE]\+?(-?)0*(\d+)(?![\w.])",
        r"\1\\times10^{\2\3}",
    ),
    (r"(?<=\d)\s*[x*]\s*(?=10\^)", r"\\times"),
    (r"(?:(?<=10\^)\+?(\d+)|(?<=\^)(-(?:\d+|[a-z])))(?![\d^]|\.\d)", r"{\1\2}"),
    (r"(?<![\d.])(\d+)\s+(\d+)/(\d+)(?![\d.])", r"\1\\frac{\2}{\3}"),
    (
        rf"([\d}}])\s*\\text\{{\s*({'|'.join(_POWERS)})s?(?![a-z])",
        lambda match: rf"{match[1]}\times10^{{{_POWERS[match[2]]}}}\text{{",
    ),
    (
        (
            r"(?<!\d)(\d+)((?:\s*\\text\{[^{}]*\})?)"
            rf"\s*\(\s*\\text\{{\s*((?:[a-z]+[- ])?(?:{NUMBERS}))\s*\}}\s*\)\s*$"
        ),
        _named,
    ),
    (r"\s*\\text\{\s*(?:percent|percentage|pct)\s*\}", r"\\%"),
    (rf"_\{{\s*\\text\{{(?:base )?({'|'.join(_BASES)})\}}\s*\}}", _base),
    (rf"\s*\(?\s*\\text\{{(?:in )?base ({'|'.join(_BASES)})\}}\s*\)?\s*$", _base),
    (r"_\{\s*\\text\{base\}\s*(\d+)\s*\}", _base),
    (r"\s*\(?\s*\\text\{(?:in )?base\}\s*\{?(\d+)\}?\s*\)?\s*$", _base),
    (
        r"\s*\(?\s*\\(?:text\{mod(?:ulo)?(?:\}| (?=[a-z]\}))|[pb]?mod)\s*\{?(\d+|[a-z])\}?\s*\)?",
        r"\\pmod{\1}",
    ),
    (r"=(?=[^=]*\\pmod)", r"\\equiv "),
    (r"\^?\{?\s*\\text\{(?:st|nd|rd|th)\}\s*\}?", ""),
    (
        rf"({_TRIGONOMETRIC})\s*{_DEGREES}",
        r"\1(\\frac{\2\\pi}{180})",
    ),
    (
        rf"{_TRIGONOMETRIC}\s*[({{](?:[^(){{}},]|\{{[^{{}}]*\}})*",
        lambda match: re.sub(_DEGREES, r"\\frac{\1\\pi}{180}", match[0]),
    ),
    (
        r"(?i)^\s*\\text\{(?:therefore|thus|hence|so|(?:the )?(?:final )?answer(?: is)?)\}\s*[,:]?",
        "",
    ),
    (r"(?i)^\s*\\text\{(?:the )?(?:correct )?(?:option|choice|answer)(?: is)? ([A-J])\}", r"\1"),
    (r"\\text\{(and|or) (?=[^{}])", r"\\text{\1}\\text{"),
    (r"\^\{?0\.5\}?(?!\d)", r"^{\\frac{1}{2}}"),
    (
        r"(?i)^\s*\\text\{(?:the )?(?:correct )?(?:option|choice|answer)(?: is)?\}\s*:?(?=\W?[A-J]\b)",
        "",
    ),
    (
        (
            rf"(?i)^\s*\\text\{{(?! *(?:the )?no\b|[^{{}}]*\b(?:(?!no \w)(?:{DENIALS})\b"
            r"|(?:but|except|unlike|than|at least|at most|instead of|far from)\}))[^{}]*\}"
            r"\s*:\s*(?=[^\s:])"
        ),
        "",
    ),
    (r"^\s*(?:\\text\{[^{}]*\})?\s*([a-zA-Z])\s*\\text\{(?:is|equals)\}", r"\1="),
    (r"\\text\{([^{}]+) (and|or) ([^{}]+)\}", r"\\text{\1}\\text{\2}\\text{\3}"),
    (r"(^|[^\d\s])\s*\\text\{([A-J])\}", r"\1\2"),
    (r"(?<=\d)\s*\\text\{to\}\s*(?=\d)", ":"),
    (r"\(\s*\\text\{(?:since|because|as)[^()]*\)", ""),
    (r"\(\s*(\\text\{[^{}]*\}(?:\^\{?\d\}?)?)\s*\)", r"\1"),
    (r"(?<=[\w}])\s*,?\s*\(?\s*\\text\{not\}\s*[^()\s][^()]*\)?$", ""),
    (r"\\text\{\s*\}", ""),
)
_THOUSANDS = re.compile(
    r"(?<![\d,.])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])|(?<![\w,.}])[1-9]\d{0,2}(?: \d{3})+(?![\d,])"
)
_OPEN = re.compile(r"\\\{|[(\[]")
_CLOSE = re.compile(r"\\\}|[)\]]")


def _joined_thousands(text: str) -> str:
    """Remove the commas of `1,000`, but not the commas of a point, a set or an interval."""

    def join(match: re.Match[str]) -> str:
        before = text[: match.start()]
        if len(_OPEN.findall(before)) > len(_CLOSE.findall(before)):
            return match[0]
        return match[0].replace(",", "").replace(" ", "")

    return _THOUSANDS.sub(join, text)


LEADING_PLUS = r"(?:(?<=[(\[{,;:=<>^])|(?<=\\\\)|^)\+(?=[\w\\.(|])|(?<=&)\+(?=[\d.])"
"""A plus at the beginning of a value, which changes nothing."""
_SPACES = _rules(
    (r" +", " "),
    (r"(?<![a-zA-Z0-9]) | (?![a-zA-Z0-9])", ""),
    (LEADING_PLUS, ""),
    (r"\^\(((?:[^()]|\([^()]*\))*)\)", r"^{\1}"),
    (
        r"^(?:[^|]|\|-?\d+\|)+$",
        lambda match: re.sub(r"\|-?(\d+)\|", r"(\1)", match[0]),
    ),
    # math-verify would add: `3(4)` was 7.
    (
        (
            r"(?:(?<=\\cdot)|(?<=\\times)|(?<![\w^.\\}])(?=\d)|(?<![a-zA-Z])(?=\\))"
            r"(?:\d+(?:[xyz]|\\pi)?|\\frac\{\d+\}\{\d+\})"
            r"(?:\(-?(?:[\d.]+(?:/\d+)?|\\frac\{\d+\}\{\d+\})\))+(?!\d)"
        ),
        lambda match: match[0].replace("(", r"\cdot("),
    ),
    (r"\\log_([2-9])(?=\d(?:$|\\simeq|[^\w ({\\]))", r"\\log_{\1}"),
    (r"(?<![\w})\]])[_^]\{?(\d+)\}?C_\{?(\d+)\}?", r"\\binom{\1}{\2}"),
    (r"(\\binom\{[^{}]*\}\{[^{}]*\})(?=\\(?:binom|frac)|\d|\()", r"\1\\cdot "),
    (r"(\\frac\{-?\d+\}\{\d+\}|\)|(?<![_^])\d(?=\\binom))(?=\\(?:binom|frac))", r"\1\\cdot"),
    (r"\\sqrt(\[\d*[13579]\])\{-(\d+)\}", r"(-\\sqrt\1{\2})"),
    (
        (
            r"^([\d.]+)?\\frac\{(?(1)|([\d.]+))\\text\{([a-z]+)\}\}"
            r"\{(?:\\text\{)?([smh]|[a-z]{2,})\}?(\^\d)?\}$"
        ),
        r"\1\2\\text{\3 per \4}\5",
    ),
)

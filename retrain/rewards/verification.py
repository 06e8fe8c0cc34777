"""math-verify as a reward worker calls it. Importing this module imports sympy, so only the fork
server and its workers do.
"""

import importlib
import logging
import re
from functools import lru_cache
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Expr, I, N, Rational

from retrain.rewards.equality import same_answer
from retrain.rewards.normalize import normalize

# It warns that its timeouts are off, but the parent keeps time.
logging.getLogger("math_verify").setLevel(logging.ERROR)
# math-verify takes a letter at the end for a unit: 4t for 4.
_CONFIGURATION = [LatexExtractionConfig(normalization_config=NormalizationConfig(boxed="all"))]


def right(reference: str, answer: str) -> bool:
    """Return True if the answer is the reference in another form.

    Raises MemoryError, and an error that `_pass_memory_errors_on` could not name.
    """
    return same_answer(normalize(reference), normalize(answer), equal)


def equal(gold: str, answer: str) -> bool:
    """Return True if two expressions are equal. The order matters to math-verify; an answer that it
    cannot parse is not equal.
    """
    if answer.startswith(r"\simeq"):
        return _rounds(_parse_gold(_bracketed(gold)), answer.split()[1])
    gold, answer = map(_bracketed, _with_other_letters(gold, answer))
    reference, given = _parse_gold(gold), _parse(answer)
    return bool(verify(reference, given, timeout_seconds=None)) and _agree(reference[0], given[0])


_MIXED = re.compile(r"(?<![\d._^])(\d+)(\\frac\{\d+\}\{\d+\})")
_GROUP = r"\{(?:[^{}]|\{[^{}]*\})*\}"
_FUNCTION = r"\\(?:(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|lg|exp)(?![a-zA-Z])"
_TIMES = r"(?:\\(?:cdot|times)(?![a-zA-Z])|\*)"
_ARGUMENT = re.compile(
    rf"({_FUNCTION}(?:[_^](?:\w|{_GROUP}))*+)"
    rf"((?:[\w^' ]|{_GROUP}|(?!{_FUNCTION}|{_TIMES})\\[a-zA-Z]+)++)(?={_TIMES})"
)


def _bracketed(side: str) -> str:
    r"""Write brackets around a mixed number, and around the argument before a sign of
    multiplication. In `\ln 2\cdot 3` math-verify takes 6 for it.
    """
    return _ARGUMENT.sub(r"\1(\2)", _MIXED.sub(r"(\1+\2)", side))


_LETTER = re.compile(r"\\mathbb\{[a-zA-Z]+|(\\[a-zA-Z]+|[a-zA-Z])")
_CONSTANTS = {"I", r"\gamma", r"\Gamma"}
_FREE = "abchjkmnopqrstuvwxyz"


def _with_other_letters(*sides: str) -> list[str]:
    """Replace a capital by an unused letter where its small letter occurs too. To math-verify
    both are one symbol, so R - r would be 0. It takes some letters for numbers or functions.
    """
    used = {found for side in sides for found in _LETTER.findall(side)} - {""}
    misread = {name for name in used if name.lower() in used - {name}} | used & _CONSTANTS
    free = (f" {letter}" for letter in _FREE if not used & {letter, letter.upper()})
    other = dict(zip(sorted(misread), free))
    return [_LETTER.sub(lambda found: other.get(found[1], found[0]), side) for side in sides]


def _agree(gold: Any, answer: Any) -> bool:
    """Return False for two numbers whose relative difference is above 1e-12: math-verify compares
    absolute differences with 1e-15.
    """
    if not all(isinstance(side, Expr) and side.is_number for side in (gold, answer)):
        return True
    size = abs(N(gold, 30))
    if not size.is_finite:
        return True
    return bool(abs(N(gold - answer, 30)) <= 1e-12 * size)


def _rounds(exact: list[Any], decimal: str) -> bool:
    """Return True if the number is less than one unit of the decimal's last place away. Without
    decimal places, the limit is half a unit.
    """
    if not (exact and isinstance(exact[0], Expr) and exact[0].is_number):
        return False
    places = len(decimal.partition(".")[2])
    error = abs(N(exact[0] - Rational(decimal), 30))
    return bool(error < (Rational(1, 10**places) if places else Rational(1, 2)))


def _parse(answer: str) -> list[Any]:
    parsed: list[Any] = parse(f"\\boxed{{{answer}}}", _CONFIGURATION, parsing_timeout=None)
    if parsed and isinstance(parsed[0], Expr):
        unit = {symbol: I for symbol in parsed[0].free_symbols if symbol.name == "i"}
        parsed[0] = parsed[0].subs(unit).doit()
    return parsed


_parse_gold = lru_cache(maxsize=4096)(_parse)  # a group asks for the same reference G times


# ---- once, before the workers are forked ---------------------------------------------------------


def _warm_up() -> None:
    """Build the parser tables and import the lazy half of sympy."""
    for gold, answer in (
        ("1", r"\frac{2}{2}"),
        ("(x+1)^2", "x^2+2x+1"),
        (r"\{1,2\}", r"\{2,3\}"),
        ("x>1", "[1,2]"),
        (r"\sqrt{2}", "1.41"),
    ):
        equal(gold, answer)
    _parse_gold.cache_clear()


class _ExceptMemory(tuple[type[Exception], ...]):
    """A stand-in for the name Exception that leaves MemoryError out: an `except` clause takes it as
    a tuple, and `raise` calls it.
    """

    def __call__(self, *arguments: object) -> Exception:
        return RuntimeError(*arguments)


def _pass_memory_errors_on() -> None:
    """Rebind the name Exception in the modules that say `except Exception: pass`, so that
    MemoryError passes through them.

    They do so in two dozen places and offer no setting for it. An answer for which memory ran out
    would count as wrong, although the score must be could-not-judge. Code outside of these modules
    cannot see such an error. Python 3.11 reports caught exceptions to tracers only, which slow
    every call down, and a failed allocation leaves no trace in the process's peak memory. Without
    the address-space limit such errors would be rare. But the parent's memory watch alone does not
    protect while the parent waits for a core. So the rebinding stays, in processes that do nothing
    but verify.

    Exception itself, and a kind of exception that a later import defines, pass through too; the
    worker cannot judge then.
    """
    kinds = _ExceptMemory(kind for kind in Exception.__subclasses__() if kind is not MemoryError)
    for name in (
        "math_verify.grader",
        "math_verify.parser",
        "latex2sympy2_extended.latex2sympy2",
        "latex2sympy2_extended.math_normalization",
    ):
        vars(importlib.import_module(name))["Exception"] = kinds


_warm_up()
_pass_memory_errors_on()  # after the first use, when all kinds of exceptions exist

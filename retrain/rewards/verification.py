r"""math-verify inside a worker: symbolic equality of two LaTeX answers. Only worker processes import this module.

Neither the time nor the memory of sympy is bounded here, since the library's own alarm is no guard: a single power of big
integers never returns to it. The parent kills the worker instead.
"""

import importlib
import logging
from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # its warning that time-outs are off is the intention here
_CONFIGURATION = [LatexExtractionConfig()]


def _parse(answer: str) -> list[Any]:
    parsed: list[Any] = parse(f"\\boxed{{{answer}}}", _CONFIGURATION, parsing_timeout=None)
    return parsed


_parse_gold = lru_cache(maxsize=4096)(_parse)  # a group asks for the same reference G times


def equal(gold: str, answer: str) -> bool:
    """Whether `answer` equals `gold`. The order matters to math-verify; what it cannot parse is not equal.

    MemoryError, and nothing else, is raised.
    """
    return bool(verify(_parse_gold(gold), _parse(answer), timeout_seconds=None))


for _gold, _answer in (("1", r"\frac{2}{2}"), ("(x+1)^2", "x^2+2x+1"), (r"\{1,2\}", r"\{2,3\}"), ("x>1", "[1,2]"), (r"\sqrt{2}", "1.41")):
    equal(_gold, _answer)  # builds parser tables and imports the lazy half of sympy once, before the workers are forked
_parse_gold.cache_clear()


class _ExceptMemory(tuple[type[Exception], ...]):
    """Every kind of Exception but MemoryError, under the name Exception: an `except` clause takes a tuple, `raise` wants a call."""

    def __call__(self, *arguments: object) -> Exception:
        return RuntimeError(*arguments)


def _let_memory_errors_out() -> None:
    """Both libraries say `except Exception: pass` in two dozen places and have no setting for it.

    An answer for which memory ran out would so be found unequal, and count as wrong where it could not be judged.
    """
    kinds = _ExceptMemory(kind for kind in Exception.__subclasses__() if kind is not MemoryError)
    for name in (
        "math_verify.grader",
        "math_verify.parser",
        "latex2sympy2_extended.latex2sympy2",
        "latex2sympy2_extended.math_normalization",
    ):
        vars(importlib.import_module(name))["Exception"] = kinds


_let_memory_errors_out()  # after the first use: by now all kinds of exceptions are defined

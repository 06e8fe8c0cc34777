"""Which cases of a family are slow."""

from collections.abc import Iterable
from typing import Any

import pytest


def first_of(values: Iterable[Any], quick: int = 1) -> list[Any]:
    """The values as parameters of a test, a tuple as several; all but the first `quick` are slow."""
    cases = [value if isinstance(value, tuple) else (value,) for value in values]
    slow = pytest.mark.slow
    return [
        pytest.param(*case, marks=[slow] if at >= quick else []) for at, case in enumerate(cases)
    ]

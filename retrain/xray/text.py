"""X-rays as text: a table over pass rates, a line of blocks each, and what to read in it."""

from collections.abc import Iterator, Sequence

import numpy as np

from retrain.records.terminal import table_lines
from retrain.types import Float64Array
from retrain.xray.binary import RATES, Xray

_BLOCKS = "▁▂▃▄▅▆▇█"
_MIDDLE = 0.5
"""Pass rate at which every weight is shown as 1."""
_NOISE_AT = (0.05, 0.5, 0.95)
_ALIKE = 1e-6
"""Largest difference of two relative weights that counts as none."""


def text_lines(xrays: Sequence[Xray]) -> Iterator[str]:
    """Yield the table of all, then a sentence for each that has one."""
    yield (
        "Weight f'(p) of a prompt by its pass rate p, for right-or-wrong rewards, on policy;"
        f" 1 at p = {_MIDDLE:g}."
    )
    yield ""
    head = ("", *(f"{rate:g}" for rate in RATES), "over 0 to 1", *(f"{p:g}" for p in _NOISE_AT))
    rows = [head]
    rows += [
        (
            f"{one.name} (G = {one.group})",
            *(_number(value) for value in relative_weight(one, RATES)),
            blocks(relative_weight(one, np.linspace(0.01, 0.99, 16))),
            *(_number(value) for value in one.noise(_NOISE_AT)),
        )
        for one in xrays
    ]
    yield from table_lines(rows, right=(*range(1, len(RATES) + 1), *range(len(RATES) + 2, 14)))
    yield ""
    yield (
        "Last three columns: noise over signal of one prompt at p ="
        f" {', '.join(map(str, _NOISE_AT))} (with respect to the logit of p)."
    )
    for one in xrays:
        yield from (f"{one.name}: {sentence}" for sentence in sentences(one))


def sentences(one: Xray) -> Iterator[str]:
    """Yield the meaning of one advantage's numbers."""
    if one.is_flat:
        yield (
            "no gradient at any pass rate: right and wrong completions get the same advantages"
            " in expectation, so right-or-wrong rewards do not train."
        )
        return
    rates = np.linspace(0.001, 0.999, 999)
    weight = one.weight(rates)
    if np.any(weight < -_ALIKE) and np.any(weight > _ALIKE):
        turns = rates[np.flatnonzero(np.diff(np.sign(weight)))]
        yield (
            "it lowers the pass rate of some prompts: the weight changes its sign at p ="
            f" {', '.join(f'{rate:.2g}' for rate in turns)}."
        )
    elif np.all(weight <= _ALIKE):
        yield "it lowers the pass rate of every prompt; turn the sign of the advantage."
    elif name := objective_name(one):
        yield f"it optimizes {name}."
    else:
        hard, middle, easy = one.weight([0.05, _MIDDLE, 0.95])
        yield (
            f"a prompt at p = 5% weighs {hard / middle:.3g} times a prompt at 50%, a prompt at"
            f" 95% {easy / middle:.3g} times."
        )
    wrong, right = one.uniform
    uneven = [
        f"{value:+.3g} where all are {word}"
        for value, word in ((wrong, "wrong"), (right, "right"))
        if abs(value) > _ALIKE
    ]
    if uneven:
        yield (
            f"groups of equal rewards have an advantage too ({', '.join(uneven)}): noise, which"
            " grows or shrinks every sampled completion."
        )


def objective_name(one: Xray) -> str:
    """Return the closed form of the objective where it is a known one, else ""."""
    group, coefficients = one.group, one.coefficients
    scale = coefficients[0]
    if scale == 0:
        return ""
    if np.allclose(coefficients, scale, rtol=_ALIKE) and scale > 0:
        factor = "" if np.isclose(scale, 1, rtol=_ALIKE) else f"{scale:.4g} x "
        return f"{factor}the pass rate p, as grpo and rloo do"
    # (1 - (1-p)^(G-1)) / p, the slope of log p's expansion, as a Bernstein polynomial.
    likelihood = group / np.arange(1, group + 1)
    likelihood[0] -= 1
    if np.allclose(coefficients / scale, likelihood / likelihood[0], rtol=1e-4):
        return f"log p, expanded to order {group - 1} (the maximum likelihood of MaxRL)"
    for k in range(2, group + 1):
        if np.allclose(coefficients / scale, _pass_at_k(group, k), atol=1e-6):
            return f"pass@{k}: the probability that one of {k} samples is right"
    return ""


def _pass_at_k(group: int, k: int) -> Float64Array:
    """Return [G] Bernstein coefficients of (1-p)^(k-1), which is the slope of pass@k over k."""
    from math import comb

    return np.array([comb(group - 1 - i, k - 1) / comb(group - 1, k - 1) for i in range(group)])


def relative_weight(one: Xray, rates: Sequence[float] | Float64Array) -> Float64Array:
    """Return the weight over the weight at p = 0.5; as it is where that is 0."""
    (middle,) = one.weight([_MIDDLE])
    weight = one.weight(rates)
    return weight / middle if abs(middle) > _ALIKE else weight


def blocks(values: Float64Array) -> str:
    """Return [n] numbers as n characters, from 0 or the least to the largest."""
    low, high = min(0.0, float(values.min())), float(values.max())
    if high <= low:
        return _BLOCKS[0] * len(values)
    places = np.rint((values - low) / (high - low) * (len(_BLOCKS) - 1)).astype(int)
    return "".join(_BLOCKS[place] for place in places)


def _number(value: float) -> str:
    if not np.isfinite(value):
        return "-"
    return f"{value:.2f}"


WEIGHTS = "weights of prompts at a pass rate of 5% / 50% / 95%"
"""The numbers that `headline` shows."""


def headline(one: Xray) -> str:
    """Three weights, for `retrain explain`."""
    return " / ".join(_number(value) for value in relative_weight(one, (0.05, _MIDDLE, 0.95)))

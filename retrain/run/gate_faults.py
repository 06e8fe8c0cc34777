"""Find the faults of a server's completions in the parity gate. One fault is a difference from the
learner's log-probs that rounding does not explain. Another is a kept count that does not fit the
learner's distribution.

The learner measures the rounding: half precision may move log-probs as far as it moves the
learner's own on the same tokens, within a factor. The tolerance of half precision hides part of a
fault. So the gate looks for two faults by their direction, which rounding does not have: another
temperature, and a missing part of the adapter's effect.
"""

from collections.abc import Callable, Iterator, Sequence
from math import exp

import numpy as np

from retrain.inference_engine.base import Truncation
from retrain.run.gate_samples import PAGE, GateSample
from retrain.run.identical import chance_of_identical
from retrain.types import Float32Array, Row

Bare = Callable[[Sequence[Row]], Float32Array]
"""[n] the learner's log-probs without the trial adapter."""

_FP32_IN_PROCESS, _FP32_SERVER = 1e-4, 1e-3
"""Nats by which float32 may move a log-prob at temperature 1 and above, if the model is no more
sensitive than most. Below temperature 1, log-probs are 1 / temperature times as sensitive to the
logits' rounding.
"""
_FP32_MEAN = 5e-5
"""The same for the mean. A server with the head alone in bf16 moves no token by 1e-3 if the policy
is sharp, and gave 1e-4 on average.
"""
_HALF, _EIGHT_BITS = 0.005, 0.02
"""The same for the mean in 16 bits, and in 8 bits. The second also holds if the learner knows only
one precision.
"""
_ONE = 0.6
"""Nats at temperature 1 and above by which a single token may be off, in the mean of few tokens."""
_ROUNDINGS = 3.0
"""Limit of the differences, as a multiple of the learner's own rounding on the same tokens. Sound
bf16 engines gave 0.3 to 1.6 on the lab and SmolLM2, T = 0.3 to 1.5.
"""
_FP32_SHARE = 2.0**-13
"""Rounding in float32 as a share of rounding in bf16, 2^-16, times 8 for sums in another order."""
_SHOWS = 5.0
"""Least size of an effect whose share the gate looks for, as a multiple of the learner's own
rounding.
"""
_MISSING = 0.25
"""Share of the trial adapter's effect that may be missing or too much. If the engine applies the
adapter, the share is within a few hundredths of 0. For a temperature that is a tenth higher, the
share may be half.
"""
_SIGNIFICANT = 5.0
"""Standard errors by which such a share must differ from 0."""
_MISCOUNTED, _MISCOUNTED_IN_HALF = 0.01, 0.1
"""Share of tokens whose kept count may be outside of the rounding range; two such tokens are the
least fault. In half precision the gate knows only the mean, and single tokens move by several times
the mean.
"""
_IMPOSSIBLE = 1e-6
"""Chance of identical completions, in each of two looks, below which the engine does not sample
independently.
"""
_MAX_SLACK = 500.0
"""Maximum rounding in nats that a count allows for: near temperature 0, exp() of it would
overflow.
"""


def fault(part: GateSample, bare: Bare | None = None) -> str:
    """Return the fault of a server's completions in words; "" without one. The caller gives `bare`
    under a trial adapter.
    """
    found = _miscount(part) or _difference(part)
    if found or not part.inputs.half_precision:
        return found
    return _direction(part, bare)


def _difference(part: GateSample) -> str:
    """Compare the differences with the learner's rounding. Log-probs that are not finite always
    disagree.
    """
    for where, found, permitted in _measures(part):
        if not found <= permitted:
            return (
                f"engine and learner disagree by {found:.3g} nats{where} (allowed: {permitted:.2g})"
            )
    return ""


def tolerance(part: GateSample) -> float:
    """Return the limit in nats: of the mean of all tokens in half precision, else of the largest
    difference.
    """
    return next(_measures(part))[2]


def _measures(part: GateSample) -> Iterator[tuple[str, float, float]]:
    """Yield for each measure its name, the difference of engine and learner in nats, and the
    permitted difference.
    """
    inputs, off = part.inputs, np.abs(part.off)
    if not inputs.half_precision:
        floor = _FP32_IN_PROCESS if inputs.in_process else _FP32_SERVER
        for where, measure, least in (("", np.max, floor), (" on average", np.mean, _FP32_MEAN)):
            found, permitted = float(measure(off)), least * inputs.sharpness
            if not found <= permitted:
                rounding = float(measure(np.abs(part.rounding)))
                permitted = max(permitted, _ROUNDINGS * _FP32_SHARE * rounding)
            yield where, found, permitted
        return
    # A mean counts, since the largest difference is one token's luck; of each part too, since a
    # fault in few tokens would not show in the mean of all.
    own = np.abs(part.rounding)
    floor = _HALF if own.any() and not inputs.eight_bits else _EIGHT_BITS
    long = [row.spans[0][0] > PAGE for row in part.rows for _ in range(row.num_actions)]
    for where, tokens in (
        ("", np.ones(len(off), np.bool_)),
        (" after a long prompt", np.array(long)),
        (" at the end-of-sequence token", part.at_end),
    ):
        if tokens.any():
            permitted = (floor + _ONE / int(tokens.sum())) * inputs.sharpness
            permitted = max(permitted, _ROUNDINGS * float(own[tokens].mean()))
            yield f" on average{where}", float(off[tokens].mean()), permitted


def _direction(part: GateSample, bare: Bare | None) -> str:
    """Look for a fault below half precision's tolerance by its direction, which rounding does not
    have. By least squares, the differences contain a share of an effect. Single tokens may have
    their own errors.
    """
    inputs, off = part.inputs, part.off
    hotter = inputs.backend.logprobs(part.rows, 1.1 * inputs.engine_temperature)
    effects = [("a temperature a tenth higher", 0.5, np.concatenate(hotter))]
    if bare is not None:
        effects.append(("leaving out the adapter", _MISSING, bare(part.rows)))
    for what, least, changed in effects:
        effect = changed - part.learner
        # The engine samples tokens that its rounding made probable, as a hotter engine would. Where
        # tokens are certain the effect is small, and the two look alike.
        if np.abs(effect).mean() < _SHOWS * np.abs(part.rounding).mean():
            continue
        # The size is 0 for a backend whose learner knows one temperature only.
        size = float(effect @ effect) or 1.0
        share = float(off @ effect) / size
        error = float(np.linalg.norm(effect * (off - share * effect))) / size
        if abs(share) > max(least, _SIGNIFICANT * error):
            return f"engine and learner differ by {share:.0%} of the effect of {what}"
    return ""


# -- kept counts and draws -------------------------------------------------------------------------


def _miscount(part: GateSample) -> str:
    """Compare the engine's kept counts with counts from the learner's logits, which rounding may
    move at the boundary.
    """
    inputs, cuts = part.inputs, part.inputs.truncation
    counts = [row.kept for row in part.rows if row.kept is not None]
    if not counts:
        return ""
    # Rounding moves tokens across the boundary, so a count lies between the counts of a slightly
    # tighter cut and of a slightly wider one.
    slack = min(2 * tolerance(part), _MAX_SLACK)
    fewest = inputs.backend.kept(part.rows, _moved(cuts, -slack))
    most = inputs.backend.kept(part.rows, _moved(cuts, slack))
    if fewest is None or most is None:
        return ""
    low, high, found = np.concatenate(fewest), np.concatenate(most), np.concatenate(counts)
    outside = (found < low) | (found > high)
    allowed = _MISCOUNTED_IN_HALF if inputs.half_precision else _MISCOUNTED
    if outside.sum() <= max(1, allowed * len(found)):
        return ""
    one = int(np.argmax(outside))
    return (
        f"the engine kept {found[one]:,} tokens where [training] top_k, top_p and min_p keep"
        f" {low[one]:,.0f} to {high[one]:,.0f} of the learner's distribution"
    )


def _moved(cuts: Truncation, slack: float) -> Truncation:
    """Return cuts that keep at most as many tokens as `cuts` do if logits move by |slack| / 2 nats.
    With `slack` below 0, they keep at least as many.

    The odds of a set's probability then change by a factor of at most e^|slack|, and so does the
    ratio of two probabilities.
    """
    top_p = cuts.top_p
    if top_p < 1:
        top_p = 1 / (1 + (1 / top_p - 1) * exp(-slack))
    return Truncation(cuts.top_k, top_p, min(1.0, cuts.min_p * exp(-slack)))


def identical(part: GateSample) -> str:
    """Check that completions of the first prompt differ, since they are equal only by chance."""
    drawn = [row for row in part.rows if row.group == part.rows[0].group]
    # `learner` may be at another temperature.
    own = part.inputs.backend.logprobs(drawn, part.inputs.temperature)
    ids = [row.token_ids[row.spans[0][0] :] for row in drawn]
    if chance_of_identical([list(zip(ids, own, strict=True))], min_tokens=1) >= _IMPOSSIBLE:
        return ""
    return (
        "completions of one prompt are identical, which by the learner's log-probs has a chance"
        f" below {_IMPOSSIBLE:.0e}"
    )

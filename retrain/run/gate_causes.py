"""Why engine and learner disagree after the gate's first adapter: a cause is named only where it
explains the differences, and no other does.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from retrain.backends.base import LAST_UPDATE, WHOLE_ADAPTER, TrialAdapter
from retrain.run.gate_fits import (
    CHECK_LOADING,
    UNCLEAR,
    GateSample,
    Mask,
    agreement,
    temperature_fit,
)

_NAMED, _NAMED_HALF = 0.99, 0.8
"""Share of the differences' sum of squares that a cause must explain: in half precision rounding is
a part of it."""
_TEMPERATURE = 0.9
"""Share of the differences' sum of squares that another temperature must explain: its effect is
known to first order."""
_MIN_TOKENS = 16
"""Tokens. Fewer than these name no cause, and in half precision tell no late request."""

_SOUND = 1.6
"""Differences of sound engines in half precision as a multiple of the learner's own rounding: the
most that was seen."""

ServedAdapters = Mapping[str, tuple[TrialAdapter, float]]
"""Name of an adapter that the engine may serve in place of its own -> the change of the learner's,
and its strength, that give it."""
_EOS_ALONE = "the end-of-sequence token alone differs; check the log-prob that the engine returns"
_OLD_CACHE = (
    "only what follows the long prompt differs, as with keys and values that were computed with"
    " another adapter; check how it caches prefixes"
)


def learned_adapters(sampled: GateSample) -> ServedAdapters:
    """Adapters that an engine may still serve after training."""
    names = {LAST_UPDATE: "the adapter of the step before", WHOLE_ADAPTER: "the base model"}
    learned = sampled.inputs.backend.learned()
    return {names[name]: (change, 1.0) for name, change in learned.items()}


def likely_cause(sampled: GateSample, served: ServedAdapters, *, tried: bool = False) -> str:
    """Return the cause of the differences and what to check, or that they do not say it.

    Under a trial adapter, which is `tried`, a part that is missing looks much as another
    temperature does, which would have shown before.
    """
    difference = np.concatenate(sampled.differences).astype(np.float64)
    named = _NAMED_HALF if sampled.inputs.half_precision else _NAMED
    if len(difference) < _MIN_TOKENS or not np.isfinite(difference).all():
        return UNCLEAR
    explained = {
        name: _share(difference, effect_of(sampled, change, strength))
        for name, (change, strength) in served.items()
    }
    # Two of them are one adapter after the first step, and nothing separates them.
    like = [name for name, share in explained.items() if share >= named]
    if like:
        return (
            "the engine still serves another adapter: its log-probs are those of"
            f" {' or of '.join(like)}; {CHECK_LOADING}"
        )
    fitted = None if tried else temperature_fit(sampled)
    if fitted is not None and fitted.explained >= _TEMPERATURE:
        return (
            f"its log-probs are as at a temperature of {fitted.temperature:.2g} in place of"
            f" {sampled.inputs.engine_temperature:g}; check the engine's own sampling settings"
        )
    for place, sentence in ((sampled.at_end, _EOS_ALONE), (sampled.after_long, _OLD_CACHE)):
        if np.count_nonzero(~place) >= _MIN_TOKENS and _is_rounding(sampled, ~place):
            return sentence
    return UNCLEAR


def _is_rounding(sampled: GateSample, place: Mask) -> bool:
    """Return True where the tokens of `place` [n] differ by rounding alone. In half precision what
    the gate tolerates is too wide for that: a fault of all tokens may hide in it.
    """
    found = np.abs(np.concatenate(sampled.differences)[place])
    if not sampled.inputs.half_precision:
        return bool(found.max() <= agreement(sampled).tolerance)
    if sampled.rounding is None:
        return False
    own = np.abs(np.concatenate(sampled.rounding)[place])
    return bool(found.mean() <= _SOUND * own.mean())


def effect_of(
    sampled: GateSample, change: TrialAdapter, strength: float
) -> npt.NDArray[np.float64]:
    """[n] how log-probs under the changed adapter differ from the learner's own."""
    with change:
        change.set(strength)
        other = sampled.inputs.learner_logprobs(sampled.rows)
    return np.concatenate(other).astype(np.float64) - np.concatenate(sampled.learner)


def late_requests(sampled: GateSample, effects: Sequence[npt.NDArray[Any]]) -> int:
    """Count the requests whose completions have the log-probs of an adapter before the learner's;
    `effects` [n] say how those differ from the learner's. In half precision the rounding of a few
    tokens may look like it.
    """
    named, fewest = _NAMED, 1
    if sampled.inputs.half_precision:
        named, fewest = _NAMED_HALF, _MIN_TOKENS
    difference = np.concatenate(sampled.differences).astype(np.float64)
    request = np.repeat(
        [row.group for row in sampled.rows], [row.num_actions for row in sampled.rows]
    )
    every = [request == number for number in np.unique(request)]
    own = [of for of in every if np.count_nonzero(of) >= fewest]
    return sum(any(_share(difference[of], effect[of]) >= named for effect in effects) for of in own)


def _share(difference: npt.NDArray[np.float64], explained: npt.NDArray[np.float64]) -> float:
    """Return the part of the difference's sum of squares that is explained: below 0 if it grows, 0
    where nothing differs.
    """
    rest, whole = difference - explained, float(difference @ difference)
    return (whole - float(rest @ rest)) / max(whole, 1e-30)

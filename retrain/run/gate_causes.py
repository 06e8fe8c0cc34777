"""Why engine and learner disagree after the gate's first adapter: a cause is named only where it
explains the differences, and no other does.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from retrain.backends.base import LAST_UPDATE, WHOLE_ADAPTER, TrialAdapter
from retrain.run.gate_fits import GateSample, agreement, temperature_fit

_NAMED, _NAMED_HALF = 0.99, 0.8
"""Share of the differences' sum of squares that a cause must explain: in half precision rounding is
a part of it."""
_TEMPERATURE = 0.9
"""The same for another temperature, whose effect is known to first order."""
_MIN_TOKENS = 16
"""Tokens. Fewer than these name no cause."""

ServedAdapters = Mapping[str, tuple[TrialAdapter, float]]
"""Name of an adapter that the engine may serve in place of its own -> the change of the learner's,
and its strength, that give it."""
_CHECK_LOADING = "check how it loads adapters and caches prefixes"
_EOS_ALONE = "the end-of-sequence token alone differs; check the log-prob that the engine returns"
_OLD_CACHE = (
    "only what follows the long prompt differs, as with keys and values that were computed with"
    " another adapter; check how it caches prefixes"
)
UNCLEAR = (
    "the engine may still serve another adapter, or keys and values computed with it, sample at"
    " another temperature, or draw otherwise; the differences do not say which, so"
    f" {_CHECK_LOADING}, and its own sampling settings"
)


def learned_adapters(sampled: GateSample) -> ServedAdapters:
    """Adapters that an engine may still serve after training."""
    names = {LAST_UPDATE: "the adapter of the step before", WHOLE_ADAPTER: "the base model"}
    learned = sampled.inputs.backend.learned()
    return {names[name]: (change, 1.0) for name, change in learned.items()}


def likely_cause(sampled: GateSample, served: ServedAdapters) -> str:
    """Return the cause of the differences and what to check, or that they do not say it."""
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
            f" {' or of '.join(like)}; {_CHECK_LOADING}"
        )
    fitted = temperature_fit(sampled)
    if fitted is not None and fitted.explained >= min(named, _TEMPERATURE):
        return (
            f"its log-probs are as at a temperature of {fitted.temperature:.2g} in place of"
            f" {sampled.inputs.engine_temperature:g}; check the engine's own sampling settings"
        )
    allowed, half = agreement(sampled).tolerance, sampled.inputs.half_precision
    for place, sentence in ((sampled.at_end, _EOS_ALONE), (sampled.after_long, _OLD_CACHE)):
        rest = np.abs(difference[~place])
        if len(rest) >= _MIN_TOKENS and (rest.mean() if half else rest.max()) <= allowed:
            return sentence
    return UNCLEAR


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
    `effects` [n] say how those differ from the learner's.
    """
    named = _NAMED_HALF if sampled.inputs.half_precision else _NAMED
    difference = np.concatenate(sampled.differences).astype(np.float64)
    request = np.repeat(
        [row.group for row in sampled.rows], [row.num_actions for row in sampled.rows]
    )
    own = [request == number for number in np.unique(request)]
    return sum(any(_share(difference[of], effect[of]) >= named for effect in effects) for of in own)


def _share(difference: npt.NDArray[np.float64], explained: npt.NDArray[np.float64]) -> float:
    """Return the part of the difference's sum of squares that is explained: below 0 if it grows, 0
    where nothing differs.
    """
    rest, whole = difference - explained, float(difference @ difference)
    return (whole - float(rest @ rest)) / max(whole, 1e-30)

"""The test, in a run, that the engine serves this step's adapter: the gate's test of directions,
made again on the step's own completions.

At a small learning rate a stale or foreign adapter moves log-probs by less than `[inference]
mismatch_limit`. But it moves them along what the learner knows: along its last update, or along all
that its adapter does. The effect of each is measured on the completions, enlarged so that rounding
does not hide it, and the share of it that the engine lacks is fitted as at the gate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from retrain.backends.base import LAST_UPDATE, WHOLE_ADAPTER, TrialAdapter
from retrain.run.gate_fits import Fit, GateInputs, GateSample, fits_of, is_off
from retrain.types import Float32Array, Row

_COMPLETIONS, _COMPLETIONS_HALF = 8, 32
"""Completions of a step that are tested: in half precision a share is known less well by the
token."""
_VISIBLE, _VISIBLE_HALF = (2e-5, 0.1), (0.05, 0.5)
"""Nats by which a change should move the learner's log-probs on average: far above its rounding,
and small enough to be in proportion to the change. In float32 few changes need to be enlarged for
it."""
_MAX_STRENGTH, _MAX_TRIES = 1e4, 6
"""How many times a change is enlarged at most; and how often its size is tried."""
_NAMED = 0.99
"""Share of the difference's sum of squares that a cause must explain to be named."""
_OLDER = 0.9
"""Share of the last update's effect that must be missing before the engine is said to serve an
earlier adapter; it is above 1 where updates before that one were alike and are missing too."""


@dataclass(frozen=True)
class AdapterLag:
    """The shares that the engine lacks, each None where its effect could not be made visible."""

    last: Fit | None
    """Of the last update's effect: 1 if the engine serves the adapter before it."""
    whole: Fit | None
    """Of the whole adapter's: 1 if it serves the base model."""
    off: bool
    """One of them differs from 0 by more than chance and rounding give."""

    def sentence(self, step: int) -> str:
        """Warn of an engine that does not serve this step's adapter; name what it serves only where
        that explains the differences.
        """
        found = []
        for fit, what in ((self.last, LAST_UPDATE), (self.whole, WHOLE_ADAPTER)):
            if fit is not None:
                found.append(f"{fit.share:.0%} (+-{fit.error:.1%}) of the effect of {what}")
        return (
            f"Step {step}: the engine's log-probs lack {' and '.join(found)}, and a sound engine's"
            f" lack about 0: {self.cause}. Nothing is stopped; adapter_lag and adapter_missing in"
            " metrics.jsonl are tested again at steps 2, 8, 32 and so on."
        )

    @property
    def cause(self) -> str:
        """The cause that the differences look like, in words."""
        last = self.last.explained if self.last else 0.0
        whole = self.whole.explained if self.whole else 0.0
        if self.whole and whole >= max(_NAMED, last) and self.whole.is_all:
            return "it looks as if it served the base model"
        if self.last and last >= max(_NAMED, whole) and self.last.share > _OLDER:
            return "it looks as if it served the adapter of an earlier step"
        return (
            "another adapter, cached prefixes, or another cause; the differences do not say which"
        )


def most_completions(*, half_precision: bool) -> int:
    """Return the number of completions of a step that are tested."""
    return _COMPLETIONS_HALF if half_precision else _COMPLETIONS


def is_due(step: int) -> bool:
    """Return True at steps 2, 8, 32 and so on."""
    return step > 1 and step.bit_count() == 1 and step.bit_length() % 2 == 0


def adapter_lag(
    inputs: GateInputs, learned: Mapping[str, TrialAdapter], rows: Sequence[Row]
) -> AdapterLag | None:
    """Fit what the engine's log-probs of `rows` lack of the adapter that the learner has now, which
    is restored byte for byte; None where nothing can be compared.
    """
    if not rows or not learned:
        return None
    sampled = GateSample(inputs, [*rows], inputs.learner_logprobs(rows))
    effects = {}
    for name, change in learned.items():
        with change:
            effect = _effect(sampled, change)
        if effect is not None:
            effects[name] = effect
    difference = np.concatenate(sampled.differences)
    fits = {fit.group: fit for fit in fits_of(difference, effects, inputs.half_precision)}
    return AdapterLag(
        fits.get(LAST_UPDATE),
        fits.get(WHOLE_ADAPTER),
        any(is_off(fit, inputs) for fit in fits.values()),
    )


def _effect(sampled: GateSample, change: TrialAdapter) -> Float32Array | None:
    """[n] what the learner's log-probs lose by the change at strength 1, measured at a strength at
    which it is visible; None if there is none.
    """
    inputs, strength = sampled.inputs, 1.0
    low, high = _VISIBLE_HALF if inputs.backend.half_precision else _VISIBLE
    below, above = 0.0, float("inf")
    own = np.concatenate(sampled.learner)
    for _ in range(_MAX_TRIES):
        change.set(strength)
        lost = own - np.concatenate(inputs.learner_logprobs(sampled.rows))
        size = float(np.abs(lost).mean())
        if low <= size <= high:
            return lost / np.float32(strength)
        if size < low:
            larger = strength * 2 * low / max(size, low / 100)
            below, strength = strength, min(_MAX_STRENGTH, larger)
        else:  # too large, or not finite
            above, strength = strength, strength * max(0.01, low / size)
        # Beyond the visible the effect grows faster than the strength.
        if below and above < float("inf"):
            strength = (below * above) ** 0.5
    return None

"""The causes of differences between engine and learner: rounding, a missing part of the adapter, or
another temperature.

How much rounding is, the learner says: half precision may move log-probs as far as it moves the
learner's own on the same tokens, within a factor. Faults that hide below this are looked for by
their direction, which rounding does not have.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from retrain.backends.base import Backend, TrialAdapter
from retrain.inference_engine.base import Truncation
from retrain.types import Float32Array, Int32Array, Prompt, Row

_FP32_IN_PROCESS, _FP32_SERVER = 1e-4, 1e-3
"""Nats by which float32 may move a log-prob at temperature 1 and above, if the model is no more
sensitive than most. Below 1, log-probs are so many times as sensitive to the logits' rounding. A
stale KV cache gives 0.2, raw log-probs at T = 0.7 give 1.97. """
_HALF, _EIGHT_BITS = 0.005, 0.02
"""The same for the mean in 16 bits; and where [inference] says 8 bits, or the learner knows one
precision only."""
_ONE = 0.3
"""Nats at temperature 1 and above by which a single token may be off, in the mean of few tokens."""
_ROUNDINGS = 3.0
"""The differences may be as many times the learner's own rounding on the same tokens. Sound bf16
engines gave 0.3 to 1.6 on the lab and SmolLM2, T = 0.3 to 1.5."""
_FP32_SHARE = 2.0**-13
"""Rounding in float32 as a share of that in bf16, 2^-16, times 8 for sums in another order."""

_VISIBLE, _VISIBLE_HALF = (0.02, 0.5), (0.1, 1.0)
"""Nats by which the trial adapter should change the log-probs on average: far above rounding, and
still a language model."""
_FIRST_STRENGTH, _STRENGTH_TRIES = 0.1, 6
_PROBED = 2
"""Effects are measured on this many completions, those that change most, and on more where these
have fewer tokens than a fit needs."""
_MISSING = 0.25
"""Share of a group's effect that may be missing or too much; where the engine applies the adapter,
it is within a few hundredths of 0."""
_SIGNIFICANT = 5.0
"""Standard errors by which that share must differ from 0."""
_ROUNDING = 1e-5
"""Nats per token that must be off, at temperature 1 and above: rounding in float32 gives less, and
a few tokens of it can look like the effect of a group. """
_ALL = (0.9, 1.1)
"""Within these shares all of an effect is missing."""
_WHOLE = "all layers"
_HOTTER = 1.1
"""The temperature, as a multiple of the run's, whose effect on the log-probs is looked for in the
differences."""
_WRONG_TEMPERATURE = 0.5
"""Share of that effect which the differences may contain: 5% of the temperature."""
_ROUNDED, _SELECTED = 0.5, 0.1
"""From this share of the differences' root mean square on, and this many nats of it, what half
precision does to the learner on the same tokens hides another temperature: rounding of s nats
shifts the log-probs of sampled tokens by about s^2 / 2 on average."""
CHECK = (
    "check how the engine loads the adapter, its scale, the names of its layers, cached prefixes,"
    " and its own sampling settings"
)
_ONE_TOKEN = 0.9
"""Share of the sum of squares above which one token decides a fit, which is then only as accurate
as that token's rounding, whatever its standard error."""
_FITTED = 24
"""Tokens that a fit needs in half precision: of fewer, a standard error says nothing."""

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class GateInputs:
    backend: Backend
    check_gold: Callable[[Sequence[Prompt]], str]
    """Says how many gold answers score, or "not applicable"; raises RunFailed for one that does
    not."""
    decode: Callable[[Int32Array], str]
    """Token ids to text with special tokens kept."""
    eos_ids: Sequence[int]
    answers: Callable[[Prompt], list[Int32Array]]
    """Token ids of answers to a prompt, after which a completion may well end; none where no answer
    is known."""
    temperature: float
    truncation: Truncation
    longest_row: int
    """Tokens of the run's longest prompt and completion together."""
    seed: int
    half_precision: bool
    """Weights, activations or the KV cache of either side are rounded to 16 bits or fewer."""
    eight_bits: bool
    """The sampler's weights or KV cache are rounded to 8 bits or fewer."""
    dtype_set: bool
    """[inference] dtype says in what the sampler computes."""
    step: int
    """Training steps behind the weights."""
    trained: bool
    """The engine already serves these weights, and is checked with them before it is given the
    trial adapter."""

    @property
    def raw(self) -> bool:
        """The engine's log-probs are at temperature 1, whatever the run's."""
        return self.backend.engine.capabilities.logprobs == "raw"

    @property
    def in_process(self) -> bool:
        return self.backend.engine.capabilities.in_process

    @property
    def sharpness(self) -> float:
        """The factor by which the temperature multiplies the rounding of logits, at least 1."""
        if self.raw:
            return 1.0
        return 1 / min(1.0, self.temperature)

    @property
    def consequence(self) -> str:
        """The consequence of a failed check, in words."""
        return "the run stops" if self.trained else "nothing was trained"

    @property
    def engine_temperature(self) -> float:
        """The temperature of the engine's log-probs."""
        return 1.0 if self.raw else self.temperature

    def learner_logprobs(self, rows: Sequence[Row]) -> list[Float32Array]:
        """[T] of each row, at the temperature of the engine's log-probs."""
        return self.backend.logprobs(rows, self.engine_temperature)


@dataclass(frozen=True)
class GateSample:
    """Completions as rows with the engine's log-probs, and the learner's view of them with the
    adapter of that moment.
    """

    inputs: GateInputs
    rows: list[Row]
    learner: list[Float32Array]
    """[T] of each row."""
    long: frozenset[int] = frozenset()
    """The rows after the long prompt."""
    servers: Sequence[str] = ()
    """The address of the server that sampled each row; empty where none did."""

    def by_server(self) -> dict[str, "GateSample"]:
        """Split the completions by the server that sampled them: its address, or "" if there was
        none. Judged together, those of sound servers would hide the fault of one.
        """
        addresses = sorted({*self.servers}) or [""]
        if len(addresses) == 1:
            return {addresses[0]: self}
        return {server: self._part(server) for server in addresses}

    def _part(self, server: str) -> "GateSample":
        kept = [number for number, one in enumerate(self.servers) if one == server]
        return GateSample(
            self.inputs,
            [self.rows[number] for number in kept],
            [self.learner[number] for number in kept],
            frozenset(place for place, number in enumerate(kept) if number in self.long),
        )

    @property
    def after_long(self) -> Mask:
        """[n] of the tokens of all rows: those after the long prompt."""
        in_long = [number in self.long for number in range(len(self.rows))]
        return np.repeat(in_long, [row.num_actions for row in self.rows])

    @property
    def at_end(self) -> Mask:
        """[n] of the tokens of all rows: those that end a sequence."""
        ids = [row.token_ids[list(row.action_positions())] for row in self.rows]
        return np.isin(np.concatenate(ids), self.inputs.eos_ids)

    @property
    def differences(self) -> list[Float32Array]:
        """[T] engine - learner of each row."""
        return [row.logprobs - own for row, own in zip(self.rows, self.learner, strict=True)]

    @cached_property
    def rounding(self) -> list[Float32Array] | None:
        """[T] of each row: what half precision changes in the learner's log-probs; None where that
        is not known. Ask for it before the adapter changes.
        """
        other = self.inputs.backend.rounded_logprobs(self.rows, self.inputs.engine_temperature)
        return other and [rounded - own for rounded, own in zip(other, self.learner, strict=True)]


# -- rounding --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Agreement:
    """The differences between engine and learner, beside what rounding explains."""

    tokens: int
    largest: float
    mean: float
    tolerance: float
    """In half precision for the mean, else for the largest difference."""
    rounding: float | None
    """Nats by which half precision moves the learner's own log-probs on average; None where it was
    not needed, or is not known."""
    excess: str
    """The difference that is too large, in words; "" if none is."""


def agreement(sampled: GateSample) -> Agreement:
    """Compare the differences with what rounding does to the learner. Log-probs that are not finite
    agree with nothing.
    """
    inputs, found = sampled.inputs, np.abs(np.concatenate(sampled.differences))
    largest, mean, excess = float(found.max()), float(found.mean()), ""
    if not inputs.half_precision:
        floor = _FP32_IN_PROCESS if inputs.in_process else _FP32_SERVER
        tolerance = floor * inputs.sharpness
        if largest > tolerance and sampled.rounding is not None:
            moved = float(np.abs(np.concatenate(sampled.rounding)).max())
            tolerance = max(tolerance, _ROUNDINGS * _FP32_SHARE * moved)
        if not largest <= tolerance:
            excess = f"by {largest:.3g} nats (allowed: {tolerance:.2g})"
        return Agreement(len(found), largest, mean, tolerance, None, excess)
    # In half precision a mean counts, of all tokens and of each part: the largest difference is one
    # token's luck.
    rounded, rounding, worst = np.zeros_like(found), None, 1.0
    if sampled.rounding is not None:
        rounded = np.abs(np.concatenate(sampled.rounding))
        rounding = float(rounded.mean())
    for where, part in _parts(sampled):
        allowed, off = _allowed_mean(inputs, rounded[part]), float(found[part].mean())
        if not off / allowed <= worst:
            worst = off / allowed
            excess = f"by {off:.3g} nats on average{where} (allowed: {allowed:.2g})"
    tolerance = _allowed_mean(inputs, rounded)
    return Agreement(len(found), largest, mean, tolerance, rounding, excess)


def _parts(sampled: GateSample) -> Iterator[tuple[str, Mask]]:
    """Yield tokens that have to agree on average: a fault in few of them would not show in the mean
    of all.
    """
    after_long = sampled.after_long
    yield "", np.ones_like(after_long)
    for where, part in (
        (" after the long prompt", after_long),
        (" at the end-of-sequence token", sampled.at_end),
    ):
        if part.any():
            yield where, part


def _allowed_mean(inputs: GateInputs, rounding: Float32Array) -> float:
    """Nats by which n tokens may differ on average in half precision, given the learner's own
    rounding [n].
    """
    floor = _HALF if rounding.any() and not inputs.eight_bits else _EIGHT_BITS
    floor += _ONE / len(rounding)
    return max(floor * inputs.sharpness, _ROUNDINGS * float(rounding.mean()))


# -- the adapter's effect --------------------------------------------------------------------------


def visible_strength(trial: TrialAdapter, sampled: GateSample) -> float:
    """Bisect for the strength at which the trial adapter changes log-probs visibly. Leaves the
    trial adapter at it.
    """
    inputs = sampled.inputs
    visible = _VISIBLE_HALF if inputs.half_precision else _VISIBLE
    before = np.concatenate(sampled.learner)
    strength, bounds = _FIRST_STRENGTH, [0.0, float("inf")]
    for _ in range(_STRENGTH_TRIES):
        trial.set(strength)
        after = np.concatenate(inputs.learner_logprobs(sampled.rows))
        effect = float(np.abs(after - before).mean())
        if visible[0] <= effect <= visible[1]:
            break
        bounds[not effect <= visible[1]] = strength  # not finite is too large
        low, high = bounds
        if high == float("inf"):
            strength = 2 * low
        elif not low:
            strength = high / 2
        else:
            strength = (low * high) ** 0.5
    trial.set(strength)
    return strength


Suspect = tuple[float, str]
"""A fault that the differences look like: the part of their sum of squares that it explains, and
the gate's sentence."""


def adapter_suspects(
    trial: TrialAdapter, strength: float, sampled: GateSample
) -> tuple[float, list[Suspect]]:
    """Return the trial adapter's mean effect in nats, and the groups whose effect the engine's
    log-probs lack in part, or have too much of.

    A group's effect is what the learner's log-probs lose without the group, on the completions that
    the whole adapter changes most. The whole adapter counts as one more group, on all completions.
    """
    inputs = sampled.inputs
    trial.set(0.0)
    without = inputs.learner_logprobs(sampled.rows)
    whole = [own - other for own, other in zip(sampled.learner, without, strict=True)]
    by_change = sorted(range(len(whole)), key=lambda number: -float(np.abs(whole[number]).sum()))
    counts = np.cumsum([len(whole[number]) for number in by_change])
    probed = by_change[: max(_PROBED, 1 + int(np.searchsorted(counts, _FITTED)))]
    effects = _group_effects(trial, strength, sampled, probed)
    fits: list[Fit] = []
    # In half precision few tokens cannot tell an effect from rounding.
    fewest = _FITTED if inputs.half_precision else 1
    for numbers, fitted in (
        (range(len(whole)), {_WHOLE: np.concatenate(whole)}),
        (probed, effects),
    ):
        difference = np.concatenate([sampled.differences[number] for number in numbers])
        if len(difference) >= fewest:
            fits += _fits_of(difference, fitted, inputs.half_precision)
    suspects = [_suspect(fit, inputs) for fit in fits if _is_off(fit, inputs)]
    return float(np.abs(np.concatenate(whole)).mean()), suspects


def _suspect(fit: "Fit", inputs: GateInputs) -> Suspect:
    where = "" if fit.group == _WHOLE else f" on {fit.group}"
    fault = f"lack {fit.share:.0%} of the adapter's effect{where}"
    if fit.share < 0:
        fault = f"have {-fit.share:.0%} too much of the adapter's effect{where}"
    if not where and _ALL[0] < fit.share < _ALL[1]:
        fault = "ignore the adapter and sample from the base model"
    return fit.explained, _told(fault, fit.explained, inputs)


def _told(fault: str, explained: float, inputs: GateInputs) -> str:
    return (
        f"Parity gate: the engine seems to {fault}, which explains {explained:.0%} of the"
        f" differences from the learner's log-probs, so {inputs.consequence}; {CHECK}."
    )


def _group_effects(
    trial: TrialAdapter, strength: float, sampled: GateSample, probed: Sequence[int]
) -> dict[str, Float32Array]:
    """Group of the adapter -> [n] what the learner's log-probs of the `probed` completions lose
    without it; nothing where all that differs is rounding. The trial adapter is whole afterwards.
    """
    inputs, rows = sampled.inputs, [sampled.rows[number] for number in probed]
    own = np.concatenate([sampled.learner[number] for number in probed])
    differences = own - np.concatenate([row.logprobs for row in rows])
    groups = trial.groups
    if np.sqrt(np.mean(np.square(differences))) <= _ROUNDING * inputs.sharpness:
        groups = ()
    effects = {}
    for group in groups:
        trial.set(strength, without=group)
        effects[group] = own - np.concatenate(inputs.learner_logprobs(rows))
    trial.set(strength)
    return effects


def rounding_hides_temperature(sampled: GateSample) -> bool:
    """Return True where half precision moves the learner's own log-probs by much of what engine and
    learner differ by. A sampled token is one that the engine's rounding made probable, as a hotter
    engine would, so the two look alike there.
    """
    if sampled.rounding is None:
        return False
    rounding, difference = np.concatenate(sampled.rounding), np.concatenate(sampled.differences)
    moved, off = np.sqrt(np.mean(np.square(rounding))), np.sqrt(np.mean(np.square(difference)))
    return bool(moved > max(_SELECTED, _ROUNDED * off))


def temperature_suspects(sampled: GateSample) -> list[Suspect]:
    """Return another temperature as a suspect where the differences, each within half precision's
    tolerance, together say so.
    """
    inputs, difference = sampled.inputs, np.concatenate(sampled.differences)
    if not inputs.half_precision or len(difference) < _FITTED or not np.isfinite(difference).all():
        return []  # in float32 the tolerance of a single difference leaves nothing
    temperature = inputs.engine_temperature
    hotter = np.concatenate(inputs.backend.logprobs(sampled.rows, _HOTTER * temperature))
    effect = hotter.astype(np.float64) - np.concatenate(sampled.learner)
    size = effect @ effect
    # The size is 0 for a backend whose learner knows one temperature only.
    if not size or not difference.any() or np.square(effect).max() > _ONE_TOKEN * size:
        return []
    share = float(effect @ difference / size)
    error = _standard_error(effect, difference - share * effect)
    if abs(share) <= max(_WRONG_TEMPERATURE, _SIGNIFICANT * error):
        return []
    temperature *= 1 + (_HOTTER - 1) * share
    explained = float(share**2 * size / (difference @ difference))
    fault = f"have a temperature of {temperature:.2g} instead of {inputs.engine_temperature:g}"
    return [(explained, _told(fault, explained, inputs))]


@dataclass(frozen=True)
class Fit:
    """Weighted least squares over the tokens: engine - learner = -share * (effect of a group)."""

    group: str
    share: float
    """The part of the group's effect that the engine lacks; below 0 where it has too much of it."""
    error: float
    """Standard error of the share."""
    nats: float
    """Root mean square of that part over the tokens, in nats."""
    explained: float
    """The part of the difference's sum of squares that the fit explains, between 0 and 1."""


def _is_off(fit: Fit, inputs: GateInputs) -> bool:
    """Return True where a share is missing, or too much, that neither chance nor rounding gives."""
    return (
        abs(fit.share) > max(_MISSING, _SIGNIFICANT * fit.error)
        and fit.nats > _ROUNDING * inputs.sharpness
    )


def _fits_of(
    difference: Float32Array, effects: Mapping[str, Float32Array], half_precision: bool
) -> list[Fit]:
    """Fit a share for each group of `effects`, [n] like `difference`.

    Rounding moves a token's log-prob in proportion to its sensitivity, which the effects show. Few
    tokens of a sharp policy are sensitive: unweighted, their rounding alone would decide the fit,
    and look like the effect of some group.
    """
    if not np.isfinite(difference).all():
        return []
    weights = 1 / (
        np.sqrt(sum(np.square(effect, dtype=np.float64) for effect in effects.values())) + _ROUNDING
    )
    fits = []
    for group, effect in effects.items():
        own, found = weights * effect, weights * difference
        size, total = float(own @ own), float(found @ found)
        if not size or not total:
            continue
        share = -float(found @ own) / size
        rest = found + share * own
        if half_precision:
            error = _standard_error(own, rest)
        else:
            error = float(np.sqrt((rest @ rest) / len(rest) / size))
        nats = abs(share) * float(np.sqrt(np.mean(np.square(effect))))
        fits.append(Fit(group, share, error, nats, share**2 * size / total))
    return fits


def _standard_error(regressor: npt.NDArray[np.float64], rest: npt.NDArray[np.float64]) -> float:
    """Standard error of a least-squares slope in half precision, given the regressor and the
    residuals [n].

    A token's rounding depends on the token, and a few tokens of a sharp policy can decide the fit;
    it allows for both (HC3 of MacKinnon and White, J. Econometrics 29, 1985, 305).
    """
    size = regressor @ regressor
    leverage = np.square(regressor) / size
    return float(np.linalg.norm(regressor * rest / np.maximum(1 - leverage, 1e-9)) / size)

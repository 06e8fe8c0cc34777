"""The test that a run's completions are draws from the distribution that is trained: valid at any
time, it gives numbers and a warning.

The evidence is a mean of likelihood ratios: of samplers tempered by more than the tolerance, on
either side, to those tempered by the tolerance itself. For a sampler tempered by at most the
tolerance each ratio has a mean of at most 1 at every step, so the mean exceeds 1 / alpha at any
step of a run with a probability of at most alpha (Ville's inequality). So does a mean over the
steps at which the ratios begin; those that begin late see a fault that begins late.

Tokens may be fair one by one, and their noise shared: by all completions of a prompt, or by those
of one number in all prompts. Then products of their places in the distribution add up.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from retrain.config.schema import Inference
from retrain.config.values import MAX_TESTED
from retrain.noise import Stream, uniform
from retrain.types import Float32Array, Group, Row

AT_ONCE, ONE_IN = 4, 32
"""Unless more are asked for, one completion of so many drawn is tested, and so many together: four
have pairs of one prompt and of one number, and a pass over fewer costs more for each."""
WARNED_FROM = 4.0
"""log10 of the evidence: at most one sound run in 10,000 reaches it."""
TOLERANCE, WIDE_TOLERANCE = 0.03, 0.05
"""lambda of a sampler that counts as sound. The wide one holds where rounding has moved lambda by
up to 0.009, or was not measured: below temperature 0.7, in 8 bits, and outside this process."""
_COOL = 0.7
Places = npt.NDArray[np.int64]
SHARED_FROM = 6.0
"""Standard deviations of the products of places from which noise counts as shared."""
MIN_VARIANCE = 1.0
"""Variance of the products that counts at least. A product is at most 1/4: while their standard
deviation is below that, a few pairs of improbable tokens would look like shared noise."""


@dataclass(frozen=True)
class Calibration:
    """Sums over tested tokens, of a step or since the start of the run. With x ~ p, D = -log p(x) -
    H has mean 0, and variance V.
    """

    tokens: int = 0
    surprise: float = 0.0
    """Sum of D, in nats."""
    variance: float = 0.0
    """Sum of V."""
    steps: int = 0
    """Steps that the sums are over; 0 for one alone."""
    ratios: Sequence[float] = ()
    """Log of the likelihood ratios, of the flatter samplers and then the sharper ones."""
    products: Sequence[float] = ()
    """Of the places of two tokens at one position, in completions of one prompt: the sum of their
    products, and its variance; then the same for completions of one number in two prompts."""
    warned: bool = False
    """The evidence has reached WARNED_FROM."""
    shares: bool = False
    """The products have reached SHARED_FROM."""

    @classmethod
    def of(cls, rows: Sequence[Row], scores: Sequence[Float32Array]) -> "Calibration | None":
        """The sums of [T, 14] `tempered_scores` of each row; None where they are not finite."""
        sums = np.concatenate(scores).sum(0, dtype=np.float64)
        if not np.isfinite(sums).all():
            return None
        surprise, variance, *ratios = sums[:-2].tolist()
        products = pair_products(rows, scores)
        return cls(sum(map(len, scores)), surprise, variance, ratios=ratios, products=products)

    def after(self, step: Self) -> "Calibration":
        """Return the sums after one more step.

        A ratio R over the starts k, with weights 1 / (k (k + 1)) that add up to 1, goes on as
        R_n = (R_n-1 + 1 / (n (n + 1))) L_n.
        """
        number = self.steps + 1
        begun = np.logaddexp(self.ratios or -np.inf, -np.log(number * (number + 1)))
        total = Calibration(
            self.tokens + step.tokens,
            self.surprise + step.surprise,
            self.variance + step.variance,
            number,
            (begun + step.ratios).tolist(),
            np.add(self.products or 0.0, step.products).tolist(),
        )
        return replace(
            total,
            warned=self.warned or total.evidence >= WARNED_FROM,
            shares=self.shares or max(total.shared) >= SHARED_FROM,
        )

    @property
    def effect(self) -> float | None:
        """lambda: the tokens are as if sampled at T / (1 - lambda), to first order."""
        if self.variance > 0:
            return self.surprise / self.variance
        return None

    @property
    def evidence(self) -> float:
        """log10 of the mean likelihood ratio."""
        if not self.ratios:
            return 0.0
        mean = np.logaddexp.reduce(self.ratios) - np.log(len(self.ratios))
        return float(mean / np.log(10))

    @property
    def shared(self) -> tuple[float, float]:
        """Standard deviations by which completions of one prompt, and completions of one number,
        are more alike than independent ones; too few while the variance is below MIN_VARIANCE.
        """
        prompt, prompt_variance, number, number_variance = self.products or (0.0,) * 4
        return (
            prompt / max(prompt_variance, MIN_VARIANCE) ** 0.5,
            number / max(number_variance, MIN_VARIANCE) ** 0.5,
        )

    @property
    def is_flat(self) -> bool:
        """The evidence is mostly for a flatter sampler."""
        half = len(self.ratios) // 2
        flat, sharp = self.ratios[:half], self.ratios[half:]
        return bool(np.logaddexp.reduce(flat) > np.logaddexp.reduce(sharp))


def pair_products(rows: Sequence[Row], scores: Sequence[Float32Array]) -> list[float]:
    """Calibration.products, of scores that end with a token's place and its variance. A rewritten
    history counts up to where it was rewritten.
    """
    whole = [number for number, row in enumerate(rows) if row.part == 0]
    # [rows, T, 2] places and their variances, 0 past the end
    found = np.zeros((len(whole), max(map(len, scores), default=0), 2))
    for place, number in enumerate(whole):
        found[place, : len(scores[number])] = scores[number][:, -2:]
    sums = []
    for keys in ([rows[i].group for i in whole], [rows[i].sample for i in whole]):
        _, sets = np.unique(keys, return_inverse=True)
        totals = np.zeros_like(found)
        np.add.at(totals, sets, found)
        # of each set, the products of all pairs: half of (the sum's square - the sum of squares)
        pairs = np.square(totals).sum((0, 1)) - np.square(found).sum((0, 1))
        sums += (pairs / 2).tolist()
    return sums


def tolerance(inference: Inference, temperature: float, *, in_process: bool) -> float:
    """Return the lambda that rounding alone may give."""
    if temperature < _COOL or inference.eight_bits or not in_process:
        return WIDE_TOLERANCE
    return TOLERANCE


def how_many(inference: Inference, drawn: int, step: int) -> int:
    """Return how many of the `drawn` completions of a step are tested: what the user asks for, or
    else one of ONE_IN on average. These are tested AT_ONCE, so after step 0 some steps of a small
    batch test none.

    `drawn` counts all first draws, not those that are trained on: which groups are trained on
    depends on their rewards, and the choice must not.
    """
    if inference.calibration_completions is not None:
        return inference.calibration_completions
    before, after = (-(-number * drawn // (AT_ONCE * ONE_IN)) for number in (step, step + 1))
    return min(AT_ONCE * (after - before), MAX_TESTED)


def paired_rows(groups: Sequence[Group], inference: Inference, seed: int, step: int) -> list[Row]:
    """Choose the completions of the first draws that are tested; return their rows."""
    slots, samples = _places(groups)
    count = how_many(inference, len(slots), step)
    return _rows(groups, pairs_first(slots, samples, seed, step)[:count])


def pairs_first(slots: Places, samples: Places, seed: int, step: int) -> Places:
    """Return the places of completions, shuffled by counter noise so that each four in turn are the
    same two numbers of the same two prompts, as long as the prompts have so many.
    """
    _, prompts = np.unique(
        uniform(seed, Stream.CALIBRATION, step, slots, 0, 1), return_inverse=True
    )
    _, numbers = np.unique(
        uniform(seed, Stream.CALIBRATION, step, samples, 0, 2), return_inverse=True
    )
    return np.lexsort((numbers, prompts, numbers // 2, prompts // 2))


def chosen_rows(groups: Sequence[Group], seed: int, step: int, count: int) -> list[Row]:
    """Choose `count` completions of the first draws by counter noise, which knows no reward: a
    group's reward selects among its completions, and so moves the mean of D. Return their rows.
    """
    slots, samples = _places(groups)
    noise = uniform(seed, Stream.CALIBRATION, step, slots, samples, 0)
    return _rows(groups, np.argsort(noise)[:count])


def _places(groups: Sequence[Group]) -> tuple[Places, Places]:
    """The slot and the number of each completion."""
    members = [(group.slot, one.sample) for group in groups for one in group.trajectories]
    slots, samples = np.array(members, np.int64).reshape(-1, 2).T
    return slots, samples


def _rows(groups: Sequence[Group], chosen: Places) -> list[Row]:
    """The rows of the chosen completions that have a token, in the order of the groups."""
    members = [(group, one) for group in groups for one in group.trajectories]
    rows: list[Row] = []
    for number in np.sort(chosen):
        group, one = members[number]
        nothing = np.zeros(one.num_actions, np.float32)
        rows += Row.of(group.prompt, one, nothing, group.slot)
    return [row for row in rows if row.num_actions]


def warning(
    number: int, step: Calibration, total: Calibration, tolerance: float, temperature: float
) -> str:
    """Write the warning that the sampler is not the policy: whether it is flatter or sharper, and
    by how much.
    """
    if total.is_flat:
        side = "flatter (a higher temperature and a repetition penalty do so)"
    else:
        side = "sharper (a lower temperature and tokens cut by top_p, top_k or min_p do so)"
    # Since the start: the few completions of a step often lie on the other side by chance.
    effect = total.effect or 0.0
    return (
        f"Step {number}: the engine does not sample from the trained policy: its completions are"
        f" {side}, since the start as if at a temperature of about"
        f" {temperature / (1 - min(effect, 0.9)):.2g} in place of {temperature:g}"
        f" (calibration_lambda_total {effect:+.3f} over {total.tokens:,} tokens, tolerated"
        f" {tolerance:g}; in this step {step.effect or 0.0:+.3f}). A sound engine is told this in"
        " at most 1 run of 10,000. Nothing is stopped; compare the engine's own sampling settings"
        " with [training]."
    )


def shared_warning(number: int, total: Calibration) -> str:
    """Write the warning that completions are not drawn independently, and which are alike."""
    by_prompt, by_number = total.shared
    alike, how = "of one prompt", "one seed for all n of a request does so"
    if by_number > by_prompt:
        alike, how = "of one number in different prompts", "one seed for all requests does so"
    return (
        f"Step {number}: completions {alike} are more alike than independent draws, by"
        f" {max(by_prompt, by_number):.3g} standard deviations since the start ({how}, and a"
        " penalty of the engine's own can). Nothing is stopped; compare how the engine takes seed"
        " and n, and its own sampling settings with [training]."
    )

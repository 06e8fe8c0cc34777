"""Compute how small a difference a number of seeds can find, and how many seeds a difference needs,
given the spread of the differences.

The decision rule is the same as in `compare`: the t interval excludes 0, and the adjusted sign-flip
p is below alpha. The computation assumes that one arm of the family differs. With few seeds the
sign flips are coarse and the rule has less power than a t test, so this simulates it up to
SIMULATED_SEEDS. Beyond, it uses a t test at the level that the flips can reach. The two agree
within about five points (benchmarks/results/calibration-2026-11-22.md).
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from math import ceil, floor, log2
from typing import TYPE_CHECKING, Literal

import numpy as np

from retrain.analysis.e_process import adjust, capital
from retrain.analysis.statistics import Floats, Interval, max_t_rows, smallest_p
from retrain.records.terminal import counted

if TYPE_CHECKING:
    from retrain.config.schema import Campaign

Correction = Literal["maxt", "evidence"]
"""The adjustment of p over a family: joint sign flips, or the e-process of a campaign with
looks.
"""

SIMULATED_SEEDS = 10
_CAMPAIGNS = 4000
"""Simulated campaigns: a standard error of 0.6 points at a power of 0.8."""
_LEVELS = 100_000
"""Simulated campaigns for a joint level: a standard error of 0.07 points at an alpha of 0.05."""
_MAX_FAMILY = 20
"""Simulations replace a larger family by this size: under joint flips each further arm costs next
to nothing.
"""
_MAX_LOOKS = 64
MAX_SEEDS = 100_000
"""A difference that needs more seeds is out of reach."""
SD_UNIT = "standard deviations of the paired differences"
SEED_COUNTS = (4, 6, 8, 12, 16, 24, 32)
"""Rows of the table of detectable differences."""


@dataclass(frozen=True)
class Rule:
    """The criterion for finding a difference, and the required probability of finding it."""

    comparisons: int = 1
    """The size of the family."""
    alpha: float = 0.05
    power: float = 0.8
    correction: Correction = "maxt"

    @property
    def fewest(self) -> int:
        """The fewest pairs with which a contrast of the family can be significant. With looks, this
        assumes that the other contrasts have no evidence for or against.
        """
        if self.correction == "maxt":
            return next(seeds for seeds in count(1) if smallest_p(seeds) < self.alpha)
        others = self.comparisons - 1
        reached = capital(np.ones(_MAX_LOOKS)) >= self.comparisons / self.alpha - others
        return int(reached.argmax()) + 1 if reached.any() else _MAX_LOOKS


_ALONE = Rule()


def power_of(seeds: int, effect: float, rule: Rule = _ALONE) -> float:
    """Return the probability that `seeds` pairs find a mean difference of `effect` standard
    deviations (normal differences).

    With the correction "evidence", return the probability that a look up to `seeds` finds it. The
    other contrasts of the family do not differ; all share the baseline, so that their differences
    correlate by a half.
    """
    if seeds < rule.fewest:
        return 0.0
    family, alpha = min(rule.comparisons, _MAX_FAMILY), rule.alpha
    looked = rule.correction == "evidence"
    if seeds > SIMULATED_SEEDS and not looked:
        level = alpha if family == 1 else _joint_level(seeds, alpha, family)
        return _power_of_t(seeds, effect, level)
    differences = _noise(seeds, family) + effect * np.eye(family)[0]
    if looked:
        found = adjust(capital(np.swapaxes(differences, 1, 2)))[:, 0, -1]
        return float((found >= 1 / alpha).mean())
    return _power_of_flips(differences, alpha)


def _power_of_flips(differences: Floats, alpha: float) -> float:
    """Return the share of simulated campaigns whose first contrast has a t interval without 0 and a
    joint sign-flip p below `alpha`.
    """
    from scipy.special import stdtrit

    first, seeds = differences[..., 0], differences.shape[1]
    critical = float(stdtrit(seeds - 1, 1 - alpha / 2))
    t = first.mean(axis=1) * np.sqrt(seeds) / first.std(axis=1, ddof=1)
    candidates = differences[t > critical]
    # Work in parts, since each row and contrast takes 2^(n-1) sums.
    parts = [part for part in np.array_split(candidates, 16) if len(part)]
    found = sum(int(np.count_nonzero(max_t_rows(part) < alpha)) for part in parts)
    return found / len(differences)


def _power_of_t(seeds: int, effect: float, level: float) -> float:
    """Return the power of a two-sided paired t test at the largest sign-flip p below `level`."""
    from scipy.special import nctdtr, stdtrit

    if seeds <= 50:  # It is a multiple of 2 / 2^n; beyond 50 seeds it is near `level`.
        flips = 2.0 ** (seeds - 1)
        level = (ceil(level * flips) - 1) / flips
    critical = float(stdtrit(seeds - 1, 1 - level / 2))
    return float(1 - nctdtr(seeds - 1, effect * np.sqrt(seeds), critical))


def minimal_detectable_effect(seeds: int, sd: float, rule: Rule = _ALONE) -> float | None:
    """Return the smallest mean difference that `seeds` pairs find with the rule's power; None if so
    few can conclude nothing.
    """
    units = _detectable_units(seeds, rule)
    return None if units is None else units * sd


def seeds_needed(effect: float, sd: float, rule: Rule = _ALONE) -> int | None:
    """Return the fewest seeds that find a mean difference of `effect` > 0 with the rule's power;
    None if more than MAX_SEEDS. `sd` is the spread of the differences.
    """
    # The normal approximation is near the answer, and every power on the way is a simulation.
    near, fewest = normal_seeds(effect, sd, rule.alpha / rule.comparisons, rule.power), rule.fewest
    if near > MAX_SEEDS:
        return None
    counts = range(fewest, 4 * ceil(near) + fewest)
    return fewest + bisect_left(
        counts, True, key=lambda seeds: power_of(seeds, effect / sd, rule) >= rule.power
    )


def normal_seeds(effect: float, sd: float, alpha: float = 0.05, power: float = 0.8) -> float:
    """Return the normal approximation ((z_{1 - alpha/2} + z_power) sd / effect)^2, without
    rounding; about two too few for a t test.
    """
    from scipy.special import ndtri

    return float(((ndtri(1 - alpha / 2) + ndtri(power)) * sd / effect) ** 2)


def sd_interval(sd: float, freedom: int, confidence: float = 0.95) -> Interval:
    """Return the confidence interval of a normal population's standard deviation, estimated as `sd`
    with `freedom` >= 1 degrees of freedom.
    """
    from scipy.special import chdtri

    tail = (1 - confidence) / 2
    low, high = (sd * float(np.sqrt(freedom / chdtri(freedom, part))) for part in (tail, 1 - tail))
    return low, high


@lru_cache(maxsize=256)
def _detectable_units(seeds: int, rule: Rule) -> float | None:
    """Return the minimal detectable effect in standard deviations, by bisection."""
    if seeds < rule.fewest:
        return None
    low, high = 0.0, 1.0
    while power_of(seeds, high, rule) < rule.power:
        low, high = high, 2 * high
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        if power_of(seeds, middle, rule) >= rule.power:
            high = middle
        else:
            low = middle
    return high


@lru_cache(maxsize=2 * SIMULATED_SEEDS)
def _noise(seeds: int, family: int) -> Floats:
    """Return [campaigns, seeds, contrasts] standard normal noise, the same in every call so that
    power rises smoothly with the effect.
    """
    rng = np.random.default_rng(seeds)
    if family == 1:
        return rng.standard_normal((_CAMPAIGNS, seeds, 1))
    runs = rng.standard_normal((_CAMPAIGNS // 4, seeds, family + 1))
    differences: Floats = (runs[..., 1:] - runs[..., :1]) / np.sqrt(2)
    return differences


@lru_cache(maxsize=256)
def _joint_level(seeds: int, alpha: float, family: int) -> float:
    """Return the level of Dunnett's test for `family` contrasts with one baseline. With probability
    alpha, the p of at least one contrast is below it. The estimate uses _LEVELS simulated campaigns
    of three seeds or more.

    It draws the components of t instead of the runs, so the cost does not grow with the seeds. The
    component sqrt(n) times an arm's mean is normal. The baseline's sum of squares about its mean is
    chi-square with n - 1 degrees of freedom. An arm's sum of squares splits into the square of a
    normal, along the baseline's, and a chi-square with n - 2 (Bartlett's decomposition).
    """
    from scipy.special import stdtr

    rng = np.random.default_rng(seeds)
    means = rng.standard_normal((_LEVELS, family)) - rng.standard_normal((_LEVELS, 1))
    baseline = np.sqrt(rng.chisquare(seeds - 1, (_LEVELS, 1)))
    along = rng.standard_normal((_LEVELS, family)) - baseline
    squares = along**2 + rng.chisquare(seeds - 2, (_LEVELS, family))
    largest = (np.abs(means) / np.sqrt(squares / (seeds - 1))).max(axis=1)
    return 2 * float(stdtr(seeds - 1, -np.quantile(largest, 1 - alpha)))


# -- a design, in words ----------------------------------------------------------------------------


def equivalence_line(seeds: int, comparisons: int, settings: "Campaign") -> Iterator[str]:
    """Say that so few seeds can call no condition equivalent, however alike they are. Yield nothing
    if they can, without a margin, or if looks decide the number of seeds.
    """
    margin, rule = settings.margin, Rule(comparisons)
    if not margin or settings.stop != "seeds":
        return
    # n pairs give a p of 2^-n at best, which Holm multiplies for the first.
    own = floor(log2(rule.comparisons / rule.alpha)) + 1
    fewest = max(rule.fewest, own)
    if seeds < fewest:
        yield (
            f"[campaign] margin = {margin:g} can call nothing equivalent with"
            f" {counted(seeds, 'seed')}: {at_least(fewest, rule.comparisons, rule.alpha, 'take')}."
        )


def at_least(seeds: int, comparisons: int, alpha: float, verb: str = "need") -> str:
    """State what a family takes, such as "1 comparison at 0.05 needs at least 6"."""
    return (
        f"{counted(comparisons, 'comparison')} at {alpha:g} {verb}{'s' * (comparisons == 1)} at"
        f" least {seeds}"
    )


def finds(seeds: int, size: float, rule: Rule, unit: str = SD_UNIT) -> str:
    """State the size of the difference that a campaign finds, before and after its runs."""
    looked = ", looked at one by one," if rule.correction == "evidence" else ""
    return (
        f"{counted(seeds, 'seed')}{looked} and {counted(rule.comparisons, 'comparison')} find a"
        f" true difference of {size:.3g} {unit} with {100 * rule.power:g}% power"
    )


def design_line(seeds: int, rule: Rule, problems: int = 0, samples: int = 1) -> str:
    """Return a line on the effects that a campaign can find by comparing every condition with the
    first.

    `problems` is 0 if their number is unknown.
    """
    units = minimal_detectable_effect(seeds, 1.0, rule)
    fewest = rule.fewest
    if units is None:
        return (
            f"{counted(seeds, 'seed')} {'is' if seeds == 1 else 'are'} too few for a verdict:"
            f" {at_least(fewest, rule.comparisons, rule.alpha)} seeds; use {fewest + 1}, in case"
            " one run fails."
        )
    found = f"{finds(seeds, units, rule)}."
    if seeds == fewest:
        found += f" Fewer seeds cannot conclude: use {fewest + 1}, in case one run fails."
    if not problems:
        return found
    # The largest sd that answers alone can give: independent arms, accuracy 1/2.
    sd = 100 * float(np.sqrt(0.5 / (problems * samples)))
    return (
        f"{found} {problems:,} held-out problems x {counted(samples, 'sample')} give the"
        f" differences an sd of up to {sd:.1f} pp, so these seeds find {units * sd:.1f} pp. More"
        " [evaluation] max_examples or samples make it smaller, down to the run-to-run variance."
    )

"""Paired statistics of conditions across seeds: pure functions of numbers.

The unit is the training run. Completions belong to prompts, prompts to steps and steps to a run. A
test on pooled completions would mistake the variance between runs for an effect. A difference d_s =
candidate - baseline compares two runs of seed s, which saw the same prompts. Every function raises
ValueError for an empty list and for a number that is not finite.

Joint sign flips of whole seeds over a family of contrasts: the step-down max-T of Westfall and
Young.

If an arm does not differ from its baseline, its difference at a seed is as likely as its negative.
A flip turns the sign of a seed in every contrast at once. So the flips keep what the contrasts have
in common, such as a lucky run of the baseline. Contrasts that hardly vary together with the winner
cost it nothing. Six seeds can suffice for a family of any size, whereas Holm's correction asks for
more with each contrast. Source: Westfall and Young 1993, Resampling-Based Multiple Testing,
algorithm 2.8.

Two-way analysis of variance of paired differences [seeds, problems]. It gives an interval for new
seeds and new problems, and the sources of the spread between seeds.

Every run answers the same held-out problems, so the design crosses seeds and problems. With mean
squares of seeds, problems and residual, Var(mean) = (MS_seed + MS_problem - MS_residual) / (seeds *
problems). Its degrees of freedom follow Satterthwaite. Sources: Searle, Casella and McCulloch 1992,
Variance Components, chapter 4. Satterthwaite 1946, doi 10.2307/3002019.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Numbers = Sequence[float] | Floats
Interval = tuple[float, float]
Differences = Mapping[int, float]
"""Seed -> difference."""

EXACT_SEEDS = 20
"""Up to this many seeds a test counts all 2^n sign flips; beyond, a sample of them."""
_MONTE_CARLO_FLIPS = 100_000
_TIE = 1e-12
"""Sums this close, relative to the sum of all |d|, count as equal: 0.1 + 0.2 and 0.3 differ in
binary only."""


def numbers(values: Numbers) -> Floats:
    """Return `values` as [n] float64. Raises ValueError unless they are one or more finite numbers
    in one dimension.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0 or not np.isfinite(array).all():
        raise ValueError(f"expected a list of finite numbers, got {values!r}")
    return array


def paired_differences(candidate: Differences, baseline: Differences) -> dict[int, float]:
    """Map each seed that both have to candidate - baseline, in the baseline's order."""
    return {key: candidate[key] - value for key, value in baseline.items() if key in candidate}


def mean(values: Numbers) -> float:
    """Return the mean of n >= 1 numbers, scaled so that a sum of huge numbers does not overflow."""
    x = numbers(values)
    largest = _largest(x)
    return largest * float((x / largest).mean())


def sample_sd(differences: Numbers) -> float:
    """Return the standard deviation (ddof = 1) of n >= 2 differences; exactly 0 if they are equal
    up to rounding.
    """
    d = numbers(differences)
    if len(d) < 2:
        raise ValueError("a standard deviation needs at least two differences")
    largest = _largest(d)
    scaled = d / largest  # Without this, squares could be 0 or infinite.
    return largest * float(np.std(scaled, ddof=1)) if np.ptp(scaled) > _TIE else 0.0


def _largest(values: Floats) -> float:
    """Return the largest |value|, 1 if all are 0."""
    return float(np.abs(values).max()) or 1.0


def t_interval(differences: Numbers, confidence: float = 0.95) -> Interval:
    """Student's interval for the mean of n >= 2 differences, n - 1 degrees of freedom.

    It is not a percentile bootstrap, whose coverage is too low below about ten runs (Colas et al.,
    arXiv 1806.08295).
    """
    from scipy.special import stdtrit

    n, center = len(differences), mean(differences)
    half = float(stdtrit(n - 1, 0.5 + confidence / 2)) * sample_sd(differences) / float(np.sqrt(n))
    return center - half, center + half


def smallest_p(seeds: int) -> float:
    """Return the smallest two-sided p that sign flips of n differences can give, 2 / 2^n, in a
    family of any size.
    """
    return min(1.0, 2.0 ** (1 - seeds))


def corrected_dz(differences: Numbers) -> float:
    """J * mean / sd (ddof = 1): Cohen's d_z with Hedges' correction for the bias of few seeds.

    n >= 2; J and with it the result is 0 at n = 2. For equal differences, whose sd is 0: 0 if they
    are 0, else infinity with their sign. Source: Hedges 1981, doi 10.3102/10769986006002107.
    """
    d = numbers(differences)
    d = d / _largest(d)
    sd, center = sample_sd(d), mean(d)
    if sd == 0:
        return float(np.copysign(np.inf, center)) if center else 0.0
    # With the correction J the bias is at most about 1% from n = 4 on.
    return (1 - 3 / (4 * (len(d) - 1) - 1)) * center / sd


def holm(p: Sequence[float]) -> list[float]:
    """Return the adjusted p values of one family, in the order given. They are step-down (m - i) *
    p_(i), made monotone, at most 1; empty for an empty family.

    Raises ValueError for a p outside [0, 1]. Source: Holm 1979, Scand. J. Statist. 6.
    """
    values = np.asarray(p, dtype=np.float64)
    if not ((values >= 0) & (values <= 1)).all():
        raise ValueError(f"p values lie in [0, 1], got {list(p)}")
    order = np.argsort(values, kind="stable")
    return _stepped(np.minimum(values[order] * np.arange(len(values), 0, -1), 1.0), order)


def _stepped(p: Floats, order: npt.NDArray[np.intp]) -> list[float]:
    """Make p values monotone, and undo their `order`."""
    # The inverse of a permutation is its order.
    found: list[float] = np.maximum.accumulate(p)[np.argsort(order)].tolist()
    return found


def tost(differences: Numbers, margin: float) -> float:
    """Return p of the claim |mean| < margin: the larger of two one-sided paired t tests, against
    -margin and against +margin.

    n >= 2, margin > 0. Equal differences have no t statistic: inside the margin their p is 2^-n,
    the best that sign flips can give, else 1. Source: Schuirmann 1987, doi 10.1007/BF01068419.
    """
    from scipy.special import stdtr

    if not margin > 0:
        raise ValueError(f"the margin must be above 0, got {margin}")
    sd, inside, n = sample_sd(differences), margin - abs(mean(differences)), len(differences)
    if sd == 0:
        return 2.0**-n if inside > 0 else 1.0
    return float(stdtr(n - 1, -inside / sd * np.sqrt(n)))


def standard_error(values: Numbers) -> float:
    """Return the standard error of the mean of n >= 2 values: sqrt(var / n), ddof = 1."""
    return sample_sd(values) / float(np.sqrt(len(values)))


# -- joint sign flips ------------------------------------------------------------------------------


_AT_ONCE = 1 << 13
_FLIP_TIE = 1e-9
"""Statistics this close, of a unit variance, are equal: 0.1 + 0.2 and 0.3 differ in binary only."""


def max_t(family: Sequence[Differences]) -> list[float]:
    """Return the adjusted two-sided p of each contrast, in the order given. A contrast maps a seed
    to its difference, one seed or more.

    The statistic is sum(d) / sqrt(sum(d^2)). Flips leave its denominator as it is, so a family of
    one gets the p of the mean. Up to EXACT_SEEDS seeds it counts all flips; beyond, it returns (b +
    1) / (m + 1) from a fixed sample of m.
    """
    if not family:
        return []
    seeds = dict.fromkeys(chain.from_iterable(family))
    # A contrast has no say at a seed that it lacks.
    table = np.array([[contrast.get(seed, 0.0) for contrast in family] for seed in seeds])
    if not np.isfinite(table).all():
        raise ValueError("expected finite differences")
    columns = _unit_length(table)
    observed = np.abs(columns.sum(axis=0))
    order = np.argsort(-observed, kind="stable")
    as_far, flips = np.zeros(len(family)), 0
    for signs in _signs(len(columns)):
        values = np.abs(signs @ columns[:, order])
        # The maximum is over the undecided contrasts.
        largest = np.maximum.accumulate(values[:, ::-1], axis=1)[:, ::-1]
        as_far += (largest >= observed[order] - _FLIP_TIE).sum(axis=0)
        flips += len(signs)
    sampled = len(columns) > EXACT_SEEDS
    return _stepped((as_far + sampled) / (flips + sampled), order)


def _unit_length(columns: Floats) -> Floats:
    """Turn [..., seeds, contrasts] differences into contrasts of unit length."""
    # Divide by the largest first, since squares could be 0 or infinite.
    largest = np.abs(columns).max(axis=-2, keepdims=True)
    columns = columns / np.where(largest > 0, largest, 1.0)
    norms = np.sqrt((columns**2).sum(axis=-2, keepdims=True))
    unit: Floats = columns / np.where(norms > 0, norms, 1.0)
    return unit


def max_t_rows(differences: Floats) -> Floats:
    """Turn [campaigns, seeds, contrasts] differences into [campaigns] p of the first contrast,
    adjusted over all (the first step alone).

    For simulations with at most EXACT_SEEDS seeds.
    """
    columns = _unit_length(differences)
    bar = np.abs(columns[..., 0].sum(axis=1)) - _FLIP_TIE
    as_far, flips = np.zeros(len(columns)), 0
    for signs in _signs(differences.shape[1]):
        largest = np.abs(signs @ columns).max(axis=2)
        as_far += (largest >= bar[:, np.newaxis]).sum(axis=1)
        flips += len(signs)
    fractions: Floats = as_far / flips
    return fractions


def _signs(seeds: int) -> Iterator[Floats]:
    """Blocks [flips, seeds] of 1 and -1: all flips that leave the first seed as it is, or a fixed
    sample of all flips.
    """
    if seeds > EXACT_SEEDS:
        rng = np.random.default_rng(0)
        for start in range(0, _MONTE_CARLO_FLIPS, _AT_ONCE):
            count = min(_AT_ONCE, _MONTE_CARLO_FLIPS - start)
            yield (1 - 2 * rng.integers(0, 2, size=(count, seeds))).astype(np.float64)
        return
    total = 1 << (seeds - 1)
    for start in range(0, total, _AT_ONCE):
        numbers = np.arange(start, min(start + _AT_ONCE, total))
        # The last seed's bit is always 0: a flip and its mirror image count alike.
        bits = (numbers[:, np.newaxis] >> np.arange(seeds)) & 1
        yield (1 - 2 * bits).astype(np.float64)


# -- seeds and problems, two ways ------------------------------------------------------------------


_FILLINGS = 30
"""Passes over the missing cells; each shrinks their error by about the fraction of missing
cells.
"""


@dataclass(frozen=True)
class TwoWay:
    """The mean squares of differences [seeds, problems], two or more of each."""

    seeds: int
    problems: int
    mean: float
    seed_square: float
    problem_square: float
    residual_square: float
    residual_freedom: int

    @classmethod
    def of(cls, differences: Floats) -> "TwoWay | None":
        """Analyze a table; a cell is NaN without a judged answer to its problem in both runs of a
        pair. Return None below two seeds or two problems, or with too few cells.

        A missing cell takes its value from the additive fit of the others and costs a degree of
        freedom (Yates 1933). It drops a problem or a seed without any cell.
        """
        known = ~np.isnan(differences)
        table = differences[known.any(axis=1)][:, known.any(axis=0)]
        seeds, problems = table.shape
        freedom = (seeds - 1) * (problems - 1) - int(np.isnan(table).sum())
        if min(seeds, problems) < 2 or freedom < 1:
            return None
        table = _filled(table)
        rows, columns, mean = table.mean(axis=1), table.mean(axis=0), float(table.mean())
        residual = table - rows[:, np.newaxis] - columns + mean
        return cls(
            seeds=seeds,
            problems=problems,
            mean=mean,
            seed_square=problems * float(rows.var(ddof=1)),
            problem_square=seeds * float(columns.var(ddof=1)),
            residual_square=float((residual**2).sum()) / freedom,
            residual_freedom=freedom,
        )

    @property
    def noise_variance(self) -> float:
        """The part of the variance between a seed's differences that comes from the evaluation: its
        problems and samples.
        """
        return min(self.residual_square, self.seed_square) / self.problems

    @property
    def luck_variance(self) -> float:
        """The rest of that variance, between runs (seeds), which no larger evaluation removes."""
        return max(0.0, self.seed_square - self.residual_square) / self.problems

    def interval(self, confidence: float = 0.95) -> Interval:
        """Return the interval of the mean over new seeds and new problems.

        It is never narrower than Student's intervals over the seeds alone and over the problems
        alone. If a mean square is small by chance, the estimated variance is small too.
        """
        from scipy.special import stdtrit

        quantile, cells = 0.5 + confidence / 2, self.seeds * self.problems
        freedoms = (self.seeds - 1, self.problems - 1, self.residual_freedom)
        squares = (self.seed_square, self.problem_square, -self.residual_square)
        total = sum(squares)
        halves = [
            float(stdtrit(freedom, quantile)) * np.sqrt(square / cells)
            for freedom, square in zip(freedoms[:2], squares[:2], strict=True)
        ]
        if total > 0:
            freedom = total**2 / sum(
                square**2 / own for square, own in zip(squares, freedoms, strict=True)
            )
            # Satterthwaite's falls toward 0 where the mean squares nearly cancel.
            freedom = max(freedom, min(freedoms))
            halves.append(float(stdtrit(freedom, quantile)) * np.sqrt(total / cells))
        half = float(max(halves))
        return self.mean - half, self.mean + half


def _filled(table: Floats) -> Floats:
    """Return `table` with the additive fit of rows and columns in its NaN cells."""
    missing = np.isnan(table)
    if not missing.any():
        return table
    filled = np.where(missing, np.nanmean(table), table)
    for _ in range(_FILLINGS):
        fit = filled.mean(axis=1, keepdims=True) + filled.mean(axis=0) - filled.mean()
        filled = np.where(missing, fit, table)
    return filled

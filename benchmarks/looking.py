"""Looking after every seed: how often the e-process is wrong where nothing differs, and after how
many seeds it concludes.

    python benchmarks/looking.py                      # 100,000 null campaigns; about four minutes
    on one core python benchmarks/looking.py --campaigns 2000     # seconds

The differences of K conditions from one baseline are normal, with a standard deviation of 1 and a
correlation of a half, unless a row says otherwise. All campaigns of a row are computed at once.
tests/test_campaign_looking.py does the same with fewer campaigns.
"""

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import numpy.typing as npt
from report import publish_simulation, table
from scipy.special import stdtrit

from retrain.analysis import power
from retrain.analysis.e_process import adjust, capital
from retrain.analysis.statistics import Floats, max_t_rows, sign_flip_p_rows

ALPHA = 0.05
_AT_ONCE = 5000
Random = np.random.Generator
Bools = npt.NDArray[np.bool_]


def normal(rng: Random, campaigns: int, contrasts: int, seeds: int) -> Floats:
    """[campaigns, contrasts, seeds] differences from one baseline."""
    return _from_runs(rng.standard_normal((campaigns, contrasts + 1, seeds)))


def heavy_tails(rng: Random, campaigns: int, contrasts: int, seeds: int) -> Floats:
    """Student's t with two degrees of freedom: now and then a run is far off, in every arm
    alike.
    """
    return _from_runs(rng.standard_t(2, (campaigns, contrasts + 1, seeds)))


def skewed(rng: Random, campaigns: int, contrasts: int, seeds: int) -> Floats:
    """The luck of every run has a long tail downwards."""
    return _from_runs(-rng.exponential(1.0, (campaigns, contrasts + 1, seeds)))


def discrete(rng: Random, campaigns: int, contrasts: int, seeds: int) -> Floats:
    """Rates of 16 answers, with many ties and differences of 0."""
    return _from_runs(rng.binomial(16, 0.5, (campaigns, contrasts + 1, seeds)) / 16)


def growing(rng: Random, campaigns: int, contrasts: int, seeds: int) -> Floats:
    """The spread doubles with every other seed."""
    return normal(rng, campaigns, contrasts, seeds) * 2.0 ** (np.arange(seeds) / 2)


def _from_runs(runs: Floats) -> Floats:
    differences: Floats = (runs[:, 1:] - runs[:, :1]) / np.sqrt(2)
    return differences


NULLS: dict[str, Callable[[Random, int, int, int], Floats]] = {
    "normal": normal,
    "heavy tails (t, 2 degrees of freedom)": heavy_tails,
    "skewed luck": skewed,
    "16 answers": discrete,
    "growing spread": growing,
}


def decided(differences: Floats) -> Bools:
    """[campaigns, contrasts, seeds] whether a contrast is decided after that seed; decided
    contrasts go on running here.
    """
    return adjust(capital(differences)) >= 1 / ALPHA


def decided_with_drops(differences: Floats) -> Bools:
    """The same where a contrast stops when it is decided, as in a campaign: its capital stays as it
    was.
    """
    capitals = capital(differences)
    done = np.zeros(capitals.shape, dtype=bool)
    for seed in range(1, capitals.shape[-1]):
        done[..., seed - 1] = adjust(capitals[..., :seed])[..., -1] >= 1 / ALPHA
        capitals[..., seed] = np.where(
            done[..., seed - 1], capitals[..., seed - 1], capitals[..., seed]
        )
    done[..., -1] = adjust(capitals)[..., -1] >= 1 / ALPHA
    return np.maximum.accumulate(done, axis=-1)


def peeked(differences: Floats, first: int = 3) -> Bools:
    """[campaigns] whether the fixed rule finds anything at a look from `first` on."""
    campaigns, contrasts, seeds = differences.shape
    found = np.zeros(campaigns, dtype=bool)
    for count, contrast in product(range(first, seeds + 1), range(contrasts)):
        todo = np.flatnonzero(~found)
        found[todo] = found_once(differences[todo, :, :count], contrast)
    return found


def found_once(differences: Floats, contrast: int = 0) -> Bools:
    """[campaigns, contrasts, seeds] -> [campaigns] whether the fixed rule finds a contrast: its t
    interval excludes 0, and its sign-flip p (adjusted by max-T over the family, the first step
    alone) is below ALPHA.
    """
    seeds = differences.shape[-1]
    own = differences[:, contrast]
    with np.errstate(
        divide="ignore", invalid="ignore"
    ):  # equal differences: their interval is a point
        t = own.mean(axis=1) * np.sqrt(seeds) / own.std(axis=1, ddof=1)
    found = np.abs(t) > stdtrit(seeds - 1, 1 - ALPHA / 2)
    todo = np.flatnonzero(found)
    for part in np.array_split(todo, max(1, len(todo) // 100)):
        if len(part):
            found[part] = _significant(differences[part], contrast)
    return found


def _significant(rows: Floats, contrast: int) -> Bools:
    """[campaigns] whether a contrast's adjusted sign-flip p (its first step) is below ALPHA."""
    if rows.shape[1] == 1:
        return sign_flip_p_rows(rows[:, 0]) < ALPHA
    order = [contrast, *(other for other in range(rows.shape[1]) if other != contrast)]
    return max_t_rows(np.swapaxes(rows[:, order], 1, 2)) < ALPHA


def false_rate(
    draw: Callable[[Random, int, int, int], Floats], campaigns: int, contrasts: int, seeds: int
) -> float:
    """Fraction of null campaigns in which any contrast is ever decided."""
    rng, wrong = np.random.default_rng(seeds + contrasts), 0
    for start in range(0, campaigns, _AT_ONCE):
        wrong += int(
            decided(draw(rng, min(_AT_ONCE, campaigns - start), contrasts, seeds))[..., -1]
            .any(axis=1)
            .sum()
        )
    return wrong / campaigns


def false_rate_beside_a_winner(
    draw: Callable[[Random, int, int, int], Floats], campaigns: int, contrasts: int, seeds: int
) -> float:
    """The same for the contrasts beside the first, which is better by two typical sizes and dropped
    when it is decided.
    """
    rng, wrong = np.random.default_rng(seeds + contrasts), 0
    for start in range(0, campaigns, _AT_ONCE):
        drawn = draw(rng, min(_AT_ONCE, campaigns - start), contrasts, seeds)
        drawn[:, 0] += 2 * np.median(np.abs(drawn), axis=(0, 1))
        wrong += int(decided_with_drops(drawn)[:, 1:, -1].any(axis=1).sum())
    return wrong / campaigns


def seeds_used(
    effect: float, campaigns: int, contrasts: int, seeds: int
) -> tuple[float, float, float]:
    """Power for the first contrast, the only one that differs; mean and 90% quantile of the seeds
    that it took, `seeds` where undecided.
    """
    rng = np.random.default_rng(int(100 * effect) + contrasts)
    drawn = normal(rng, campaigns, contrasts, seeds)
    drawn[:, 0] += effect
    found = decided(drawn)[:, 0]
    used = np.where(found[:, -1], found.argmax(axis=1) + 1, seeds)
    return float(found[:, -1].mean()), float(used.mean()), float(np.quantile(used, 0.9))


# -- tables ----------------------------------------------------------------------------------------


def false_verdicts(campaigns: int) -> Iterator[list[object]]:
    bound = ALPHA + 2 * np.sqrt(ALPHA * (1 - ALPHA) / campaigns)
    for name, draw in NULLS.items():
        for contrasts in (1, 4):
            dropped = (
                f"{100 * false_rate_beside_a_winner(draw, campaigns, contrasts, 16):.2f}%"
                if contrasts > 1
                else ""
            )
            rates = (
                false_rate(draw, campaigns, contrasts, 16),
                false_rate(draw, campaigns // 4, contrasts, 64),
            )
            yield [
                name,
                contrasts,
                *(f"{100 * rate:.2f}%" for rate in rates),
                dropped,
                f"{100 * bound:.2f}%",
            ]


def peeking(campaigns: int) -> Iterator[list[object]]:
    for contrasts, seeds in ((1, 8), (1, 16), (4, 8), (4, 12)):
        count = campaigns // (2 if contrasts == 1 else 25)
        rng, wrong = np.random.default_rng(seeds), 0
        for start in range(0, count, _AT_ONCE):
            wrong += int(peeked(normal(rng, min(_AT_ONCE, count - start), contrasts, seeds)).sum())
        yield [contrasts, seeds, f"{count:,}", f"{100 * wrong / count:.2f}%"]


def expected_seeds(campaigns: int) -> Iterator[list[object]]:
    for contrasts in (1, 4):
        for effect in (1.0, 1.5, 2.0):
            fixed = power.seeds_needed(effect, 1.0, power.Rule(contrasts, ALPHA))
            same = power.power_of(fixed, effect, power.Rule(contrasts, ALPHA))
            for most in (12, 16, 24):
                found, mean, most_used = seeds_used(effect, campaigns, contrasts, most)
                at_mean = power.power_of(round(mean), effect, power.Rule(contrasts, ALPHA))
                plan = f"{fixed} ({100 * same:.0f}%)"
                yield [
                    contrasts,
                    effect,
                    most,
                    f"{100 * found:.1f}%",
                    f"{mean:.1f}",
                    f"{most_used:.0f}",
                    plan,
                    f"{100 * at_mean:.0f}%",
                ]


def paragraphs(campaigns: int) -> Iterator[str]:
    yield "## False verdicts where nothing differs"
    yield (
        f"{campaigns:,} null campaigns per row with a look after every seed; any false verdict. The"
        " bound is 0.05 + 2 standard errors. 64 seeds: a quarter of the campaigns. Beside a"
        " winner: one condition is better and is dropped when it is decided; any false verdict on"
        " the others, after at most 16 seeds."
    )
    head = [
        "differences",
        "comparisons",
        "at most 16 seeds",
        "at most 64 seeds",
        "beside a winner",
        "bound",
    ]
    yield table(head, false_verdicts(campaigns))
    yield "## The fixed test with peeking"
    yield (
        "The rule of `compare` after every seed from the third on, stopped at its first verdict;"
        " normal differences."
    )
    yield table(["comparisons", "most seeds", "campaigns", "any false verdict"], peeking(campaigns))
    yield "## Seeds until the verdict"
    yield (
        "One condition differs by so many standard deviations of the differences; an undecided"
        " campaign counts with all its seeds. The fixed plan is the fewest seeds with 80% power."
        " The last column is the power of a fixed plan with as many seeds as the e-process takes on"
        " average: it needs the effect to be known beforehand, the e-process does not."
    )
    head = [
        "comparisons",
        "effect (sd)",
        "most seeds",
        "power",
        "mean seeds",
        "90% quantile",
        "fixed plan (its power)",
        "fixed at the mean",
    ]
    yield table(head, expected_seeds(max(campaigns // 5, 100)))


if __name__ == "__main__":
    publish_simulation(
        "looking",
        "Looking after every seed",
        __doc__,
        paragraphs,
        100_000,
        "null campaigns per row",
    )

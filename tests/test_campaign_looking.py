"""Looking after every seed: the e-process is a fair game at every look, and in simulated campaigns
it is wrong as seldom as it says.

The differences of K conditions from one baseline have a correlation of a half. All campaigns of a
row are computed at once.
"""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from looking import ALPHA, Bools, decided
from scipy import stats

from retrain.analysis.e_process import adjust, anytime_p, capital, confidence_sequence, evidence
from retrain.analysis.headline import p_words
from retrain.analysis.statistics import Floats

Random = np.random.Generator
Draw = Callable[[Random, int, int, int], Floats]


def normal(rng: Random, campaigns: int, contrasts: int, seeds: int) -> Floats:
    """[campaigns, contrasts, seeds] differences from one baseline."""
    return _from_runs(rng.standard_normal((campaigns, contrasts + 1, seeds)))


def heavy_tails(rng: Random, campaigns: int, contrasts: int, seeds: int) -> Floats:
    """Student's t with two degrees of freedom: now and then a run is far off, in every arm
    alike.
    """
    return _from_runs(rng.standard_t(2, (campaigns, contrasts + 1, seeds)))


def growing(rng: Random, campaigns: int, contrasts: int, seeds: int) -> Floats:
    """The spread doubles with every other seed."""
    return normal(rng, campaigns, contrasts, seeds) * 2.0 ** (np.arange(seeds) / 2)


def _from_runs(runs: Floats) -> Floats:
    differences: Floats = (runs[:, 1:] - runs[:, :1]) / np.sqrt(2)
    return differences


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


def false_rate(draw: Draw, campaigns: int, contrasts: int, seeds: int) -> float:
    """Fraction of null campaigns in which any contrast is ever decided."""
    drawn = draw(np.random.default_rng(seeds + contrasts), campaigns, contrasts, seeds)
    return float(decided(drawn)[..., -1].any(axis=1).mean())


def false_rate_beside_a_winner(draw: Draw, campaigns: int, contrasts: int, seeds: int) -> float:
    """The same for the contrasts beside the first, which is better by two typical sizes and dropped
    when it is decided.
    """
    drawn = draw(np.random.default_rng(seeds + contrasts), campaigns, contrasts, seeds)
    drawn[:, 0] += 2 * np.median(np.abs(drawn), axis=(0, 1))
    return float(decided_with_drops(drawn)[:, 1:, -1].any(axis=1).mean())


@pytest.mark.parametrize(
    "sizes", [[1.0, 2.0, 0.5, 2.0, 0.0, 3.0, 1e-9], [0.1] * 7, [5.0, 1.0, 0.2, 0.1, 9.0, 9.0, 1.0]]
)
def test_over_all_signs_of_any_sizes_the_capital_is_1_on_average_at_every_look(
    sizes: list[float],
) -> None:
    signs = np.array(list(product([1, -1], repeat=len(sizes))))
    after = capital(signs * np.array(sizes))
    assert (after >= 0).all() and after.mean(axis=0) == pytest.approx(np.ones(len(sizes)))
    # Not only on average over the past: after any past, the next factor is fair.
    pasts = after.reshape(2**3, -1, len(sizes))
    assert pasts[:, :, 3].mean(axis=1) == pytest.approx(pasts[:, 0, 2])


def test_a_bet_never_depends_on_what_comes_later() -> None:
    rng = np.random.default_rng(0)
    whole = rng.normal(0.5, 1.0, (50, 12))
    for seeds in (1, 4, 11):
        assert capital(whole)[:, :seeds] == pytest.approx(capital(whole[:, :seeds]))


def test_scale_order_of_contrasts_and_missing_seeds_change_nothing_else() -> None:
    d = np.random.default_rng(1).normal(0.5, 1.0, (3, 10))
    assert capital(1e-6 * d) == pytest.approx(capital(d))
    assert capital(-d) == pytest.approx(capital(d))
    gap = np.insert(d, 4, np.nan, axis=1)
    assert np.delete(capital(gap), 4, axis=1) == pytest.approx(capital(d))
    assert adjust(capital(d[::-1])) == pytest.approx(adjust(capital(d))[::-1])


def test_evidence_over_a_family_is_the_least_mean_of_any_part_of_it() -> None:
    rng = np.random.default_rng(2)
    for contrasts in (1, 2, 3, 4):
        capitals = rng.exponential(10.0, (contrasts, 1))
        for contrast in range(contrasts):
            parts = [part for part in product([False, True], repeat=contrasts) if part[contrast]]
            least = min(float(capitals[list(part), 0].mean()) for part in parts)
            assert adjust(capitals)[contrast, 0] == pytest.approx(least)


def test_a_decided_contrast_stays_decided_and_p_is_one_over_the_evidence() -> None:
    family = [dict(enumerate([1.0, 1.2, 0.9, 1.1, 1.0, 1.3, 0.8, -9.0, -9.0]))]
    found = [evidence(family, count) for count in (6, 7, 8, 9)]
    assert found == sorted(found) and found[0][0] > 20
    assert anytime_p(found[0][0]) < 0.05 and anytime_p(0.2) == 1.0


def test_of_null_campaigns_with_looks_no_more_than_alpha_end_in_a_verdict() -> None:
    trials = 4000
    for draw in (normal, heavy_tails, growing):
        for contrasts in (1, 4):
            wrong = round(trials * false_rate(draw, trials, contrasts, 16))
            assert 0 < wrong <= stats.binom.ppf(0.999, trials, ALPHA)
    assert false_rate_beside_a_winner(normal, trials, 4, 12) < ALPHA + 0.015


def test_the_confidence_sequence_covers_the_center_at_all_looks_together() -> None:
    rng, missed, trials = np.random.default_rng(3), 0, 40
    for _ in range(trials):
        d = rng.normal(1.0, 1.0, 9)
        intervals = [
            interval for count in (6, 7, 8, 9) if (interval := confidence_sequence(d[:count]))
        ]
        missed += any(not low <= 1.0 <= high for low, high in intervals)
        assert not intervals or intervals[-1][0] < np.median(d) < intervals[-1][1]
    assert missed <= stats.binom.ppf(0.999, trials, 0.05)
    assert confidence_sequence([1.0, 2.0, 3.0]) is None


@pytest.mark.parametrize(
    ("p", "words"),
    [
        (0.0497, "0.0497"),
        (0.04999, "0.04999"),
        (0.05, "0.05"),
        (0.0504, "0.05"),
        (0.0078125, "0.0078"),
        (1.0, "1"),
    ],
)
def test_rounding_carries_no_p_across_the_level(p: float, words: str) -> None:
    assert p_words(p) == words

"""The formulas behind a comparison, against independent ones: brute force, scipy's own tests, and
simulation.
"""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from retrain.analysis import pairs, power, statistics
from retrain.analysis.statistics import TwoWay, max_t
from tests.golden import sign_flip_p

TENTHS = st.lists(st.integers(-9, 9).map(lambda k: k / 10), min_size=1, max_size=9)


def brute_force_p(differences: list[float]) -> float:
    """Over all 2^n flips, in whole tenths, where equal sums are equal."""
    tenths = [round(10 * d) for d in differences]
    sums = [
        abs(sum(s * d for s, d in zip(signs, tenths, strict=True)))
        for signs in product((1, -1), repeat=len(tenths))
    ]
    return sum(value >= abs(sum(tenths)) for value in sums) / len(sums)


@given(TENTHS)
@settings(deadline=None)  # a busy machine may take a second over 2^9 flips
def test_the_sign_flip_p_counts_every_flip_and_ties_of_decimals_are_ties(
    differences: list[float],
) -> None:
    assert sign_flip_p(differences) == pytest.approx(brute_force_p(differences), abs=1e-15)


@pytest.mark.parametrize(
    ("seeds", "smallest"),
    [(1, 1.0), (3, 0.25), (5, 0.0625), (6, 0.03125), (8, 0.0078125), (16, 2 / 2**16)],
)
def test_the_smallest_p_is_two_in_all_flips(seeds: int, smallest: float) -> None:
    assert sign_flip_p([1.0] * seeds) == statistics.smallest_p(seeds) == smallest


def test_beyond_twenty_seeds_a_sample_of_flips_agrees_and_is_never_zero() -> None:
    rng = np.random.default_rng(1)
    differences = rng.normal(0.3, 1, 24)
    reference = stats.permutation_test(
        (differences,),
        np.mean,
        permutation_type="samples",
        n_resamples=50_000,
        rng=np.random.default_rng(2),
    ).pvalue
    assert sign_flip_p(differences) == pytest.approx(reference, abs=0.01)
    assert sign_flip_p([1.0] * 40) == pytest.approx(1e-5, rel=1e-3)
    assert sign_flip_p([0.0] * 40) == 1.0


def test_p_depends_neither_on_scale_nor_on_the_sign_of_the_effect() -> None:
    differences = [0.3, -0.1, 0.2, 0.4, 0.05, 0.1]
    p = sign_flip_p(differences)
    for scale in (-1, 1e-310, 1e307):
        assert sign_flip_p([scale * d for d in differences]) == p


def test_the_interval_and_tost_are_those_of_paired_t_tests() -> None:
    d = np.array([0.02, -0.01, 0.03, 0.015, 0.0, 0.04])
    reference = stats.ttest_1samp(d, 0.0)
    assert statistics.t_interval(d, 0.9) == pytest.approx(tuple(reference.confidence_interval(0.9)))
    above = stats.ttest_1samp(d, -0.05, alternative="greater").pvalue
    below = stats.ttest_1samp(d, 0.05, alternative="less").pvalue
    assert statistics.tost(d, 0.05) == pytest.approx(max(above, below))
    assert statistics.tost(d, 0.01) > 0.5


def test_differences_without_spread_claim_no_more_than_their_number_allows() -> None:
    assert statistics.tost([0.0] * 3, 0.01) == 1 / 8
    assert statistics.tost([0.02] * 8, 0.01) == 1.0
    assert statistics.corrected_dz([0.1] * 3) == np.inf
    assert statistics.corrected_dz([-0.1] * 3) == -np.inf
    assert statistics.corrected_dz([0.0] * 3) == 0.0
    assert statistics.t_interval([0.1] * 3) == pytest.approx((0.1, 0.1))


def test_the_effect_size_has_hedges_correction() -> None:
    d = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert statistics.corrected_dz(d) == pytest.approx(3 / np.sqrt(2.5) * (1 - 3 / 15))
    assert statistics.corrected_dz([1.0, 3.0]) == 0.0


@pytest.mark.parametrize("scale", [1e-310, 1e-200, 1e200, 1e307])
def test_numbers_of_any_size_have_a_mean_a_spread_and_an_effect(scale: float) -> None:
    d = [1.0, 2.0, 4.0, 8.0]
    huge = [scale * value for value in d]
    assert statistics.mean(huge) == pytest.approx(3.75 * scale, rel=1e-6)
    assert statistics.sample_sd(huge) == pytest.approx(np.std(d, ddof=1) * scale, rel=1e-6)
    assert statistics.corrected_dz(huge) == pytest.approx(statistics.corrected_dz(d), rel=1e-6)
    assert pairs.iqm(huge) == pytest.approx(3.0 * scale, rel=1e-6)
    assert statistics.tost(huge, 10 * scale) == pytest.approx(statistics.tost(d, 10), rel=1e-6)


def test_differences_that_are_equal_but_for_rounding_have_no_spread() -> None:
    d = [0.3 - 0.2, 0.2 - 0.1, 0.6 - 0.5]
    assert len(set(d)) > 1 and statistics.sample_sd(d) == 0.0
    assert statistics.corrected_dz(d) == np.inf


def test_holm_by_hand() -> None:
    assert statistics.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert statistics.holm([0.9, 0.8]) == [1.0, 1.0]
    assert statistics.holm([]) == []


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_lies_between_the_raw_p_and_bonferroni_and_keeps_the_order(p: list[float]) -> None:
    adjusted = statistics.holm(p)
    for raw, value in zip(p, adjusted, strict=True):
        assert raw <= value <= min(1.0, len(p) * raw) + 1e-15
    assert np.all(np.diff(np.array(adjusted)[np.argsort(p, kind="stable")]) >= 0)


@pytest.mark.parametrize("values", [[], [float("nan")], [float("inf"), 1.0]])
def test_what_is_no_number_is_refused(values: list[float]) -> None:
    for function in (
        statistics.corrected_dz,
        statistics.t_interval,
        pairs.iqm,
    ):
        with pytest.raises(ValueError, match="finite"):
            function(values)  # type: ignore[operator]


@pytest.mark.parametrize("p", [[1.1], [-0.1], [float("nan")]])
def test_holm_refuses_what_is_no_probability(p: list[float]) -> None:
    with pytest.raises(ValueError, match="p values"):
        statistics.holm(p)


def test_one_difference_has_a_p_and_no_spread() -> None:
    assert sign_flip_p([0.5]) == 1.0
    with pytest.raises(ValueError, match="two differences"):
        statistics.corrected_dz([0.5])


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=30))
def test_the_iqm_is_the_mean_without_a_quarter_at_either_end(scores: list[float]) -> None:
    assert pairs.iqm(scores) == pytest.approx(float(stats.trim_mean(scores, 0.25)), abs=1e-12)


def test_the_standard_error_is_scipys() -> None:
    values = np.random.default_rng(0).random(50)
    assert statistics.standard_error(values) == pytest.approx(float(stats.sem(values)), rel=1e-12)


# -- tasks -----------------------------------------------------------------------------------------


def test_the_probability_of_improvement_is_the_fraction_of_pairs_won() -> None:
    better, worse = np.array([[0.6], [0.5]]), np.array([[0.5], [0.4]])
    assert pairs.probability_of_improvement(better, worse) == pytest.approx((2 + 1 + 0.5) / 4)
    assert pairs.probability_of_improvement(worse, worse) == 0.5


def test_the_interval_of_an_iqm_difference_is_narrower_for_paired_arms() -> None:
    rng = np.random.default_rng(0)
    shared = rng.normal(0.5, 0.1, (10, 4))
    candidate, baseline = shared + 0.02 + rng.normal(0, 0.005, (10, 4)), shared
    low, high = pairs.iqm_difference_interval(candidate, baseline)
    assert 0 < low < 0.02 < high
    wide = pairs.run_interval(candidate)
    assert high - low < 0.5 * (wide[1] - wide[0])


@pytest.mark.parametrize(("runs", "tasks_asked"), [(3, 4), (12, 8)])
def test_the_iqms_interval_covers_the_truth_where_a_runs_luck_is_in_all_of_its_tasks(
    runs: int, tasks_asked: int
) -> None:
    rng = np.random.default_rng(0)
    covered, trials = 0, 150
    for _ in range(trials):
        scores = (
            np.linspace(0.1, 0.9, tasks_asked)
            + rng.normal(0, 0.05, (runs, 1))
            + rng.normal(0, 0.02, (runs, tasks_asked))
        )
        low, high = pairs.run_interval(scores)
        covered += low <= 0.5 <= high
    assert covered / trials >= 0.88


def table_of(
    rng: np.random.Generator, seeds: int, problems: int, luck: float, spread: float, noise: float
) -> np.ndarray:
    return (
        luck * rng.normal(size=(seeds, 1))
        + spread * rng.normal(size=problems)
        + noise * rng.normal(size=(seeds, problems))
    )


@pytest.mark.parametrize(("luck", "spread"), [(0.03, 0.25), (0.0, 0.25), (0.05, 0.0), (0.0, 0.0)])
def test_the_two_way_interval_covers_new_problems_and_is_not_much_too_wide(
    luck: float, spread: float
) -> None:
    rng = np.random.default_rng(0)
    intervals = np.array(
        [TwoWay.of(table_of(rng, 8, 40, luck, spread, 0.5)).interval() for _ in range(1000)]
    )  # type: ignore[union-attr]
    covered = np.mean((intervals[:, 0] <= 0) & (intervals[:, 1] >= 0))
    ideal = 2 * 1.96 * np.sqrt(luck**2 / 8 + spread**2 / 40 + 0.25 / 320)
    assert 0.93 <= covered <= 0.995
    assert np.median(np.diff(intervals)) / ideal < 1.35


def test_the_two_way_parts_are_the_evaluations_noise_and_the_runs_luck() -> None:
    rng = np.random.default_rng(0)
    found = [TwoWay.of(table_of(rng, 12, 60, 0.05, 0.2, 0.5)) for _ in range(300)]
    assert np.mean([table.noise_variance for table in found if table]) == pytest.approx(
        0.25 / 60, rel=0.08
    )
    assert np.mean([table.luck_variance for table in found if table]) == pytest.approx(
        0.0025, rel=0.15
    )


# -- joint sign flips ------------------------------------------------------------------------------


def test_max_t_by_brute_force_on_contrasts_with_seeds_of_their_own() -> None:
    family = [
        {1: 0.3, 2: 0.1, 3: 0.4, 4: 0.2, 5: 0.3},
        {2: -0.2, 3: 0.1, 4: 0.3, 5: -0.1, 6: 0.2},
        {1: 0.1, 6: 0.1},
    ]
    seeds = sorted({seed for contrast in family for seed in contrast})
    norms = [np.sqrt(sum(d * d for d in contrast.values())) for contrast in family]

    def statistics_of(signs: dict[int, int]) -> list[float]:
        return [
            abs(sum(signs[s] * d for s, d in contrast.items())) / norm
            for contrast, norm in zip(family, norms, strict=True)
        ]

    observed = statistics_of(dict.fromkeys(seeds, 1))
    order = sorted(range(3), key=lambda index: -observed[index])
    flips = [
        statistics_of(dict(zip(seeds, signs, strict=True)))
        for signs in product((1, -1), repeat=len(seeds))
    ]
    expected, largest = [0.0] * 3, 0.0
    for step, index in enumerate(order):
        p = np.mean(
            [
                max(values[other] for other in order[step:]) >= observed[index] - 1e-9
                for values in flips
            ]
        )
        largest = max(largest, float(p))
        expected[index] = largest
    assert max_t(family) == pytest.approx(expected)


def test_beyond_twenty_seeds_joint_flips_are_sampled_and_never_zero() -> None:
    rng = np.random.default_rng(0)
    family = [dict(enumerate(rng.normal(0.3, 1, 24))), dict(enumerate([1.0] * 24))]
    adjusted = max_t(family)
    assert adjusted[1] == pytest.approx(1e-5, rel=1e-3)
    assert adjusted[0] == pytest.approx(sign_flip_p(list(family[0].values())), abs=0.01)


def test_a_contrast_without_any_difference_has_a_p_of_one() -> None:
    assert max_t([{1: 0.0, 2: 0.0}, {1: 1.0, 2: 1.0}]) == [1.0, 0.5]
    assert max_t([]) == []


# -- power -----------------------------------------------------------------------------------------


def found(differences: np.ndarray, comparisons: int = 1) -> float:
    """How often the rule of `compare` finds an improvement in rows of differences."""
    p = np.array([comparisons * sign_flip_p(row) for row in differences])
    return float(
        np.mean([low > 0 for low, _ in map(statistics.t_interval, differences)] & (p < 0.05))
    )


@pytest.mark.parametrize(("seeds", "effect"), [(6, 1.8), (8, 1.2), (13, 0.85)])
def test_power_is_as_predicted(seeds: int, effect: float) -> None:
    simulated = found(np.random.default_rng(5).normal(effect, 1, (600, seeds)))
    assert power.power_of(seeds, effect) == pytest.approx(simulated, abs=0.05)


def test_the_minimal_detectable_effect_is_found_four_times_in_five() -> None:
    for seeds in (6, 8, 16):
        effect = power.minimal_detectable_effect(seeds, sd=0.02)
        assert effect is not None
        assert power.power_of(seeds, effect / 0.02) == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize(("sd", "textbook"), [(0.02, 19), (0.01, 5)])
def test_seeds_needed_is_the_textbook_and_a_few(sd: float, textbook: int) -> None:
    assert np.ceil(power.normal_seeds(0.013, sd)) == textbook
    assert textbook + 1 <= power.seeds_needed(0.013, sd) <= textbook + 3


@given(st.floats(0.3, 3.0), st.sampled_from([1, 4]))
@settings(deadline=None, max_examples=12)
def test_seeds_needed_is_the_first_number_with_that_power(effect: float, comparisons: int) -> None:
    seeds = power.seeds_needed(effect, 1.0, power.Rule(comparisons))
    assert power.power_of(seeds, effect, power.Rule(comparisons)) >= 0.8
    assert power.power_of(seeds - 1, effect, power.Rule(comparisons)) < 0.8


@pytest.mark.parametrize(("seeds", "effect"), [(7, 1.7), (9, 1.4), (13, 1.0)])
def test_power_under_joint_flips_is_as_predicted(seeds: int, effect: float) -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(500):
        runs = rng.normal(0, np.sqrt(0.5), (5, seeds))
        differences = runs[1:] - runs[0] + effect * np.eye(4)[:, :1]
        hits += (
            max_t([dict(enumerate(row)) for row in differences])[0] < 0.05
            and statistics.t_interval(differences[0])[0] > 0
        )
    assert power.power_of(seeds, effect, power.Rule(4)) == pytest.approx(hits / 500, abs=0.06)


@pytest.mark.parametrize(("seeds", "family"), [(11, 4), (30, 12)])
def test_at_the_joint_level_any_of_equal_arms_is_below_it_at_alpha(seeds: int, family: int) -> None:
    campaigns, critical = 8000, stats.t.isf(power._joint_level(seeds, 0.05, family) / 2, seeds - 1)
    runs = np.random.default_rng(7).standard_normal((campaigns, seeds, family + 1))
    differences = runs[..., 1:] - runs[..., :1]
    t = differences.mean(axis=1) * np.sqrt(seeds) / differences.std(axis=1, ddof=1)
    wrong = (np.abs(t) > critical).any(axis=1).mean()
    assert wrong == pytest.approx(0.05, abs=3.5 * np.sqrt(0.05 * 0.95 / campaigns))


def test_too_few_seeds_have_no_power_whatever_the_effect() -> None:
    assert power.power_of(5, 100.0) == 0.0 and power.minimal_detectable_effect(5, 0.01) is None
    assert power.minimal_detectable_effect(6, 0.01) is not None
    assert power.minimal_detectable_effect(5, 0.01, power.Rule(4)) is None
    assert power.seeds_needed(1.0, 0.0) == 6


def test_the_interval_of_a_pilots_sd_covers_it() -> None:
    rng = np.random.default_rng(0)
    low, high = zip(
        *(power.sd_interval(statistics.sample_sd(rng.normal(0, 1, 4)), 3) for _ in range(2000)),
        strict=True,
    )
    assert np.mean((np.array(low) <= 1) & (np.array(high) >= 1)) == pytest.approx(0.95, abs=0.02)

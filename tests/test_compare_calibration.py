"""How often the rule of `compare` is wrong where nothing differs, and how often it finds what does.

The campaigns are simulated: each seed has its own prompts, shared by all arms, and each run its own
luck (a standard deviation of 0.3 logit between runs), which makes completions of one run agree with
each other.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import scenarios
from scipy import stats

from retrain.analysis import power, verdict
from retrain.analysis.verdict import PairedDifferences, TestSettings, Verdict, conclude

SEEDS = 8
PROMPTS, COMPLETIONS = 8, 16
PROMPT_SD = 1.1
"""Standard deviation of the prompts' difficulty, in logits."""
RULES = TestSettings()

Counts = npt.NDArray[np.int64]
Random = np.random.Generator


def right_answers(
    rng: Random,
    arms: int,
    seeds: int,
    *,
    run_sd: float = 0.3,
    effect: float = 0.0,
    shared_prompts: bool = True,
) -> Counts:
    """[arms, seeds] right answers of PROMPTS * COMPLETIONS; every arm but the first is better by
    `effect` logits.
    """
    prompts = rng.normal(0, PROMPT_SD, (1 if shared_prompts else arms, seeds, PROMPTS))
    luck = rng.normal(0, run_sd, (arms, seeds, 1))
    shift = np.where(np.arange(arms) > 0, effect, 0.0)[:, np.newaxis, np.newaxis]
    right: Counts = rng.binomial(COMPLETIONS, 1 / (1 + np.exp(-(prompts + luck + shift)))).sum(
        axis=2
    )
    return right


def verdicts(campaign: Counts) -> list[Verdict]:
    """The verdict on each arm against the first."""
    rates = campaign / (PROMPTS * COMPLETIONS)
    return [
        found.verdict
        for found in conclude(
            [PairedDifferences(dict(enumerate(arm - rates[0]))) for arm in rates[1:]], RULES
        )
    ]


def at_most(count: int, trials: int, rate: float) -> bool:
    """Whether `count` of `trials` is what a rate no higher than `rate` gives, Monte Carlo error
    (99.9%) aside.
    """
    return count <= stats.binom.ppf(0.999, trials, rate)


def test_where_nothing_differs_a_verdict_is_given_at_most_as_often_as_alpha_says() -> None:
    rng = np.random.default_rng(0)
    trials = 800
    wrong = sum(
        verdicts(right_answers(rng, 2, SEEDS)) != [Verdict.INCONCLUSIVE] for _ in range(trials)
    )
    assert at_most(wrong, trials, RULES.alpha)
    assert wrong > 0  # a rule that never speaks would pass as well


@pytest.mark.slow
def test_over_a_family_the_chance_of_any_false_verdict_stays_below_alpha() -> None:
    rng = np.random.default_rng(1)
    trials = 400
    wrong = sum(
        set(verdicts(right_answers(rng, 5, SEEDS))) != {Verdict.INCONCLUSIVE} for _ in range(trials)
    )
    assert at_most(wrong, trials, RULES.alpha)


def test_equivalence_is_claimed_wrongly_at_most_as_often_as_alpha_says() -> None:
    """True differences at the margin, which may be improvements as well; then true differences of
    0.
    """
    rng = np.random.default_rng(2)
    test = verdict.TestSettings(margin=1.0)
    at_margin = [
        conclude([PairedDifferences(dict(enumerate(rng.normal(1.0, 0.4, 6))))], test)[0]
        for _ in range(2000)
    ]
    wrong = sum(found.within_margin or found.verdict is Verdict.EQUIVALENT for found in at_margin)
    assert at_most(wrong, 2000, RULES.alpha) and not at_most(wrong, 2000, 0.5 * RULES.alpha)
    at_zero = [
        conclude([PairedDifferences(dict(enumerate(rng.normal(0.0, 0.4, SEEDS))))], test)[0].verdict
        for _ in range(400)
    ]
    assert at_zero.count(Verdict.EQUIVALENT) > 0.9 * len(at_zero)


def test_real_effects_are_found_as_often_as_the_power_predicts() -> None:
    """The prediction takes the mean and spread of the differences, as a pilot would give them."""
    rng = np.random.default_rng(3)
    campaigns = [right_answers(rng, 2, SEEDS, effect=0.5) for _ in range(400)]
    differences = np.array([(arms[1] - arms[0]) / (PROMPTS * COMPLETIONS) for arms in campaigns])
    found = np.mean([verdicts(arms) == [Verdict.IMPROVEMENT] for arms in campaigns])
    predicted = power.power_of(SEEDS, differences.mean() / differences.std(ddof=1))
    assert 0.3 < predicted < 0.98
    assert abs(found - predicted) < 0.06


def test_the_interval_covers_the_true_difference() -> None:
    rng = np.random.default_rng(4)
    trials, covered = 600, 0
    for _ in range(trials):
        one, two = right_answers(rng, 2, SEEDS)
        interval = conclude([PairedDifferences(dict(enumerate(two - one)))], RULES)[0].interval
        covered += interval is not None and interval[0] <= 0 <= interval[1]
    assert at_most(trials - covered, trials, RULES.alpha) and at_most(covered, trials, 0.97)


# -- outside the textbook ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scenario", "seeds"),
    [
        (scenarios.asymmetric, 8),
        (scenarios.collapsing, 8),
        (scenarios.incomplete, 8),
        (scenarios.unjudged, 8),
        (scenarios.discrete, 6),
        (scenarios.unequal, 6),
        (scenarios.forty_problems, 10),
    ],
)
def test_what_goes_wrong_outside_the_textbook_makes_no_more_verdicts_than_alpha_says(
    scenario: Callable[[np.random.Generator, int, int], scenarios.Campaign], seeds: int
) -> None:
    rng = np.random.default_rng(seeds)
    trials = 100
    found = [conclude(scenario(rng, 2, seeds).family(), RULES)[0] for _ in range(trials)]
    wrong = sum(item.verdict is Verdict.IMPROVEMENT for item in found)
    assert at_most(wrong, trials, RULES.alpha)


def test_over_a_family_with_skewed_luck_joint_flips_keep_the_rate() -> None:
    rng = np.random.default_rng(0)
    trials, wrong = 300, 0
    for _ in range(trials):
        runs = -rng.exponential(1, (5, 8))
        family = [PairedDifferences(dict(enumerate(arm - runs[0]))) for arm in runs[1:]]
        wrong += any(found.verdict is not Verdict.INCONCLUSIVE for found in conclude(family, RULES))
    assert at_most(wrong, trials, RULES.alpha)

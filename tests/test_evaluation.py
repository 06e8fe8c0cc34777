"""pass@k is unbiased, and the interval of pass@1 is clustered by problem."""

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import lines, small
from scipy import stats

from retrain.config import TrainConfig, config_from_mapping
from retrain.config.judging import judge_words
from retrain.config.plan import Plan
from retrain.errors import ConfigurationError
from retrain.records.entries import EvaluationRecord
from retrain.records.evaluation import Evaluation, clustered_interval, pass_at_k
from tests.runs import small_run


@given(
    st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n)))
)
def test_pass_at_k_is_the_fraction_of_draws_with_a_right_one(case: tuple[int, int, int]) -> None:
    n, c, k = case
    draws = list(combinations([1] * c + [0] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(
        sum(any(draw) for draw in draws) / len(draws), abs=1e-12
    )


@pytest.mark.parametrize(("n", "c", "k"), [(3, 4, 1), (3, -1, 1), (3, 1, 0), (3, 1, 4)])
def test_pass_at_k_refuses_impossible_counts(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@k"):
        pass_at_k(n, c, k)


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=40))
def test_the_interval_holds_the_mean_and_stays_inside_zero_and_one(means: list[float]) -> None:
    low, high = clustered_interval(means, 4 * len(means))
    assert 0 <= low <= np.mean(means) + 1e-12
    assert np.mean(means) - 1e-12 <= high <= 1
    assert high > low


def test_an_interval_covers_about_nine_tenths_where_few_problems_carry_the_mean() -> None:
    """docs/comparing.md gives the figure: three sets of 1,500 draws had 88.7% to 91.4%."""
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(1500):
        means = generator.binomial(16, generator.beta(0.05, 0.95, 30)) / 16
        low, high = clustered_interval(means.tolist(), 16 * 30)
        covered += low <= 0.05 <= high
    assert 0.87 < covered / 1500 < 0.93


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """Problems differ in difficulty; 4 samples each. A normal interval over samples would cover far
    less.
    """
    rng = np.random.default_rng(0)
    difficulty = rng.beta(0.4, 0.6, size=100_000)
    covered = 0
    for _ in range(400):
        problems = rng.choice(difficulty, size=60)
        means = rng.binomial(4, problems) / 4
        low, high = clustered_interval(list(means), 240)
        covered += low <= difficulty.mean() <= high
    assert 0.92 <= covered / 400 <= 0.98


@pytest.mark.parametrize(
    ("problems", "a", "b"), [(10, 0.2, 4.0), (30, 9.0, 0.5)], ids=["10 hard", "30 easy"]
)
def test_few_problems_are_covered_as_often_as_it_says(problems: int, a: float, b: float) -> None:
    """A Wilson interval on the effective sample size covers 87% and 93% of these."""
    rng, covered = np.random.default_rng(1), 0
    for _ in range(1000):
        low, high = clustered_interval(
            list(rng.binomial(16, rng.beta(a, b, problems)) / 16), 16 * problems
        )
        covered += low <= a / (a + b) <= high
    assert covered / 1000 >= 0.93


def test_with_one_answer_to_each_of_few_problems_the_interval_is_clopper_pearsons() -> None:
    found = stats.binomtest(28, 30).proportion_ci(0.95, method="exact")
    assert clustered_interval([1.0] * 28 + [0.0] * 2, 30) == pytest.approx((found.low, found.high))


def test_problems_that_could_not_be_judged_are_left_out_of_the_mean() -> None:
    judged = EvaluationRecord(0, "a", "t", samples=4, correct=2, could_not_judge=0, reward_mean=0.5)
    unknown = EvaluationRecord(
        0, "b", "t", samples=0, correct=0, could_not_judge=4, reward_mean=None
    )
    evaluation = Evaluation(step=0, problems=[judged, unknown], ks=[1, 4, 8])
    assert evaluation.pass_at == {1: 0.5, 4: 1.0}
    assert evaluation.summary()["could_not_judge"] == 4


@pytest.mark.slow
def test_held_out_answers_of_a_random_reward_run_are_judged_as_any_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same untrained weights and noise, so the same answers; chance would find all of them
    right.
    """
    evaluation = {"at_start": True, "max_examples": 16}
    rewards = {"match": {"type": "match"}, "random": {"type": "random", "random_p": 1.0}}
    training = {"max_steps": 1, "max_tokens": 96}
    for name, reward in rewards.items():
        own = {"reward": reward, "evaluation": evaluation, "training": training}
        small_run(small(tmp_path / name, **own))
    judged, by_chance = (lines(tmp_path / name / "evaluation.jsonl") for name in rewards)
    assert by_chance == judged and 0 < sum(line["correct"] for line in judged) < 16
    assert lines(tmp_path / "random" / "metrics.jsonl")[0]["correct_rate"] == 1.0
    assert capsys.readouterr().out.count("The reward of held-out answers is match") == 1


@pytest.mark.parametrize(
    ("sections", "judging", "weights"),
    [
        ({"data": {"source": "lab"}}, ["match"], [1.0]),
        ({"data": {"source": "gsm8k"}}, ["math"], [1.0]),
        ({"data": {"source": "lab"}, "evaluation": {"source": "math"}}, ["math"], [1.0]),
        ({"data": {"source": "problems.jsonl"}}, ["match"], [1.0]),
        ({"reward": {"type": ["math", "random"], "weights": [0.9, 0.1]}}, ["math"], [0.9]),
    ],
)
def test_what_chance_decides_is_left_out_of_the_judgment(
    sections: dict[str, Any], judging: list[str], weights: list[float]
) -> None:
    config = TrainConfig.model_validate({"reward": {"type": "random"}} | sections)
    reward = Plan.of(config).judging.reward
    assert (reward.types, reward.type_weights) == (judging, weights)


def test_a_reward_without_chance_in_it_judges_held_out_answers_itself() -> None:
    config = TrainConfig.model_validate({"data": {"source": "gsm8k"}, "reward": {"type": "match"}})
    assert Plan.of(config).judging is config


def test_a_reward_for_held_out_answers_wins_over_the_runs_own() -> None:
    sections: dict[str, Any] = {
        "reward": {"type": "random", "normalize": "hendrycks"},
        "evaluation": {"reward": "match"},
    }
    judging = Plan.of(
        TrainConfig.model_validate(sections | {"data": {"source": "gsm8k"}})
    ).judging.reward
    assert (judging.types, judging.normalize) == (["match"], "hendrycks")
    with pytest.raises(ConfigurationError, match="by chance"):
        config_from_mapping({"evaluation": {"reward": "random"}})
    with pytest.raises(ConfigurationError, match="needs custom_module"):
        config_from_mapping({"evaluation": {"reward": "custom"}})


def test_judges_have_the_same_words_exactly_where_they_decide_alike() -> None:
    def words(**reward: object) -> str:
        config = TrainConfig.model_validate({"reward": reward})
        return judge_words(Plan.of(config).rewards, config.reward)

    assert words() == words(workers=3, custom_module="unused", random_p=0.1) == "match"
    assert words(type=["match", "math"]) == words(type=["math", "match"], weights=[1.0, 1.0])
    different = [
        words(),
        words(normalize="hendrycks"),
        words(type="math"),
        words(correct_threshold=0.9),
        words(type="custom", custom_module="mine"),
        words(type="custom", custom_module="mine", params={"limit": 3}),
        words(type=["match", "math"], weights=[0.5, 0.5]),
    ]
    assert len(set(different)) == len(different)

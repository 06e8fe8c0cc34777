"""Verdicts: right, wrong, could not judge; sums of rewards; and the guard that stops a run without
verdicts.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.config import TrainConfig
from retrain.errors import RunFailed
from retrain.rewards import (
    FailureGuard,
    Scorer,
    ScoreRequest,
    box_reader,
    boxed_reference,
    build_scorer,
)
from retrain.run.gate import score_references
from retrain.types import Example, Outcome, Prompt, Score


def config_of(seed: int = 7, **reward: Any) -> TrainConfig:
    table = {"workers": 1, "deadline_s": 60.0} | reward
    return TrainConfig.model_validate({"training": {"seed": seed}, "reward": table})


def scorer_of(seed: int = 7, **reward: Any) -> Scorer:
    return build_scorer(config_of(seed, **reward))


def request(
    response: str, reference: str | None = "4", step: int = 0, slot: int = 0, sample: int = 0
) -> ScoreRequest:
    return ScoreRequest(
        response, reference, "prompt", Example("What is 2+2?", "4"), step, slot, sample
    )


def score(scorer: Scorer, response: str, reference: str | None = "4") -> Score:
    return scorer.submit(request(response, reference)).result(60)


RIGHT, WRONG = Score(Outcome.RIGHT, 1.0), Score(Outcome.WRONG, 0.0)


@pytest.fixture(scope="module")
def math_scorer() -> Iterator[Scorer]:
    with scorer_of(type="math") as scorer:
        yield scorer


@pytest.mark.parametrize(
    ("response", "reference", "expected"),
    [
        (r"\boxed{4}", "4", RIGHT),
        (r"\boxed{\frac{8}{2}}", "4", RIGHT),
        (r"\boxed{\dfrac{9}{2}}", "4", WRONG),
        ("it is 4", "4", WRONG),
        (r"\boxed{4", "4", WRONG),
        (r"\boxed{\sqrt{}", "4", WRONG),
        (r"\boxed{\foo}", "4", WRONG),
        (r"\boxed{9^{9^{9^9}}}", "4", WRONG),
        (r"\boxed{}", "", WRONG),
        (r"\boxed{None}", None, WRONG),
        (r"<think>\boxed{4}</think> no", "4", WRONG),
    ],
)
def test_math_is_right_or_wrong(
    math_scorer: Scorer, response: str, reference: str | None, expected: Score
) -> None:
    assert score(math_scorer, response, reference) == expected


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([1e308, 1.7e308], "the reward is inf, and training takes at most 1e+15"),
        ([-1e30, 0.0], "the reward is -1e+30, and"),
    ],
)
def test_a_sum_that_training_cannot_hold_is_no_reward(weights: list[float], words: str) -> None:
    rewards = {"type": ["match", "random"], "weights": weights, "random_p": 1.0}
    with scorer_of(**rewards) as scorer:
        verdict = score(scorer, r"\boxed{4}")
    assert (verdict.outcome, verdict.reward) == (Outcome.COULD_NOT_JUDGE, None)
    assert words in verdict.reason


def test_match_compares_strings_and_hendrycks_forms() -> None:
    with (
        scorer_of(type="match") as exact,
        scorer_of(type="match", normalize="hendrycks") as lenient,
    ):
        assert score(exact, r"\boxed{0.5}", "0.5") == RIGHT
        assert score(exact, r"\boxed{0.5}", r"\frac{1}{2}") == WRONG
        assert score(lenient, r"\boxed{0.5}", r"\frac{1}{2}") == RIGHT


@pytest.mark.parametrize("kind", ["match", "math"])
def test_an_empty_reference_never_scores(kind: str) -> None:
    with scorer_of(type=kind) as scorer:
        for reference in ("", "  ", None):
            for response in ("", r"\boxed{}", r"\boxed{ }", r"\boxed{None}"):
                assert score(scorer, response, reference) == WRONG


def test_a_box_in_the_scratchpad_counts_when_the_configuration_says_so() -> None:
    with scorer_of(type="match", after_think=False) as scorer:
        assert score(scorer, r"<think>\boxed{4}</think> no") == RIGHT


@pytest.mark.parametrize("kind", ["match", "math", "majority"])
@pytest.mark.parametrize(
    ("prompt", "response", "end", "right"),
    [
        ("4?<think>\n", r"so \boxed{4}", "", False),
        ("4?<think>\n", r"so \boxed{4}</think> yes", "", False),
        ("4?<think>\n", r"so</think> \boxed{4}", "", True),
        ("4?<think>\n\n</think>\n\n", r"\boxed{4}", "", True),
        ("4?[THINK]", r"\boxed{4}</think>\boxed{4}", "", False),
        ("4?", r"\boxed{4}", "<end>", False),
        ("4?", r"\boxed{3}<end>\boxed{4}", "<end>", True),
        ("4?<think>", r"<end>\boxed{4}", "<end>", False),
        ("4?<think>\n\n</think>\n\n", r"\boxed{4}", "</think>", True),
        ("4?<think>\n\n</think>\n\n", r"<think>\boxed{4}", "</think>", False),
    ],
)
def test_a_thought_that_the_prompt_opens_must_end_before_an_answer(
    kind: str, prompt: str, response: str, end: str, right: bool
) -> None:
    with scorer_of(type=kind, think_end_token=end) as scorer:
        asked = replace(request(response), prompt=prompt)
        assert scorer.submit(asked).result(60) == (RIGHT if right else WRONG)
    read = box_reader(config_of(type=kind, think_end_token=end).reward)
    assert read is not None
    assert (read(response, prompt) is not None) == right


def test_the_reference_answers_score_behind_a_prompt_that_opens_a_thought() -> None:
    prompt = Prompt(Example("4?", "4"), "4?<think>", np.zeros(1, np.int32))
    for end in ("", "<end>"):
        with scorer_of(type="match", think_end_token=end) as scorer:
            assert score_references(scorer, end, [prompt]) == "1/1"


def test_the_gold_answer_scores_where_answers_are_compared(math_scorer: Scorer) -> None:
    assert math_scorer.compares_answers
    assert math_scorer.reference_reward == 1.0
    assert score(math_scorer, boxed_reference(r"\frac{1}{2}"), r"\frac{1}{2}") == RIGHT
    with (
        scorer_of(type=["match", "math"], weights=[0.5, 2.0]) as both,
        scorer_of(type=["match", "random"]) as mixed,
    ):
        assert both.compares_answers
        assert score(both, boxed_reference("7"), "7").reward == both.reference_reward == 2.5
        assert not mixed.compares_answers


def test_rewards_add_up_with_their_weights_and_the_sum_decides() -> None:
    table = {"type": ["match", "math"], "weights": [0.2, 0.3]}
    with scorer_of(**table) as half, scorer_of(**table, correct_threshold=0.49) as lower:
        assert score(half, r"\boxed{4}") == Score(Outcome.WRONG, 0.5)  # 0.5 itself is not correct
        assert score(lower, r"\boxed{4}") == Score(Outcome.RIGHT, 0.5)
        assert score(half, r"\boxed{\frac{8}{2}}") == Score(Outcome.WRONG, 0.3)
        assert score(half, r"\boxed{5}") == WRONG


def test_one_part_that_cannot_judge_makes_the_whole_so() -> None:
    with scorer_of(type=["match", "math"], deadline_s=0.001) as scorer:
        verdict = score(scorer, r"\boxed{\sin(\cos(\sin(x^2+1)))}", r"\tan(\cos(\sin(x^2+1)))")
    assert (verdict.outcome, verdict.reward) == (Outcome.COULD_NOT_JUDGE, None)
    assert "deadline_s = 0.001" in verdict.reason


def test_random_rewards_depend_on_the_coordinates_alone() -> None:
    table = {"type": "random", "random_p": 0.3}
    with scorer_of(**table) as scorer, scorer_of(seed=8, **table) as other:

        def draw(who: Scorer, order: range) -> dict[int, float | None]:
            places = {i: {"step": i // 100, "slot": i // 10 % 10, "sample": i % 10} for i in order}
            asked = {i: who.submit(request("", None, **place)) for i, place in places.items()}
            return {i: one.result(1).reward for i, one in asked.items()}

        forward, backward = draw(scorer, range(2000)), draw(scorer, range(1999, -1, -1))
        assert forward == backward
        assert forward != draw(other, range(2000))
        drawn = [forward[i] for i in range(2000)]
        # No coordinate is left out.
        assert len({tuple(drawn[step : step + 100]) for step in range(0, 2000, 100)}) == 20
        assert len({tuple(drawn[slot : slot + 10]) for slot in range(0, 100, 10)}) > 5
        assert len({forward[sample] for sample in range(10)}) == 2
        assert 0.25 < sum(value or 0.0 for value in forward.values()) / 2000 < 0.35


def test_a_closed_scorer_still_gives_verdicts_that_say_so() -> None:
    scorer = scorer_of(type="math")
    scorer.close()
    scorer.close()
    assert scorer.submit(request(r"\boxed{\sqrt{16}}")).result(5).outcome is Outcome.COULD_NOT_JUDGE


def failed(reason: str) -> Score:
    return Score(Outcome.COULD_NOT_JUDGE, None, reason)


def test_the_guard_stops_when_nothing_can_be_judged() -> None:
    told = r"8 of 8 .* of the last step .* \(8 times: it is down\), .*\. Fix the reward\.$"
    with pytest.raises(RunFailed, match=told):
        FailureGuard(0.05).observe([failed("it is down.")] * 8)


@pytest.mark.parametrize(
    ("rate", "steps", "scores"),
    [
        (0.05, 1, [failed("slow")] + [RIGHT] * 7),  # one bad answer of the first step
        (1.0, 30, [failed("down")] * 8),  # a rate of one switches it off
        (0.0, 1, []),  # an empty step is no failure
    ],
)
def test_the_guard_does_not_stop(rate: float, steps: int, scores: list[Score]) -> None:
    guard = FailureGuard(rate)
    for _ in range(steps):
        guard.observe(scores)
    told = {1.0: "160 of the last 160 completions got no verdict (160 times: down)."}
    told[0.05] = "1 of the last 8 completions got no verdict (1 times: slow)."
    assert guard.check_end() == told.get(rate, "")


def test_the_guard_stops_above_a_whole_windows_rate_and_names_the_usual_reason() -> None:
    guard = FailureGuard(0.05, window=20)
    for _ in range(30):
        guard.observe([failed("slow")] + [WRONG] * 19)  # exactly 5%
    told = r" times: slow\), more than \[reward\] max_failure_rate = 0.05 "
    with pytest.raises(RunFailed, match=told):
        guard.observe([failed("died"), failed("slow")] + [WRONG] * 18)


def test_the_guard_forgets_steps_that_left_the_window() -> None:
    guard = FailureGuard(0.1, window=4)
    for _ in range(50):
        guard.observe([failed("slow")] * 3 + [WRONG] * 7)
        for _ in range(3):
            guard.observe([WRONG] * 10)


def test_a_guard_that_has_stopped_a_run_does_not_hold_it_against_the_mended_reward() -> None:
    stopped, resumed = FailureGuard(0.02), FailureGuard(0.02)
    with pytest.raises(RunFailed):
        stopped.observe([failed("down")] * 16)
    resumed.load_state_dict(stopped.state_dict())
    for _ in range(30):
        resumed.observe([RIGHT] * 16)
    with pytest.raises(RunFailed):
        for _ in range(30):
            resumed.observe([failed("slow")] + [RIGHT] * 7)


@given(
    st.lists(
        st.lists(st.sampled_from([RIGHT, WRONG, failed("a"), failed("b")]), max_size=6), max_size=30
    )
)
def test_the_guard_goes_on_from_its_saved_state(steps: list[list[Score]]) -> None:
    def verdicts(guard: FailureGuard, observed: list[list[Score]]) -> list[str]:
        said = []
        for scores in observed:
            try:
                guard.observe(scores)
                said.append("")
            except RunFailed as error:
                said.append(str(error))
        return said

    whole, first, second = (FailureGuard(0.2, window=5) for _ in range(3))
    middle = len(steps) // 2
    expected = verdicts(whole, steps)
    before = verdicts(first, steps[:middle])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + verdicts(second, steps[middle:]) == expected

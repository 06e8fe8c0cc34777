"""Rewards of whole groups: what waits for whom, the majority's vote, normalization within a group,
and the user's functions of all completions of a prompt.
"""

from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import lines, small, small_run

from retrain.config import TrainConfig, config_from_mapping
from retrain.config.plan import Plan
from retrain.errors import ConfigurationError
from retrain.rewards import Scorer, ScoreRequest, build_scorer
from retrain.rewards.groups import majority, normalized
from retrain.types import Example, FinishReason, Outcome, Score
from tests.marks import first_of

MODULE = """
import asyncio, os, time
def order(responses, reference): return [float(text) for text in responses]
def place(responses, reference): return [float(place) for place in range(len(responses))]

def everything(responses, reference, prompt, example, params, token_counts, finish_reasons):
    assert (reference, prompt, example.reference, params) == ("4", "the prompt", "4", {"bonus": 2})
    assert finish_reasons == ["stop", "length", "stop"]
    return tuple(count + params["bonus"] for count in token_counts)
async def some(responses, reference):
    await asyncio.sleep(0)
    return [1.0, None, "high"]
def few(responses, reference): return [1.0]
def one_number(responses, reference): return 1.0
def angry(responses, reference): raise KeyError("no such key")

def by_first(responses, reference):
    if responses[0] == "hang":
        time.sleep(600)
    return [1.0 for _ in responses]
def short(response, reference, token_count, finish_reason): return token_count + (0.5 if finish_reason == "length" else 0.0)
def third(responses, reference, judge): return [1.0 for _ in responses]

def channel():  # this worker's only socket
    return next(fd for fd in range(3, 100) if os.path.exists(f"/proc/self/fd/{fd}") and os.readlink(f"/proc/self/fd/{fd}")[:6] == "socket")
def forged(responses, reference):
    text = responses[0]
    os.write(channel(), len(text).to_bytes(4, "little") + text.encode())
    return [1.0 for _ in responses]
def parity(responses, reference, token_counts):
    assert len(responses) == 4 or len(responses) == 2
    return [float(count % 2) for count in token_counts]
"""


GRPO = {"algorithm": {"advantage_mode": "grpo"}}


@pytest.fixture(autouse=True)
def user_module(here: Path) -> None:
    (here / "my_groups.py").write_text(MODULE)


def scorer_of(*types: str, **reward: Any) -> Scorer:
    table = {"type": list(types), "workers": 1, "deadline_s": 30.0} | reward
    sections = {"reward": table, "training": {"max_tokens": 100}, **GRPO}
    return build_scorer(TrainConfig.model_validate(sections))


def request(response: str, sample: int, tokens: int = 0) -> ScoreRequest:
    finish = FinishReason.LENGTH if sample == 1 else FinishReason.STOP
    example = Example("What is 2+2?", "4")
    return ScoreRequest(response, "4", "the prompt", example, 0, 0, sample, tokens, finish)


def scored(scorer: Scorer, *responses: str) -> list[Score]:
    """The scores of a group, whose completions have 10, 11 ... tokens."""
    group = scorer.group(len(responses))
    asked = [request(text, sample, 10 + sample) for sample, text in enumerate(responses)]
    return [future.result(60) for future in [*map(group.submit, asked)]]


def rewards(scorer: Scorer, *responses: str) -> list[float | None]:
    return [score.reward for score in scored(scorer, *responses)]


BOXES = (r"\boxed{4}", r"\boxed{5}", r"\boxed{4}")


# -- who waits for whom ----------------------------------------------------------------------------


def test_only_a_reward_that_looks_at_the_group_waits_for_it() -> None:
    with scorer_of("match") as alone, scorer_of("match", "majority") as together:
        assert alone.group(3).submit(request(BOXES[0], 0)).done()
        group = together.group(3)
        futures = [group.submit(request(text, sample)) for sample, text in enumerate(BOXES[:2])]
        assert not any(future.done() for future in futures)
        futures.append(group.submit(request(BOXES[2], 2)))
        assert [future.result(1).reward for future in futures] == [2.0, 0.0, 2.0]


def test_the_order_of_arrival_changes_nothing() -> None:
    with scorer_of("my_groups.place", "match", weights=[1.0, 10.0]) as scorer:
        for arrival in permutations(range(3)):
            group = scorer.group(3)
            futures = {sample: group.submit(request(BOXES[sample], sample)) for sample in arrival}
            assert [futures[sample].result(60).reward for sample in range(3)] == [10.0, 1.0, 12.0]


def test_a_closed_scorer_leaves_no_group_waiting() -> None:
    with scorer_of("my_groups.by_first", deadline_s=60.0) as scorer:
        group = scorer.group(2)
        futures = [group.submit(request("hang", sample)) for sample in range(2)]
    assert {future.result(5).outcome for future in futures} == {Outcome.COULD_NOT_JUDGE}


# -- the majority ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (["4", "5", "4"], [1, 0, 1]),
        (["5", "4", "4", "5"], [1, 0, 0, 1]),  # a tie: the answer of the lowest sample
        (["7"], [1]),
        ([None, None, "5"], [0, 0, 1]),  # without an answer there is no vote
        ([None, ""], [0, 0]),
        ([" 4", "0.5", r"\frac{1}{2}", r"\dfrac12"], [0, 1, 1, 1]),
        ([r"\sqrt", r"\sqrt", "1"], [1, 1, 0]),  # what cannot be normalized is compared as it is
    ],
)
def test_the_most_frequent_answer_is_right(
    answers: list[str | None], expected: list[float]
) -> None:
    assert majority(answers, "hendrycks") == expected


def test_a_majority_reads_no_reference() -> None:
    with scorer_of("majority") as scorer:
        assert rewards(scorer, r"\boxed{9}", r"\boxed{9}", r"\boxed{4}") == [1.0, 1.0, 0.0]
        assert not scorer.compares_answers


# -- sums and norms --------------------------------------------------------------------------------


def test_overlong_falls_to_minus_one_over_the_buffer() -> None:
    def penalty(count: int, longest: int, cache: int) -> float:
        """DAPO, equation 13."""
        if count <= longest - cache:
            return 0.0
        return (longest - cache - count) / cache if count <= longest else -1.0

    with scorer_of("overlong", overlong_buffer=40) as given, scorer_of("overlong") as fifth:
        for scorer, cache in ((given, 40), (fifth, 20)):
            for count in (0, 1, 59, 60, 61, 80, 81, 99, 100):
                reward = scorer.submit(request("", 0, count)).result(1).reward
                assert reward == pytest.approx(penalty(count, 100, cache), abs=1e-12)


def test_a_normalized_reward_has_mean_zero_and_an_equal_one_is_exactly_zero() -> None:
    values = [0.3, 0.1, 0.1, 0.9]
    by_hand = (np.array(values) - np.mean(values)) / np.std(values, ddof=1)
    assert normalized(values) == pytest.approx(by_hand.tolist(), rel=1e-5)
    assert normalized([0.1] * 3) == [0.0] * 3
    assert normalized([7.0]) == [0.0] and normalized([]) == []


def test_rewards_are_normalized_before_the_sum_and_the_plain_sum_says_who_is_right() -> None:
    types = ("match", "my_groups.order")
    table = {"weights": [1.0, 0.01], "combine": "normalise_then_sum", "after_think": False}
    texts = [r"1", r"2", r"6"]
    with scorer_of(*types, **table) as scorer:
        numbers = scored(scorer, *texts)
    expected = 0.01 * (np.array([1, 2, 6]) - 3) / np.std([1, 2, 6], ddof=1)
    assert [score.reward for score in numbers] == pytest.approx(expected.tolist(), rel=1e-5)
    assert {score.outcome for score in numbers} == {Outcome.WRONG}
    with scorer_of("match", "overlong", combine="normalise_then_sum") as scorer:
        scores = scored(scorer, *BOXES)
        assert not scorer.compares_answers
    right = 1 / 3 / np.std([1, 0, 1], ddof=1)  # all are short, so overlong is 0 for all
    assert [score.reward for score in scores] == pytest.approx([right, -2 * right, right], 1e-5)
    assert [score.outcome.value for score in scores] == ["right", "wrong", "right"]


def test_who_could_not_be_judged_is_in_no_mean() -> None:
    with scorer_of("match", "my_groups.some", combine="normalise_then_sum") as scorer:
        scores = scored(scorer, BOXES[1], BOXES[0], BOXES[0])
    assert [score.reward for score in scores] == [0.0, None, None]


# -- functions of the user -------------------------------------------------------------------------


def test_a_group_function_gets_what_its_signature_takes() -> None:
    with scorer_of("my_groups.everything", params={"bonus": 2}) as scorer:
        assert rewards(scorer, "a", "b", "c") == [12.0, 13.0, 14.0]


def test_a_single_reward_gets_the_tokens_and_how_they_ended() -> None:
    with scorer_of("my_groups.short") as scorer:
        assert rewards(scorer, "a", "b") == [10.0, 11.5]


def test_a_member_that_could_not_be_judged_leaves_the_others() -> None:
    with scorer_of("my_groups.some") as scorer:
        first, second, third = scored(scorer, "a", "b", "c")
    assert first == Score(Outcome.RIGHT, 1.0)
    assert "returned None" in second.reason and "type str" in third.reason
    assert (second.reward, third.reward) == (None, None)


@pytest.mark.faults("rewards and judges that misbehave")
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("few", "1 rewards, not a list of 2"),
        ("one_number", "type float, not a list of 2"),
        ("angry", "KeyError"),
    ],
)
def test_a_group_that_could_not_be_judged_says_why(function: str, reason: str) -> None:
    with scorer_of(f"my_groups.{function}") as scorer:
        scores = scored(scorer, "a", "b")
    assert [score.outcome for score in scores] == [Outcome.COULD_NOT_JUDGE] * 2
    assert all(reason in score.reason for score in scores)


@pytest.mark.faults("rewards and judges that misbehave")
def test_a_group_function_that_hangs_is_killed_and_the_next_group_is_judged() -> None:
    with scorer_of("my_groups.by_first", deadline_s=1.0) as scorer:
        assert all("deadline_s = 1" in score.reason for score in scored(scorer, "hang", "b"))
        assert rewards(scorer, "a", "b") == [1.0, 1.0]


@pytest.mark.faults("rewards and judges that misbehave")
@pytest.mark.parametrize(
    "reply",
    first_of(
        [
            '"members": [{"value": 1.0}]',
            '"members": [{"value": Infinity}, {"value": 0.0}]',
            '"value": 1.0',
            '"members": 3',
            '"members": [1.0, 1.0]',
        ],
        quick=2,
    ),
)
def test_a_reply_that_is_no_group_s_could_not_be_judged(reply: str) -> None:
    reply = f'{{"number": 0, {reply}}}'
    with scorer_of("my_groups.forged") as scorer:
        assert all("is not readable" in score.reason for score in scored(scorer, reply, "b"))


def test_a_group_function_with_another_input_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"f\(responses, reference, prompt=\.\.\."):
        scorer_of("my_groups.third")


# -- the configuration, the audit, and a run -------------------------------------------------------


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ({"type": ["match", "overlong"]}, "overlong"),
        ({"combine": "normalise_then_sum"}, "normalize_then_sum"),
    ],
)
def test_maxrl_is_refused_beside_negative_rewards(reward: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{said}.*maxrl"):
        config_from_mapping({"reward": reward})
    config_from_mapping({"reward": reward, **GRPO})


def test_an_overlong_buffer_fits_into_the_completion() -> None:
    reward = {"type": "overlong", "overlong_buffer": 9}
    with pytest.raises(ConfigurationError, match="overlong_buffer = 9 is above"):
        config_from_mapping({"reward": reward, "training": {"max_tokens": 8}, **GRPO})


def test_held_out_answers_are_judged_by_what_verifies() -> None:
    def judges(**reward: Any) -> list[tuple[str, float]]:
        sections = {"reward": reward, "data": {"source": "lab"}, **GRPO}
        return [*Plan.of(TrainConfig.model_validate(sections)).judges]

    assert judges(type="majority") == [("match", 1.0)]
    assert judges(type=["math", "overlong"], weights=[2, 1]) == [("math", 2.0)]
    assert judges(type="my_groups.order") == [("my_groups.order", 1.0)]
    with pytest.raises(ConfigurationError, match="without their reference"):
        config_from_mapping({"evaluation": {"reward": "majority"}})


def test_a_redraw_and_an_evaluation_are_groups_of_their_own(tmp_path: Path) -> None:
    config = small(
        tmp_path / "run",
        reward={"type": ["my_groups.parity", "overlong"], "weights": [1.0, 0.0], "workers": 1},
        algorithm={"advantage_mode": "grpo"},
        training={"max_steps": 1, "max_resamples": 2, "max_tokens": 6},
        evaluation={"at_end": True, "max_examples": 2, "samples": 2},
    )
    small_run(config, quiet=True)
    (step,) = lines(tmp_path / "run" / "metrics.jsonl")
    assert step["reward_could_not_judge"] == 0 and step["groups_redrawn"] > 0
    for line in lines(tmp_path / "run" / "emergence" / "generations.jsonl"):
        assert line["reward"] == line["num_tokens"] % 2
    held_out = lines(tmp_path / "run" / "evaluation.jsonl")
    assert {problem["could_not_judge"] for problem in held_out} == {0}

"""Environments of verifiers' older interface, installed from packages/v0: played by scripts, and
trained on the lab.
"""

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.environments
vf = pytest.importorskip("verifiers")
if not hasattr(vf, "MultiTurnEnv"):
    pytest.skip("the installed verifiers has no older interface", allow_module_level=True)

from retrain import train  # noqa: E402
from retrain.config.schema import Environment as Settings  # noqa: E402
from retrain.environments.base import Environment  # noqa: E402
from retrain.environments.episodes import EpisodeHost, play  # noqa: E402
from retrain.environments.verifiers import load as load_verifiers  # noqa: E402
from retrain.errors import ConfigurationError, EnvironmentFailure  # noqa: E402
from retrain.types import Outcome  # noqa: E402
from tests.environments.checks import check_learns, check_trained, scripted  # noqa: E402
from tests.runs import small  # noqa: E402


def loaded(name: str, **args: Any) -> Environment:
    return load_verifiers(Settings(provider="verifiers", id=name, args=args))


def host_of(environment: Environment) -> EpisodeHost:
    return EpisodeHost(environment, max_turns=0, timeout_s=20, correct_threshold=0.5)


def test_single_turn_is_scored_by_its_rubric() -> None:
    environment = loaded("lab_sums")
    host, (first, *_) = host_of(environment), environment.examples("train")
    right, wrong = (
        play(host, first, [f"so \\boxed{{{first.reference}}}"]),
        play(host, first, ["\\boxed{0}"]),
    )
    assert (right.reward, right.outcome) == (1.1, Outcome.RIGHT) and (
        wrong.reward,
        wrong.outcome,
    ) == (0.1, Outcome.WRONG)
    assert (
        right.metrics["right"] == 1
        and right.metrics["has_box"] == 1
        and right.metrics["num_turns"] == 1
    )
    assert len(environment.examples("evaluation")) == 8
    host.close()


def test_multi_turn_answers_each_reply() -> None:
    environment = loaded("lab_guess", largest=7)
    example = next(item for item in environment.examples("train") if item.reference == "6")
    said, score = scripted(
        host_of(environment), example, ["\\boxed{4}", "\\boxed{7}", "\\boxed{6}"]
    )
    assert (
        said == ["higher", "lower"]
        and score.reward == pytest.approx(1.0)
        and score.metrics["num_turns"] == 3
    )
    _, lost = scripted(host_of(environment), example, ["1", "2", "3", "4"])
    assert lost.outcome is Outcome.WRONG and lost.metrics["num_turns"] == 4


def test_a_word_game_with_a_parser() -> None:
    environment = loaded("word-game")
    example = next(item for item in environment.examples("train") if item.reference == "house")
    assert isinstance(example.prompt, list) and example.prompt[0]["role"] == "system"
    replies = ["<guess>hello</guess>", "no idea", "<guess>house</guess>"]
    said, score = scripted(host_of(environment), example, replies)
    assert said == ["GYXXY", "Give a word of five letters."] and score.outcome is Outcome.RIGHT
    assert score.metrics["speed"] == pytest.approx(1 / 3)


def test_tools_are_offered_called_and_answered() -> None:
    environment = loaded("lab_tools")
    example = environment.examples("train")[0]
    call = '<tool_call>{"name": "add", "arguments": {"a": 100, "b": 101}}</tool_call>'
    said, score = scripted(host_of(environment), example, [call, "It is 201."], tools=["add"])
    assert said == ["201"] and score.outcome is Outcome.RIGHT and score.metrics["add_calls"] == 1


def test_running_out_of_tokens_ends_the_rollout_and_is_scored() -> None:
    environment = loaded("lab_guess", largest=7)
    example = next(item for item in environment.examples("train") if item.reference == "6")
    score = play(host_of(environment), example, ["5"])
    assert score.outcome is Outcome.WRONG and score.reward == pytest.approx(0.4 * (1 - 1 / 7))


@pytest.mark.parametrize(("name", "turns"), [("lab_sums", 1), ("lab_guess", 4)])
def test_the_lab_trains(name: str, turns: int, tmp_path: Path) -> None:
    check_trained(tmp_path / "run", {"provider": "verifiers", "id": name}, turns)


def test_a_short_run_raises_the_reward(tmp_path: Path) -> None:
    check_learns(
        tmp_path / "run",
        {"provider": "verifiers", "id": "lab_guess", "args": {"problems": 1, "max_turns": 2}},
    )


def test_what_cannot_train_says_so(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match="has no training set, so it can evaluate and not train"
    ):
        train(
            small(tmp_path / "a", environment={"provider": "verifiers", "id": "only_evaluation"}),
            quiet=True,
        )
    with pytest.raises(
        ConfigurationError, match=r"could not be loaded with args .*'wrong': 1.*TypeError"
    ):
        train(
            small(
                tmp_path / "b",
                environment={"provider": "verifiers", "id": "lab_sums", "args": {"wrong": 1}},
            ),
            quiet=True,
        )
    with pytest.raises(EnvironmentFailure, match="prime env install owner/absent"):
        train(
            small(tmp_path / "c", environment={"provider": "verifiers", "id": "owner/absent"}),
            quiet=True,
        )

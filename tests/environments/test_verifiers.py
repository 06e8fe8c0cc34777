"""Environments of verifiers, from packages: played by scripts, and trained on the lab."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.environments
if find_spec("verifiers") is None:
    pytest.skip("needs verifiers", allow_module_level=True)

from retrain import train  # noqa: E402
from retrain.config.schema import Environment as Settings  # noqa: E402
from retrain.environments.base import Environment  # noqa: E402
from retrain.environments.episodes import EpisodeHost, play  # noqa: E402
from retrain.environments.verifiers import load as load_verifiers  # noqa: E402
from retrain.errors import ConfigurationError, EnvironmentFailure  # noqa: E402
from retrain.types import Outcome  # noqa: E402
from tests.environments.checks import check_learns, check_trained, scripted  # noqa: E402
from tests.runs import small  # noqa: E402

HELD_OUT: dict[str, Any] = {
    "lab_sums": {"evaluation": {"first": 64, "problems": 8}},
    "lab_guess": {"evaluation": {"problems": 10}},
}


def loaded(name: str, **args: Any) -> Environment:
    return load_verifiers(Settings(provider="verifiers", id=name, args=args))


def host_of(environment: Environment) -> EpisodeHost:
    return EpisodeHost(environment, max_turns=0, timeout_s=30, correct_threshold=0.5)


def test_single_turn_is_scored_by_its_rewards() -> None:
    environment = loaded("lab_sums", **HELD_OUT["lab_sums"])
    host, (first, *_) = host_of(environment), environment.examples("train")
    right, wrong = (
        play(host, first, [f"so \\boxed{{{first.reference}}}"]),
        play(host, first, ["\\boxed{0}"]),
    )
    assert right.reward == pytest.approx(1.1) and right.outcome is Outcome.RIGHT
    assert wrong.reward == pytest.approx(0.1) and wrong.outcome is Outcome.WRONG
    assert right.metrics["right"] == 1
    held_out = environment.examples("evaluation")
    assert len(held_out) == 8 and not {str(item.prompt) for item in held_out} & {
        str(item.prompt) for item in environment.examples("train")
    }
    host.close()


def test_multi_turn_answers_each_reply() -> None:
    environment = loaded("owner/lab-guess", taskset={"largest": 7})
    host = host_of(environment)
    example = next(item for item in environment.examples("train") if item.reference == "6")
    said, score = scripted(host, example, ["\\boxed{4}", "\\boxed{7}", "\\boxed{6}"])
    assert (
        said == ["higher", "lower"]
        and score.reward == 1
        and score.metrics["turns"] == 3 == score.metrics["replies"]
    )
    _, lost = scripted(host, example, ["1", "2", "3", "4"])
    assert lost.outcome is Outcome.WRONG
    cut = play(host, example, ["1"])
    assert cut.outcome is Outcome.WRONG, "a rollout whose tokens ran out is judged"
    assert environment.examples("evaluation") == []
    host.close()


@pytest.mark.parametrize(("name", "turns"), [("lab_sums", 1), ("lab_guess", 4)])
def test_the_lab_trains(name: str, turns: int, tmp_path: Path) -> None:
    check_trained(
        tmp_path / "run", {"provider": "verifiers", "id": name, "args": HELD_OUT[name]}, turns
    )


def test_a_short_run_raises_the_reward(tmp_path: Path) -> None:
    args = {"taskset": {"problems": 1}, "turns": 2}
    check_learns(tmp_path / "run", {"provider": "verifiers", "id": "lab_guess", "args": args})


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("two_seats", {}, r"has 2 seats \(left, right\), and a run trains the model of one"),
        (
            "lab_tools",
            {},
            r'serves tools over MCP.* such as args = \{ agent = \{ harness = \{ id = "null" \} \} \}',
        ),
        ("lab_sums", {"wrong": 1}, "does not load with args"),
    ],
)
def test_what_cannot_train_says_so(
    name: str, args: dict[str, Any], said: str, tmp_path: Path
) -> None:
    environment = {"provider": "verifiers", "id": name, "args": args}
    with pytest.raises(ConfigurationError, match=said):
        train(small(tmp_path / "run", environment=environment), quiet=True)


def test_an_environment_of_the_older_interface_is_told_from_a_broken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "older_sums.py").write_text("def load_environment(train: int = 64): ...\n")
    (tmp_path / "broken_sums.py").write_text("import verifiers.v1 as vf\n1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EnvironmentFailure, match=r"interface before verifiers 0\.4"):
        loaded("older_sums")
    with pytest.raises(ConfigurationError, match="ZeroDivisionError"):
        loaded("broken_sums")

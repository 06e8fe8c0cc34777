"""User functions: called as they ask, killed when they hang, and never turned into a zero when they
fail.
"""

import sys
from pathlib import Path
from typing import Any

import pytest

from retrain.config import TrainConfig, load_config
from retrain.errors import ConfigurationError, EnvironmentFailure
from retrain.rewards import Scorer, ScoreRequest, build_scorer
from retrain.types import Example, Outcome, Score
from tests.marks import first_of

MODULE = """
import asyncio, numbers, os, time
import numpy as np
def score(response, reference): return float(response == reference)
def half(response, reference): return 0.5

def everything(response, reference, prompt, example, params):
    assert (prompt, example.reference, example.info["row"], params) == ("the prompt", reference, [1, 2], {"bonus": 0.25})
    return params["bonus"]
def keywords(response, reference, **more): return sorted(more) == ["example", "finish_reason", "params", "prompt", "token_count"]

async def later(response, reference):
    await asyncio.sleep(0.01)
    return True
def unsure(response, reference): return None

def angry(response, reference):
    raise KeyError("no\\nsuch key")
def bottomless(response, reference): return float("nan")

def huge(response, reference): return 10**400
class Mute(GeneratorExit):
    def __str__(self): raise self
    __float__ = __str__
numbers.Real.register(Mute)
def mute(response, reference): raise Mute
def floatless(response, reference): return Mute()
def wordy(response, reference): return "yes"
def numpy_float(response, reference): return np.float32(0.75)
def numpy_bool(response, reference): return np.bool_(True)

def by_request(response, reference):
    print("talking on standard output")
    if response == "hang":
        while True:
            pass
    if response == "sleep":
        time.sleep(600)
    if response == "exit":
        os._exit(3)
    if response == "quit":
        raise SystemExit
    if response == "interrupt":
        raise KeyboardInterrupt
    if response == "crash":
        os.kill(os.getpid(), 11)
    return 1.0
def channel():  # this worker's only socket
    return next(fd for fd in range(3, 100) if os.path.exists(f"/proc/self/fd/{fd}") and os.readlink(f"/proc/self/fd/{fd}")[:6] == "socket")
def framed(text): return len(text).to_bytes(4, "little") + text.encode()

def by_fork(response, reference):
    if response == "fork":
        if os.fork() == 0:
            return 0.0
        time.sleep(0.2)
    return 1.0
def by_channel(response, reference):
    written = {
        "noise": b"\\xff" * 50,
        "no JSON": framed("[1, 2"),
        "a list": framed("[1, 2]"),
        "no number": framed('{"value": 0.0}'),
        "another's": framed('{"value": 0.0, "number": 123456}'),
        "a word": framed('{"value": "much", "number": %d}' % 0),
        "infinity": framed('{"value": Infinity, "number": %d}' % 0),
        "deep": framed("[" * 50000),
    }
    if response == "drip":
        os.write(channel(), (1000).to_bytes(4, "little"))
        while True:
            os.write(channel(), b" ")
            time.sleep(0.01)
    if response in written:
        os.write(channel(), written[response])
    return 1.0
def three(response, reference, judge): return 1.0

not_a_function = 3
"""


@pytest.fixture(autouse=True)
def user_module(here: Path) -> None:
    (here / "my_rewards.py").write_text(MODULE)


def custom(function: str, **reward: Any) -> Scorer:
    table = {"type": "custom", "custom_module": "my_rewards", "custom_function": function}
    table |= {"workers": 1, "deadline_s": 30.0} | reward
    return build_scorer(TrainConfig.model_validate({"reward": table}))


def request(
    response: str = "4", info: dict[str, Any] | None = None, reference: str | None = "4"
) -> ScoreRequest:
    example = Example("What is 2+2?", "4", info=info)
    return ScoreRequest(response, reference, "the prompt", example, step=0, slot=0, sample=0)


def judged(scorer: Scorer, response: str = "4", info: dict[str, Any] | None = None) -> Score:
    return scorer.submit(request(response, info)).result(60)


REWARDS = {"score": 1.0, "half": 0.5, "keywords": 1.0, "later": 1.0}
REWARDS |= {"numpy_float": 0.75, "numpy_bool": 1.0}


@pytest.mark.parametrize(("function", "reward"), REWARDS.items())
def test_a_float_or_a_bool_is_the_reward(function: str, reward: float) -> None:
    with custom(function) as scorer:
        assert judged(scorer) == Score(Outcome.RIGHT if reward > 0.5 else Outcome.WRONG, reward)


@pytest.mark.faults("rewards and judges that misbehave")
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("unsure", "my_rewards.unsure returned None"),
        ("angry", "KeyError: 'no"),
        ("bottomless", "nan, which is not finite"),
        ("huge", "inf, which is not finite"),
        ("wordy", "type str"),
        ("mute", "mute failed with Mute."),
        ("floatless", "a value of type Mute: Mute"),
    ],
)
def test_what_is_no_reward_could_not_judge_and_says_why(function: str, reason: str) -> None:
    with custom(function) as scorer:
        score = judged(scorer)
    assert (score.outcome, score.reward) == (Outcome.COULD_NOT_JUDGE, None)
    assert reason in score.reason
    assert "\n" not in score.reason


def test_a_function_gets_the_keywords_that_it_asks_for() -> None:
    import numpy as np

    with custom("everything", params={"bonus": 0.25}) as scorer:
        assert judged(scorer, info={"row": np.array([1, 2])}).reward == 0.25


@pytest.mark.faults("rewards and judges that misbehave")
def test_info_that_cannot_travel_is_named() -> None:
    with custom("everything", params={"bonus": 0.25}) as scorer:
        score = judged(scorer, info={"row": {1, 2}})
    assert score.outcome is Outcome.COULD_NOT_JUDGE
    assert "type set" in score.reason


@pytest.mark.faults("rewards and judges that misbehave")
@pytest.mark.parametrize(
    ("response", "reason"),
    [
        pytest.param("hang", "deadline_s", marks=pytest.mark.slow),
        pytest.param("sleep", "deadline_s", marks=pytest.mark.slow),
        ("exit", "exit code 3"),
        ("quit", "SystemExit"),
        ("interrupt", "by_request raised KeyboardInterrupt"),
        ("crash", "signal 11"),
    ],
)
def test_code_that_hangs_or_dies_costs_one_verdict_and_the_worker_is_replaced(
    response: str, reason: str
) -> None:
    with custom("by_request", deadline_s=2.0) as scorer:
        score = judged(scorer, response)
        assert score.outcome is Outcome.COULD_NOT_JUDGE
        assert reason in score.reason
        assert judged(scorer, "fine").reward == 1.0


def test_what_user_code_prints_stays_off_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    with custom("by_request") as scorer:
        judged(scorer)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "talking" in captured.err


def test_a_dotted_path_is_a_reward_too() -> None:
    table = {"type": ["my_rewards.half", "my_rewards.score"], "weights": [1.0, 2.0], "workers": 1}
    with build_scorer(TrainConfig.model_validate({"reward": table})) as scorer:
        assert judged(scorer).reward == 2.5
        assert not scorer.compares_answers


def test_a_module_beside_the_configuration_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    file = tmp_path / "run.toml"
    file.write_text('[reward]\ntype = "custom"\ncustom_module = "my_rewards"\nworkers = 1\n')
    with build_scorer(load_config(file)) as scorer:
        assert judged(scorer).reward == 1.0
    with pytest.raises(ConfigurationError, match=r"^flag --reward-type: \[reward\] type"):
        build_scorer(load_config(file, ["--reward-type", "absent.score"]))


@pytest.mark.parametrize(
    ("function", "params", "said"),
    [
        ("missing", {}, "missing"),
        ("not_a_function", {}, "must be a function"),
        ("three", {}, "response, reference"),
        ("score", {"bonus": 1}, "takes no params"),
    ],
)
def test_a_function_that_cannot_be_a_reward_is_refused_at_the_start(
    function: str, params: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said) as refused:
        custom(function, params=params)
    assert len(refused.value.problems) == 1


def test_a_file_that_ends_its_process_at_the_import_is_named(tmp_path: Path) -> None:
    (tmp_path / "dying.py").write_text("import os; os._exit(7)")
    with pytest.raises(EnvironmentFailure, match=r"worker for dying\.score \(.*exit code 7"):
        custom("score", custom_module="dying")


def test_params_that_no_reward_takes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="bonus"):
        build_scorer(
            TrainConfig.model_validate({"reward": {"type": "match", "params": {"bonus": 1}}})
        )


@pytest.mark.faults("rewards and judges that misbehave")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "response",
    first_of(
        ["noise", "another's", "infinity", "no JSON", "a list", "no number", "a word", "deep"],
        quick=3,
    ),
)
def test_a_reply_that_cannot_be_read_could_not_judge_and_the_next_answer_is_its_own(
    response: str,
) -> None:
    with custom("by_channel", deadline_s=10.0) as scorer:
        score = judged(scorer, response)
        assert score.outcome is Outcome.COULD_NOT_JUDGE
        assert "is not readable" in score.reason
        assert [judged(scorer, "4").reward for _ in range(2)] == [1.0, 1.0]


@pytest.mark.slow
@pytest.mark.faults("rewards and judges that misbehave")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_worker_that_writes_for_ever_ends_on_the_deadline() -> None:
    with custom("by_channel", deadline_s=2.0) as scorer:
        assert "deadline_s = 2" in judged(scorer, "drip").reason
        assert judged(scorer).reward == 1.0


@pytest.mark.faults("rewards and judges that misbehave")
def test_a_child_that_a_reward_forks_answers_for_nobody() -> None:
    with custom("by_fork") as scorer:
        assert [
            judged(scorer, response).reward for response in ("fork", "4", "fork", "fork", "4")
        ] == [1.0] * 5

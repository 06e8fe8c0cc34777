"""Environments: trajectories of several turns, exact in tokens, and episodes that fail alone."""

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain import train
from retrain.config import TrainConfig
from retrain.config.overrides import deep_merge
from retrain.config.schema import Model
from retrain.data.chat import ChatRenderer
from retrain.environments import Environment, Episode, Observation, Result, reasoning_gym
from retrain.environments.base import Split
from retrain.environments.bridge import BridgedEpisode, RolloutBridge
from retrain.environments.episodes import EpisodeHost, play
from retrain.environments.lab import NumberGuessing
from retrain.errors import ConfigurationError, Interrupted, RunFailed
from retrain.model.budget import PROMPT_ALLOWANCE
from retrain.model.text import TextModel, load_text_model
from retrain.records.token_table import read_tokens
from retrain.run.dialogues import Dialogue, environment_seed
from retrain.run.gate import play_references
from retrain.run.gate_samples import GateInputs
from retrain.run.parts import load_prompts, load_stage
from retrain.run.session import Session
from retrain.types import (
    ChatMessage,
    Completion,
    Example,
    FinishReason,
    Outcome,
    Prompt,
    Row,
    Score,
    Trajectory,
    Turn,
)
from retrain.web import EventLoop
from tests import commands
from tests.marks import first_of
from tests.runs import lines, small, small_run, timeless
from tests.trajectories import replies_of_rendered

GUESSING: dict[str, Any] = {
    "environment": {
        "provider": "retrain.environments.lab.NumberGuessing",
        "args": {"largest": 10, "turns": 3},
    },
    "training": {"max_tokens": 72},
    "evaluation": {"every": 2, "at_start": True, "max_examples": 2},
    "logging": {"tokens_every": 1, "generations_per_step": 99},
}


def guessing(folder: Path, **sections: dict[str, Any]) -> TrainConfig:
    return small(folder, **deep_merge(GUESSING, sections))


def own(name: str, **keys: Any) -> dict[str, Any]:
    """The section of an environment of this file."""
    return {"provider": f"tests.test_environments.{name}", "args": {}} | keys


def host_of(
    environment: Environment, max_turns: int = 2, timeout_s: float = 0.3, **settings: Any
) -> EpisodeHost:
    return EpisodeHost(
        environment, max_turns=max_turns, timeout_s=timeout_s, correct_threshold=0.5, **settings
    )


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight") / "run"
    small_run(guessing(folder), quiet=True)
    return folder


@pytest.fixture(scope="module")
def text() -> TextModel:
    return load_text_model(Model(model="lab"))


# -- a run -----------------------------------------------------------------------------------------


def test_every_trajectorys_ids_are_what_the_chat_template_renders(
    straight: Path, text: TextModel
) -> None:
    replies = [
        count
        for step in range(4)
        for count in replies_of_rendered(text, straight / f"tokens/step_{step}.safetensors")
    ]
    assert max(replies) == 3 and min(replies) < 3


def test_the_ratio_is_one_on_policy_in_every_turn(straight: Path) -> None:
    table = read_tokens(straight / "tokens/step_0.safetensors")
    assert table.log_ratios is not None
    known = table.log_ratios[~np.isnan(table.log_ratios)]
    assert len(known) > 50 and np.abs(known).max() < 1e-4
    assert lines(straight / "metrics.jsonl")[0]["ratio_max"] == pytest.approx(1, abs=1e-4)


def test_records_know_turns(straight: Path) -> None:
    records = lines(straight / "metrics.jsonl")
    generations = lines(straight / "emergence/generations.jsonl")
    assert all(1 <= record["turns_mean"] <= 3 for record in records)
    assert not any(record["trajectories_rewritten"] for record in records)
    assert {"heeded", "turns"} <= records[0]["environment_metrics"].keys()
    several = [one for one in generations if one["turns"] > 1]
    assert several
    for one in several:
        assert one["completion"].count("<|im_start|>assistant") == one["turns"] - 1
    assert all(one["metrics"]["turns"] == one["turns"] for one in generations)
    evaluations = lines(straight / "evaluation.jsonl")
    assert [line["step"] for line in evaluations] == [0, 0, 2, 2, 4, 4]
    assert {line["task"] for line in evaluations} == {"guess"}


def test_inspect_shows_what_the_environment_said_between_the_replies(
    straight: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from retrain.cli.main import main

    assert main(["inspect", str(straight), "--step", "0", "--json"]) == 0
    completions = json.loads(capsys.readouterr().out)["completions"]
    several = next(one for one in completions if len(one["turns"]) > 1)
    assert several["turns"][0] == {"start": 0, "context": "", "restarts": False}
    assert "<|im_start|>user" in several["turns"][1]["context"]
    assert 0 < several["turns"][1]["start"] < len(several["token_ids"])
    assert main(["inspect", str(straight), "--step", "0", "--against", "gtpo"]) == 0
    shown = capsys.readouterr().out
    assert " turns" in shown and "<|im_start|>assistant" in shown


@pytest.mark.slow
def test_a_run_killed_between_two_steps_resumes_to_the_same_bytes(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    real = Session.turn_to_learning

    def stop(session: Session, used: int) -> None:
        if session.state.step == 3:
            raise Interrupted("cut", signal.SIGINT)
        real(session, used)

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(Session, "turn_to_learning", stop)
        small_run(guessing(folder), quiet=True)
    small_run(guessing(folder, resume={"from": str(folder)}), quiet=True)
    assert_same_bytes(straight, folder)


def assert_same_bytes(straight: Path, folder: Path) -> None:
    assert timeless(straight / "metrics.jsonl") == timeless(folder / "metrics.jsonl")
    for name in (
        "emergence/generations.jsonl",
        "evaluation.jsonl",
        "checkpoints/final/adapter_model.safetensors",
        "tokens/step_3.safetensors",
    ):
        assert (straight / name).read_bytes() == (folder / name).read_bytes(), name


class Deadly(NumberGuessing):
    """Where a variable names a run, it kills its process at a second guess of that run's fourth
    step.
    """

    def episode(self) -> Episode:
        guessing, run = super().episode(), os.environ.get("RETRAIN_TEST_RUN")
        real, guesses = guessing.step, 0

        def step(reply: str) -> Any:
            nonlocal guesses
            guesses += 1
            metrics = Path(run or "", "metrics.jsonl")
            if run and guesses == 2 and metrics.exists() and len(lines(metrics)) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(reply)

        guessing.step = step  # type: ignore[method-assign]
        return guessing


@pytest.mark.slow
def test_a_run_killed_within_a_dialogue_resumes_to_the_same_bytes(
    straight: Path, tmp_path: Path
) -> None:
    folder, file, environment = (
        tmp_path / "run",
        tmp_path / "run.toml",
        {"provider": "tests.test_environments.Deadly"},
    )
    text = (straight / "config.toml").read_text().replace(str(straight), str(folder))
    file.write_text(
        text.replace("retrain.environments.lab.NumberGuessing", environment["provider"])
    )
    command = [sys.executable, "-m", "retrain", str(file), "--quiet", "--skip-parity"]
    killed = commands.run(command, env=os.environ | {"RETRAIN_TEST_RUN": str(folder)})
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(lines(folder / "metrics.jsonl")) == 3
    small_run(guessing(folder, environment=environment, resume={"from": str(folder)}), quiet=True)
    assert_same_bytes(straight, folder)


def test_a_later_turn_continues_the_noise_of_the_turns_before(
    straight: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every token of a trajectory has a uniform of its own: no two of its turns begin at the same
    position.
    """
    asked: list[tuple[int, int, int]] = []
    from retrain.inference_engine.torch_engine import TorchEngine

    real = TorchEngine.sample

    def watched(engine: TorchEngine, requests: Any) -> Any:
        asked.extend(
            (item.noise.prompt, item.first_sample, item.first_position)
            for item in requests
            if item.noise.stream == 0
        )
        return real(engine, requests)

    monkeypatch.setattr(TorchEngine, "sample", watched)
    unevaluated = {"every": 0, "at_start": False}
    config = guessing(tmp_path / "run", training={"max_steps": 1}, evaluation=unevaluated)
    small_run(config, quiet=True)
    table = read_tokens(tmp_path / "run/tokens/step_0.safetensors")
    assert table.turns is not None
    wanted = set()
    for number in range(len(table.slot)):
        actions = table.turns.actions[table.turns.offsets[number] : table.turns.offsets[number + 1]]
        wanted |= {
            (int(table.slot[number]), int(table.sample[number]), int(sum(actions[:turn])))
            for turn in range(1, len(actions))
        }
    assert wanted and wanted == {one for one in asked if one[2] > 0}


def test_the_labs_game_counts_the_guesses_that_heed_its_hints() -> None:
    """A fixed series of guesses wins some games; only guesses that fit every hint so far count as
    heeding them.
    """
    host = host_of(NumberGuessing(largest=7, turns=3), 0, 30)
    halving = play(host, Example("", "6"), ["4", "7", "6"])
    fixed = play(host, Example("", "1"), ["4", "6", "no idea"])
    assert (halving.reward, halving.metrics["heeded"], halving.metrics["turns"]) == (1, 1, 3)
    assert fixed.metrics["heeded"] == 0 and fixed.reward == 0
    both = play(host, Example("", "3"), ["4", "1", "4"])
    assert both.metrics["heeded"] == 0.5, "it must heed the first hint too"
    assert "heeded" not in play(host, Example("", "4"), ["4"]).metrics
    host.close()


# -- conversations and rows ------------------------------------------------------------------------


def completion(ids: list[int], reason: FinishReason = FinishReason.STOP) -> Completion:
    return Completion(
        0, 5, np.array(ids, np.int32), np.full(len(ids), -0.5, np.float32), None, reason
    )


def dialogue(text: TextModel) -> Dialogue:
    renderer = ChatRenderer(text.tokenizer, text.eos_ids, {})
    opening = renderer.opening([ChatMessage(role="user", content="1..3")])
    return Dialogue(Prompt(Example("1..3", "2"), opening.text, opening.token_ids), 0, 5)


def test_only_what_the_environment_says_is_encoded_and_the_models_tokens_stay(
    text: TextModel,
) -> None:
    """The reply is sampled in tokens that its text would not be encoded to; an unfinished turn is
    closed by the template.
    """
    renderer, talk = ChatRenderer(text.tokenizer, text.eos_ids, {}), dialogue(text)
    talk.add(
        completion([50, 257, 258]), "2"
    )  # a special token in mid-reply, which the text does not show
    talk.add_observation(Observation([ChatMessage(role="user", content=">")]), renderer)
    assert text.decode(talk.context_ids).endswith(
        "<|im_start|>assistant\n"
        + text.decode(np.array([50, 257, 258]))
        + "\n<|im_start|>user\n><|im_end|>\n<|im_start|>assistant\n"
    )
    talk.add(completion([51], FinishReason.LENGTH), "3")
    (row,) = Row.of(talk.prompt, talk.trajectory, np.array([1, 1, 1, 2], np.float32), group=0)
    assert [row.token_ids[start:stop].tolist() for start, stop in row.spans] == [
        [50, 257, 258],
        [51],
    ]
    assert row.num_actions == 4
    assert row.token_ids[: row.spans[0][0]].tolist() == talk.prompt.token_ids.tolist()


def test_a_rewritten_history_begins_a_row_of_its_own(text: TextModel) -> None:
    """A template that drops earlier reasoning, as reasoning models have: the second turn's row
    holds the context that the model then saw.
    """
    tokenizer = load_text_model(Model(model="lab")).tokenizer
    tokenizer.chat_template = (
        "{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' +"
        " m['content'].split('</think>')[-1] + '<|im_end|>\n' }}{%- endfor %}{%- if"
        " add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
    )
    renderer, talk = ChatRenderer(tokenizer, text.eos_ids, {}), dialogue(text)
    ids = tokenizer("<think>a</think>2<|im_end|>", add_special_tokens=False)["input_ids"]
    talk.add(completion(ids), "<think>a</think>2")
    talk.add_observation(Observation([ChatMessage(role="user", content=">")]), renderer)
    talk.add(completion([51, 258]), "3")
    talk.add_observation(Observation([ChatMessage(role="user", content="<")]), renderer)
    talk.add(completion([52, 258]), "4")
    first, second = Row.of(
        talk.prompt, talk.trajectory, np.arange(len(ids) + 4, dtype=np.float32), group=0
    )
    assert first.num_actions == len(ids) and second.num_actions == 4 and len(second.spans) == 2
    assert first.key == (0, 5, 0) and second.key == (0, 5, 1)
    assert "think" not in text.decode(second.token_ids)
    assert text.decode(second.token_ids).startswith("<|im_start|>user\n1..3<|im_end|>")
    assert second.advantages.tolist() == [len(ids), len(ids) + 1, len(ids) + 2, len(ids) + 3]


def test_an_opening_of_tools_alone_keeps_the_problems_messages(text: TextModel) -> None:
    talk = dialogue(text)
    opening = Observation([], rewrites=True, tools=[{"type": "function"}])
    talk.add_observation(opening, ChatRenderer(text.tokenizer, text.eos_ids, {}))
    assert talk.context_ids.tolist() == talk.prompt.token_ids.tolist()


# -- episodes that fail ----------------------------------------------------------------------------


class Misbehaving(Environment):
    """Its episodes do what the problem's reference says."""

    max_turns = 2

    def examples(self, split: Split) -> list[Example]:
        return []

    def episode(self) -> Episode:
        return Misbehaves()

    def close(self) -> None:
        raise RuntimeError("the door is stuck")


WRONGLY_SAID: dict[str, Any] = {
    "text": "go on",
    "numbers": [{"role": "user", "content": 5}],
    "half a character": [{"role": "user", "content": "\ud800"}],
    "no conversation": Observation([], rewrites=True),
    "no tools": Observation([{"role": "user", "content": "go on"}], tools="add"),
    # type: ignore[arg-type]
}
JUDGED: dict[str, Any] = {"nan": Result(float("nan")), "none": None}
JUDGED["a word"] = Result("1")  # type: ignore[arg-type]


class Misbehaves(Episode):
    def reset(self, example: Example, seed: int) -> None:
        self.what = example.reference
        if self.what == "reset":
            raise RuntimeError("no seat is free")

    def step(self, reply: str) -> list[ChatMessage] | None:
        match self.what:
            case "crash":
                raise ValueError("division by zero")
            case "exit":
                sys.exit(3)
            case "hang" | "hang twice":
                time.sleep(30)
            case "long":
                return [ChatMessage(role="user", content="go on")]
        return WRONGLY_SAID.get(self.what)

    def result(self) -> Result:
        verdict: Result = JUDGED.get(self.what, Result(1.0))
        return verdict

    def close(self) -> None:
        if self.what == "hang twice":
            time.sleep(30)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("fine", ""),
        ("crash", "the environment failed with ValueError: division by zero"),
        ("exit", "the environment failed with SystemExit: 3"),
        ("hang", "took longer than [environment] timeout_s = 0.3"),
        ("reset", "the environment failed with RuntimeError: no seat is free"),
        ("nan", "reward is nan"),
        ("none", "result returned NoneType, and must return a Result"),
        ("a word", "failed with TypeError: the result's reward is str, and must be a number"),
        ("text", "step returned str, and must return a list of messages"),
        ("numbers", "returned list, and must return a list of messages {role, content} of text"),
        ("half a character", "failed with UnicodeEncodeError"),
        ("no conversation", "a rewritten conversation without messages"),
        ("no tools", "tools that are not a list of JSON schemas"),
        ("long", ""),
    ],
)
def test_an_episode_that_fails_could_not_be_judged(what: str, reason: str) -> None:
    began = time.monotonic()
    score = play(host_of(Misbehaving()), Example("?", what), ["a", "b", "c"])
    assert time.monotonic() - began < 5 and reason in score.reason
    assert score.outcome is (Outcome.COULD_NOT_JUDGE if reason else Outcome.RIGHT)


def test_an_episode_serves_one_dialogue_at_a_time() -> None:
    host = host_of(Shared())
    first = host.begin(Example("?", "fine"), 0)
    assert isinstance(first.answer(lambda: None), Observation)
    second = host.begin(Example("?", "fine"), 0).answer(lambda: None)
    assert isinstance(second, Score) and "an open Episode" in second.reason
    first.end()
    assert isinstance(first.answer(lambda: None), Score)
    assert play(host, Example("?", "fine"), ["a"]).outcome is Outcome.RIGHT


def test_an_episode_that_hung_closes_once_though_a_pool_gives_it_out_again() -> None:
    pool = Pool()
    host = host_of(pool)
    assert play(host, Example("?", "late"), ["a"]).outcome is Outcome.COULD_NOT_JUDGE
    while not pool.free:
        time.sleep(0.01)
    again = host.begin(Example("?", "fine"), 0)
    assert isinstance(again.answer(lambda: None), Observation) and not pool.free
    time.sleep(0.8)  # The late reply of the first dialogue comes to its end.
    assert not pool.free
    again.end()
    assert isinstance(again.answer(lambda: None), Score) and len(pool.free) == 1


class Pool(Misbehaving):
    """Gives a closed episode out again."""

    def __init__(self) -> None:
        self.free: list[Episode] = []

    def episode(self) -> Episode:
        return self.free.pop() if self.free else Pooled(self)


class Pooled(Misbehaves):
    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def step(self, reply: str) -> None:
        time.sleep(0.8)

    def close(self) -> None:
        self.pool.free.append(self)


class Shared(Misbehaving):
    """Makes one episode for all dialogues."""

    one = None

    def episode(self) -> Episode:
        self.one = self.one or Misbehaves()
        return self.one


def test_an_environment_that_fails_to_close_costs_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    host_of(Misbehaving()).close()
    told = "environment: close() failed with RuntimeError: the door is stuck.\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize("what", ["hang", "hang twice"])
def test_a_hanging_episode_costs_only_itself(what: str) -> None:
    """With one thread, the episode behind a hanging one is still judged, even where its close hangs
    too.
    """
    from retrain.environments.episodes import DaemonThreads

    host = host_of(Misbehaving(), threads=DaemonThreads(1, "test"))
    hanging, fine = (host.begin(Example("?", what), 0) for what in (what, "fine"))
    for episode in (hanging, fine):
        assert isinstance(episode.answer(lambda: None), Observation)
        episode.reply("a", last=False)
    outcomes = [episode.answer(lambda: None) for episode in (hanging, fine)]
    judged = [one.outcome for one in outcomes if not isinstance(one, Observation)]
    assert judged == [Outcome.COULD_NOT_JUDGE, Outcome.RIGHT]


class OneTask:
    """Stands for reasoning_gym."""

    class factory:  # noqa: N801
        DATASETS = ("task",)

    @staticmethod
    def create_dataset(*_: str, **__: int) -> Any:
        return [{"question": "?", "answer": "a"}]


def judge_with_a_slow_pattern() -> None:
    sys.modules["reasoning_gym"] = OneTask  # type: ignore[assignment]
    reasoning_gym._SEARCH_S = 0.5
    environment = reasoning_gym.ReasoningGym("task", {"answer": "(a+)+$"})
    host = host_of(environment, 1)
    (example,) = environment.examples("train")
    assert "timeout_s = 0.3" in play(host, example, ["a" * 100_000 + "!"]).reason
    slow = environment.episode()
    slow.reset(example, 0)
    with pytest.raises(TimeoutError, match=r"args\.answer = '\(a\+\)\+\$' searched longer than"):
        slow.step("a" * 100_000 + "!")


@pytest.mark.slow
def test_a_pattern_that_backtracks_for_ever_costs_only_its_episode() -> None:
    """In a process of its own: one that searches with `re` cannot be stopped by a signal."""
    process = commands.forked(judge_with_a_slow_pattern)
    process.join(240)
    code = process.exitcode
    process.kill()
    assert code == 0


class SelfPlaying(Misbehaving):
    """Calls the model itself, on one event loop for all of its episodes."""

    def __init__(self) -> None:
        self.loop = EventLoop("environment")

    def episode(self) -> Episode:
        async def rollout(bridge: RolloutBridge, example: Example, seed: int) -> Result:
            reply = await bridge.ask([ChatMessage(role="user", content="?")], [])
            if example.reference == "exit":
                sys.exit(3)
            return Result(float(reply == example.reference))

        return BridgedEpisode(self.loop, rollout)


def test_a_rollout_that_exits_leaves_the_loop_to_the_others() -> None:
    host = host_of(SelfPlaying(), 0, 2)
    assert "failed with SystemExit: 3" in play(host, Example("?", "exit"), ["a"]).reason
    assert play(host, Example("?", "a"), ["a"]).outcome is Outcome.RIGHT


def test_failed_trajectories_stay_in_their_group_and_out_of_training(tmp_path: Path) -> None:
    config = small(
        tmp_path / "run",
        environment=own("Sometimes"),
        reward={"max_failure_rate": 1.0},
        training={"max_steps": 1, "max_tokens": 48},
        logging={"generations_per_step": 99},
    )
    small_run(config, quiet=True)
    generations = lines(tmp_path / "run/emergence/generations.jsonl")
    (record,) = lines(tmp_path / "run/metrics.jsonl")
    failed = [one for one in generations if one["outcome"] == "could_not_judge"]
    assert len(generations) == 8 and len(failed) == record["reward_could_not_judge"] > 0
    assert all(one["advantage"] is None for one in failed)
    assert record["num_datums"] <= 8 - len(failed)


class Sometimes(Environment):
    """Fails for some replies, and is random for the others."""

    def examples(self, split: Split) -> list[Example]:
        return [Example("7+8+9=?", "24"), Example("1+2+3=?", "6")] if split == "train" else []

    def episode(self) -> Episode:
        return Fails()


class Fails(Episode):
    def reset(self, example: Example, seed: int) -> list[ChatMessage]:
        return [ChatMessage(role="user", content=str(example.prompt))]

    def step(self, reply: str) -> None:
        self.sum = sum(map(ord, reply))
        if self.sum % 2 == 0:
            raise RuntimeError("out of luck")

    def result(self) -> Result:
        return Result(float(self.sum % 3 == 0))


def test_a_conversation_without_room_for_a_reply_takes_nothing_from_the_others(
    tmp_path: Path,
) -> None:
    """One problem opens with more tokens than the model has positions. Its trajectories have no
    token, and the others keep their entropies and kept counts.
    """
    config = small(
        tmp_path / "run",
        environment=own("LongWinded"),
        training={"max_steps": 1, "top_k": 20},
        algorithm={"transform_mode": "gtpo", "uncertainty_kind": "shannon_entropy"},
        logging={"tokens_every": 1},
    )
    small_run(config, quiet=True)
    table = read_tokens(tmp_path / "run/tokens/step_0.safetensors")
    assert np.count_nonzero(np.diff(table.offsets) == 0) == 4
    assert table.entropies is not None and len(table.entropies) == len(table.token_ids)
    assert table.kept is not None and len(table.kept) == len(table.token_ids)


class LongWinded(Sometimes):
    """The first of its two problems fills the context of the lab before any reply."""

    def episode(self) -> Episode:
        return Opens()


class Opens(Fails):
    def reset(self, example: Example, seed: int) -> list[ChatMessage]:
        self.sum = 1
        times = 400 if example.reference == "24" else 1
        return [ChatMessage(role="user", content=str(example.prompt) * times)]

    def step(self, reply: str) -> None:
        self.sum = sum(map(ord, reply))


def test_what_an_episode_does_to_its_objects_and_folder_reaches_no_other_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The episodes of a group extend one prompt, write each hint into one message, and leave the
    folder of the run.
    """
    monkeypatch.chdir(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    config = small(
        Path("run"),
        environment=own("Careless", args={"folder": str(elsewhere)}),
        training={"max_steps": 2, "max_tokens": 96},
        logging={"generations_per_step": 99},
    )
    small_run(config, quiet=True)
    said = [one["completion"] for one in lines(tmp_path / "run/emergence/generations.jsonl")]
    assert {one.count("user\nnow") for one in said} == {1}
    assert max(one.count("hint 2") for one in said) == 1
    assert not list(elsewhere.iterdir())


class Careless(Environment):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def examples(self, split: Split) -> list[Example]:
        opening = ChatMessage(role="user", content="guess my number from 1 to 10")
        return [Example([opening], "")] * 2

    def episode(self) -> Episode:
        return Extends(self.folder)


class Extends(Episode):
    def __init__(self, folder: str) -> None:
        self.folder, self.replies = folder, 0
        self.hint = ChatMessage(role="user", content="")

    def reset(self, example: Example, seed: int) -> list[ChatMessage]:
        os.chdir(self.folder)
        assert isinstance(example.prompt, list)
        example.prompt.append(ChatMessage(role="user", content="now"))
        return example.prompt

    def step(self, reply: str) -> list[ChatMessage] | None:
        self.replies += 1
        self.hint["content"] = f"hint {self.replies}"
        return None if self.replies == 3 else [self.hint]

    def result(self) -> Result:
        return Result(float(self.replies % 2))


# -- what is refused -------------------------------------------------------------------------------


LAB_GAME = "retrain.environments.lab.NumberGuessing"


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        (own("Nowhere"), "does not load"),
        (own("Misbehaves"), "must be a subclass of retrain.environments.base.Environment"),
        ({"provider": LAB_GAME, "args": {"smallest": 3}}, "failed with TypeError"),
        (
            own("WrongProblems", args={"problem": {"prompt": "?"}}),
            r"train set holds \{'prompt': '\?'\}\. It must hold",
        ),
        (
            own("WrongProblems", args={"problem": [5]}),
            r"train set holds Example\(prompt=\[5\]",
        ),
        (own("WrongProblems", args={"problem": []}), r"train set holds Example\(prompt=\[\]"),
        (own("WrongProblems", args={"problem": "half"}), "are UTF-8 text"),
        (own("WrongProblems", args={"problem": "number"}), "are UTF-8 text"),
        (
            own("WrongProblems", args={"problem": [], "max_turns": "3"}),
            "max_turns = '3' is not a whole number",
        ),
        (
            {"provider": LAB_GAME, "args": {"examples": 0}},
            "has no training set, so it can only evaluate",
        ),
    ],
    ids=range(10),
)
def test_what_cannot_be_trained_is_said_in_a_sentence(
    section: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        small_run(small(tmp_path / "run", environment=section), quiet=True)


class Begins(Misbehaving):
    """Hangs, or exits, where its first argument says: when it is built, or when a set of its
    problems is read.
    """

    def __init__(self, where: str = "", how: str = "") -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.where, self.how = where, how
        self.at("built")

    def at(self, place: str) -> None:
        if place == self.where and self.how == "exit":
            sys.exit(3)
        while place == self.where:
            try:
                time.sleep(0.1)
            except Exception:  # noqa: BLE001 - it tries for ever
                continue

    def examples(self, split: Split) -> list[Example]:
        self.at(split)
        return [Example("7+8+9=?", "24")]

    def gold(self, example: Example) -> None:
        self.at("gold")


BEGINNINGS = {
    "built": r"provider = .*Begins\": building it with args \['how', 'where'\]",
    "train": "reading its train set",
    "gold": "asking for its right replies",
}


@pytest.mark.parametrize(
    ("how", "where"),
    first_of([(how, where) for how in ("exit", "hang") for where in BEGINNINGS], quick=4),
)
def test_an_environment_that_hangs_or_exits_before_its_first_episode_is_a_sentence(
    how: str, where: str, text: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    importlib.import_module("tests.test_environments")  # not within the time of its environments
    limit = 0.5 if (how, where) == ("hang", "built") else 2.0  # nothing else runs within it
    monkeypatch.setattr("retrain.environments.loading.MIN_LIMIT_S", limit)
    environment = own("Begins", args={"where": where, "how": how}, timeout_s=0.5)
    config = small(tmp_path / "run", environment=environment)
    before = signal.getsignal(signal.SIGTERM)
    hangs, exits = f"took longer than {limit:g} s; look at", r"failed with SystemExit: 3\."
    ending = hangs if how == "hang" else exits
    with pytest.raises(ConfigurationError, match=f"{BEGINNINGS[where]} {ending}"):
        stage = load_stage(config, text, print)
        assert stage is not None
        prompts = load_prompts(config, text, stage, print)
        play_references(stage.host, prompts.prompts)
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_environments_signal_handlers_do_not_replace_the_runs() -> None:
    from retrain.environments.loading import load_environment

    before = signal.getsignal(signal.SIGTERM)
    config = TrainConfig.model_validate({"environment": own("Begins")})
    assert type(load_environment(config)).__name__ == "Begins"
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


class WrongProblems(Misbehaving):
    def __init__(self, problem: Any, max_turns: int = 2) -> None:
        self.problem, self.max_turns = problem, max_turns

    def examples(self, split: Split) -> list[Example]:
        named = {"half": Example("\ud800", ""), "number": Example("?", 24)}  # type: ignore[arg-type]
        if isinstance(self.problem, str):
            return [named[self.problem]]
        return [Example(self.problem, "") if isinstance(self.problem, list) else self.problem]


def test_an_evaluation_without_an_evaluation_set_is_refused(tmp_path: Path) -> None:
    evaluated = {"environment": own("Sometimes"), "evaluation": {"at_end": True}}
    with pytest.raises(ConfigurationError, match="has no evaluation set"):
        small_run(small(tmp_path / "run", **evaluated), quiet=True)


@pytest.mark.parametrize(
    ("replies", "said"),
    [
        (["0"], "own solution .* as a right completion would"),
        (0.5, "asking for its right replies failed with TypeError"),
    ],
    ids=["wrong", "no list"],
)
def test_the_gate_plays_right_replies(
    replies: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NumberGuessing, "reference_replies", lambda self, example: replies)
    with pytest.raises((RunFailed, ConfigurationError), match=said):
        train(guessing(tmp_path / "run"), quiet=True)


def test_the_gate_reckons_with_what_an_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dialogue may pass a sliding window that its prompt and replies alone do not reach."""
    rows: list[int] = []

    def gate(inputs: GateInputs, prompts: Sequence[Prompt]) -> None:
        rows.append(inputs.longest_row - len(prompts[0].token_ids))
        raise RunFailed("seen")

    monkeypatch.setattr("retrain.run.parts.parity_gate", gate)
    for turns in (-1, 1):
        with pytest.raises(RunFailed, match="seen"):
            train(guessing(tmp_path / str(turns), environment={"max_turns": turns}), quiet=True)
    assert rows == [72 + PROMPT_ALLOWANCE, 72]


def test_a_groups_episodes_share_a_seed_and_groups_do_not() -> None:
    from retrain.run.dialogues import SamplingPlan

    plan = SamplingPlan(4, 8, 1.0, seed=3, stream=0)
    seeds = [environment_seed(plan, step, slot) for step in range(3) for slot in range(3)]
    assert len(set(seeds)) == 9 and seeds[0] == environment_seed(plan, 0, 0)
    assert Trajectory((Turn(completion([1])),)).token_ids.tolist() == [1]

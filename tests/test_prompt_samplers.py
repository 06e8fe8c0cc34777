"""Samplers of prompts: what the built-in ones choose, exact resume, and how a wrong one is found."""

import json
import shutil
from collections.abc import Iterator
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.cli.main import main
from retrain.config import replaced
from retrain.config.overrides import parse_overrides
from retrain.data.samplers import SAMPLERS, PromptSampler, build_sampler, checked_indices
from retrain.errors import ConfigurationError, RunFailed
from retrain.model.text import resolve_model
from retrain.records.run_folder import RunFolder, mark
from retrain.run.evaluate import evaluate_run
from retrain.run.parts import check_plugins
from retrain.run.start import with_prompt_date
from retrain.types import (
    Example,
    Group,
)
from tests.groups import group
from tests.marks import first_of
from tests.runs import lines, quiet_run, small, small_run, timeless

LEARNING = sorted(name for name, sampler in SAMPLERS.items() if sampler)
TOKEN = np.zeros(1, np.int32)


def made(name: str, size: int, **params: float) -> PromptSampler:
    sampler = SAMPLERS[name]
    assert sampler is not None
    return sampler([Example(f"{i}?", "", example_id=f"{i}") for i in range(size)], params)


def answered(right: int, size: int = 4) -> Group:
    return group([float(sample < right) for sample in range(size)])


def uniforms(size: int, step: int) -> np.ndarray:
    return np.random.default_rng(step).random(size)


def steps(sampler: PromptSampler, number: int, count: int) -> Iterator[list[int]]:
    """Step after step, in which example i has i % 5 of 4 answers right."""
    for step in range(number):
        chosen = list(sampler.choose(step, count, uniforms(sampler.size, step)))
        sampler.observe(chosen, [answered(index % 5) for index in chosen])
        yield chosen


@pytest.mark.parametrize("name", LEARNING)
@given(size=st.integers(1, 12), count=st.integers(1, 12), done=st.integers(0, 4))
def test_a_choice_holds_the_asked_number_of_examples_and_follows_from_the_state(
    name: str, size: int, count: int, done: int
) -> None:
    sampler, again = made(name, size), made(name, size)
    for chosen in steps(sampler, done, count):
        assert checked_indices(chosen, count, size) == chosen
        # Repeats come only where fewer are left: a fifth of the examples is solved when seen.
        assert count > size - size // 5 or len(set(chosen)) == count
    again.load(json.loads(json.dumps(sampler.state())))
    wanted = sampler.choose(done, count, uniforms(size, done))
    assert again.choose(done, count, uniforms(size, done)) == wanted


def test_solved_prompts_never_come_back_until_all_are_solved() -> None:
    sampler, seen = made("drop_solved", 20), []
    for chosen in steps(sampler, 12, 5):
        assert not {index for index in chosen if index % 5 == 4} & set(seen)
        seen += chosen
    assert set(seen) == set(range(20))
    sampler.observe(range(20), [answered(4)] * 20)
    assert len(set(sampler.choose(9, 20, uniforms(20, 9)))) == 20


def test_a_pass_rate_of_the_threshold_is_solved() -> None:
    sampler = made("drop_solved", 2, threshold=0.56)
    sampler.observe([0, 1], [answered(14, 25), answered(13, 25)])
    assert set(sampler.choose(1, 2, uniforms(2, 1))) == {1}


def test_the_pools_have_their_shares() -> None:
    sampler = made("pools", 50, easy=0.2, hard=0.4)
    sampler.observe(range(50), [answered(index % 5) for index in range(50)])
    chosen = sampler.choose(1, 10, uniforms(50, 1))
    kinds = [index % 5 for index in chosen]
    assert kinds.count(4) == 2 and kinds.count(0) == 4


def test_prompts_that_are_solved_half_of_the_time_are_drawn_most() -> None:
    sampler = made("learnability", 50, memory=1.0)
    sampler.observe(range(50), [answered(index % 5) for index in range(50)])
    drawn = [i for step in range(400) for i in sampler.choose(step, 5, uniforms(50, step))]
    counts = np.bincount(np.array(drawn) % 5, minlength=5)
    p = (np.arange(5) + 1) / 6  # those solved 4 of 4 times keep a seventh of the draws
    # Five of fifty without return flattens the weights a little.
    assert counts / counts.sum() == pytest.approx(p * (1 - p) / (p * (1 - p)).sum(), abs=0.04)


@pytest.mark.parametrize("name", first_of(LEARNING))
def test_a_resumed_run_chooses_as_the_straight_one(name: str, tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "data": {"sampler": name},
        "training": {"max_examples": 12, "batch_size": 3, "max_tokens": 8, "save_every": 1},
    }
    straight = small_run(small(tmp_path / "straight", **sections), quiet=True)
    config = small(tmp_path / "cut", **sections)
    small_run(replaced(config, {"training.max_steps": 2}), quiet=True)
    small_run(replaced(config, {"resume.from": str(tmp_path / "cut")}), quiet=True)
    assert timeless(straight.folder / "metrics.jsonl") == timeless(tmp_path / "cut/metrics.jsonl")
    prompts = [
        [line["prompt_id"] for line in lines(folder / "emergence" / "generations.jsonl")]
        for folder in (straight.folder, tmp_path / "cut")
    ]
    assert prompts[0] == prompts[1]


WRONG = {
    "pure": (
        "def choose(self, s, n, u):\n        self.k += 1\n        return [0] * n",
        "changes its state in `choose`",
    ),
    "range": ("def choose(self, s, n, u): return [99] * n", "chose the example 99, there are 8"),
    "short": ("def choose(self, s, n, u): return [0]", "must choose 4 whole numbers"),
    "float": ("def choose(self, s, n, u): return [0.5] * n", "must choose 4 whole numbers"),
    "raise": ("def choose(self, s, n, u): return 1 / 0", "ZeroDivisionError"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_sampler_is_named_before_the_first_step(name: str, here: Path) -> None:
    body, sentence = WRONG[name]
    (here / f"wrong_{name}.py").write_text(
        "from retrain.data import PromptSampler\n"
        "class S(PromptSampler):\n"
        "    k = 0\n"
        f"    {body}\n"
        "    def observe(self, indices, groups): self.k = (self.k + 1) % 3\n"
        "    def state(self): return {'k': self.k}\n"
    )
    with pytest.raises(ConfigurationError, match=f"sampler.*{sentence}"):
        build_sampler(
            small(here / "run", data={"sampler": f"wrong_{name}.S"}),
            [Example(f"{number}?", "") for number in range(8)],
        )


def test_a_parameter_that_a_sampler_has_not_is_refused(tmp_path: Path) -> None:
    params = {"sampler": "pools", "sampler_params": {"medium": 0.3}}
    with pytest.raises(ConfigurationError, match="medium is not one of easy, hard"):
        quiet_run(tmp_path / "run", data=params)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def own_sampler(name: str, *body: str) -> str:
    """A sampler that passes its trial of eight examples, with `body` on top; its dotted path."""
    Path(f"{name}.py").write_text(
        "from retrain.data import PromptSampler\n"
        "class S(PromptSampler):\n"
        "    seen = 0\n"
        "    def choose(self, s, n, u): return [self.seen % self.size] * n\n"
        "    def observe(self, indices, groups): self.seen += 1\n"
        "    def state(self): return {'seen': self.seen}\n"
        "    def load(self, state): self.seen = state['seen']\n"
        "class Own(S):\n" + "".join(f"    {line}\n" for line in body)
    )
    return f"{name}.Own"


def test_the_trial_draws_as_the_run_does_above_0_and_below_1(here: Path) -> None:
    body = "def choose(self, s, n, u): assert 0 < u.min() <= u.max() < 1; return u.argsort()[:n]"
    quiet_run(here / "run", data={"sampler": own_sampler("logarithms", body)})


LATE = {
    "late_set": (
        "def state(self): return {'seen': {1} if self.size > 8 else self.seen}",
        r"state\(\) failed with TypeError: Object of type set",
    ),
    "late_state": (
        "def state(self): return {'seen': self.seen // (self.size < 64)}",
        r"state\(\) failed with ZeroDivisionError",
    ),
    "late_rows": (
        "def choose(self, s, n, u): return [[0], [1, 2]] if self.size > 8 else [0] * n",
        "at step 0 failed with ValueError",
    ),
}


@pytest.mark.parametrize("name", LATE)
def test_what_a_sampler_does_wrong_in_the_run_is_a_sentence(name: str, here: Path) -> None:
    body, sentence = LATE[name]
    with pytest.raises(RunFailed, match=f"sampler .*{sentence}"):
        quiet_run(here / "run", data={"sampler": own_sampler(name, body)})


def test_a_state_that_a_resume_cannot_load_is_a_sentence(here: Path) -> None:
    body = "def load(self, state): self.seen = state['seen' if self.size <= 8 else 'lost']"
    config = small(here / "run", data={"sampler": own_sampler("lost_state", body)})
    small_run(replaced(config, {"training.max_steps": 2}), quiet=True)
    with pytest.raises(RunFailed, match=r"load\(\) failed with KeyError: 'lost'"):
        small_run(replaced(config, {"resume.from": str(here / "run")}), quiet=True)


def test_a_state_that_is_not_restored_is_found_before_a_choice_needs_it(here: Path) -> None:
    choose = "def choose(self, s, n, u): return [max(0, self.seen - 9)] * n"
    name = own_sampler("warm_up", choose, "def load(self, s): pass")
    with pytest.raises(ConfigurationError, match="does not restore in `load`"):
        quiet_run(here / "run", data={"sampler": name})
    assert not (here / "run" / "metrics.jsonl").exists()


def test_a_group_that_nobody_could_judge_is_no_evidence() -> None:
    for name in LEARNING:
        sampler = made(name, 6)
        sampler.observe(range(6), [answered(index % 5) for index in range(6)])
        before = sampler.state()["seen"]
        sampler.observe(range(6), [answered(0, size=0)] * 6)
        assert [row[2:] for row in sampler.state()["seen"]] == [row[2:] for row in before]


class AnotherDay(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> "AnotherDay":
        return cls(2001, 2, 3, tzinfo=tz)


def test_a_later_session_renders_the_date_of_the_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(resolve_model("lab"), tmp_path / "model")
    template = model / "chat_template.jinja"
    own = template.read_text()
    template.write_text("{{ strftime_now('%Y') }}\n" + own)
    run = RunFolder(tmp_path / "run")
    sections = {"model": {"model": str(model)}, "evaluation": {"at_start": False}}
    config = small(run.path, **sections)
    small_run(replaced(config, {"training.max_steps": 1}), quiet=True)
    year = json.loads(run.environment.read_text())["prompt_date"][:4]
    monkeypatch.setattr("retrain.run.start.datetime", AnotherDay)
    more = {"resume.from": str(run.path)}
    small_run(replaced(config, more | {"training.max_steps": 2}))
    assert {line["prompt"][:4] for line in lines(run.generations)} == {year}
    assert main(["verify", str(run.path)]) == 0
    other = "The chat template writes other prompts than when the run began."
    assert other not in capsys.readouterr().out
    template.write_text("Today\n" + own)
    small_run(replaced(config, more | {"training.max_steps": 3}))
    assert other in capsys.readouterr().out


@pytest.mark.parametrize(
    ("manifest", "day"),
    [
        ({"timestamp": "20200203_235959"}, "2020-02-03"),
        ({"name": "a file of another program"}, "2001-02-03"),
    ],
)
def test_runs_of_a_campaign_share_the_date_of_its_first_start(
    manifest: dict[str, str], day: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrain.run.start.datetime", AnotherDay)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    if "timestamp" in manifest:
        mark(tmp_path, "campaign")
    folder = RunFolder(tmp_path / "runs" / "grpo_none_seed1")
    dated = with_prompt_date(small(folder.path), folder)
    assert dated.data.chat_template_args == {"strftime_now": day}


@pytest.mark.parametrize("name", first_of(["drop_solved", "shuffle"]))
def test_a_run_is_not_resumed_on_other_examples(name: str, tmp_path: Path) -> None:
    data = tmp_path / "sums.jsonl"
    rows = [json.dumps({"prompt": f"{i}+{i}=?", "answer": f"{2 * i}"}) for i in range(40)]
    data.write_text("\n".join(rows))
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(rows[0])
    asked = {"source": str(held_out), "at_start": True}
    sections = {"data": {"source": str(data), "sampler": name}, "evaluation": asked}
    config = small(tmp_path / "run", **sections)
    small_run(replaced(config, {"training.max_steps": 2}), quiet=True)
    again = replaced(config, {"resume.from": str(tmp_path / "run")})
    files = [tmp_path / "run" / name for name in ("environment.json", "summary.json")]
    before = [file.read_text() for file in files]
    data.write_text("\n".join(rows[:20]))
    with pytest.raises(ConfigurationError, match=r"holds other examples than .* began with"):
        small_run(again, quiet=True)
    data.write_text("\n".join(rows))
    held_out.write_text(rows[1])
    for flags in ([], ["--evaluation-samples", "2", "--evaluation-temperature", "1"]):
        notes: list[str] = []
        evaluate_run(tmp_path / "run", overrides=parse_overrides(flags), log=notes.append)
        assert any("The held-out examples differ from the run's own" in note for note in notes)
    for other in (again, replaced(again, {"evaluation.every": 3})):
        with pytest.raises(ConfigurationError, match=r"\[evaluation\] source holds other examples"):
            small_run(other, quiet=True)
    assert [file.read_text() for file in files] == before
    held_out.write_text(rows[0])
    small_run(again, quiet=True)


def test_explain_refuses_the_sampler_that_a_run_would_refuse(tmp_path: Path) -> None:
    easy = {"sampler": "pools", "sampler_params": {"easy": 2}}
    with pytest.raises(ConfigurationError, match="easy = 2 is not a number from 0 to 1"):
        check_plugins(small(tmp_path / "run", data=easy))
    with pytest.raises(ConfigurationError, match="does not load"):
        check_plugins(small(tmp_path / "run", data={"sampler": "no_such_module.S"}))


def test_a_sampler_of_ones_own_is_tried_on_no_more_examples_than_there_are(here: Path) -> None:
    name = own_sampler("firsts", "def choose(self, s, n, u): return range(self.size)[:n]")
    config = small(here / "run", data={"sampler": name})
    assert build_sampler(config, [Example("1?", ""), Example("2?", "")]) is not None

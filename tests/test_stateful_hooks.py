"""Hooks that keep something between steps, where runs are not plain: split mode, several processes,
back pressure, redraws, and kills.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from retrain.config import dump_toml, replaced
from retrain.data.samplers import SAMPLERS
from tests.commands import Ranks
from tests.marks import first_of
from tests.runs import lines, quiet_run, small, small_run, timeless
from tests.split import two_devices
from tests.stops import killed

LEARNING = sorted(name for name, sampler in SAMPLERS.items() if sampler)
WEIGHTS = "checkpoints/final/adapter_model.safetensors"
HOOKS = """
from retrain.data import PromptSampler

class Seen(PromptSampler):
    seen = 0
    def choose(self, step, count, uniforms): return [self.seen % self.size] * count
    def observe(self, indices, groups): self.seen += 1
    def state(self): return {"seen": self.seen}
    def load(self, state): self.seen = state["seen"]

class Running:
    # the mean reward so far is the baseline
    def __init__(self): self.sum, self.count = 0.0, 0
    def __call__(self, rewards):
        self.sum, self.count = self.sum + sum(rewards), self.count + len(rewards)
        mean = self.sum / self.count
        return [reward - mean for reward in rewards]
    def state(self): return {"sum": self.sum, "count": self.count}
    def load(self, state): self.sum, self.count = state["sum"], state["count"]
"""
STATEFUL: dict[str, dict[str, Any]] = {
    "sampler": {"data": {"sampler": "learnability"}},
    "advantage": {"algorithm": {"advantage_mode": "stateful_hooks.Running"}},
}


@pytest.fixture(autouse=True)
def hooks(here: Path) -> None:
    (here / "stateful_hooks.py").write_text(HOOKS)


def prompts(folder: Path) -> list[tuple[int, str]]:
    written = lines(folder / "emergence" / "generations.jsonl")
    return [(line["step"], line["prompt_id"]) for line in written]


def assert_same_run(left: Path, right: Path) -> None:
    assert timeless(left / "metrics.jsonl") == timeless(right / "metrics.jsonl")
    assert prompts(left) == prompts(right)
    assert (left / WEIGHTS).read_bytes() == (right / WEIGHTS).read_bytes()


def test_in_split_mode_a_sampler_has_seen_the_steps_up_to_two_before(tmp_path: Path) -> None:
    """After a checkpoint, which nothing is sampled across, it has seen the step before."""
    sections: dict[str, Any] = {
        "data": {"sampler": "stateful_hooks.Seen"},
        "backend": {"devices": "gpu:0,gpu:1"},
        "training": {"max_steps": 6, "save_every": 4},
    }
    with two_devices():
        run = quiet_run(tmp_path / "run", **sections)
    ids = dict(prompts(run.folder))
    with two_devices():
        every = quiet_run(
            tmp_path / "every", **{**sections, "training": {"max_steps": 5, "save_every": 1}}
        )
    at = {prompt: step for step, prompt in prompts(every.folder)}  # chosen after so many steps
    assert [at[ids[step]] for step in range(6)] == [0, 0, 1, 2, 4, 4]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["learnability", "drop_solved", "pools"])
def test_a_split_run_with_a_sampler_resumes_byte_for_byte(name: str, tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "data": {"sampler": name},
        "backend": {"devices": "gpu:0,gpu:1"},
        "training": {"max_steps": 5, "save_every": 3, "max_examples": 8},
    }
    with two_devices():
        straight = small_run(small(tmp_path / "straight", **sections), quiet=True)
        config = small(tmp_path / "cut", **sections)
        small_run(replaced(config, {"training.max_steps": 3}), quiet=True)
        small_run(replaced(config, {"resume.from": str(tmp_path / "cut")}), quiet=True)
    assert_same_run(straight.folder, tmp_path / "cut")


@pytest.mark.parametrize("name", first_of(LEARNING))
def test_redraws_are_not_shown_to_a_sampler_and_the_batch_may_change(
    name: str, tmp_path: Path
) -> None:
    sections: dict[str, Any] = {
        "data": {"sampler": name},
        "training": {"dynamic_sampling": 2, "group_size": 2, "max_steps": 3, "max_examples": 16},
        "backpressure": {"enabled": True, "warmup_steps": 1, "max_batch_size": 4, "cooldown": 0},
    }
    run = quiet_run(tmp_path / "run", **sections)
    records = lines(run.folder / "metrics.jsonl")
    assert len({record["batch_size"] for record in records}) > 1
    assert sum(record["groups_redrawn"] for record in records)
    state = json.loads((run.folder / "trainer_state.json").read_text())
    seen = state["sampler"]["seen"]
    assert sum(taken for _, taken, _, _ in seen) == sum(r["batch_size"] for r in records)
    if max(taken for _, taken, _, _ in seen) == 1:  # else older groups count less
        right = sum(r["correct_rate"] * r["batch_size"] * 2 for r in records)
        assert sum(row[2] for row in seen) == pytest.approx(right)


@pytest.mark.slow
@pytest.mark.parametrize("hook", STATEFUL)
def test_a_run_killed_at_random_has_the_same_bytes(hook: str, tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "training": {"max_steps": 6, "max_examples": 12, "dynamic_sampling": 1, "save_every": 2},
        **STATEFUL[hook],
    }
    rng = random.Random(hook)
    files = {}
    for name in ("whole", "cut"):
        files[name] = tmp_path / f"{name}.toml"
        files[name].write_text(dump_toml(small(tmp_path / name, **sections)), encoding="utf-8")
    assert killed(files["whole"], tmp_path / "whole", 6, 240) == 0
    for _ in range(2):
        killed(files["cut"], tmp_path / "cut", rng.randrange(1, 6), rng.uniform(0, 0.3))
    assert killed(files["cut"], tmp_path / "cut", 6, 240) == 0
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.slow
def test_two_processes_take_the_prompts_of_one(tmp_path: Path) -> None:
    """Rank 0 chooses, and tells the other."""
    sections: dict[str, Any] = {
        "data": {"sampler": "learnability"},
        "training": {"batch_size": 3, "max_examples": 12},
    }
    alone = quiet_run(tmp_path / "alone", **sections)
    file = tmp_path / "shared.toml"
    file.write_text(dump_toml(small(tmp_path / "shared", **sections)), encoding="utf-8")
    ranks = Ranks([sys.executable, "-m", "retrain", str(file), "--skip-parity"])
    output, codes = ranks.communicate(timeout=240)
    assert codes == [0, 0], output
    assert prompts(tmp_path / "shared") == prompts(alone.folder)

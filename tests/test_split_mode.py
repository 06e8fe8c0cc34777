"""Split mode: sampling one step ahead on weights of its own. Both devices are this CPU; the threads
and the copies are real.
"""

from pathlib import Path
from typing import Any

import pytest

from retrain.cli.main import main
from tests.runs import lines, small, small_run, timeless
from tests.split import two_devices


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A split run with a checkpoint after its fourth step."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    run(folder, save_every=4, top_p=0.9)
    return folder


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    run(folder, {"evaluation": {"every": 3, "max_examples": 2}}, save_every=8)
    return folder


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one device."""
    folder = tmp_path_factory.mktemp("single") / "run"
    small_run(small(folder, training={"max_steps": 8, "save_every": 8}), quiet=True)
    return folder


def run(
    folder: Path, sections: dict[str, Any] | None = None, **training: Any
) -> list[dict[str, Any]]:
    resume = {"resume": {"from": str(folder)}} if folder.exists() else {}
    more = {"training": {"max_steps": 8, **training}, **resume, **(sections or {})}
    split = small(folder, backend={"devices": "gpu:0,gpu:1"}, **more)
    with two_devices():
        small_run(split, quiet=True)
    return timeless(folder / "metrics.jsonl")


def on_policy(folder: Path) -> list[bool]:
    """Of each step whether the weights that sampled it learned from it: the ratio is 1 then, and is
    not otherwise.
    """
    return [abs(record["ratio_max"] - 1) < 1e-4 for record in lines(folder / "metrics.jsonl")]


def prompts(folder: Path) -> list[tuple[int, str]]:
    return [
        (line["step"], line["prompt_id"])
        for line in lines(folder / "emergence" / "generations.jsonl")
    ]


def test_a_step_is_sampled_by_the_weights_before_the_last_update(straight: Path) -> None:
    """But nothing is drawn ahead of a checkpoint."""
    assert on_policy(straight) == [True, False, False, False, True, False, False, False]


def test_an_evaluation_has_the_engine_to_itself(evaluated: Path) -> None:
    assert on_policy(evaluated) == [True, False, False, True, False, False, True, False]


def test_every_step_has_the_prompts_of_a_run_on_one_device(
    straight: Path, evaluated: Path, single: Path
) -> None:
    assert prompts(straight) == prompts(evaluated) == prompts(single)


def test_with_a_checkpoint_at_every_step_split_mode_is_the_run_on_one_device(
    single: Path, tmp_path: Path
) -> None:
    split, records = run(tmp_path / "split", save_every=1), lines(single / "metrics.jsonl")
    assert [record["mean_reward"] for record in split] == [
        record["mean_reward"] for record in records
    ]
    assert [record["loss"] for record in split] == pytest.approx(
        [record["loss"] for record in records], abs=1e-5
    )


def test_a_resumed_split_run_equals_the_straight_one(straight: Path, tmp_path: Path) -> None:
    run(tmp_path / "run", save_every=4, top_p=0.9, max_steps=4)
    assert run(tmp_path / "run", save_every=4, top_p=0.9) == timeless(straight / "metrics.jsonl")
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        left, right = (
            folder / "checkpoints" / "step_000008" / name for folder in (straight, tmp_path / "run")
        )
        assert left.read_bytes() == right.read_bytes()


@pytest.mark.slow
def test_a_run_that_was_resumed_where_no_checkpoint_is_due_is_made_again(tmp_path: Path) -> None:
    """Nothing was drawn ahead of the end of its first session."""
    for steps in (2, 4):
        run(tmp_path / "run", save_every=0, max_steps=steps)
    with two_devices():
        assert main(["verify", str(tmp_path / "run"), "--steps", "0:4"]) == 0


def test_a_sampling_failure_ahead_is_the_runs_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from retrain.run.rollout import Sampler

    real = Sampler.draw

    def fails_at_step_2(self: Sampler, prompts: Any, step: int, *rest: Any) -> Any:
        if step == 2:
            raise RuntimeError("no such kernel")
        return real(self, prompts, step, *rest)

    monkeypatch.setattr(Sampler, "draw", fails_at_step_2)
    with pytest.raises(RuntimeError, match="no such kernel"):
        run(tmp_path / "run", save_every=4)
    assert len(lines(tmp_path / "run" / "metrics.jsonl")) == 2

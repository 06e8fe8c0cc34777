"""Back pressure in whole runs: the batch size follows the record, and a resumed run visits the same
sizes.
"""

import shutil
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from retrain.cli.main import main
from retrain.config import TrainConfig, config_from_toml
from retrain.config.load import replaced
from retrain.errors import ConfigurationError
from retrain.records.jsonl import truncate_to_step
from retrain.records.run_folder import RunFolder
from retrain.run.loop import Run
from retrain.run.pressure import decided_by
from tests.runs import lines, quiet_run, small, small_run, timeless

BLOCK = """
[backpressure]
enabled = true
warmup_steps = 10
ema_decay = 0.9
throttle_margin = 0.85
increase_margin = 0.5
min_batch_size = 1
max_batch_size = 64
peak_gflops = 0.0 # 0 = skip roofline hints
peak_bw_gb_s = 0.0
"""
"""As the annotated configuration has it, switched on."""


ALL = {"generations_per_step": 100}


def pressed(folder: Path, **changes: Any) -> TrainConfig:
    pressure = {"enabled": True, "warmup_steps": 1, "max_batch_size": 4}
    pressure |= {"cooldown": 0, "min_r2": 0.0}
    training = {"max_steps": 9, "batch_size": 3, "group_size": 2, "max_tokens": 8, "save_every": 3}
    return small(folder, backpressure=pressure | changes, training=training, logging=ALL)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return small_run(
        pressed(tmp_path_factory.mktemp("pressed") / "run", peak_gflops=50.0, peak_bw_gb_s=10.0),
        quiet=True,
    )


def test_the_batch_is_the_one_that_the_step_before_announced(run: Run) -> None:
    records = run.records()
    sizes = [record.batch_size for record in records[:7]]
    assert sizes == [1, 2, 4, 1, 2, 4, 3]  # the sweep twice, then the configured size
    announced = [record.next_batch_size for record in records[:-1]]
    assert announced == [record.batch_size for record in records[1:]]
    assert [record.bp_action for record in records[:6]] == ["sweep"] * 6
    assert all(record.bp_step_time_s == record.step_time_s for record in records)


def test_prompts_go_on_where_the_step_before_ended(run: Run) -> None:
    """The nth prompt is the same whatever the sizes; only the step in which it is seen differs."""
    training = {"max_steps": 3, "batch_size": 7, "group_size": 2, "max_tokens": 8}
    fixed = quiet_run(run.folder.parent / "fixed", training=training, logging=ALL)

    def order(folder: Path) -> list[str]:
        rows = lines(folder / "emergence" / "generations.jsonl")
        return [row["prompt_id"] for row in rows if row["sample"] == 0]

    assert order(run.folder)[:21] == order(fixed.folder)[:21]


def test_times_that_a_resume_cut_are_found_by_the_next_one(run: Run, tmp_path: Path) -> None:
    """The first one ended before it had made a step again."""
    folder = RunFolder(tmp_path)
    shutil.copyfile(run.folder / "metrics.jsonl", folder.metrics)
    times = decided_by(folder, 3)
    assert set(times) == {3, 4, 5, 6, 7, 8}
    truncate_to_step(folder.metrics, 3)
    assert decided_by(folder, 3) == times
    folder.metrics.unlink()
    assert decided_by(folder, 3) == times


def test_a_resumed_run_decides_by_the_recorded_times(run: Run, tmp_path: Path) -> None:
    """Steps 3 to 8 are made again from the checkpoint of step 3, with other times on the clock and
    the same bytes.
    """
    again = tmp_path / "run"
    shutil.copytree(run.folder, again)
    for step in (6, 9):
        shutil.rmtree(again / "checkpoints" / f"step_{step:06d}")
    shutil.copyfile(
        again / "checkpoints" / "step_000003" / "trainer_state.json", again / "trainer_state.json"
    )
    config = replaced(
        pressed(again, peak_gflops=50.0, peak_bw_gb_s=10.0), {"resume.from": str(again)}
    )
    resumed = small_run(config, quiet=True)
    assert timeless(resumed.folder / "metrics.jsonl") == timeless(run.folder / "metrics.jsonl")
    for name in ("final/adapter_model.safetensors", "step_000009/adapter_model.safetensors"):
        assert (resumed.folder / "checkpoints" / name).read_bytes() == (
            run.folder / "checkpoints" / name
        ).read_bytes()


def test_a_run_is_verified_by_the_recorded_times(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock by which every step takes longer than all before it."""
    clock = (3.0**number for number in count())
    monkeypatch.setattr("retrain.run.step_record.monotonic", lambda: next(clock))
    assert main(["verify", str(run.folder), "--steps", "0:9"]) == 0


def test_the_documented_block_runs_as_it_is(tmp_path: Path) -> None:
    pressure = config_from_toml(BLOCK).backpressure.model_dump(exclude_unset=True)
    training = {"max_steps": 2, "group_size": 2, "max_tokens": 4, "batch_size": 8}
    records = quiet_run(tmp_path / "run", training=training, backpressure=pressure).records()
    assert [(record.batch_size, record.next_batch_size) for record in records] == [(1, 2), (2, 4)]


def test_split_mode_is_refused(tmp_path: Path) -> None:
    told = "two sample a step before the last one's measurement"
    with pytest.raises(ConfigurationError, match=told):
        small(tmp_path, backpressure={"enabled": True}, backend={"devices": "gpu:0,gpu:1"})

"""Whole runs on the lab, small enough for a test: seconds each, with every part of a real one."""

import io
import json
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

from retrain import train
from retrain.config import TrainConfig, config_from_mapping
from retrain.config.overrides import deep_merge
from retrain.run.loop import Run

SMALL: dict[str, Any] = {
    "model": {"model": "lab", "lora_rank": 4},
    "data": {"source": "lab"},
    # Half of the completions are right whatever the model writes, so that every step learns
    # something.
    "reward": {"type": "random"},
    "algorithm": {"advantage_mode": "maxrl", "transform_mode": "none"},
    "training": {
        "seed": 3,
        "max_steps": 4,
        # Else all 4,096 examples of the lab are encoded for the eight that four steps use.
        "max_examples": 64,
        "batch_size": 2,
        "group_size": 4,
        "max_tokens": 24,
        "temperature": 1.0,
        "lr": 1e-3,
        "save_every": 2,
    },
    "backend": {"devices": "cpu"},
}


def small(folder: Path, **sections: dict[str, Any]) -> TrainConfig:
    """A configuration of a small run in `folder`, with `sections` on top."""
    return config_from_mapping(
        deep_merge(deep_merge(SMALL, {"logging": {"log_dir": str(folder)}}), sections)
    )


def small_run(config: TrainConfig, *, overwrite: bool = False, quiet: bool = False) -> Run:
    """`train` without the parity gate, which takes as long as all that follows it in a run this
    small. A test whose subject is the gate, or what it says of a run, calls `train`. With `quiet` it
    prints nothing at all.
    """
    with redirect_stdout(io.StringIO()) if quiet else nullcontext():
        return train(config, overwrite=overwrite, quiet=quiet, skip_parity=True)


def quiet_run(folder: Path, **sections: dict[str, Any]) -> Run:
    """A small run in `folder` that prints nothing."""
    return small_run(small(folder, **sections), quiet=True)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def timeless(path: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what the clock and the machine say."""
    measured = {
        "time_sample_s",
        "time_layout_s",
        "time_reward_s",
        "time_credit_s",
        "time_learn_s",
        "step_time_s",
        "tokens_per_s",
        "peak_memory_gib",
    }
    return [
        {name: value for name, value in line.items() if name not in measured}
        for line in lines(path)
    ]


def assert_same_run(left: Path, right: Path, steps: int) -> None:
    """Two runs of so many steps hold the same bytes, the clock's aside."""
    assert timeless(left / "metrics.jsonl") == timeless(right / "metrics.jsonl")
    for name in ("emergence/generations.jsonl", "evaluation.jsonl"):
        assert (left / name).read_bytes() == (right / name).read_bytes(), name
    files = sorted(
        path.relative_to(left)
        for folder in (f"checkpoints/step_{steps:06d}", "tokens")
        for path in (left / folder).iterdir()
    )
    assert any(path.name == "optimizer.safetensors" for path in files)
    for name in files:
        if name.name not in ("trainer_state.json", "manifest.json"):  # they hold seconds
            assert (left / name).read_bytes() == (right / name).read_bytes(), name

"""Trackers in tests: everything that they keep stays in the test's folder, and nothing is sent
anywhere.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb

from retrain.config import TrainConfig

SECRET = "k" * 40
"""The value of WANDB_API_KEY."""


def keep_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb offline, its cache and trackio's database in `folder`."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "TRACKIO_DIR"):
        monkeypatch.setenv(name, str(folder / name))
    wandb.teardown()  # it reads the environment once a process


def config(*trackers: str, **logging: Any) -> TrainConfig:
    return TrainConfig.model_validate({"logging": {"trackers": list(trackers), **logging}})


def wandb_logs(folder: Path) -> list[Path]:
    return sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))


def wandb_read(log: Path, *options: str) -> str:
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", *options, str(log)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def wandb_history(log: Path) -> Iterator[dict[str, Any]]:
    for line in wandb_read(log).splitlines():
        record = json.loads(line)
        if record["type"] == "history":
            yield record["history"]["item"]


def wandb_steps(log: Path) -> list[int]:
    """The steps whose metrics a log holds."""
    return [item["trainer/step"] for item in wandb_history(log) if "train/loss" in item]

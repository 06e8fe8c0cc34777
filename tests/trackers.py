"""Trackers in tests: everything that they keep stays in the test's folder, and nothing is sent
anywhere.
"""

from pathlib import Path

import pytest
import wandb

SECRET = "k" * 40
"""The value of WANDB_API_KEY."""


def keep_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb offline, its cache and trackio's database in `folder`."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "TRACKIO_DIR"):
        monkeypatch.setenv(name, str(folder / name))
    wandb.teardown()  # it reads the environment once a process

"""Six algorithms that were written by the manual alone still run."""

import shutil
from pathlib import Path

import pytest

from retrain import load_config
from tests.marks import first_of
from tests.runs import lines, small_run

FOLDER = Path(__file__).parent / "data" / "by_manual"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.mark.parametrize("name", first_of(NAMES, quick=0))
def test_a_plugin_that_was_written_by_the_manual_runs(name: str, here: Path) -> None:
    for path in FOLDER.iterdir():
        if path.is_file():
            shutil.copy(path, here)
    config = load_config(f"{name}.toml", ["--seed", "1", "--lora-rank", "4"])
    small_run(config, quiet=True)
    records = lines(here / "logs" / name / "metrics.jsonl")
    assert len(records) == config.training.max_steps
    assert any(record["num_datums"] for record in records)
